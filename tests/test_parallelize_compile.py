"""torch.compile under every axis: the same numbers, one graph for all layers, and faults that have to be found."""

from typing import Any

import pytest
import torch

import train
from components.commands.figures import broken_bars, figures
from parallelize.scores import Scorer
from parallelize.sharding import local_part
from tests.harness import observe, rewrite
from tests.test_memory import LONG
from tests.test_parallelize_activation import FULL, LAYOUTS
from tests.test_parallelize_data import UNEVEN_LABELS, one_process

TRACED = ("--compile.enable", "true", "--compile.backend", "aot_eager")
BUDGET = ("--activation_checkpoint.mode", "memory_budget", "--activation_checkpoint.memory_budget")
INDUCTOR = ("--compile.enable", "true")


def reference(layout: str) -> Any:
    flavor = ("--model.flavor", "long") if layout.startswith("pp") else ()
    return one_process(*flavor, valid_labels=UNEVEN_LABELS)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        *((layout, more) for layout in LAYOUTS for more in ((), FULL)),
        *((layout, (*BUDGET, "0.3")) for layout in ("tp 2", "pp 2 zero bubble")),
    ],
)
def test_compiled_layout_is_the_run_of_one_process(layout: str, more: tuple[str, ...]) -> None:
    ranks, overrides = LAYOUTS[layout]
    observed = observe(*overrides, *TRACED, *more, ranks=ranks, valid_labels=UNEVEN_LABELS)
    assert not broken_bars(observed, reference(layout))


@pytest.mark.skipif(" " in torch.__file__, reason="inductor cannot link with a torch whose path has a space")
def test_inductor_gives_the_same_run() -> None:
    """Compiled against compiled, and both against eager: its kernels round otherwise."""
    ranks, overrides = LAYOUTS["tp 2"]
    observed = observe(*overrides, *INDUCTOR, ranks=ranks, steps=2, valid_labels=UNEVEN_LABELS)
    compiled = observe(*INDUCTOR, steps=2, valid_labels=UNEVEN_LABELS)
    assert not broken_bars(observed, compiled)
    eager = observe(steps=2, valid_labels=UNEVEN_LABELS)
    assert max(figures(each, eager)["gradient"] for each in (observed, compiled)) < 1e-5


RING = ("--parallelism.context_parallel_degree", "4", "--parallelism.context_parallel_rotate_method")


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
def test_a_ring_among_compiled_layers_is_the_run_of_one_process(rotate: str) -> None:
    observed = observe(*RING, rotate, *TRACED, ranks=4, valid_labels=UNEVEN_LABELS)
    assert not broken_bars(observed, one_process(valid_labels=UNEVEN_LABELS))


def compile_the_ring_too() -> None:
    rewrite("parallelize.compile", "apply_compile", "if apart:", "if False:")


def kept_for_backward(run: train.Run) -> int:
    """Bytes that forward saves, without parameters."""
    own = {local_part(parameter)[1].untyped_storage().data_ptr() for parameter in run.parameters}
    saved: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = run.stages[0](**train.own_part(run, next(train.local_batches(run))))
    return sum(size for start, size in saved.items() if start not in own) + 0 * loss.numel()  # alive until here


def test_a_compiled_ring_would_keep_the_keys_of_all_ranks() -> None:
    """The compiler takes forward's message and backward's for one, and keeps what it brings."""
    layout = (*RING, "allgather", *TRACED)
    whole = observe(*layout, ranks=4, steps=1, at_end=kept_for_backward, mutate=compile_the_ring_too).extra
    assert observe(*layout, ranks=4, steps=1, at_end=kept_for_backward).extra < 0.95 * whole


def test_a_layer_keeps_to_its_memory_budget() -> None:
    inputs, small, half, whole, without = (
        observe(*LONG, *TRACED, *more, steps=1, at_end=kept_for_backward).extra
        for more in (*((*BUDGET, budget) for budget in ("0", "0.3", "0.5", "1")), ())
    )
    assert 5 * inputs < whole == without
    assert small == pytest.approx(inputs + 0.3 * (whole - inputs), rel=0.15)
    assert half == pytest.approx(inputs + 0.5 * (whole - inputs), rel=0.15)


