"""Pipeline parallel: the run of one process, and faults that have to be found."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import train
from components.commands.figures import Observation, broken_bars
from models.layers import FeedForward
from tests.harness import Case, observe, observe_all, rewrite
from tests.test_parallelize_data import UNEVEN_LABELS, one_process

SIX_LAYERS = ("--model.flavor", "long", "--training.global_batch_size", "24", "--training.local_batch_size", "24")
PP2 = ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_microbatch_size", "3")
SCHEDULE = "--parallelism.pipeline_parallel_schedule"


@functools.cache
def one() -> Any:
    return one_process(*SIX_LAYERS, valid_labels=UNEVEN_LABELS)


@pytest.mark.parametrize(
    "more",
    [
        ("--parallelism.pipeline_parallel_layers_per_stage", "4"),
        ("--parallelism.pipeline_parallel_first_stage_less_layers", "3"),
        (
            "--parallelism.module_fqns_per_model_part",
            json.dumps([["tok_embeddings"], [*(f"layers.{layer}" for layer in range(6)), "norm", "output"]]),
        ),
    ],
    ids=["layers a stage", "lighter first stage", "listed modules"],
)  # fmt: skip
def test_uneven_stages(more: tuple[str, ...]) -> None:
    observed = observe(*SIX_LAYERS, *PP2, *more, ranks=2, valid_labels=UNEVEN_LABELS)
    assert not broken_bars(observed, one())


@pytest.mark.parametrize("more", [(), ("--parallelism.no_sequence_parallel",), ("--model.sizes.mtp_layers", "1")])
def test_a_stage_may_end_with_the_norm(more: tuple[str, ...]) -> None:
    listed = json.dumps([["tok_embeddings", *(f"layers.{layer}" for layer in range(6)), "norm"], ["output"]])
    layout = ("--parallelism.tensor_parallel_degree", "2", "--parallelism.module_fqns_per_model_part", listed)
    observed = observe(*SIX_LAYERS, *PP2, *layout, *more, ranks=4, valid_labels=UNEVEN_LABELS)
    run = [word for word in more if "parallelism" not in word]
    assert not broken_bars(observed, one_process(*SIX_LAYERS, *run, valid_labels=UNEVEN_LABELS))


def test_no_two_layers_start_equal_and_every_stage_starts_as_in_one_process() -> None:
    """Pitfall: pipeline stages that are initialised alike."""
    observed = observe(*SIX_LAYERS, *PP2, SCHEDULE, "Interleaved1F1B", ranks=2, steps=1)
    weights = [weight for name, weight in observed.first_weights.items() if name.endswith("wq.weight")]
    assert len(weights) == 6
    assert not any(torch.equal(one, other) for place, one in enumerate(weights) for other in weights[:place])


def test_every_gradient_has_the_scale_of_one_process() -> None:
    """Pitfall: gradients that are too large by the number of micro-batches, which AdamW hides."""
    observed = observe(*SIX_LAYERS, *PP2, ranks=2, valid_labels=UNEVEN_LABELS)
    for name, gradient in one().gradients.items():
        assert abs((observed.gradients[name].norm() / gradient.norm()).item() - 1) < 1e-5, name


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_validation_in_a_pipeline(schedule: str) -> None:
    """Before and after a training step; the same on every rank."""
    given = ("--validation.enable", "true", "--validation.held_out_fraction", "0.006", "--validation.seq_len", "40")
    whole = observe(*SIX_LAYERS, *given, steps=1, at_end=validate_twice).extra
    split = observe(*SIX_LAYERS, *PP2, SCHEDULE, schedule, *given, ranks=2, steps=1, at_end=validate_twice).extra
    assert all(abs(one / other - 1) < 1e-6 for one, other in zip(split, whole, strict=True))


def validate_twice(run: train.Run) -> list[float]:
    first = train.validate(run)[0]
    train.train_step(run, train.local_batches(run), train.divisor(run))
    return [first, train.validate(run)[0]]


def test_neighbouring_ranks_may_be_one_pipeline() -> None:
    layout = (*PP2, "--parallelism.pipeline_first", "true", "--parallelism.data_parallel_replicate_degree", "2")
    observed = observe(*SIX_LAYERS, *layout, "--training.local_batch_size", "12", ranks=4, valid_labels=UNEVEN_LABELS)
    assert not broken_bars(observed, one())


def test_a_single_micro_batch_of_a_split_backward_is_reduced_in_one_precision() -> None:
    """Its weights' gradients come after FSDP's sum, but for those of the rank's other stage: an error of FSDP."""
    words = (*SIX_LAYERS, "--training.mixed_precision_param", "bfloat16")
    split = (*PP2[:2], "--parallelism.pipeline_parallel_microbatch_size", "24", SCHEDULE, "ZBVZeroBubble")
    whole, observed = observe(*words, steps=1), observe(*words, *split, ranks=2, steps=1)
    for name, gradient in whole.gradients.items():
        assert ((observed.gradients[name] - gradient).norm() / gradient.norm()).item() < 3e-2, name


def count_forwards() -> None:
    forward, counted = FeedForward.forward, vars(torch)
    counted["forwards"] = 0

    def count(layer: FeedForward, x: Tensor) -> Tensor:
        counted["forwards"] += 1
        return forward(layer, x)

    FeedForward.forward = count  # type: ignore[method-assign, assignment]


def forwards(run: train.Run) -> int:
    return int(vars(torch)["forwards"])


