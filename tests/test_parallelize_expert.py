"""Expert parallel: the run of one process at every degree, its planted faults, its messages, and resuming."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train
from components.commands.figures import Observation, broken_bars, figures
from components.config import load_config
from models import MODELS
from models.moe import Router
from parallelize.mesh import resolve_degrees
from parallelize.rules.expert import ranks_misfit
from tests.harness import observe, rewrite
from tests.small import SMALL
from tests.test_collectives import count_traffic
from tests.test_weights import export

EP, TP = "--parallelism.expert_parallel_degree", "--parallelism.tensor_parallel_degree"
SHARD, CP = "--parallelism.data_parallel_shard_degree", "--parallelism.context_parallel_degree"
LOCAL, LENGTH = "--training.local_batch_size", "--training.seq_len"
MOE = ("--model.name", "qwen3_moe", "--experts.bias_update_speed", "0.01")
LABELS = (30, 1, 32, 7, 0, 5)


@functools.cache
def one_process(*more: str) -> Observation:
    return observe(*MOE, *more, valid_labels=LABELS)


FAULTS: dict[str, tuple[str, tuple[str, ...], tuple[str, str, str, str]]] = {
    "the gate's gradient is taken for whole": (
        "gradient",
        (TP, "2"),
        ("parallelize.expert", "_replicate", "partial_sum(weight)", "weight.to_local()"),
    ),
    "tp is left out of the count": (
        "expert rows",
        (TP, "2"),
        ("parallelize.expert", "balance", 'if mesh["holders"].size() > 1', 'if mesh["fsdp"].size() > 1'),
    ),
    "gradients of experts are averaged": (
        "gradient",
        (SHARD, "2", LOCAL, "18", EP, "2"),
        ("parallelize.data", "apply_data_parallel", "divide_factor(1.0)", "divide_factor(2.0)"),
    ),
    "the norm leaves experts out": (
        "gradient norm",
        (SHARD, "2", LOCAL, "18", EP, "2"),
        ("components.optim.optimizer", "local_gradients", "is not None:", "is not None and parameter.ndim < 3:"),
    ),
    "padding is routed": (
        "expert rows",
        (TP, "2", LENGTH, "33"),
        ("models.moe", "Mixture.routed", "if padding_BS is None:", "if True:"),
    ),
    "rows are not brought into the order of experts": (
        "gradient",
        (SHARD, "2", LOCAL, "18", EP, "2"),
        ("parallelize.expert", "AllToAll.dispatch", "expert_R.argsort(stable=True)", "torch.arange(len(expert_R))"),
    ),
    "a bias moves by the rows of one rank": (
        "weights",
        (SHARD, "2", LOCAL, "18"),
        ("parallelize.expert", "balance", "dist.all_reduce(rows,", "dist.all_reduce(rows.clone(),"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    figure, layout, old = FAULTS[fault]
    more = layout[layout.index(LENGTH) :] if LENGTH in layout else ()
    observed = observe(*MOE, *layout, ranks=2, valid_labels=LABELS, mutate=functools.partial(rewrite, *old))
    assert figure in broken_bars(observed, one_process(*more)), figures(observed, one_process(*more))


LOSSES = ("--model.name", "qwen3_moe", "--experts.sequence_loss_factor", "0.1", "--experts.z_loss_factor", "0.01")


def test_the_loss_of_a_sequence_counts_the_rows_of_all_its_ranks() -> None:
    one = observe(*LOSSES, valid_labels=LABELS)
    assert not broken_bars(observe(*LOSSES, CP, "2", EP, "2", ranks=2, valid_labels=LABELS), one)
    plant = functools.partial(rewrite, "parallelize.expert", "_summed", "mesh[name].size() > 1", "False")
    observed = observe(*LOSSES, CP, "2", EP, "2", ranks=2, valid_labels=LABELS, mutate=plant)
    assert "gradient" in broken_bars(observed, one)
    without = observe(*LOSSES[:2], valid_labels=LABELS)
    assert figures(without, one)["gradient"] > 1e-2


@pytest.mark.parametrize("padded", [False, True])
def test_routing_that_differs_is_replayed(padded: bool) -> None:
    """A router that is disturbed at a layout: tokens flip, and with one process's routing the run is its run."""
    more = (LENGTH, "33") if padded else ()
    one = one_process(*more)
    assert one.routing.smallest_gap() > 0
    disturb = functools.partial(
        rewrite,
        "models.moe",
        "Router.choose",
        "config = self.config",
        "config = self.config; scores_TE = scores_TE.flip(0)",
    )
    options: dict[str, Any] = {"ranks": 2, "valid_labels": LABELS, "mutate": disturb}
    assert "expert rows" in broken_bars(observe(*MOE, *more, TP, "2", EP, "2", **options), one)
    replayed = observe(*MOE, *more, TP, "2", EP, "2", **options, routing=one.routing)
    assert replayed.routing.flips > 100
    assert not broken_bars(replayed, one)


