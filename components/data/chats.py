"""Chats from records of any usual shape: messages, their tokens, and which tokens are trained.

A record has one of these fields: messages (OpenAI), conversations (ShareGPT), prompt with completion, or instruction
with output (Alpaca). It may have tools too.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from components.config import ConfigError
from components.config.keys import short
from components.config.tables import Chat
from components.data.sources import SURROGATE
from components.data.special_tokens import CHAT_TEMPLATE
from components.data.template import BadChat, Template, bounded, load_template, targets
from components.data.tokenizer import Tokenizer, load_tokenizer

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "function": "tool"}
"""Role in ShareGPT's records -> role in templates."""
_MARK = "\ufdd0"
"""A code point that no text contains. It is inserted into each special token that a message spells, so that the
tokenizer finds no special token in the spelling."""
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message's thinking. Templates read one of the first two, and get both, as in transformers."""
Tokens = tuple[list[int], np.ndarray]
"""Ids of a sequence, and a bool for each: whether it is trained as a label."""


class Chats:
    """Turns records into sequences: token ids, and a bool for each that says whether it is trained as a label."""

    def __init__(self, chat: Chat, tokenizer_path: str) -> None:
        self.chat, self.path = chat, tokenizer_path
        self.template: Template = load_template(chat, tokenizer_path)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        tokens = sorted(self.tokenizer.special, key=len, reverse=True)
        if not tokens:
            raise ConfigError(f"model.hf_assets_path: {self.path} has no special tokens, with which turns could end")
        return re.compile("|".join(map(re.escape, tokens)))

    @cached_property
    def _marked(self) -> re.Pattern[str]:
        """Pattern of the spelled special tokens that _mark has marked."""
        return re.compile("|".join(re.escape(token[0] + _MARK + token[1:]) for token in self.tokenizer.special))

    def sequences(self, record: Any) -> list[Tokens]:
        """The sequences of a record: (ids, trained (len(ids),) bool). Raises BadChat if there are none."""
        messages, tools = self.messages(record)
        messages, tools = self._protected(messages, tools)
        trained = [self._is_trained(message) for message in messages]
        if self.chat.history == "last_turn":
            last = max((number for number, each in enumerate(trained) if each), default=-1)
            trained = [number == last for number in range(len(trained))]
        if not any(trained):
            roles = " or ".join(self.chat.roles_to_train)
            raise BadChat(f"no turn of {roles} to train (chat.roles_to_train)")
        rendered = targets(self.template, messages, tools, trained.__getitem__, self._special)
        return [self._tokens(each.text[: each.trained[-1][1]], each.trained) for each in rendered]

    def prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of messages and of the beginning of the turn that answers them. Raises BadChat."""
        messages, _ = self._protected(messages, None)
        with bounded():
            text = self.template.render(messages, prompt=True)
        return self._encoded([text])[1]

    def ends(self) -> set[int]:
        """The tokens that end an answer."""
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        whole = replace(self.chat, messages_field="", roles_to_train=["assistant"])
        return {ids[-1] for ids, _ in Chats(whole, self.path).sequences({"messages": said})}

    def _is_trained(self, message: dict[str, Any]) -> bool:
        said = message.pop(self.chat.message_field_training, None)
        if said is None:
            return message["role"] in self.chat.roles_to_train
        if not isinstance(said, bool):
            raise BadChat(f"{self.chat.message_field_training} = {short(repr(said))}: expected true or false")
        return said

    def _tokens(self, text: str, spans: list[tuple[int, int]]) -> Tokens:
        """Ids of the text, and which of them lie in the spans. Raises BadChat if a token crosses the edge of one."""
        edges = [0, *(edge for span in spans for edge in span)]
        parts, ids = self._encoded([text[start:end] for start, end in pairwise(edges)])
        trained = np.repeat([number % 2 == 1 for number in range(len(parts))], [len(part) for part in parts])
        trained[0] = False  # no token predicts it
        return ids, trained

    def _encoded(self, parts: list[str]) -> tuple[list[list[int]], list[int]]:
        """Ids of each part, and of all. Raises BadChat if a token crosses parts.

        Raises BadChat too if spelled special tokens cannot be encoded as text.
        """
        text = "".join(parts)
        if self.chat.special_tokens_in_text == "as_text" and json.dumps(_MARK)[1:-1] in text.lower():
            raise BadChat("the template escapes characters, in which spelled special tokens are lost")
        if _MARK in text:
            found, whole = [self._piecewise(part) for part in parts], self._piecewise(text)
            # _piecewise encodes the pieces between special tokens separately. The tokenizer must give the same ids.
            bare = self._marked.sub("", text)
            if self._piecewise(bare) != self.tokenizer.encode_template(bare):
                raise BadChat("this tokenizer encodes no special token as text (chat.special_tokens_in_text)")
            crosses = [token for part in found for token in part] != whole
        else:
            given = self.tokenizer.encode_parts(parts)
            found, crosses = given or [], given is None
        if crosses:
            raise BadChat("a token begins before a trained turn and ends in it")
        return found, [token for part in found for token in part]

    def _piecewise(self, text: str) -> list[int]:
        """Ids of a text in which spelled special tokens are marked."""
        ids: list[int] = []
        for piece in re.split(f"({self._special.pattern})", text):
            special = self.tokenizer.special.get(piece)
            ids += self.tokenizer.encode(piece.replace(_MARK, "")) if special is None else [special]
        return ids

    def messages(self, record: Any) -> tuple[list[dict[str, Any]], Any]:
        """Messages of a record, each with a role and a content, and the record's tools. Raises BadChat."""
        if not isinstance(record, dict):
            raise BadChat(f"expected an object, not {short(repr(record), 60)}")
        field = self.chat.messages_field
        if field:
            if field not in record:
                raise BadChat(f'no field "{field}" (chat.messages_field); it has {", ".join(map(str, record))}')
            found = record[field]
        else:
            found = _found(record)
        if not isinstance(found, list) or not found:
            raise BadChat(f"expected a list of messages, not {short(repr(found), 60)}")
        return [as_message(each, number) for number, each in enumerate(found, 1)], _tools(record.get("tools"))

    def _protected(self, messages: Sequence[dict[str, Any]], tools: Any) -> tuple[list[dict[str, Any]], Any]:
        """Special tokens come from the template alone: else a text could begin a turn of the system.

        Raises BadChat if a text spells a special token. With special_tokens_in_text = "as_text" the spelling is marked
        instead.
        """
        as_text = self.chat.special_tokens_in_text == "as_text"
        for name, value in [
            *((f"message {number}", each) for number, each in enumerate(messages, 1)),
            ("tools", tools),
        ]:
            for text in _texts(value):
                if (spelt := self._special.search(text)) and not (as_text and spelt[0][1:]):
                    raise BadChat(f"{name}: spells the special token {spelt[0]}")
                if as_text and _MARK in text:
                    raise BadChat(f"{name}: has the character U+FDD0, which is no character of a text")
                if SURROGATE.search(text):
                    raise BadChat(f"{name}: not Unicode: half of a surrogate pair")
        if not as_text:
            return [*messages], tools
        return _with_texts(list(messages), self._mark), _with_texts(tools, self._mark)

    def _mark(self, text: str) -> str:
        return self._special.sub(lambda found: found[0][0] + _MARK + found[0][1:], text)


