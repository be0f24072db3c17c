"""Muon: torch's where torch has it, no work done twice, and the run of one process at every layout."""

from typing import Any

import pytest
import torch
from torch import nn

import train
from components.commands.figures import broken_bars
from components.optim import muon
from components.optim.muon import Muon, orthogonalise, share_out
from components.optim.optimizer import AdamW
from parallelize.groups import gather
from tests.harness import observe
from tests.test_collectives import count_traffic, parameter_bytes

MUON = ("--optimizer.name", "Muon")
REPLICATE, SHARD, TP, CP, PP, LOCAL = (
    "--parallelism.data_parallel_replicate_degree",
    "--parallelism.data_parallel_shard_degree",
    "--parallelism.tensor_parallel_degree",
    "--parallelism.context_parallel_degree",
    "--parallelism.pipeline_parallel_degree",
    "--training.local_batch_size",
)


def test_singular_values_end_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((20, 50), (50, 20), (30, 30)):
        found = torch.linalg.svdvals(orthogonalise(torch.randn(shape), 5))
        assert 0.6 < found.min() <= found.max() < 1.3, shape


def test_steps_are_those_of_torch() -> None:
    """In bfloat16, in which torch's always orthogonalises."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((24, 40), (40, 24))]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    rest = nn.Parameter(torch.zeros(1))
    settings: Any = {"lr": 1e-2, "weight_decay": 0.1}
    other = AdamW([{"params": [rest], **settings}], fused=True)
    one = Muon(
        [{"params": ours, "names": ["wide", "tall"], **settings}], other, None, torch.bfloat16, momentum=0.9, steps=5
    )
    reference = torch.optim.Muon(theirs, momentum=0.9, adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(3):
        for mine, its in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape)
            its.grad = mine.grad.clone()
        one.step()
        reference.step()
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, its, rtol=0, atol=1e-4)


def test_work_is_shared_out_evenly() -> None:
    shapes = [torch.Size(shape) for shape in [(8, 8)] * 4 + [(8, 24)] * 3]
    shares = share_out(dict(enumerate(shapes)), 2)
    assert sorted(number for share in shares for number in share) == list(range(7))
    loads = [sum(shapes[number].numel() * min(shapes[number]) for number in share) for share in shares]
    assert max(loads) - min(loads) <= 8 * 8 * 8


def orthogonalised(run: train.Run) -> list[list[tuple[int, ...]]]:
    """The shapes of the matrices that each rank orthogonalises in a step."""
    shapes, original = [], muon.orthogonalise

    def watched(matrix: torch.Tensor, steps: int) -> torch.Tensor:
        shapes.append(tuple(matrix.shape))
        return original(matrix, steps)

    vars(muon)["orthogonalise"] = watched
    train.train_step(run, train.local_batches(run), train.divisor(run))
    vars(muon)["orthogonalise"] = original
    return gather(shapes)


@pytest.mark.parametrize("layout", [(SHARD, "2"), (TP, "2", SHARD, "1"), (REPLICATE, "2"), (CP, "2")])
def test_no_rank_does_what_another_does(layout: tuple[str, ...]) -> None:
    words = (*MUON, *layout, LOCAL, "18" if layout[0] in (SHARD, REPLICATE) else "36")
    one, other = observe(*words, ranks=2, steps=0, at_end=orthogonalised).extra
    ((whole,),) = (observe(*MUON, steps=0, at_end=orthogonalised).extra,)
    assert sorted(one + other) == sorted(whole)
    assert abs(len(one) - len(other)) <= 2


def kept_of_a_matrix(run: train.Run) -> list[str]:
    parameter = run.stages[0].get_parameter("layers.0.attention.wq.weight")
    return [*run.optimizer.state[parameter]]


def test_a_checkpoint_has_a_step_only_where_something_is_rounded() -> None:
    """Those of float32 have the momentum alone."""
    assert observe(*MUON, steps=1, at_end=kept_of_a_matrix).extra == ["momentum"]
    rounded = observe(*MUON, "--optimizer.state_dtype", "bfloat16", steps=1, at_end=kept_of_a_matrix).extra
    assert sorted(rounded) == ["momentum", "step"]


def test_of_ranks_with_the_same_slice_one_sends_it() -> None:
    """Each rank receives its half of the matrices once, and the results of all."""
    found = observe(*MUON, REPLICATE, "2", LOCAL, "18", ranks=2, steps=1, at_end=count_traffic).extra
    assert 1.4 < found["dp_replicate", "all-to-all"] / parameter_bytes(("layers",)) < 1.6


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (3, (SHARD, "3", LOCAL, "12", "--model.flavor", "odd")),
        (4, (REPLICATE, "2", SHARD, "2", LOCAL, "9")),
        (4, (SHARD, "2", TP, "2", LOCAL, "18", "--training.enable_cpu_offload", "true")),
        (4, (PP, "2", SHARD, "2", LOCAL, "18", "--model.flavor", "long5", "--parallelism.pipeline_first", "true")),
    ],
)
def test_a_layout_is_the_run_of_one_process(ranks: int, layout: tuple[str, ...]) -> None:
    at = layout.index("--model.flavor") if "--model.flavor" in layout else len(layout)
    assert not broken_bars(observe(*MUON, *layout, ranks=ranks), observe(*MUON, *layout[at : at + 2]))