def test_a_run_goes_on_at_other_degrees(tmp_path: Path) -> None:
    """A step at each of three layouts: the biases move on, and weights are those of one process."""
    run = functools.partial(observe, *MOE, "--checkpoint.enable", "true", steps=1, valid_labels=LABELS)
    layouts = (((SHARD, "2", LOCAL, "18", EP, "2"), 2), ((TP, "2"), 2), ((), 1))
    for layout, ranks in layouts:
        last = run(*layout, ranks=ranks, folder=str(tmp_path / "several"))
    for _ in layouts:
        alone = run(folder=str(tmp_path / "one"))
    for name, weight in alone.weights.items():
        assert weight.any(), name
        assert ((last.weights[name] - weight).norm() / weight.norm()).item() < 1e-5, name
    biases = [name for name in alone.weights if name.endswith("router.bias")]
    assert all(last.weights[name].equal(alone.weights[name]) for name in biases)
    forgotten = functools.partial(
        rewrite,
        *("train", "resume", "run.guards.load(state)"),
        "run.guards.load(state); [each.zero_() for name, each in run.stages[0].named_parameters() if '.bias' in name]",
    )
    again = run(folder=str(tmp_path / "one"), mutate=forgotten)
    assert any(again.weights[name].abs().max() < 0.02 for name in biases)


def test_rows_travel_as_often_as_the_formula_says() -> None:
    """Forward and backward send each row to its expert and back; counts go once a forward."""
    layout = (*MOE, SHARD, "2", LOCAL, "18", EP, "2")
    found = observe(*layout, ranks=2, steps=1, at_end=count_traffic).extra
    sizes = MODELS["qwen3_moe"][1]["tiny"]
    rows = 18 * 32 * sizes.top_k
    expected = sizes.n_layers * (4 * rows * sizes.dim * 4 + sizes.n_experts * 8)
    sent = sum(size for (_, kind), size in found.items() if kind == "all-to-all")
    assert abs(sent / expected - 1) < 0.1


def test_bfloat16_routes_in_float32_and_is_near_one_process() -> None:
    half = ("--training.mixed_precision_param", "bfloat16")
    one = one_process(*half)
    for layout in ((SHARD, "2", LOCAL, "18", EP, "2"), (SHARD, "2", LOCAL, "18")):
        observed = observe(*MOE, *half, *layout, ranks=2, valid_labels=LABELS, routing=one.routing)
        assert figures(observed, one)["gradient"] < 1e-2
    assert torch.isfinite(torch.tensor(one.losses)).all()


@pytest.mark.parametrize("axis", [TP, CP])
def test_bfloat16_is_as_near_as_without_experts_where_routing_is_replayed(axis: str) -> None:
    """Of the first step: split sums are rounded otherwise than one process's, with experts and without."""
    half = ("--training.mixed_precision_param", "bfloat16", "--model.flavor", "many_heads")
    errors = {}
    for name in ("qwen3", "qwen3_moe"):
        words = ("--model.name", name, *half)
        one = observe(*words, steps=1, valid_labels=LABELS)
        routing = replace(one.routing, within=0.1) if name == "qwen3_moe" else None
        split = observe(*words, axis, "2", ranks=2, steps=1, valid_labels=LABELS, routing=routing)
        errors[name] = figures(split, one)["gradient"]
    assert errors["qwen3_moe"] < 1.25 * errors["qwen3"]
    assert errors["qwen3"] < 0.02


def operations(run: train.Run) -> list[str]:
    """Of one layer's forward, in their order."""
    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.__name__.partition(".")[0])
            return function(*args, **(kwargs or {}))

    with Log(), torch.no_grad():
        run.stages[0](**train.own_part(run, next(train.local_batches(run))))
    return seen


