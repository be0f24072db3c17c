"""Activation checkpointing changes memory, and not a bit of anything else."""

import functools
from collections import Counter
from typing import Any

import pytest
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import train
from components.commands.figures import Observation, figures
from models.llama import FLAVORS
from tests.harness import observe, rewrite
from tests.test_memory import LONG, count_activations
from tests.test_parallelize_data import UNEVEN_LABELS

FULL = ("--activation_checkpoint.mode", "full")
EVERY_SECOND = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "2")
PER_OPERATION = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op")
OFFLOADED = (*FULL, "--activation_checkpoint.offload", "true")
MODES = {"full": FULL, "every second layer": EVERY_SECOND, "per operation": PER_OPERATION}
STAGES = ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_microbatch_size", "6")
LAYOUTS = {
    "one": (1, ()),
    "fsdp 2": (2, ("--training.local_batch_size", "18")),
    "tp 2": (2, ("--parallelism.tensor_parallel_degree", "2")),
    "cp 2": (2, ("--parallelism.context_parallel_degree", "2")),
    "pp 2": (2, (*STAGES, "--model.flavor", "long")),
    "pp 2 zero bubble": (
        2,
        (*STAGES, "--model.flavor", "long", "--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"),
    ),
}


@functools.cache
def without(layout: str) -> Observation:
    ranks, overrides = LAYOUTS[layout]
    return observe(*overrides, ranks=ranks, steps=3, valid_labels=UNEVEN_LABELS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_bit_changes(layout: str, mode: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    observed = observe(*overrides, *MODES[mode], ranks=ranks, steps=3, valid_labels=UNEVEN_LABELS)
    assert not any(figures(observed, without(layout)).values())


def test_results_kept_for_one_backward_are_not_there_for_a_second() -> None:
    ranks, overrides = LAYOUTS["pp 2 zero bubble"]
    forget = functools.partial(
        rewrite, "parallelize.activation", "_keep_costly_results", "if splits_backward:", "if 0:"
    )
    with pytest.raises(RuntimeError, match="backward an extra time"):
        observe(*overrides, *PER_OPERATION, ranks=ranks, steps=1, mutate=forget)


@pytest.mark.parametrize("mode", ["none", *MODES])
def test_memory_is_that_of_what_is_kept(mode: str) -> None:
    """docs/activation_checkpointing.md: bytes that forward leaves, with each mode."""
    found = observe(*LONG, *MODES.get(mode, ()), steps=1, at_end=count_activations).extra
    sizes, tokens = FLAVORS["deep"], 512
    kv_dim = sizes.n_kv_heads * sizes.head_dim
    plain = 8 * sizes.dim + 3 * kv_dim + 4 * sizes.ffn_dim
    layers = sizes.n_layers
    kept = {
        "none": layers * plain,
        "full": layers * sizes.dim,
        "every second layer": layers // 2 * (plain + sizes.dim),
        # Its input, every second of the seven products (queries, values, gate, down), and attention with its sums.
        "per operation": layers * (4 * sizes.dim + kv_dim + sizes.ffn_dim),
    }[mode]
    expected = 4 * (tokens * (kept + 3 * sizes.dim) + sizes.vocab_size * sizes.dim)
    assert found == pytest.approx(expected, rel=0.15), found / expected


class Operations(TorchDispatchMode):
    """How often each operation runs on local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as what it does to local tensors
        self.counts[str(function).partition(".default")[0]] += 1
        return function(*args, **(kwargs or {}))


def operations_of_a_step(run: train.Run) -> Counter[str]:
    batches = train.local_batches(run)
    with Operations() as operations:
        train.train_step(run, batches, train.divisor(run))
    return operations.counts


def test_attention_and_sums_over_ranks_are_not_computed_again_per_operation() -> None:
    """All-gathers and every second product of the seven of a layer are; full runs everything again."""
    layout = (*LONG, "--parallelism.tensor_parallel_degree", "2")
    none, per_operation, full = (
        observe(*layout, *MODES.get(mode, ()), ranks=2, steps=1, at_end=operations_of_a_step).extra
        for mode in ("none", "per operation", "full")
    )
    layers = FLAVORS["deep"].n_layers
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert (none[attention], per_operation[attention], full[attention]) == (layers, layers, 2 * layers)
    assert per_operation["aten.mm"] - none["aten.mm"] == 3 * layers
    assert full["aten.mm"] - none["aten.mm"] == 7 * layers
    gather, scatter = "_c10d_functional.all_gather_into_tensor", "_c10d_functional.reduce_scatter_tensor"
    assert none[gather] < per_operation[gather] == full[gather]
    assert none[scatter] == per_operation[scatter] < full[scatter]


def names_and_weights(run: train.Run) -> list[str]:
    return [name for name, _ in run.stages[0].named_parameters()]


def test_names_of_parameters_do_not_change() -> None:
    assert observe(*FULL, steps=0, at_end=names_and_weights).extra == observe(steps=0, at_end=names_and_weights).extra


def other_layers_are_left_out() -> None:
    rewrite("parallelize.activation", "apply_activation_checkpoint", "== 0", "== 1")


def test_layers_are_counted_in_the_whole_model() -> None:
    """A stage that holds layers 1 and 2 recomputes layer 2, as one process does."""
    wrapped = observe(*LAYOUTS["pp 2"][1], *EVERY_SECOND, ranks=2, steps=0, at_end=wrapped_layers).extra
    assert wrapped == [layer for layer in wrapped_layers_of_one() if layer in wrapped]
    moved = observe(
        *LAYOUTS["pp 2"][1], *EVERY_SECOND, ranks=2, steps=0, at_end=wrapped_layers, mutate=other_layers_are_left_out
    ).extra
    assert not {*moved} & {*wrapped_layers_of_one()}


def wrapped_layers(run: train.Run) -> list[str]:
    """Layers of this rank whose forward is replaced."""
    layers = run.stages[0].get_submodule("layers").named_children()
    return [name for name, layer in layers if isinstance(vars(layer).get("forward"), functools.partial)]


def wrapped_layers_of_one() -> list[str]:
    return observe("--model.flavor", "long", *EVERY_SECOND, steps=0, at_end=wrapped_layers).extra
