"""Chats for tests: tokenizers with the special tokens of well-known templates, and such templates in our own words."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.config import ROOT, load_config
from components.config.tables import Chat
from components.data import prepare
from components.data.chats import Chats
from components.data.datasets import packed, spec_of
from components.data.rows import ChatRows, ChatSpec

CHATML = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}
{%- if message.reasoning_content and loop.last %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>' + call | tojson + '</tool_call>' }}{% endfor %}
{%- endgeneration %}{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Ends a turn with a token and a line feed; shows only the last turn's thinking."""
NO_END = """\
{% for m in messages %}[{{ m.role }}] {{ m.content }}
{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"""
OTHER_PROMPT = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n'")
LLAMA3 = (ROOT / "assets" / "templates" / "llama3.jinja").read_text(encoding="utf-8")
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def tokenizer_in(folder: Path, template: str | None = None, special: Sequence[str] = SPECIAL) -> Path:
    """A byte-level tokenizer.json with these special tokens, and a chat template beside it."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizers.Tokenizer(
        models.BPE({c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([*special])
    made.save(str(folder / "tokenizer.json"))
    ending = {"eos_token": "<|im_end|>"} if "<|im_end|>" in special else {}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **ending}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def said(*turns: str, **more: Any) -> dict[str, Any]:
    """A record whose turns are by a user and an assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": turn} for at, turn in enumerate(turns)], **more}


def chats_in(folder: Path, template: str = CHATML, **settings: Any) -> Chats:
    return Chats(Chat(**settings), str(tokenizer_in(folder, template)))


def trained_text(chats: Chats, record: Any) -> list[list[str]]:
    """The trained runs of each sequence of a record, decoded."""
    found = []
    for ids, trained in chats.sequences(record):
        runs: list[list[int]] = []
        for at, (token, is_trained) in enumerate(zip(ids, trained, strict=True)):
            if is_trained and (at == 0 or not trained[at - 1]):
                runs.append([])
            if is_trained:
                runs[-1].append(token)
        found.append([chats.tokenizer.decode(run) for run in runs])
    return found


def save(folder: Path, records: list[Any], name: str = "chats.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def rows_in(folder: Path, records: list[Any], seq_len: int = 64, *words: str, **given: Any) -> ChatRows:
    """Rows of these records, tokenized into the folder."""
    tokenizer = tokenizer_in(folder / "tokenizer", CHATML)
    job = ["--training.dataset_format", "chat", "--training.dataset_path", str(save(folder, records))]
    job += ["--model.hf_assets_path", str(tokenizer), "--training.dataset_cache", str(folder / "cache"), *words]
    config = load_config(job)
    spec = spec_of(config)
    assert isinstance(spec, ChatSpec)
    found = packed(config, prepare(spec, 1), seq_len, *given.values())
    assert isinstance(found, ChatRows)
    return found