@pytest.mark.parametrize("layout", [(SHARD, "2", LOCAL, "18"), (TP, "2")], ids=["fsdp 2", "tp 2"])
def test_shared_experts_are_computed_while_rows_travel(layout: tuple[str, ...]) -> None:
    run = ("--model.name", "qwen3_moe", "--model.flavor", "many_heads_sigmoid")
    layout = (*run, *layout, EP, "2")
    seen = observe(*layout, ranks=2, steps=0, at_end=operations).extra
    sent = seen.index("all_to_all_single")
    between = seen[sent : seen.index("grouped_product", sent)]
    assert between.count("mm") == 3
    assert "wait_tensor" in between[len(between) - between[::-1].index("mm") :]
    observed, one = observe(*layout, ranks=2, valid_labels=LABELS), observe(*run, valid_labels=LABELS)
    assert not broken_bars(observed, one)


def test_a_stage_without_a_layer_makes_the_same_groups() -> None:
    """The first of four stages has the embedding alone."""
    layout = ("--parallelism.pipeline_parallel_degree", "4", "--parallelism.pipeline_parallel_microbatch_size", "9")
    lighter = ("--parallelism.pipeline_parallel_first_stage_less_layers", "2", "--model.flavor", "long5")
    run = ("--model.name", "qwen3_moe", "--model.flavor", "long5", "--experts.bias_update_speed", "0.01")
    observed = observe(*run, *layout, *lighter, ranks=4, valid_labels=LABELS)
    assert not broken_bars(observed, observe(*run, valid_labels=LABELS))


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ((), ""),
        (("--model.sizes.dim", "64"), ""),
        (("--model.sizes.dim", "64", "--optimizer.state_dtype", "int8"), "neither 2 nor the size 64"),
        (("--model.sizes.dim", "64", "--lora.rank", "3"), "neither 2 nor the size 64"),
        (("--model.sizes.dim", "64", "--model.sizes.expert_dim", "50"), "neither 2 nor the size 50"),
    ],
)
def test_ranks_share_experts_by_rows_or_by_columns(words: tuple[str, ...], refused: str) -> None:
    sizes = ("--model.sizes.n_experts", "4", "--model.sizes.dim", "48", "--model.sizes.expert_dim", "48")
    config = load_config([*SMALL, *MOE, *sizes, *words, SHARD, "6", LOCAL, "6", EP, "2"])
    reason = ranks_misfit(config, resolve_degrees(config, 6))
    assert refused in reason
    assert bool(reason) == bool(refused)


def test_biases_are_not_lost_in_an_export(tmp_path: Path) -> None:
    to_hugging_face = functools.partial(export, checkpoint=tmp_path / "run" / "step-1", target=tmp_path / "out")
    words = (*MOE, "--checkpoint.enable", "true")
    with pytest.raises(RuntimeError, match="a Hugging Face folder has no place for it"):
        observe(*words, steps=1, folder=str(tmp_path / "run"), at_end=to_hugging_face)


def precision_of_routers(run: train.Run) -> set[str]:
    return {str(module.weight.dtype) for module in run.stages[0].modules() if isinstance(module, Router)}


@pytest.mark.parametrize("half", ["--training.mixed_precision_param", "--training.dtype"])
def test_routers_keep_float32(half: str) -> None:
    assert observe(*MOE, half, "bfloat16", steps=0, at_end=precision_of_routers).extra == {"torch.float32"}


@pytest.mark.parametrize(
    ("flavor", "layout"), [("tiny", (SHARD, "2", LOCAL, "18")), ("tiny_sigmoid", (TP, "2"))], ids=["fsdp", "shared, tp"]
)
def test_compiled_layers_leave_experts_out(flavor: str, layout: tuple[str, ...]) -> None:
    """What all tokens share is another graph: in one with the layer, its last collective would be taken apart."""
    compiled = ("--compile.enable", "true", "--compile.backend", "aot_eager")
    chosen = ("--model.flavor", flavor)
    observed = observe(*MOE, *chosen, *layout, EP, "2", *compiled, ranks=2, valid_labels=LABELS)
    assert not broken_bars(observed, one_process(*chosen))
