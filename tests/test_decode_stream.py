"""Text of tokens that come one by one: no character in halves, no space lost."""

from pathlib import Path

import tokenizers

from components.commands.generate import decode_stream
from components.data.tokenizer import JsonTokenizer, load_tokenizer


def test_characters_come_whole() -> None:
    words, tokenizer = "für 日本語 🙂, ok", load_tokenizer("assets/tokenizer")
    ids = tokenizer.encode(words)
    pieces = [*decode_stream(tokenizer, tokenizer.encode("Ein Wort "), ids)]
    assert "".join(pieces) == words
    assert 5 < len(pieces) < len(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    cut = tokenizer.encode("🙂")[:-1]
    assert "".join(decode_stream(tokenizer, [], cut)) == "\ufffd"


def test_words_of_a_tokenizer_that_leaves_out_the_first_space_stay_apart(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1, "<unk>": 2}, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    assert "".join(decode_stream(tokenizer, [0], [1, 1, 0])) == " b b a"
