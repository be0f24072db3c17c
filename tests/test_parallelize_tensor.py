"""Tensor parallel: its plan, its loss, what is replicated, and faults that have to be found."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

import train
from components.commands.figures import Observation, broken_bars
from components.config import Parallelism
from models.llama import FLAVORS, Llama
from models.loss import chunk_loss, linear_loss
from models.objective import OBJECTIVES
from parallelize.llama import llama_tp_plan
from parallelize.mesh import Mesh
from parallelize.tensor import apply_tensor_parallel, gathered_softmax, vocabulary_parallel_softmax
from tests.harness import observe, rewrite
from tests.small import VOCABULARY
from tests.test_parallelize_data import UNEVEN_LABELS, one_process

TP2 = ("--parallelism.tensor_parallel_degree", "2")
WITHOUT_SEQUENCE = ("--parallelism.sequence_parallel", "false")
WITHOUT_LOSS = ("--parallelism.loss_parallel", "false")


@pytest.fixture
def two_ranks() -> Any:
    """Two ranks as seen by the first, without another process: nothing here communicates."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def tiny_model() -> Llama:
    with torch.device("meta"):
        return Llama(FLAVORS["tiny"])


def mesh_of_two() -> Mesh:
    from parallelize.mesh import Degrees

    return Mesh(Degrees(tp=2), "cpu")


@pytest.mark.parametrize("pattern", ["layers.*.attention.wx", "layers.*attention", "layer.*.attention"])
def test_a_pattern_that_matches_nothing_is_an_error(pattern: str, two_ranks: None) -> None:
    plan = llama_tp_plan(Parallelism()) | {pattern: ColwiseParallel()}
    with pytest.raises(ValueError, match=f"modules that are not there: {re.escape(pattern)}"):
        apply_tensor_parallel(tiny_model(), mesh_of_two(), plan)


@pytest.mark.parametrize("left_out", ["norm", "layers.*.ffn_norm", "layers.*.feed_forward.w2", "output"])
def test_a_parameter_without_a_style_is_an_error(left_out: str, two_ranks: None) -> None:
    plan = llama_tp_plan(Parallelism())
    del plan[left_out]
    with pytest.raises(ValueError, match=f"no style for .*{left_out.rpartition('.')[2]}.weight"):
        apply_tensor_parallel(tiny_model(), mesh_of_two(), plan)


def test_a_stage_may_lack_the_ends_of_the_model(two_ranks: None) -> None:
    model = tiny_model()
    model.tok_embeddings = model.output = model.norm = None
    apply_tensor_parallel(model, mesh_of_two(), llama_tp_plan(Parallelism()))
    model.layers = nn.ModuleDict()
    apply_tensor_parallel(model, mesh_of_two(), llama_tp_plan(Parallelism()))


def compare_losses(run: train.Run, split_softmax: Any, vocabulary: int) -> list[float]:
    """Relative errors of the loss, and of the gradients of hidden states and weights."""
    mesh, generator = run.mesh["tp"], torch.Generator().manual_seed(0)
    hidden = torch.randn(24, 16, generator=generator, requires_grad=True)
    weights = torch.randn(vocabulary, 16, generator=generator, requires_grad=True)
    labels = torch.randint(0, vocabulary, (24,), generator=generator)
    labels[::5] = -100
    plain = F.cross_entropy(hidden @ weights.T, labels, reduction="sum")
    expected = [plain, *torch.autograd.grad(plain, (hidden, weights))]
    padded = F.pad(weights.detach(), (0, 0, 0, -vocabulary % mesh.size()))
    rows = padded.chunk(mesh.size())[mesh.get_local_rank()].requires_grad_()
    softmax = functools.partial(split_softmax, mesh=mesh, vocabulary=vocabulary)
    of_chunk = functools.partial(chunk_loss, softmax=softmax, terms=OBJECTIVES["next_token"].terms)
    (loss,) = linear_loss(hidden[None], rows, labels[None], of_chunk)
    of_hidden, of_rows = torch.autograd.grad(loss, (hidden, rows))
    dist.all_reduce(of_hidden, group=mesh.get_group())
    parts = [torch.empty_like(of_rows) for _ in range(mesh.size())]
    dist.all_gather(parts, of_rows, group=mesh.get_group())
    found = [loss, of_hidden, torch.cat(parts)[:vocabulary]]
    return [((got - want).norm() / want.norm()).item() for got, want in zip(found, expected, strict=True)]


