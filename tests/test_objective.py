"""Objectives and trained labels: each is one process's run at every layout."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import train
from components.commands.figures import Observation, broken_bars
from components.config import ConfigError, load_config
from components.data import TokenCache, loader
from models import objective
from models.layers import Head
from models.objective import OBJECTIVES, Objective, Terms
from parallelize.rules import check_model
from parallelize.tensor import gathered_softmax, vocabulary_parallel_softmax
from tests.harness import observe

DEGREES = "--parallelism.{}_parallel_degree"
LAYOUTS = {
    "fsdp 2": (2, ("--training.local_batch_size", "9")),
    "tp 2": (2, (DEGREES.format("tensor"), "2")),
    "tp 2, loss not split": (2, (DEGREES.format("tensor"), "2", "--parallelism.loss_parallel", "false")),
    "tp 2, compiled": (2, (DEGREES.format("tensor"), "2", "--compile.enable", "--compile.backend", "aot_eager")),
    "cp 2": (2, (DEGREES.format("context"), "2")),
    "pp 2": (2, (DEGREES.format("pipeline"), "2", "--parallelism.pipeline_parallel_microbatch_size", "6")),
    "parts": (
        2,
        (
            *(DEGREES.format("pipeline"), "2", "--parallelism.pipeline_parallel_microbatch_size", "6"),
            *("--parallelism.pipeline_parallel_sequence_splits", "2"),
        ),
    ),
}
WEIGHTED = (
    *("--training.objective", "weighted", "--model.flavor", "many_heads_odd_vocabulary"),
    *("--validation.enable", "true", "--validation.held_out_fraction", "0.02"),
)


def weighted(log_total: Tensor, label_logit: Tensor, weights: Tensor) -> Terms:
    """Weights of tokens from a column, and a square of the log of the sum of exponentials."""
    share = weights / 1000
    squares = 0.01 * log_total.square()
    loss = share * (log_total - label_logit) + squares
    return Terms(loss, share + 0.02 * log_total, -share, (squares, share + 0 * log_total))


def plant_weighted() -> None:
    OBJECTIVES["weighted"] = Objective(weighted, columns=("weights",), divisor="halves", logged=("squares", "shares"))
    loader.COLUMNS["weights"] = lambda sequences, positions, seed: (
        (positions[:, None] * 37 + np.arange(sequences.seq_len) * 11) % 1000
    )
    loader.DIVISORS["halves"] = lambda sequences, numbers: sequences.count_valid(numbers) // 2


def compared_with_torch(run: train.Run) -> list[float]:
    """Relative errors of the loss with both terms, of its gradients, and of the loss without them."""
    mesh, generator, vocabulary = run.mesh["tp"], torch.Generator().manual_seed(0), 18
    hidden = torch.randn(24, 16, generator=generator, requires_grad=True)
    weights = torch.randn(vocabulary, 16, generator=generator, requires_grad=True)
    labels = torch.randint(0, vocabulary, (24,), generator=generator)
    labels[::5] = -100
    logits = hidden @ weights.T
    squares = (logits.logsumexp(1).square() * (labels != -100)).sum()
    of_labels = functools.partial(F.cross_entropy, logits, labels, reduction="sum")
    both = of_labels(label_smoothing=0.2) + 0.01 * squares
    expected = [both, *torch.autograd.grad(both, (hidden, weights)), of_labels()]
    given = objective.objective_of("next_token", (), 0.01, 0.2)
    shares = F.pad(weights.detach(), (0, 0, 0, -vocabulary % mesh.size())).chunk(mesh.size())
    rows = shares[mesh.get_local_rank()].requires_grad_()
    head = Head(16, vocabulary)
    head.objective = given
    if mesh.size() > 1:
        split = vocabulary_parallel_softmax if run.config.parallelism.loss_parallel else gathered_softmax
        head.softmax = functools.partial(split, mesh=mesh, vocabulary=vocabulary)
    loss = head.loss(hidden[None], rows, labels[None], {})
    of_hidden, of_rows = torch.autograd.grad(loss, (hidden, rows))
    dist.all_reduce(of_hidden, group=mesh.get_group())
    all_rows = [torch.empty_like(of_rows) for _ in range(mesh.size())]
    dist.all_gather(all_rows, of_rows, group=mesh.get_group())
    plain, head.logged = head.logged, None
    assert plain is not None
    with torch.no_grad():
        validated = head.loss(hidden[None], rows, labels[None], {})
    found = [loss, of_hidden, torch.cat(all_rows)[:vocabulary], plain]
    assert validated == plain == head.logged, "a validation has neither term"
    return [((got - want).norm() / want.norm()).item() for got, want in zip(found, expected, strict=True)]


@pytest.mark.parametrize(("ranks", "split"), [(1, "true"), (2, "true"), (4, "true"), (4, "false")])
def test_terms_are_those_of_torch(ranks: int, split: str) -> None:
    """z-loss and label smoothing, with a vocabulary that four ranks cannot share evenly."""
    layout = ("--parallelism.tensor_parallel_degree", str(ranks), "--parallelism.loss_parallel", split)
    words = (*layout, "--model.flavor", "many_heads")
    assert max(observe(*words, ranks=ranks, steps=0, at_end=compared_with_torch).extra) < 1e-6


def test_terms_of_a_mixture_are_left_out_of_a_validation_of_its_sources() -> None:
    given = objective.objective_of("next_token", ("a", "b"), 0.01)
    numbers = torch.tensor([[2.0], [3.0]]), torch.ones(2, 1)
    with_terms, without = (each.terms(*numbers, sources=torch.tensor([[0], [1]])) for each in (given, given.validated))
    assert (with_terms.loss - without.loss).flatten().tolist() == pytest.approx([0.04, 0.09])
    assert [len(torch.cat(list(each.logged), 1)[0]) for each in (with_terms, without)] == [len(given.logged)] * 2


def logged(run: train.Run) -> dict[str, float]:
    return train.row_of(torch.zeros(()), run.logged, run.objective, run.mesh)


@functools.cache
def one_process(objective: str = "", trained: bool = False) -> Observation:
    words = WEIGHTED if objective else ("--model.flavor", "many_heads_odd_vocabulary")
    plant = plant_weighted if objective else plant_trained if trained else None
    return observe(*words, steps=2, mutate=plant, at_end=logged)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_objective_with_columns_and_a_divisor_of_its_own_is_one_run(layout: str) -> None:
    ranks, words = LAYOUTS[layout]
    observed = observe(*WEIGHTED, *words, ranks=ranks, steps=2, mutate=plant_weighted, at_end=logged)
    reference = one_process("weighted")
    assert not broken_bars(observed, reference)
    assert observed.extra == pytest.approx(reference.extra, rel=1e-5)
    assert reference.extra["squares"] > 0
    assert reference.validation_loss == pytest.approx(reference.losses[-1], rel=0.3), "divided alike"


def validated_then_stepped(run: train.Run) -> dict[str, float]:
    train.validate(run)
    train.train_step(run, train.local_batches(run), train.divisor(run))
    return logged(run)


def test_a_validation_is_not_logged_with_the_next_step() -> None:
    found = observe(*WEIGHTED, steps=1, mutate=plant_weighted, at_end=validated_then_stepped).extra
    assert found == pytest.approx(one_process("weighted").extra, rel=1e-6)


def test_the_weights_make_a_difference() -> None:
    assert "gradient" in broken_bars(one_process("weighted"), one_process())


def test_a_derivative_is_that_of_the_loss() -> None:
    inputs = [torch.randn(6, 1, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weights = torch.arange(6)[:, None] * 100
    terms = weighted(inputs[0], inputs[1], weights)
    by_log_total, by_label_logit = torch.autograd.grad(terms.loss.sum(), inputs)
    torch.testing.assert_close(by_log_total, torch.as_tensor(terms.by_log_total))
    torch.testing.assert_close(by_label_logit, torch.as_tensor(terms.by_label_logit).double())


def test_an_unknown_objective_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"training.objective = .*not one of next_token; did you mean next_token"):
        check_model(load_config(["--training.objective", "next_tokens"]))


def test_a_loss_that_is_no_number_is_that_of_its_source_alone() -> None:
    of_sources = objective.objective_of("next_token", ("a", "b"))
    assert of_sources is objective.objective_of("next_token", ("a", "b")), "else it is compiled again and again"
    logits, sources = torch.tensor([[1.0], [torch.nan]]), torch.tensor([[0], [1]])
    losses, labels = (each.sum(0) for each in of_sources.terms(logits, torch.zeros(2, 1), sources=sources).logged)
    assert losses[0] == 1
    assert losses[1].isnan()
    assert labels.tolist() == [1, 1]


def test_what_is_logged_is_of_the_step_alone() -> None:
    head: Any = torch.nn.Module()
    head.objective, head.logged = OBJECTIVES["next_token"], torch.tensor([6.0])
    assert objective.take_logged([head], ["sums"], torch.device("cpu"), 3) == {"sums": torch.tensor(2.0)}
    assert objective.take_logged([head], ["sums"], torch.device("cpu"), 3) == {"sums": torch.tensor(0.0)}


def plant_trained() -> None:
    """Three of five tokens, and none of the first sequences."""
    TokenCache.trained = property(  # type: ignore[assignment]
        lambda cache: (np.arange(len(cache.tokens)) % 5 < 3) & (np.arange(len(cache.tokens)) > 100)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_that_are_not_trained_are_no_labels_at_any_layout(layout: str) -> None:
    ranks, words = LAYOUTS[layout]
    flavor = ("--model.flavor", "many_heads_odd_vocabulary")
    observed = observe(*flavor, *words, ranks=ranks, steps=2, mutate=plant_trained, at_end=logged)
    reference = one_process(trained=True)
    assert not broken_bars(observed, reference)
    assert "loss" in broken_bars(observed, one_process())


def labels(run: train.Run) -> tuple[int, int]:
    """Labels of a global batch: as they are counted, and as they are in its batches."""
    batches = train.local_batches(run)
    found = sum(int((next(batches)["labels"] != loader.IGNORED).sum()) for _ in range(run.accumulation_steps))
    return train.divisor(run), found


def test_the_divisor_counts_the_labels_of_the_batch() -> None:
    counted, found = observe("--training.local_batch_size", "9", steps=0, mutate=plant_trained, at_end=labels).extra
    assert counted == found
    assert 0 < found < 0.7 * 36 * 32


def test_a_batch_without_a_label_has_no_loss_and_is_no_nan() -> None:
    observed = observe(steps=1, mutate=no_labels, at_end=logged)
    assert observed.losses == [0.0]
    assert observed.norms == [[0.0]]


def no_labels() -> None:
    TokenCache.trained = property(lambda cache: np.zeros(len(cache.tokens), bool))  # type: ignore[assignment]
