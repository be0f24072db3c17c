"""Continuations of prompts while the model trains, computed by the training ranks at any layout.

A token takes one forward of each whole text, because no layout has to keep keys and values for it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from components.config import ConfigError, JobConfig, mistake
from components.data.chats import Chats
from components.data.template import BadChat
from components.data.tokenizer import Tokenizer, load_tokenizer
from components.launch.signals import StopSignal
from models.random_bits import key_of, mixed
from parallelize.scores import Scorer


class Prompts(NamedTuple):
    """The prompts of a job."""

    tokenizer: Tokenizer
    ids: list[list[int]]
    """Tokens of each prompt."""
    ends: set[int]
    """Tokens that end a text."""


def read_prompts(config: JobConfig) -> Prompts:
    """The prompts as tokens: texts, or users' messages if the run is on chats or pairs.

    Raises ConfigError for a prompt that leaves no room for samples.tokens, or that the chat template cannot show.
    """
    samples, training, path = config.samples, config.training, config.model.hf_assets_path
    try:
        if training.has_chats:
            chats = Chats(config.chat, path)
            asked = [[{"role": "user", "content": prompt}] for prompt in samples.prompts]
            found = Prompts(chats.tokenizer, [chats.prompt(messages) for messages in asked], chats.ends())
        else:
            tokenizer = load_tokenizer(path, training.dataset_separator)
            before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            ids = [[*before, *tokenizer.encode(prompt)] for prompt in samples.prompts]
            found = Prompts(tokenizer, ids, set() if tokenizer.eos_id is None else {tokenizer.eos_id})
    except BadChat as error:
        raise ConfigError(mistake(config, "samples.prompts", str(error))) from None
    longest = max(map(len, found.ids))
    if longest + samples.tokens - 1 > training.seq_len:  # the last token of a text is not fed to the model
        reason = f"one has {longest} tokens; with samples.tokens = {samples.tokens} and training.seq_len = "
        room = training.seq_len - samples.tokens + 1
        use = f"use prompts of {room} tokens or fewer" if room > 0 else "use fewer samples.tokens"
        raise ConfigError(mistake(config, "samples.prompts", f"{reason}{training.seq_len}, {use}"))
    return found


class Samples:
    """Continues the prompts of a job."""

    def __init__(self, config: JobConfig, scorer: Scorer) -> None:
        self._config, self._scorer, self._prompts = config.samples, scorer, read_prompts(config)
        self._seed = config.debug.seed

    def see(self, step: int, stop: StopSignal) -> list[dict[str, Any]]:
        """A prompt, its continuation, and the tokens of the continuation, for each prompt; all ranks get the same.

        A text ends before an end token. Ends early if all ranks agree to stop.
        """
        texts: list[list[int]] = [[] for _ in self._prompts.ids]
        growing = list(range(len(texts)))
        count = self._config.top_k if self._config.temperature else 1
        for position in stop.until_agreed(range(self._config.tokens)):
            # The label after the last token is never looked at.
            asked = [[*self._prompts.ids[number], *texts[number], 0] for number in growing]
            found = self._scorer.of_texts(asked, count, self._prompts.tokenizer.vocab_size)
            keys = [key_of("samples", self._seed, step, self._config.prompts[number]) for number in growing]
            chosen = torch.tensor(
                [
                    choose(each.likeliest[-1], each.ids[-1], self._config.temperature, key, position)
                    for each, key in zip(found, keys, strict=True)
                ]
            )
            dist.broadcast(chosen, 0)  # so that all ranks end at the same token, whatever their rounding
            said = dict(zip(growing, chosen.tolist(), strict=True))
            growing = [number for number, token in said.items() if token not in self._prompts.ends]
            for number in growing:
                texts[number].append(said[number])
            if not growing:
                break
        given = zip(self._config.prompts, self._prompts.ids, texts, strict=True)
        return [{"prompt": prompt, "text": self._decoded(ids, text), "tokens": text} for prompt, ids, text in given]

    def _decoded(self, prompt: Sequence[int], text: Sequence[int]) -> str:
        """Decoded after the prompt, because some tokenizers leave out the space before a first word."""
        decode = self._prompts.tokenizer.decode
        return decode([*prompt, *text])[len(decode([*prompt])) :]


def choose(likeliest: Tensor, ids: Tensor, temperature: float, key: int, position: int) -> int:
    """A token: the likeliest at temperature 0, else drawn among these by a function of key and position alone.

    likeliest: (K,) log-probabilities in falling order; ids: (K,) their tokens.
    """
    if not temperature:
        return int(ids[0])
    shares = (likeliest / temperature).softmax(0).cumsum(0)
    drawn = (int(mixed(torch.tensor([position]), key)) >> 32 & 0xFFFFFFFF) / 2**32
    return int(ids[int((shares <= drawn * shares[-1]).sum())])