def test_a_split_backward_recomputes_a_layer_once_for_all_weights() -> None:
    """torch computes gradients of weights one after another, and each would recompute the layer."""
    split = (*PP2[:2], "--parallelism.pipeline_parallel_microbatch_size", "24", SCHEDULE, "ZBVZeroBubble")
    words = (*SIX_LAYERS, *split, "--activation_checkpoint.mode", "full")
    options: dict[str, Any] = {"ranks": 2, "steps": 1, "mutate": count_forwards, "at_end": forwards}
    assert observe(*words, **options).extra <= 6, "three layers on this rank, forward and once more"


def rank_of_stage(run: train.Run) -> Tensor:
    return run.mesh["pp"].mesh


def test_pipeline_first_puts_stages_on_neighbouring_ranks() -> None:
    layout = (*PP2, "--parallelism.data_parallel_replicate_degree", "2", "--training.local_batch_size", "12")
    assert observe(*SIX_LAYERS, *layout, ranks=4, steps=0, at_end=rank_of_stage).extra.tolist() == [0, 2]
    first = ("--parallelism.pipeline_first", "true")
    assert observe(*SIX_LAYERS, *layout, *first, ranks=4, steps=0, at_end=rank_of_stage).extra.tolist() == [0, 1]


FAULTS = {
    "gradients divided by the number of micro-batches": (
        "parallelize.pipeline",
        "Pipeline.__init__",
        '"scale_grads": False',
        '"scale_grads": True',
    ),
    "divided after backward": (
        "parallelize.pipeline",
        "Pipeline.forward_backward",
        "self._divisor = divisor",
        "self._divisor = 1",
    ),
    "a stage starts from another's weights": (
        "train",
        "build",
        "stage.init_std, config.debug.seed",
        "stage.init_std, config.debug.seed + mesh['pp'].get_local_rank()",
    ),
    "the norm of one stage alone": (
        "components.optim.optimizer",
        "clip_gradients",
        "if stages is not None:",
        "if False:",
    ),
    "a micro-batch dropped": (
        "parallelize.pipeline",
        "Pipeline.forward_backward",
        "losses: list[Tensor] = []",
        "losses: list[Tensor] = []; batch = {name: tensor.index_fill(0, torch.arange(3), -100) "
        "if name == 'labels' else tensor for name, tensor in batch.items()}",
    ),
    "the loss known to the last stage alone": (
        "parallelize.mesh",
        "sum_over_token_ranks",
        '("pp", "dp_replicate", "fsdp")',
        '("dp_replicate", "fsdp")',
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, schedule: str) -> None:
    plant = functools.partial(rewrite, *FAULTS[fault])
    observed = observe(*SIX_LAYERS, *PP2, SCHEDULE, schedule, ranks=2, valid_labels=UNEVEN_LABELS, mutate=plant)
    if schedule == "DualPipeV" and fault == "the loss known to the last stage alone":
        assert not broken_bars(observed, one()), "the first rank has the last stage"
        return
    assert broken_bars(observed, one())


TIED = ("--model.flavor", "long_tied", *SIX_LAYERS[2:], "--metrics.dynamics_freq", "1")
FSDP = ("--parallelism.data_parallel_shard_degree", "2", "--training.local_batch_size", "12")


@functools.cache
def tied() -> Observation:
    return observe(*TIED, valid_labels=UNEVEN_LABELS)


@pytest.mark.parametrize(("schedule", "layout", "ranks"), [("1F1B", FSDP, 4), ("ZBVZeroBubble", (), 2)])
def test_both_ends_hold_a_tied_table_and_go_on_with_it(
    schedule: str, layout: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    """In a V both are on one rank. A step and a save there, a step in one process, and a step there again."""
    words = (*TIED, "--checkpoint.enable", "true")
    split = (*words, *PP2, SCHEDULE, schedule, *layout)
    run = functools.partial(observe, valid_labels=UNEVEN_LABELS, steps=1, folder=str(tmp_path))
    for each, count in ((split, ranks), (words, 1), (split, ranks)):
        last = run(*each, ranks=count)
    assert last.losses[0] == pytest.approx(tied().losses[2], rel=1e-6)
    for name, weight in tied().weights.items():
        assert ((last.weights[name] - weight).norm() / weight.norm()).item() < 1e-5, name


TIED_FAULTS = {
    "each end has its own gradient": ("parallelize.pipeline", "Pipeline.forward_backward", "if last:", "if False:"),
    "ends swap gradients": (
        "parallelize.pipeline",
        "Pipeline._add_up_tables",
        "own[0].add_(received",
        "own[0].copy_(received",
    ),
    "the norm counts both": ("components.optim.optimizer", "clip_gradients", "if not is_copy(parameter)", "if True"),
    "dynamics count both": ("components.observe.dynamics", "Dynamics.__init__", "if not is_copy(parameter)", "if True"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", TIED_FAULTS)
def test_a_fault_of_a_tied_table_is_found(fault: str) -> None:
    """A run whose ends differ ends with an error."""
    plant = functools.partial(rewrite, *TIED_FAULTS[fault])
    (observed,) = observe_all([Case((*TIED, *PP2), 2, valid_labels=UNEVEN_LABELS, mutate=plant)])
    if isinstance(observed, Exception):
        assert "is not the same in two stages" in str(observed)
    else:
        assert broken_bars(observed, tied())


def test_a_tied_table_that_a_resume_fills_once_is_found(tmp_path: Path) -> None:
    split = (*TIED, *PP2, SCHEDULE, "ZBVZeroBubble", "--checkpoint.enable", "true")
    run = functools.partial(observe, *split, ranks=2, steps=1, folder=str(tmp_path), valid_labels=UNEVEN_LABELS)
    run()
    fault = ("components.state.tensors", "fill_copies", "tensor.copy_(filled[name])", "pass")
    with pytest.raises(RuntimeError, match=r"tok_embeddings\.weight is not the same in two stages"):
        run(mutate=functools.partial(rewrite, *fault))
