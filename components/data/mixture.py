"""Mixtures of datasets in exact shares: a pure function from a position of the run to a source and its sequence.

A group of sources is halved until one source is left. The first half, with integer weight a of the group's weight b,
gets floor(n a / b) of the group's first n positions, in exact arithmetic. A position belongs to the half whose count
rises there. In every prefix, a source's count differs from its exact share by less than one sequence for each halving.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from typing import Literal

import numpy as np

from components.config import ConfigError, Training
from components.config.bounds import integer_weights
from components.data.order import sequence_at
from components.data.packed import PackedSequences


@dataclass(frozen=True)
class Shares:
    """Integer weights that hold from the position `start` of the run on. Sources with weight 0 are left out."""

    start: int
    names: tuple[str, ...]
    weights: tuple[int, ...]


def size_weights(tokens: Mapping[str, int], temperature: float) -> dict[str, int]:
    """Weights proportional to tokens^(1 / temperature), in billionths of all; 1 at the least.

    Decimal's logarithm and exponential are rounded correctly, so every machine finds the same integers.
    """
    with localcontext(prec=40, rounding=ROUND_HALF_EVEN):
        powers = {name: (Decimal(size).ln() / Decimal(repr(temperature))).exp() for name, size in tokens.items()}
        total = sum(powers.values())
        return {name: max(1, round(10**9 * power / total)) for name, power in powers.items()}


def phases(training: Training, tokens: Mapping[str, int]) -> list[Shares]:
    """The weights of [[training.mixture]], then those of each phase. tokens: the size of each source."""
    first = {source.name: source.weight for source in training.mixture}
    if training.mixture_temperature is not None:
        sizes = {name: tokens[name] for name, weight in first.items() if weight}
        first |= size_weights(sizes, training.mixture_temperature)
    given: list[tuple[int, Mapping[str, float]]] = [(0, first)]
    given += [(phase.from_sequence, phase.weights) for phase in training.mixture_phase]
    found = []
    for start, weights in given:
        # Sorted and without zeros, so that a source that is added later changes nothing before.
        names = tuple(sorted(name for name, weight in weights.items() if weight))
        found.append(Shares(start, names, integer_weights([weights[name] for name in names])))
    return found


def counts(length: int, weights: tuple[int, ...]) -> list[int]:
    """How many of the first `length` positions each source has."""
    if len(weights) == 1:
        return [length]
    half = len(weights) // 2
    total, left = sum(weights), sum(weights[:half])
    first = length * left // total if total else 0
    return [*counts(first, weights[:half]), *counts(length - first, weights[half:])]


def split(positions: np.ndarray, weights: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The source at each position, and how many positions the source has before it; both int64."""
    if len(weights) == 1:
        return np.zeros_like(positions), positions
    half = len(weights) // 2
    total, left = sum(weights), sum(weights[:half])
    before = positions // total * left + positions % total * left // total
    is_left = (positions + 1) // total * left + (positions + 1) % total * left // total > before
    source, place = np.empty_like(positions), np.empty_like(positions)
    for chosen, own, part, first in (
        (is_left, before, weights[:half], 0),
        (~is_left, positions - before, weights[half:], half),
    ):
        if chosen.any():
            inner, place[chosen] = split(own[chosen], part)
            source[chosen] = inner + first
    return source, place