@pytest.mark.parametrize(("ranks", "vocabulary"), [(1, 20), (2, 20), (4, 20), (4, 18), (4, 5)])
@pytest.mark.parametrize("softmax", [vocabulary_parallel_softmax, gathered_softmax])
def test_loss_split_by_vocabulary_has_the_plain_gradients(softmax: Any, ranks: int, vocabulary: int) -> None:
    """Pitfall: a vocabulary-parallel loss that is right while its gradients are not. A rank may have no row at all."""
    layout = ("--parallelism.tensor_parallel_degree", str(ranks), "--model.flavor", "many_heads")
    compare = functools.partial(compare_losses, split_softmax=softmax, vocabulary=vocabulary)
    assert max(observe(*layout, ranks=ranks, steps=0, at_end=compare).extra) < 1e-6


FSDP2 = ("--parallelism.data_parallel_shard_degree", "2", "--training.local_batch_size", "18")
TP4 = ("--parallelism.tensor_parallel_degree", "4")


@functools.cache
def one_with_an_odd_vocabulary(tied: str) -> Observation:
    return observe("--model.flavor", f"many_heads_odd_vocabulary{tied}", valid_labels=UNEVEN_LABELS)


@pytest.mark.parametrize("tied", ["", "_tied"])
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [(TP2, 2), ((*TP2, "--parallelism.loss_parallel", "false"), 2), (TP4, 4), ((*TP2, *FSDP2), 4)],
    ids=["tp 2", "tp 2, loss not split", "tp 4", "fsdp 2 tp 2"],
)
def test_a_vocabulary_that_ranks_cannot_share_evenly(layout: tuple[str, ...], ranks: int, tied: str) -> None:
    words = (*layout, "--model.flavor", f"many_heads_odd_vocabulary{tied}")
    observed = observe(*words, ranks=ranks, valid_labels=UNEVEN_LABELS)
    assert not broken_bars(observed, one_with_an_odd_vocabulary(tied))


def test_a_table_with_uneven_parts_goes_on_at_another_layout(tmp_path: Path) -> None:
    words = ("--model.flavor", "many_heads_odd_vocabulary", "--checkpoint.enable", "true")
    run = functools.partial(observe, *words, steps=1, folder=str(tmp_path), valid_labels=UNEVEN_LABELS)
    for layout, ranks in (((*TP2, *FSDP2), 4), (TP4, 4), ((), 1)):
        last = run(*layout, ranks=ranks)
    for name, weight in one_with_an_odd_vocabulary("").weights.items():
        assert ((last.weights[name] - weight).norm() / weight.norm()).item() < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        ("_without_padding", "if real < columns:", "if False:"),
        ("_rows", "-(-weight.shape[0] // mesh.size())", "len(rows)"),
    ],
    ids=["padding in the softmax", "no padding"],
)
def test_a_fault_of_an_uneven_vocabulary_is_found(fault: tuple[str, str, str]) -> None:
    plant = functools.partial(rewrite, "parallelize.tensor", *fault)
    words = (*TP2, "--model.flavor", "many_heads_odd_vocabulary")
    observed = observe(*words, ranks=2, valid_labels=UNEVEN_LABELS, mutate=plant)
    assert "gradient" in broken_bars(observed, one_with_an_odd_vocabulary(""))


@functools.cache
def one_with_two_key_heads(name: str, optimizer: str) -> Observation:
    return observe("--model.name", name, "--optimizer.name", optimizer, valid_labels=UNEVEN_LABELS)