def _tools(given: Any) -> Any:
    """A record's tools: a list of objects, or its JSON, as parquet files of the hub have it."""
    try:
        tools = json.loads(given) if isinstance(given, str) and given else given or None
    except (ValueError, RecursionError):
        raise BadChat(f"tools: no JSON: {short(repr(given), 60)}") from None
    if tools is not None and not _are_objects(tools):
        raise BadChat(f"tools: expected a list of objects, not {short(repr(tools), 60)}")
    return tools


def _are_objects(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(each, dict) for each in given)


def _texts(value: Any) -> list[str]:
    """Every text in a JSON value, names of fields included."""
    if isinstance(value, str):
        return [value]
    values = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in values for text in _texts(each)]


def _with_texts(value: Any, changed: Callable[[str], str]) -> Any:
    """A JSON value with every text of _texts changed."""
    if isinstance(value, str):
        return changed(value)
    if isinstance(value, dict):
        return {_with_texts(key, changed): _with_texts(each, changed) for key, each in value.items()}
    return [_with_texts(each, changed) for each in value] if isinstance(value, list) else value


def _found(record: dict[str, Any]) -> Any:
    """The messages of a record whose field is not given."""
    for field in ("messages", "conversations"):
        if field in record:
            return record[field]
    if "prompt" in record and "completion" in record:
        parts = zip(("user", "assistant"), (record["prompt"], record["completion"]), strict=True)
        lists = [part if isinstance(part, list) else [{"role": role, "content": part}] for role, part in parts]
        return [message for each in lists for message in each]
    if "instruction" in record and "output" in record:
        for name in ("instruction", "input"):
            if not isinstance(record.get(name), str | None):
                raise BadChat(f"{name} is {short(repr(record[name]), 60)}: expected a text")
        asked = "\n\n".join(filter(None, (record["instruction"], record.get("input"))))
        system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
        return [*system, {"role": "user", "content": asked}, {"role": "assistant", "content": record["output"]}]
    raise BadChat(
        "no messages, conversations, prompt with completion, or instruction with output: chat.messages_field names "
        f"another field; it has {', '.join(map(str, record))}"
    )


def as_message(given: Any, number: int) -> dict[str, Any]:
    """A message with its role and content. Fields that are null are left out: parquet gives every row all of them."""
    if not isinstance(given, dict):
        raise BadChat(f"message {number}: expected an object, not {short(repr(given), 60)}")
    message = {key: value for key, value in given.items() if value is not None}
    if "from" in message and "value" in message:  # ShareGPT
        role = message.pop("from")
        message |= {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": message.pop("value")}
    thought = next((message[name] for name in _THOUGHTS if name in message), None)
    if thought is not None:
        message = {"thinking": thought} | message | {"reasoning_content": thought}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise BadChat(f"message {number}: no role")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        message["content"] = content = "".join(str(part.get("text", "")) for part in content)
    if isinstance(content, list):
        raise BadChat(f"message {number}: content with images or sound, which no model here takes")
    if not _are_objects(message.get("tool_calls", [])):
        raise BadChat(f"message {number}: tool_calls: expected a list of objects")
    if content is None and message.get("tool_calls"):
        message["content"] = content = ""
    if not isinstance(content, str):
        raise BadChat(f"message {number}: content is {short(repr(given.get('content')), 60)}: expected a text")
    return message


def export_template(chat: Chat, tokenizer_path: str, folder: Path) -> dict[str, list[int]]:
    """Writes chat_template.jinja beside an exported tokenizer; returns eos_token_id for generation_config.json."""
    chats = Chats(chat, tokenizer_path)
    (folder / CHAT_TEMPLATE).write_text(chats.template.source, encoding="utf-8")
    try:
        return {"eos_token_id": sorted(chats.ends())}
    except BadChat:  # a template for other chats than a user's question and an answer
        return {}
