"""Every pitfall of docs/pitfalls.md has a test; here are those that are at home nowhere else."""

import ast
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import train
from components.commands.figures import broken_bars, figures
from components.config import ROOT
from tests.harness import observe, rewrite
from tests.test_parallelize_data import LAYOUTS, UNEVEN_LABELS, local_batch, one_process

TP2 = ("--parallelism.tensor_parallel_degree", "2")
CP2 = ("--parallelism.context_parallel_degree", "2")
PP2 = (
    *("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_microbatch_size", "3"),
    *("--parallelism.pipeline_parallel_schedule", "1F1B"),
)
AXES = {
    "fsdp 2": (2, local_batch(2, 3)),
    "tp 2": (2, TP2),
    "cp 2": (2, CP2),
    "pp 2": (2, PP2),
    "fsdp 2, tp 2": (4, (*TP2, *local_batch(2, 1))),
}


def test_every_pitfall_has_a_test_that_is_there() -> None:
    rows = re.findall(r"^\| (\d+) \|.*`(tests/\w+\.py)::(\w+)` \|$", (ROOT / "docs/pitfalls.md").read_text(), re.M)
    assert [int(number) for number, _, _ in rows] == list(range(1, 23))
    for _, file, name in rows:
        functions = [
            node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        assert name in functions, f"{file} has no {name}"


def test_replicas_shards_and_replicas_of_shards_are_one_run() -> None:
    """Pitfall: an error of eight times that AdamW hid for months."""
    observed = {
        name: observe(*overrides, *local_batch(ranks, 1), ranks=ranks, steps=1, valid_labels=UNEVEN_LABELS)
        for name, (ranks, overrides) in LAYOUTS.items()
        if name in ("ddp 4", "fsdp 4 default", "hsdp 2x2")
    }
    for one in observed.values():
        assert not broken_bars(one, observed["ddp 4"])


def clipped(run: train.Run) -> dict[str, torch.Tensor]:
    """First moments after one step: a tenth of each clipped gradient, of this rank's stage."""
    moments = {}
    for name, parameter in run.stages[0].named_parameters():
        moment = run.optimizer.state[parameter]["exp_avg"]
        moments[name] = moment.full_tensor() if isinstance(moment, DTensor) else moment
    return moments


@pytest.mark.parametrize("axis", AXES)
def test_clipping_scales_every_gradient_as_in_one_process(axis: str) -> None:
    ranks, overrides = AXES[axis]
    reference = one_process(valid_labels=UNEVEN_LABELS)
    half = ("--training.max_norm", str(reference.norms[0][0] / 2))
    run = functools.partial(observe, *half, steps=1, valid_labels=UNEVEN_LABELS, at_end=clipped)
    found, expected = run(*overrides, ranks=ranks).extra, run().extra
    for name, moment in found.items():
        assert ((moment - expected[name]).norm() / expected[name].norm()).item() < 1e-5
        # The gradient of one process, halved, times one less the first decay.
        assert (moment.norm() / reference.gradients[name].norm()).item() == pytest.approx(0.5 * 0.1, rel=1e-4)


def is_tied(run: train.Run) -> bool:
    stage: Any = run.stages[0]
    return stage.tok_embeddings.weight is stage.output.weight


def one_tied_gradient_is_lost() -> None:
    rewrite("models.loss", "linear_loss", "weight_VD, labels_BS", "weight_VD.detach(), labels_BS")


@pytest.mark.parametrize("axis", ["fsdp 2", "tp 2", "cp 2"])
def test_a_tied_table_has_both_gradients_and_stays_tied(axis: str, tmp_path: Path) -> None:
    ranks, overrides = AXES[axis]
    tied = (*overrides, "--model.flavor", "tiny_tied")
    saved = (*tied, "--checkpoint.enable", "true")
    assert observe(*saved, ranks=ranks, steps=1, folder=str(tmp_path), at_end=is_tied).extra
    resumed = observe(*saved, ranks=ranks, steps=1, folder=str(tmp_path), at_end=is_tied)
    unbroken = one_process("--model.flavor", "tiny_tied")
    assert resumed.extra
    assert resumed.losses[0] == pytest.approx(unbroken.losses[1], rel=1e-6)
    lost = observe(*tied, ranks=ranks, steps=1, mutate=one_tied_gradient_is_lost)
    assert "gradient" in broken_bars(lost, observe("--model.flavor", "tiny_tied", steps=1))


@pytest.mark.parametrize("axis", AXES)
def test_every_sequence_of_a_batch_is_seen_once(axis: str) -> None:
    """Ranks that share sequences see the same (the harness compares them), others see others."""
    ranks, overrides = AXES[axis]
    observed = observe(*overrides, ranks=ranks, steps=2)
    for step in observed.sequences.values():
        assert len(set(step)) == len(step) == 36
    assert not figures(observed, observe(steps=2))["tokens"]


def counted(run: train.Run) -> tuple[int, int, int, tuple[int, int]]:
    return run.step, run.sequences, run.tokens, run.flops_per_token


@pytest.mark.parametrize("axis", AXES)
def test_every_layout_counts_the_same_tokens(axis: str) -> None:
    """Tokens and sequences consumed, and the whole model's FLOPs a token, of which MFU is made."""
    ranks, overrides = AXES[axis]
    assert observe(*overrides, ranks=ranks, steps=2, at_end=counted).extra == observe(steps=2, at_end=counted).extra
