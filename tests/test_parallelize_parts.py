"""Sequences that pass through a pipeline in parts: the run of one process, less idle time, fewer activations."""

import functools
from dataclasses import replace

import pytest
import torch

import train
from components.commands.dry_run import Meter
from components.commands.figures import Observation, broken_bars
from models.llama import FLAVORS
from parallelize.parts import _Earlier, _PartCore, cut_into_parts
from parallelize.tables import order_of_parts, simulate
from parallelize.timeline import actions, idle, most_alive
from tests.harness import observe, rewrite
from tests.test_parallelize_data import UNEVEN_LABELS

PP, SPLITS = "--parallelism.pipeline_parallel_degree", "--parallelism.pipeline_parallel_sequence_splits"
RUN = (
    *("--training.seq_len", "33", "--training.document_mask", "true", "--metrics.dynamics_freq", "3"),
    *("--validation.enable", "true", "--validation.held_out_fraction", "0.006"),  # whole sequences, between parts
)
FULL = ("--activation_checkpoint.mode", "full")
LAYOUTS = {
    "pp 2, 2 parts": (2, (PP, "2", SPLITS, "2")),
    "pp 2, 3 parts, checkpointing": (2, (PP, "2", SPLITS, "3", *FULL)),
    "pp 2, 4 parts, compiled": (
        2,
        (PP, "2", SPLITS, "4", "--compile.enable", "true", "--compile.backend", "aot_eager"),
    ),
    "pp 2, 5 parts, tp 2": (4, (PP, "2", SPLITS, "5", "--parallelism.tensor_parallel_degree", "2")),
}


@functools.cache
def one_process() -> Observation:
    return observe(*RUN, valid_labels=UNEVEN_LABELS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_the_run_of_one_process(layout: str) -> None:
    """The matrix has parts as an axis; here they divide neither the length nor each other."""
    ranks, overrides = LAYOUTS[layout]
    micro_batch = ("--parallelism.pipeline_parallel_microbatch_size", "12")
    observed = observe(*RUN, *overrides, *micro_batch, ranks=ranks, valid_labels=UNEVEN_LABELS)
    assert not broken_bars(observed, one_process())


FAULTS = {
    "what later parts add to gradients is lost": ("_Earlier.brought_home", "part + more", "part", "gradient"),
    "keys of earlier parts forgotten": (
        "_PartVisibility._of_part",
        "own_documents_BS=document_ids_BS",
        "own_documents_BS=document_ids_BS + 1",
        "loss",
    ),
    "documents in another order": (
        "_PartVisibility._of_part",
        "[*self._documents[:place], document_ids_BS]",
        "[document_ids_BS, *self._documents[:place]]",
        "loss",
    ),
    "parts of one sequence taken for parts of several": (
        "cut_into_parts",
        "parts.transpose(1, 2).flatten(0, 2)",
        "parts.flatten(0, 2)",
        "loss",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    function, old, new, figure = FAULTS[fault]
    plant = functools.partial(rewrite, "parallelize.parts", function, old, new)
    given = (*RUN, PP, "2", SPLITS, "3", "--parallelism.pipeline_parallel_microbatch_size", "12")
    observed = observe(*given, ranks=2, valid_labels=UNEVEN_LABELS, mutate=plant)
    assert figure in broken_bars(observed, one_process())


def test_a_batch_is_cut_by_micro_batch_then_by_part() -> None:
    cut = cut_into_parts(10 * torch.arange(4)[:, None] + torch.arange(4), micro_batches=2, splits=2)
    assert cut.tolist() == [[0, 1], [10, 11], [2, 3], [12, 13], [20, 21], [30, 31], [22, 23], [32, 33]]


def test_a_part_lets_go_of_its_keys_after_its_backward() -> None:
    core, own = _PartCore(), torch.zeros(1, 1, 2, 4)
    for place in range(3):
        assert len([*_Earlier(core, 0, place).passed_on(own, own)]) == 1 + (place > 0)
    for place in (2, 1, 0):
        gradients = [torch.zeros(2, 1, 1, 2 * parts, 4) for parts in (1, place) if parts]
        _Earlier(core, 0, place).brought_home(gradients)
        assert len(core.kept.get(0, [])) == len(core.gradients.get(0, [])) == place


def test_a_step_has_a_pass_for_each_part() -> None:
    """What gradients are added up over, for the line on memory."""
    given = (PP, "2", SPLITS, "4", "--parallelism.pipeline_parallel_microbatch_size", "12")
    assert observe(*given, ranks=2, steps=0, at_end=passes).extra == 3 * 4


def passes(run: train.Run) -> int:
    return run.runner.passes


@pytest.mark.parametrize(("pp", "micro_batches", "splits"), [(4, 4, 4), (2, 1, 4), (4, 2, 2), (8, 8, 3)])
def test_idle_time_and_parts_alive_are_those_of_the_formulas(pp: int, micro_batches: int, splits: int) -> None:
    boxes = simulate(order_of_parts(pp, micro_batches, splits))
    assert idle(boxes) == pytest.approx((pp - 1) / (micro_batches * splits))
    assert most_alive(boxes, 0) == min(micro_batches * splits, pp + splits - 1)


def test_idle_time_is_half_of_that_of_whole_sequences() -> None:
    whole, parts = simulate(actions("1F1B", 4, 4)), simulate(order_of_parts(4, 4, 4))
    assert idle(parts) <= 0.5 * idle(whole)


def count_activations(run: train.Run) -> int:
    """Of the first rank: bytes at the highest point of a step, over weights, moments and gradients."""
    batches, moments = train.local_batches(run), [list(state.values()) for state in run.optimizer.state.values()]
    with Meter(None, [run.parameters, moments]) as memory:
        before = memory.bytes
        train.train_step(run, batches, train.divisor(run))
    return memory.peak - before - 4 * sum(each.numel() for each in run.parameters)


def share_key_heads() -> None:
    """As in models of full size, keys and values are a small part of what a layer keeps."""
    FLAVORS["deep"] = replace(FLAVORS["deep"], n_kv_heads=1)


def test_the_first_rank_keeps_half_of_the_activations() -> None:
    given = (
        *("--model.flavor", "deep", "--training.seq_len", "1024", PP, "4"),
        *("--training.local_batch_size", "4", "--training.global_batch_size", "4"),
    )
    whole, parts = (
        observe(*given, SPLITS, splits, ranks=4, steps=1, mutate=share_key_heads, at_end=count_activations).extra
        for splits in ("1", "4")
    )
    assert parts <= 0.5 * whole, parts / whole
