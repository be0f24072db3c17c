"""Log-probabilities of tokens from the sharded model, without gradients: the same numbers at every layout."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from components.config import JobConfig
from models.layers import Head
from models.lora import AdaptedLinear
from models.moe import Experts
from parallelize.context import shard_sequence
from parallelize.data import reshard
from parallelize.mesh import Degrees, Mesh, batch_rank
from parallelize.pieces import sequence_order
from parallelize.runner import Batch, Runner


class Scores(NamedTuple):
    """Log-probabilities of the tokens of a batch, float64."""

    label: Tensor
    """(B, S): of each label; 0 where the label is -100."""
    likeliest: Tensor
    """(B, S, K): of the K likeliest next tokens, in falling order."""
    ids: Tensor
    """(B, S, K) int64: these tokens."""


class Scorer:
    """Scores tokens with the model that this rank has a part of. All ranks make the same calls."""

    def __init__(self, stages: list[nn.Module], runner: Runner, mesh: Mesh, config: JobConfig) -> None:
        self._stages, self._runner, self._mesh, self._config = stages, runner, mesh, config
        self._device = torch.device(mesh.device_type)
        self.vocabulary: int = stages[0].config.vocab_size  # type: ignore[union-attr, assignment]

    @property
    def batch_rank(self) -> int:
        """This rank's number among the degrees' batch_ranks, which have rows of their own."""
        return batch_rank(self._mesh)

    @property
    def degrees(self) -> Degrees:
        return self._mesh.degrees

    @property
    def rows_at_once(self) -> int:
        """Texts of one forward of all batch ranks."""
        return self._config.training.local_batch_size * self.degrees.batch_ranks

    @torch.no_grad()
    def of_batch(self, batch: Batch, count: int = 1, known: int | None = None, temperature: float = 1.0) -> Scores:
        """The scores of a batch rank's columns (B, S), with the `count` likeliest tokens of each.

        The likeliest are of the first `known` tokens, because a model may have more rows than a tokenizer has tokens.
        Log-probabilities are of logits divided by the temperature.

        The batch rank's other ranks (pp, cp, tp) give the same columns, and get the same scores.
        """
        length, cp = batch["tokens"].shape[1], self._mesh["cp"]
        on_device = {name: column.to(self._device) for name, column in batch.items()}
        own = shard_sequence(on_device, self._mesh, self._config.parallelism)
        known = self.vocabulary if known is None else min(known, self.vocabulary)
        count = min(count, known)
        with _scored(self._stages, (count, known, temperature)):
            found = self._runner.scores(own, 1 + 2 * count)
        reshard(self._stages)
        balanced = self._config.parallelism.context_parallel_load_balancer == "headtail"
        found = sequence_order(_whole(found, cp, 1), 1, cp.size(), balanced)[:, :length]
        label, likeliest, ids = found.split([1, count, count], dim=2)
        return Scores(label[..., 0], likeliest, ids.long())

    def of_texts(self, texts: Sequence[Sequence[int]], count: int = 1, known: int | None = None) -> list[Scores]:
        """The scores (S,) and (S, count) of each text of S + 1 tokens, whose labels are its tokens after the first.

        The texts, the same on all ranks, are shared out over the batch ranks; all ranks get all scores, on the CPU.
        Raises ValueError for a text of fewer than two tokens, or of more than training.seq_len + 1.
        """
        limit = self._config.training.seq_len
        if wrong := [len(text) for text in texts if not 2 <= len(text) <= limit + 1]:
            raise ValueError(f"a text of {wrong[0]} tokens: scores need from 2 to {limit + 1}")
        at_once, found = self.rows_at_once, []
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))  # rows of similar length together
        for first in range(0, len(texts), at_once):
            numbers = order[first : first + at_once]
            scores = self._of_rows([texts[number] for number in numbers], count, known)
            found += list(zip(numbers, scores, strict=True))
        return [scores for _, scores in sorted(found, key=lambda pair: pair[0])]

    def joined(self, part: Tensor) -> Tensor:
        """The rows (B, ...) of each batch rank, joined in the order of batch ranks, on every rank."""
        return _whole(_whole(part, self._mesh["dp_shard"], 0), self._mesh["dp_replicate"], 0)

    def _of_rows(self, texts: Sequence[Sequence[int]], count: int, known: int | None) -> list[Scores]:
        """The scores of at most local_batch_size x batch_ranks texts."""
        mesh = self._mesh
        each = -(-len(texts) // mesh.degrees.batch_ranks)
        size = min(self._config.training.local_batch_size, 1 << (each - 1).bit_length())  # few shapes
        longest = max(map(len, texts)) - 1
        length = min(self._config.training.seq_len, 1 << (longest - 1).bit_length())
        start = batch_rank(mesh) * size
        tokens, labels = torch.zeros(size, length, dtype=torch.int64), torch.full((size, length), -100)
        for row, text in enumerate(texts[start : start + size]):
            tokens[row, : len(text) - 1] = torch.tensor(text[:-1])
            labels[row, : len(text) - 1] = torch.tensor(text[1:])
        positions = torch.arange(length).expand(size, length)
        own = self.of_batch({"tokens": tokens, "labels": labels, "positions": positions}, count, known)
        whole = [self.joined(part).cpu() for part in own]
        return [Scores(*(part[row, : len(text) - 1] for part in whole)) for row, text in enumerate(texts)]


@torch.no_grad()
def label_scores(stages: list[nn.Module], runner: Runner, batch: Batch, with_adapters: bool = True) -> Tensor:
    """Log-probabilities (B, S) of the labels of this rank's part of a batch, float64; 0 where the label is -100.

    with_adapters: false for those of the base of adapters.
    """
    with _scored(stages, (0, 0, 1.0)), nullcontext() if with_adapters else without_adapters(stages):
        return runner.scores(batch, 1)[..., 0]


def with_base_scores(stages: list[nn.Module], runner: Runner, batch: Batch) -> Batch:
    """This rank's part of a batch of pairs, with the log-probabilities of the base of adapters as `reference`."""
    plain = {name: column for name, column in batch.items() if name != "dropout_keys"}
    return batch | {"reference": label_scores(stages, runner, plain, with_adapters=False)}


@contextmanager
def without_adapters(stages: list[nn.Module]) -> Iterator[None]:
    """The stages are their base: what adapters add is multiplied by 0."""
    adapted = [each for stage in stages for each in stage.modules() if isinstance(each, AdaptedLinear | Experts)]
    scales = [module.scale for module in adapted]
    for module in adapted:
        module.scale = 0.0
    try:
        yield
    finally:
        for module, scale in zip(adapted, scales, strict=True):
            module.scale = scale


@contextmanager
def _scored(stages: list[nn.Module], what: tuple[int, int, float]) -> Iterator[None]:
    """The stages' head gives scores instead of a loss; `what` is Head.scored."""
    heads = [module for stage in stages for module in stage.modules() if isinstance(module, Head)]
    for head in heads:
        head.scored = what
    try:
        yield
    finally:
        for head in heads:
            head.scored = None


def _whole(part: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """The parts of the ranks of a one-dimensional mesh, joined."""
    return part if mesh.size() == 1 else DTensor.from_local(part, mesh, [Shard(dim)], run_check=False).full_tensor()
