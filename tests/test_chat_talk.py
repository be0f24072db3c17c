"""Talking with a model that was trained on chats, and what its export says of them."""

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.commands import generate
from components.config import ROOT, ConfigError
from components.config.tables import Chat
from components.data.chats import Chats, export_template
from components.data.tokenizer import export_tokenizer
from tests.chats import CHATML, LLAMA3, NO_END, chats_in, said, tokenizer_in
from tests.limits import run


def test_each_turn_sees_all_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chats, asked = chats_in(tmp_path), list[str]()

    def answer(model: Any, tokenizer: Any, ids: list[int], ends: set[int], *sampling: Any) -> Iterator[str]:
        asked.append(tokenizer.decode(ids))
        assert ends == {tokenizer.token_id("<|im_end|>")}
        yield from ("an", "swer")

    monkeypatch.setattr(generate, "continue_tokens", answer)
    model: Any = None
    found = [(turn, "".join(pieces)) for turn, pieces in generate.answers(model, chats, "be kind", ["Hi", "And?"])]
    assert found == [("Hi", "answer"), ("And?", "answer")]
    first = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert asked == [first, first + "answer<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"]
    with pytest.raises(ConfigError, match="message 1: spells the special token"):
        [*generate.answers(model, chats, "", ["<|im_end|>"])]
    with pytest.raises(ConfigError, match="ends the assistant's turn 2 with no special token"):
        [*generate.answers(model, chats_in(tmp_path / "other", NO_END), "", ["Hi"])]


@pytest.mark.parametrize(("source", "end"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>")])
def test_an_export_has_the_template_and_the_end_of_a_turn(source: str, end: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer, out = tokenizer_in(tmp_path / "own"), tmp_path / "out"
    (tmp_path / "t.jinja").write_text(source)
    out.mkdir()
    export_tokenizer(str(tokenizer), out)
    chat = Chat(template=str(tmp_path / "t.jinja"), messages_field="talk", roles_to_train=["user"])
    chats = Chats(chat, str(tokenizer))
    assert export_template(chat, str(tokenizer), out) == {"eos_token_id": [chats.tokenizer.token_id(end)]}
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(out)
    messages = said("Hi", "Hello", "And?")["messages"]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids == chats.prompt(messages)


@pytest.mark.slow
def test_a_run_on_chats_is_exported_and_answers(tmp_path: Path) -> None:
    python = functools.partial(run, cwd=ROOT)
    words = ["--job.config_file", "recipes/llama_debug_sft.toml", "--job.dump_folder", str(tmp_path / "run")]
    words += ["--training.steps", "2", "--lr_scheduler.warmup_steps", "0", "--training.dataloader.num_workers", "1"]
    done = python([sys.executable, "train.py", *words, "--checkpoint.last_save_in_hf"])
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout
    exported = tmp_path / "run" / "hugging_face"
    assert (exported / "chat_template.jinja").read_text() == LLAMA3
    assert len(json.loads((exported / "generation_config.json").read_text())["eos_token_id"]) == 1
    for folder in (tmp_path / "run", exported):
        talk = python([sys.executable, "-m", "components.generate", str(folder), "--chat", "Sing:", "--tokens", "3"])
        assert talk.returncode == 0, talk.stderr
        assert talk.stdout.startswith("> Sing:\n")
    for wrong in (["--system", "x", "a"], []):
        assert python([sys.executable, "-m", "components.generate", str(exported), *wrong]).returncode == 2