@pytest.mark.parametrize(
    ("layout", "ranks", "name", "optimizer"),
    [
        (TP4, 4, "llama", "Muon"),
        ((*TP4, *WITHOUT_SEQUENCE), 4, "qwen3", "AdamW"),
        ((*TP4, *FSDP2), 8, "qwen3", "AdamW"),
        ((*TP4, "--parallelism.context_parallel_degree", "2"), 8, "llama", "AdamW"),
    ],
    ids=["tp 4, Muon", "without sequence parallel", "fsdp 2 tp 4", "tp 4 cp 2"],
)
def test_ranks_may_outnumber_key_heads(layout: tuple[str, ...], ranks: int, name: str, optimizer: str) -> None:
    words = (*layout, "--model.name", name, "--optimizer.name", optimizer)
    observed = observe(*words, ranks=ranks, valid_labels=UNEVEN_LABELS)
    assert not broken_bars(observed, one_with_two_key_heads(name, optimizer))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        ("partial_sum(getattr(module, name))", "getattr(module, name).to_local()"),
        ("partial_sum(x_BSD)", "x_BSD.to_local()"),
        ("device_mesh.get_local_rank() * self.heads // ranks", "device_mesh.get_local_rank() % self.heads"),
    ],
    ids=["weights' gradients not summed", "inputs' gradients not summed", "another head"],
)
def test_a_fault_of_shared_key_heads_is_found(fault: tuple[str, str]) -> None:
    plant = functools.partial(rewrite, "parallelize.tensor", "KeyValueHeads._apply", *fault)
    observed = observe(*TP4, ranks=4, valid_labels=UNEVEN_LABELS, mutate=plant)
    assert broken_bars(observed, one_with_two_key_heads("llama", "AdamW"))


OLMO = ("--model.name", "olmo2")
OF_HEADS = {
    "mean over the heads of a rank": (
        TP2,
        "(squares, device_mesh, [Partial()]",
        "(squares * 2, device_mesh, [Replicate()]",
    ),
    "a shared key head counts twice": (TP4, "/ (copies * len(weight))", "/ len(weight)"),
    "a rank has the weight of other heads": (TP4, "rank // copies * columns", "rank * columns % len(weight)"),
    "weights' gradients not summed": (TP2, "partial_sum(module.weight)", "module.weight.to_local()"),
    "gradients of the mean not summed": (
        TP2,
        "partial_sum(part.redistribute(placements=[Replicate()]))",
        "part.full_tensor()",
    ),
}
"""Faults of the norms over all heads: layout, and a replacement in NormOverHeads."""


@functools.cache
def one_olmo() -> Observation:
    return observe(*OLMO, valid_labels=UNEVEN_LABELS)


@pytest.mark.parametrize("layout", [TP2, (*TP4, *WITHOUT_SEQUENCE)], ids=["tp 2", "tp 4, two key heads"])
def test_a_norm_over_all_heads_is_that_of_one_process(layout: tuple[str, ...]) -> None:
    observed = observe(*OLMO, *layout, ranks=int(layout[1]), valid_labels=UNEVEN_LABELS)
    assert not broken_bars(observed, one_olmo())


@pytest.mark.slow
@pytest.mark.parametrize("fault", OF_HEADS)
def test_a_fault_of_a_norm_over_all_heads_is_found(fault: str) -> None:
    layout, old, new = OF_HEADS[fault]
    plant = functools.partial(rewrite, "parallelize.tensor", "NormOverHeads._apply", old, new)
    observed = observe(*OLMO, *layout, ranks=int(layout[1]), valid_labels=UNEVEN_LABELS, mutate=plant)
    assert "gradient" in broken_bars(observed, one_olmo())


ADAPTERS = (*WITHOUT_SEQUENCE, "--lora.rank", "4", "--lora.alpha", "8")


def biases_that_are_not_zero(fault: str = "") -> None:
    rewrite("components.state.init", "_fill", "mul_(std)", "mul_(std or 0.05)")
    if fault:
        rewrite("parallelize.tensor", "compute_locally", "whole.add(module.bias)", fault)


def biased(*words: str, fault: str = "", ranks: int = 1) -> Observation:
    mutate = functools.partial(biases_that_are_not_zero, fault)
    return observe("--model.flavor", "biased", *words, ranks=ranks, valid_labels=UNEVEN_LABELS, mutate=mutate)


one_biased = functools.cache(biased)