def graphs(run: train.Run) -> int:
    import torch._dynamo.utils

    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("more", "most"), [((), 3), (("--lora.rank", "4", "--lora.dropout", "0.1"), 4)])
def test_equal_layers_share_a_graph(more: tuple[str, ...], most: int) -> None:
    """Twelve layers; a graph more for the loss of a whole chunk, and of what is left over.

    And one for the first layer with adapters, whose input needs no gradient.
    """
    assert observe("--model.flavor", "deep", *more, *TRACED, steps=1, at_end=graphs).extra <= most


def validated(run: train.Run) -> tuple[float, int]:
    return train.validate(run)[:2]


def test_another_length_compiles_again() -> None:
    """Validation has its own batch size and length."""
    held_out = ("--validation.enable", "true", "--validation.local_batch_size", "3", "--validation.seq_len", "16")
    few = ("--validation.held_out_fraction", "0.01", "--validation.steps", "2")
    compiled = observe(*held_out, *few, *TRACED, steps=1, at_end=validated).extra
    assert compiled == pytest.approx(observe(*held_out, *few, steps=1, at_end=validated).extra, rel=1e-6)


def scores_of_lengths(run: train.Run) -> list[float]:
    """Log-probabilities of zeros after zeros: each number of rows and of tokens has a graph."""
    scorer = Scorer(run.stages, run.runner, run.mesh, run.config)
    shapes = [(rows, length) for rows in (1, 2) for length in (2, 4, 8, 16, 32)]
    return [float(scorer.of_texts([[0] * (length + 1)] * rows)[0].label[-1]) for rows, length in shapes]


def test_any_number_of_shapes_is_compiled() -> None:
    compiled = observe(*TRACED, steps=1, at_end=scores_of_lengths).extra
    assert compiled == pytest.approx(observe(steps=1, at_end=scores_of_lengths).extra, rel=1e-6)


def embedding_gives_what_is_still_on_its_way() -> None:
    """As torch's own style does: a compiled layer takes the asynchronous result apart, and its gradient is lost."""
    waits = "partial.redistribute(placements=[self.output_layout]).to_local().clone()"
    does_not = "partial.redistribute(placements=[self.output_layout], async_op=True).to_local()"
    rewrite("parallelize.tensor", "VocabularyParallelEmbedding._apply", waits, does_not)


def backward_may_overwrite_what_forward_saved() -> None:
    rewrite("parallelize.compile", "apply_compile", "= not splits_backward(parallelism)", "= True")


def test_a_lost_gradient_is_found() -> None:
    """Pitfall: the loss is right to the last digit while the embedding gets no gradient."""
    _, tensor_parallel = LAYOUTS["tp 2"]
    observed = observe(
        *(*tensor_parallel, *TRACED, "--training.local_batch_size", "18"),
        ranks=4,
        steps=1,
        valid_labels=UNEVEN_LABELS,
        mutate=embedding_gives_what_is_still_on_its_way,
    )
    broken = broken_bars(observed, observe(steps=1, valid_labels=UNEVEN_LABELS))
    assert "gradient" in broken
    assert "loss" not in broken


def test_saved_results_are_not_overwritten_where_backward_comes_twice() -> None:
    """torch sees by itself that a graph's first backward is split; a rank of DualPipeV splits only later ones."""
    ranks, overrides = LAYOUTS["pp 2 zero bubble"]
    given = (*overrides, *TRACED, "--parallelism.pipeline_parallel_schedule", "DualPipeV")
    assert not broken_bars(observe(*given, ranks=ranks, valid_labels=UNEVEN_LABELS), reference("pp 2 zero bubble"))
    with pytest.raises(RuntimeError, match="stage backward"):
        observe(*given, ranks=ranks, steps=1, mutate=backward_may_overwrite_what_forward_saved)


def test_the_backend_is_honoured() -> None:
    assert "aot_eager" in torch.compiler.list_backends(exclude_tags=())
    with pytest.raises(RuntimeError, match=r"compile.backend = .inductr.: not one of .*did you mean inductor"):
        observe("--compile.enable", "true", "--compile.backend", "inductr")