class Mixture(PackedSequences):
    """Sequences of several datasets. Numbers count the sequences of the first source, then those of the second, ...

    The order of a source depends on its name, and on nothing of the others.
    """

    def __init__(
        self,
        sources: Mapping[str, PackedSequences],
        shares: list[Shares],
        seq_len: int,
        part: Literal["train", "validation"] = "train",
        max_epochs: Mapping[str, float] | None = None,
    ) -> None:
        self.sources, self.shares, self.seq_len, self.part = dict(sorted(sources.items())), shares, seq_len, part
        self._parts, self._max_epochs = [*self.sources.values()], max_epochs or {}
        lengths = [len(each) for each in self._parts]
        self._firsts = np.cumsum([0, *lengths])
        self.num_sequences, self.num_tokens = sum(lengths), sum(each.num_tokens for each in self._parts)
        if part == "validation":  # every sequence once, each source in its share of all
            self.shares = [Shares(0, tuple(self.sources), tuple(lengths))]
        described = [[name, each.key] for name, each in self.sources.items()], [vars(each) for each in self.shares]
        self.key = "mixture/" + hashlib.blake2b(json.dumps(described).encode(), digest_size=12).hexdigest()
        self.mixture = [
            [each.start, {name: [weight, self.sources[name].key] for name, weight in _weights(each).items()}]
            for each in self.shares
        ]

    def seen(self, length: int) -> dict[str, int]:
        """How many of the first `length` sequences of the run each source has."""
        found = dict.fromkeys(self.sources, 0)
        ends = [*(each.start for each in self.shares[1:]), math.inf]
        for each, end in zip(self.shares, ends, strict=True):
            own = counts(max(0, int(min(end, length)) - each.start), each.weights)
            for name, count in zip(each.names, own, strict=True):
                found[name] += count
        return found

    def describe(self, end: int) -> list[str]:
        """A line for each source: how much of it is seen up to this position of the run.

        Raises ConfigError if a source would be seen more often than its max_epochs.
        """
        wrong = list[str]()
        lines = [f"source {name}: {line}" for name, each in self.sources.items() for line in each.describe(end)]
        for name, count in self.seen(end).items():
            epochs, most = count / len(self.sources[name]), self._max_epochs.get(name, 0)
            lines.append(f"source {name}: {count:,} of {end:,} sequences, {epochs:.2f} epochs")
            if most and epochs > most:
                wrong.append(
                    f"training.mixture: max_epochs = {most:g} of {name}: it would be seen {epochs:.2f} times in "
                    f"{end:,} sequences; lower its weight, or give it more data"
                )
        if wrong:
            raise ConfigError(wrong)
        return lines

    def _split(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source at each position, and how many positions the source has before it; both int64."""
        positions = np.asarray(positions, dtype=np.int64)
        phase = np.searchsorted([each.start for each in self.shares], positions, side="right") - 1
        source, place = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(phase):
            chosen, shares = phase == number, self.shares[number]
            own, places = split(positions[chosen] - shares.start, shares.weights)
            before = self.seen(shares.start)
            source[chosen] = np.asarray([[*self.sources].index(name) for name in shares.names])[own]
            place[chosen] = places + np.asarray([before[name] for name in shares.names])[own]
        return source, place

    def sources_at(self, positions: np.ndarray) -> np.ndarray:
        return self._split(positions)[0]

    def at(self, positions: np.ndarray, seed: int) -> np.ndarray:
        source, place = self._split(positions)
        numbers = np.empty_like(place)
        for index, (name, part) in enumerate(self.sources.items()):
            chosen = source == index
            if chosen.any():
                own_seed = seed ^ int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
                numbers[chosen] = self._firsts[index] + sequence_at(place[chosen], len(part), own_seed)
        return numbers

    def _sources_of(self, numbers: np.ndarray) -> list[tuple[np.ndarray, PackedSequences, np.ndarray]]:
        """For each source: (mask of the numbers that belong to it, the source, these numbers within the source)."""
        numbers = np.asarray(numbers, dtype=np.int64)
        if self.part == "validation":
            source, own = self._split(numbers)
        else:
            source = np.searchsorted(self._firsts, numbers, side="right") - 1
            own = numbers - self._firsts[source]
        return [(source == index, self._parts[index], own[source == index]) for index in np.unique(source)]

    def get(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shape = len(indices), self.seq_len + 1
        tokens, documents = np.empty(shape, np.int64), np.empty((shape[0], self.seq_len), np.int64)
        for chosen, part, own in self._sources_of(indices):
            tokens[chosen], documents[chosen] = part.get(own)
        return tokens, documents

    def trained(self, indices: np.ndarray) -> np.ndarray | None:
        return self._joined(indices, "trained", self.seq_len + 1, True)

    def padding(self, indices: np.ndarray) -> np.ndarray | None:
        return self._joined(indices, "padding", self.seq_len, False)

    def taught(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        found = [(chosen, part.taught(own)) for chosen, part, own in self._sources_of(indices)]
        kinds = [each for _, each in found if each is not None]
        if not kinds:
            return None
        ids, logs = (np.empty((len(indices), *each.shape[1:]), each.dtype) for each in kinds[0])
        for chosen, each in found:
            assert each is not None
            ids[chosen], logs[chosen] = each
        return ids, logs

    def _joined(self, indices: np.ndarray, column: str, width: int, default: bool) -> np.ndarray | None:
        """A column of each source's own sequences; None if no source has one."""
        found = [(chosen, getattr(part, column)(own)) for chosen, part, own in self._sources_of(indices)]
        if all(values is None for _, values in found):
            return None
        joined = np.full((len(indices), width), default)
        for chosen, values in found:
            joined[chosen] = default if values is None else values
        return joined

    def count_valid(self, indices: np.ndarray) -> int:
        return sum(part.count_valid(own) for _, part, own in self._sources_of(indices))


def _weights(shares: Shares) -> dict[str, int]:
    return dict(zip(shares.names, shares.weights, strict=True))
