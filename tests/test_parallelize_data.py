"""Data parallel layouts are the run of one process: weights, tokens, loss, gradients, norm and later weights."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import train
from components.commands.figures import Observation, broken_bars, figures
from components.observe.describe import introduce
from tests.harness import observe, rewrite

REPLICATE = "--parallelism.data_parallel_replicate_degree"
SHARD = "--parallelism.data_parallel_shard_degree"
RESHARD = "--parallelism.fsdp_reshard_after_forward"
REDUCE = "--parallelism.fsdp_reduce_gradients"
LOCAL = "--training.local_batch_size"
GLOBAL_BATCH = 36

LAYOUTS = {
    **{f"ddp {ranks}": (ranks, (REPLICATE, str(ranks))) for ranks in (2, 3, 4)},
    **{
        f"fsdp {ranks} {reshard}": (ranks, (SHARD, str(ranks), RESHARD, reshard))
        for ranks in (2, 3, 4)
        for reshard in ("always", "never", "default")
    },
    **{f"hsdp {replicas}x{shards}": (replicas * shards, (REPLICATE, str(replicas), SHARD, str(shards)))
       for replicas, shards in ((2, 2), (2, 3))},
}  # fmt: skip
UNEVEN_LABELS = (1, 7, 0, 30)


def local_batch(ranks: int, accumulation: int) -> tuple[str, str]:
    return LOCAL, str(GLOBAL_BATCH // ranks // accumulation)


@functools.cache
def one_process(*overrides: str, valid_labels: tuple[int, ...] = ()) -> Observation:
    return observe(*overrides, valid_labels=valid_labels)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_the_run_of_one_process(layout: str, accumulation: int) -> None:
    """Sequences keep 1, 7, 0 and 30 labels, so that ranks and accumulation steps weigh differently."""
    ranks, overrides = LAYOUTS[layout]
    observed = observe(*overrides, *local_batch(ranks, accumulation), ranks=ranks, valid_labels=UNEVEN_LABELS)
    assert not broken_bars(observed, one_process(valid_labels=UNEVEN_LABELS))


def gathered_after_forward(run: train.Run) -> bool:
    run.stages[0](**train.own_part(run, next(train.local_batches(run))))
    return not isinstance(run.stages[0].get_submodule("layers.0").get_parameter("attention.wq.weight"), DTensor)


@pytest.mark.parametrize(
    ("layout", "precision", "more", "kept"),
    [
        ("ddp 2", "bfloat16", (), True),
        ("ddp 2", "bfloat16", (RESHARD, "always"), False),
        ("ddp 2", "bfloat16", ("--training.enable_cpu_offload", "true"), False),
        ("ddp 2", "float32", (), False),
        ("fsdp 2 default", "bfloat16", (), False),
    ],
)
def test_replicas_convert_weights_once_a_step(layout: str, precision: str, more: tuple[str, ...], kept: bool) -> None:
    ranks, overrides = LAYOUTS[layout]
    words = (*overrides, *local_batch(ranks, 1), "--training.mixed_precision_param", precision, *more)
    assert observe(*words, ranks=ranks, steps=0, at_end=gathered_after_forward).extra == kept


def test_accumulation_alone() -> None:
    assert not broken_bars(observe(LOCAL, "12"), one_process())


@pytest.mark.parametrize("layout", ["ddp 3", "fsdp 4 default", "hsdp 2x3"])
@pytest.mark.parametrize("flavor", ["odd", "tiny_tied"])
def test_odd_sizes_and_tied_tables(flavor: str, layout: str) -> None:
    """Width and vocabulary that no number of ranks divides; a table that is both ends of the model."""
    ranks, overrides = LAYOUTS[layout]
    observed = observe("--model.flavor", flavor, *overrides, *local_batch(ranks, 1), ranks=ranks)
    assert not broken_bars(observed, one_process("--model.flavor", flavor))


@pytest.mark.parametrize("layout", ["one", "ddp 2", "fsdp 2 default", "hsdp 2x2"])
@pytest.mark.parametrize(
    "setting",
    ["--training.enable_cpu_offload=true", "--parallelism.fsdp_prefetch_layers=2", f"{REDUCE}=each"],
)
def test_offload_prefetch_and_reduction(setting: str, layout: str) -> None:
    """On the CPU offloading moves nothing, but its path is another one."""
    ranks, overrides = LAYOUTS.get(layout, (1, ()))
    observed = observe(setting, *overrides, *local_batch(ranks, 3), ranks=ranks, valid_labels=UNEVEN_LABELS)
    assert not broken_bars(observed, one_process(valid_labels=UNEVEN_LABELS))


def reduced_between_accumulation_steps(run: train.Run) -> tuple[list[bool], list[str]]:
    """Whether all gradients are there as shards, each time that a batch is asked for; and what a rank says it keeps."""
    asked, batches = [], train.local_batches(run)

    def watched() -> Iterator[train.Batch]:
        for batch in batches:
            asked.append(all(parameter.grad is not None for parameter in run.parameters))
            yield batch

    train.train_step(run, watched(), train.divisor(run))
    return asked, re.findall(
        r"([\d.]+) MiB of (?:weights|gradients)", introduce(run.config, run.degrees, run.stages, 3)
    )


@pytest.mark.parametrize(("reduce", "reduced"), [("last", [False] * 3), ("each", [False, True, True])])
def test_gradients_are_reduced_when_the_key_says(reduce: str, reduced: list[bool]) -> None:
    words = (SHARD, "2", REDUCE, reduce, *local_batch(2, 3))
    found, (weights, gradients) = observe(*words, ranks=2, steps=0, at_end=reduced_between_accumulation_steps).extra
    assert found == reduced
    assert float(gradients) == pytest.approx(float(weights) * (1 if reduce == "each" else 2), abs=0.11)


@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 2 default", "hsdp 2x2"])
def test_bfloat16_means_the_same_at_every_degree(layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    precision = ("--training.mixed_precision_param", "bfloat16")
    observed = observe(*precision, *overrides, *local_batch(ranks, 1), ranks=ranks)
    found = figures(observed, one_process(*precision))
    assert found["gradient"] < 1e-2
    assert found["loss"] < 1e-3
    assert not found["weights at step 0"]
    assert figures(observed, one_process())["gradient"] > 1e-4, "it was not computed in bfloat16"


@pytest.mark.parametrize(("flavor", "bar"), [("many_heads", 0.0), ("many_heads_tied", 5e-3)])
def test_one_rank_computes_in_bfloat16_as_fsdp_does(flavor: str, bar: float) -> None:
    """The same bits, but of a tied table: FSDP adds the gradients of its two ends in bfloat16."""
    given = ("--training.mixed_precision_param", "bfloat16", LOCAL, "12", "--model.flavor", flavor)
    again = ("--activation_checkpoint.mode", "selective")
    alone, wrapped = (observe(*given, *again, RESHARD, reshard, at_end=wraps) for reshard in ("default", "always"))
    assert (alone.extra, wrapped.extra) == (False, True)
    assert max(figures(alone, wrapped).values()) <= bar


def wraps(run: train.Run) -> bool:
    return any(isinstance(module, FSDPModule) for stage in run.stages for module in stage.modules())


def test_same_layout_twice_is_the_same_bits() -> None:
    runs = [observe(SHARD, "2", *local_batch(2, 3), ranks=2) for _ in range(2)]
    found = figures(*runs)
    assert set(found.values()) == {0.0}


FAULTS = {
    "FSDP's averaging left on": (
        "parallelize.data",
        "apply_data_parallel",
        "set_gradient_divide_factor(1.0)",
        "set_gradient_divide_factor(float(shards.size()))",
    ),
    "divided by local tokens": ("train", "train_step", "divisor, last)", "divisor / run.degrees.batch_ranks, last)"),
    "divided after backward": (
        "parallelize.runner",
        "Whole.forward_backward",
        "share_of_loss(self._model(**batch), divisor)\n    loss.backward()\n    return loss.detach()",
        "self._model(**batch)\n    loss.backward()\n    return loss.detach() / divisor",
    ),
    "norm not summed over shards": ("components.optim.optimizer", "clip_gradients", "group in groups:", "group in ():"),
    "loss summed over the wrong mesh": (
        "parallelize.mesh",
        "sum_over_token_ranks",
        '("pp", "dp_replicate", "fsdp")',
        '("pp", "dp_replicate")',
    ),
    "a local batch dropped": ("train", "train_step", "in range(run.acc", "in range(1, run.acc"),
    "gradients never reduced": ("train", "train_step", "(run.stages, last, ", "(run.stages, False, "),
    "a rank starts from other weights": (
        "train",
        "build",
        "stage.init_std, config.debug.seed",
        "stage.init_std, config.debug.seed + dist.get_rank()",
    ),
    "two ranks see the same batch": ("train", "local_order", "batch_rank(run.mesh)", "0"),
    "learning rate of another step": ("train", "train_step", "run.step, config.lr_", "run.step + 9, config.lr_"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 2 default"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    if layout == "ddp 2" and fault in ("norm not summed over shards", "loss summed over the wrong mesh"):
        pytest.skip("it is no fault without shards")
    schedule = ("--lr_scheduler.decay_type", "linear", "--training.steps", "20")
    reference = one_process(*schedule, valid_labels=UNEVEN_LABELS)
    try:
        observed = observe(
            *schedule,
            *overrides,
            *local_batch(ranks, 3),
            ranks=ranks,
            valid_labels=UNEVEN_LABELS,
            mutate=functools.partial(rewrite, *FAULTS[fault]),
        )
    except RuntimeError:
        assert fault == "gradients never reduced", "only this fault may leave a parameter without a gradient"
        return
    assert broken_bars(observed, reference)


def test_harness_without_a_fault_is_green() -> None:
    """The case of the planted faults, with a rewrite that changes nothing."""
    same = ("parallelize.pipeline", "share_of_loss", "/ divisor", "/ (divisor)")
    observed = observe(
        SHARD, "2", *local_batch(2, 3), ranks=2, valid_labels=UNEVEN_LABELS, mutate=functools.partial(rewrite, *same)
    )
    assert not broken_bars(observed, one_process(valid_labels=UNEVEN_LABELS))


TENSOR, CONTEXT = "--parallelism.tensor_parallel_degree", "--parallelism.context_parallel_degree"
CHAINS = {
    "data parallel": ["one", "fsdp 2 default", "ddp 2", "hsdp 2x2", "fsdp 3 default", "fsdp 2 always", "one"],
    "all axes": ["fsdp 2 default", "tp 2", "pp 2", "cp 2", "fsdp 2 tp 2 cp 2", "pp 2 tp 2", "one"],
}
MORE_LAYOUTS = LAYOUTS | {
    "one": (1, ()),
    "tp 2": (2, (TENSOR, "2")),
    "cp 2": (2, (CONTEXT, "2")),
    "pp 2": (2, ("--parallelism.pipeline_parallel_degree", "2")),
    "pp 2 tp 2": (4, ("--parallelism.pipeline_parallel_degree", "2", TENSOR, "2")),
    "fsdp 2 tp 2 cp 2": (8, (SHARD, "2", TENSOR, "2", CONTEXT, "2")),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_resume_at_other_layouts_is_the_unbroken_run(chain: str, tmp_path: Path) -> None:
    """Two steps at each of these layouts, each from the checkpoint of the one before."""
    unbroken = observe(steps=2 * len(CHAINS[chain]))
    losses: list[float] = []
    sequences: dict[str, list[str]] = {}
    for name in CHAINS[chain]:
        ranks, overrides = MORE_LAYOUTS[name]
        local = ("--training.local_batch_size", "3")
        part = observe("--checkpoint.enable", *overrides, *local, ranks=ranks, steps=2, folder=str(tmp_path))
        losses += part.losses
        sequences |= part.sequences
    assert sequences == unbroken.sequences
    assert max(abs(loss / whole - 1) for loss, whole in zip(losses, unbroken.losses, strict=True)) < 1e-6


@pytest.mark.parametrize("layout", ["one", "fsdp 2 default", "ddp 2"])
def test_resume_at_the_same_layout_is_the_same_bits(layout: str, tmp_path: Path) -> None:
    ranks, overrides = LAYOUTS.get(layout, (1, ()))
    given = ("--checkpoint.enable", *overrides, *local_batch(ranks, 1))
    unbroken = observe(*given, ranks=ranks, steps=20)
    first, second = (observe(*given, ranks=ranks, steps=10, folder=str(tmp_path)) for _ in range(2))
    assert first.losses + second.losses == unbroken.losses
    assert first.norms[0] + second.norms[0] == unbroken.norms[0]
    assert all((second.weights[name] == weight).all() for name, weight in unbroken.weights.items())