@pytest.mark.parametrize("words", [(), ADAPTERS], ids=["sequence parallel", "with adapters"])
def test_biases_of_split_matrices_are_added_once(words: tuple[str, ...]) -> None:
    assert not broken_bars(biased(*TP2, *words, ranks=2), one_biased(*words))


@pytest.mark.slow
def test_a_bias_that_each_rank_adds_is_found() -> None:
    fault = "whole.add(DTensor.from_local(module.bias.to_local(), mesh, given))"
    assert "gradient" in broken_bars(biased(*TP2, *ADAPTERS, ranks=2, fault=fault), one_biased(*ADAPTERS))


def norms_differ(run: train.Run) -> list[str]:
    """Replicated parameters that are not the same bits on each tp rank."""
    differ, replicated = [], 0
    for name, parameter in run.stages[0].named_parameters():
        if isinstance(parameter, DTensor) and parameter.placements[-1] == Replicate():
            replicated += 1
            local = parameter.to_local().detach().clone()
            everywhere = [torch.empty_like(local) for _ in range(run.mesh["tp"].size())]
            dist.all_gather(everywhere, local, group=run.mesh["tp"].get_group())
            differ += [name for other in everywhere if not torch.equal(other, local)]
    assert replicated == 5
    return differ


@pytest.mark.parametrize("settings", [(), WITHOUT_SEQUENCE], ids=["sequence parallel", "without"])
def test_replicated_parameters_keep_the_same_bits(settings: tuple[str, ...]) -> None:
    """Pitfall: norms drift apart between tp ranks."""
    assert observe(*TP2, *settings, ranks=2, steps=3, valid_labels=UNEVEN_LABELS, at_end=norms_differ).extra == []


def logits_of(run: train.Run) -> torch.Tensor:
    tokens = torch.arange(64).view(2, 32)
    with torch.no_grad():
        return run.stages[0](tokens).clone()


@pytest.mark.parametrize("settings", [(), WITHOUT_SEQUENCE, WITHOUT_LOSS])
def test_without_labels_every_rank_gets_all_logits(settings: tuple[str, ...]) -> None:
    whole = observe(steps=0, at_end=logits_of).extra
    split = observe(*TP2, *settings, ranks=2, steps=0, at_end=logits_of).extra
    assert split.shape == whole.shape == (2, 32, VOCABULARY)
    assert (split - whole).abs().max() < 1e-5


FAULTS = {
    "a norm's gradient left out of the reduction over tp": (
        "parallelize.sharding",
        "align_gradients",
        "gradient.redistribute(placements=parameter.placements)",
        "DTensor.from_local(gradient.to_local(), gradient.device_mesh, parameter.placements)",
    ),
    "a partial gradient taken for a replicated one": (
        "parallelize.tensor",
        "VocabularyParallelHead._apply",
        "grad_placements=[Partial()]",
        "grad_placements=[Replicate()]",
    ),
    "the gradient norm not summed over tp": (
        "components.optim.optimizer",
        "clip_gradients",
        "group in groups:",
        "group in ():",
    ),
    "rows of the vocabulary off by a rank": (
        "parallelize.tensor",
        "VocabularyParallelEmbedding._apply",
        "device_mesh.get_local_rank()",
        "(1 - device_mesh.get_local_rank())",
    ),
    "tp ranks see different batches": (
        "train",
        "local_order",
        "*sizes, consumed_sequences",
        "*sizes, consumed_sequences + run.mesh['tp'].get_local_rank()",
    ),
    "tp ranks start from other norms": (
        "components.state.init",
        "initialize_weights",
        "numbers.fill_(1.0 if",
        "numbers.fill_(1.0 + 0.5 * torch.distributed.get_rank() if",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    plant = functools.partial(rewrite, *FAULTS[fault])
    if fault == "tp ranks see different batches":
        with pytest.raises(RuntimeError, match="ranks of one part of the batch see different ones"):
            observe(*TP2, ranks=2, mutate=plant)
        return
    observed = observe(*TP2, ranks=2, valid_labels=UNEVEN_LABELS, mutate=plant)
    assert broken_bars(observed, one_process(valid_labels=UNEVEN_LABELS))
