"""Pairs of completions from records of any usual shape: a chosen and a rejected one after the same prompt.

A record has the fields chosen and rejected, each a text, a message or a list of messages. The prompt is in the field
prompt (TRL), messages, conversation or conversations (axolotl); without one, or if the lists begin with the prompt too,
it is what both lists begin with. Texts are shown as the turns of a user and an assistant.
"""

from typing import Any

import numpy as np

from components.config.keys import short
from components.data.chats import Chats, Tokens, as_message
from components.data.rows import ChatCache, ChatRows, ChatSpec
from components.data.template import BadChat, targets

_PROMPTS = ("prompt", "messages", "conversation", "conversations")
"""Fields of a prompt, in the order in which they are looked for."""
SIDES = ("chosen", "rejected")


class Pairs(Chats):
    """Turns records into pairs of sequences. Only completions are trained: the assistant's turns after the prompt."""

    def sequences(self, record: Any) -> list[Tokens]:
        """The chosen and the rejected sequence of a record, prompts included. Raises BadChat."""
        prompt, completions, tools = self.sides(record)
        return [self._sequence(prompt, completion, tools, side) for side, completion in zip(SIDES, completions)]

    def sides(self, record: Any) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]], Any]:
        """The prompt's messages, those of each completion, and the record's tools. Raises BadChat."""
        if not isinstance(record, dict):
            raise BadChat(f"expected an object, not {short(repr(record), 60)}")
        if missing := [side for side in SIDES if record.get(side) is None]:
            raise BadChat(f'no field "{missing[0]}"; it has {", ".join(map(str, record))}')
        completions = [_messages(record[side], "assistant", side) for side in SIDES]
        field = self.chat.messages_field or next((name for name in _PROMPTS if record.get(name) is not None), "")
        if self.chat.messages_field and record.get(field) is None:
            raise BadChat(f'no field "{field}" (chat.messages_field); it has {", ".join(map(str, record))}')
        prompt = _messages(record[field], "user", field) if field else []
        if not field or all(each[0]["role"] != "assistant" for each in completions):
            length = _shared(*completions)
            prompt, completions = completions[0][:length], [each[length:] for each in completions]
        for side, completion in zip(SIDES, completions, strict=True):
            if completion[0]["role"] != "assistant":
                raise BadChat(f"{side}: begins with a turn of {completion[0]['role']} after the prompt, not assistant")
        if completions[0] == completions[1]:
            raise BadChat("chosen and rejected are the same")
        return prompt, completions, record.get("tools") or None

    def _sequence(
        self, prompt: list[dict[str, Any]], completion: list[dict[str, Any]], tools: Any, side: str
    ) -> Tokens:
        messages, tools = self._protected([*prompt, *completion], tools)

        def is_trained(number: int) -> bool:
            return number >= len(prompt) and messages[number]["role"] == "assistant"

        rendered = targets(self.template, messages, tools, is_trained, self._special)
        if len(rendered) > 1:
            raise BadChat(f"{side}: the template shows earlier turns differently in each turn; use one turn")
        (only,) = rendered
        return self._tokens(only.text[: only.trained[-1][1]], only.trained)


def _messages(given: Any, role: str, field: str) -> list[dict[str, Any]]:
    """The messages of a text, of a message, or of a list of messages. Raises BadChat."""
    listed = [{"role": role, "content": given}] if isinstance(given, str) else given
    listed = [listed] if isinstance(listed, dict) else listed
    if not isinstance(listed, list) or not (listed or field not in SIDES):
        raise BadChat(f"{field}: expected a text, a message or a list of messages, not {short(repr(given), 60)}")
    try:
        return [as_message(each, number) for number, each in enumerate(listed, 1)]
    except BadChat as error:
        raise BadChat(f"{field}: {error}") from None


def _shared(chosen: list[dict[str, Any]], rejected: list[dict[str, Any]]) -> int:
    """How many messages both begin with, but for a last one of each."""
    length = 0
    while length < min(len(chosen), len(rejected)) - 1 and chosen[length] == rejected[length]:
        length += 1
    return length


class PairSpec(ChatSpec):
    """Pairs to tokenize."""

    kind, unit = Pairs, "pairs"

    def open(self, folder: Any) -> "PairCache":
        return PairCache(folder)


class PairCache(ChatCache):
    """A finished cache of pairs. A document is the sequence of a side: the chosen one, then the rejected one."""


class PairRows(ChatRows):
    """Rows of seq_len + 1 tokens: whole pairs one after another, then padding.

    Each sequence is a document of its own. If a pair does not fit and too_long = "truncate_end", the longer sequence
    loses its end, or both become equally long.
    """

    sides, unit = 2, "pair"
    reference: np.ndarray | None = None
    """float64, by sequence: its log-probability under the reference model; NaN if not computed."""

    def _cut(self, lengths: np.ndarray) -> np.ndarray:
        most = self.seq_len + 1
        return np.minimum(lengths, np.maximum(most // 2, most - lengths[:, ::-1]))

    def count_pairs(self, indices: np.ndarray) -> int:
        """Number of pairs in these rows."""
        return int(np.diff(self._rows)[indices].sum()) // 2

    def sides_at(self, indices: np.ndarray) -> np.ndarray:
        """(n, seq_len): 2 p + 1 for labels of the chosen completion of a row's pair p, 2 p + 2 of the rejected one."""
        places, documents = self._laid_out(indices)
        trained = (places >= 0) & self.cache.trained[places]
        return np.where(trained, documents + 1, 0)[:, 1:]

    def sequences_of(self, index: int) -> slice:
        """The numbers of a row's sequences."""
        return slice(self._rows[index], self._rows[index + 1])

    def reference_at(self, indices: np.ndarray) -> np.ndarray:
        """(n, seq_len) float64: shares of labels, which add up to each completion's log-probability by the reference.

        Zeros where none is computed.
        """
        sides = self.sides_at(indices)
        if self.reference is None:
            return np.zeros(sides.shape)
        numbers = self._rows[np.asarray(indices)][:, None] + np.maximum(sides - 1, 0)
        return np.where(sides > 0, self.reference[numbers] / self.labels_by_sequence[numbers], 0.0)
