"""Adapters of experts and of latents: what they compute, what is kept, the same run at every layout; and faults."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from components.commands.figures import broken_bars
from components.config import Lora, Model
from components.state.init import initialize_weights
from models import MODELS, grouped, meta_model
from models.parameters import is_adapter
from tests.harness import observe, rewrite

LORA = ("--lora.rank", "4", "--lora.alpha", "8")
MOE, LATENTS = ("--model.name", "qwen3_moe", *LORA), ("--model.name", "deepseek_v3", *LORA)
THIRD = ("--model.flavor", "tiny_sigmoid")
EP, TP = ("--parallelism.expert_parallel_degree", "2"), ("--parallelism.tensor_parallel_degree", "2")
FSDP, PP = ("--training.local_batch_size", "18"), ("--parallelism.pipeline_parallel_degree", "2")
MICRO = ("--parallelism.pipeline_parallel_microbatch_size", "9")
COUNTS = torch.tensor([3, 0, 5, 2])


def adapted(name: str, **settings: Any) -> Any:
    return meta_model(Model(name=name, flavor="tiny", lora=Lora(**{"rank": 4} | settings)))


@pytest.mark.parametrize("rank", [1, 3, 4, 5])
def test_a_product_is_that_of_each_expert(rank: int) -> None:
    """Also of ranks whose rows have not the strides that grouped products take; and an expert without a row."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((10, 16), (4, rank, 16), (4, 8, rank))
    tensors = [torch.randn(shape, generator=draw, requires_grad=True) for shape in shapes]
    x, lora_A, lora_B = tensors
    found = grouped.grouped_low_rank(x, lora_A, lora_B, COUNTS.cumsum(0).to(torch.int32), 2.0)
    parts = zip(x.split(COUNTS.tolist()), lora_A, lora_B, strict=True)
    wanted = torch.cat([2 * rows @ own_A.T @ own_B.T for rows, own_A, own_B in parts])
    torch.testing.assert_close(found, wanted)
    probe = torch.randn(10, 8, generator=draw)
    for ours, theirs in zip(*(torch.autograd.grad(out, tensors, probe) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.is_contiguous()


def kept_and_multiplied(trained: bool) -> tuple[int, int]:
    """Of one product with 4 matrices: whether rows are kept for backward, and products of backward."""
    kept = []
    product, products = grouped.grouped_product, 0

    def counted(*given: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return product(*given)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    x, weight = torch.ones(10, 16, requires_grad=True), torch.ones(4, 8, 16, requires_grad=trained)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "grouped_product", counted)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
            out = grouped._GroupedProduct.apply(x, weight, COUNTS.cumsum(0).to(torch.int32))
        out.sum().backward()
    assert x.grad is not None
    assert (weight.grad is not None) == trained
    return kept.count(x.shape), products - 1


def test_frozen_experts_have_no_gradient_and_keep_no_rows() -> None:
    assert kept_and_multiplied(trained=True) == (1, 2)
    assert kept_and_multiplied(trained=False) == (0, 1)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_all_matrices_of_the_layers_are_adapted(name: str) -> None:
    """A is uniform up to 1 / sqrt(in), of each expert; neither routers, head nor embedding have adapters."""
    model = adapted(name, rank=64).to_empty(device="cpu")
    initialize_weights(model, model.init_std, 0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    kinds = {each: model.kind(each).role for each, _ in model.named_parameters()}
    matrices = {each.removesuffix(".weight") for each, role in kinds.items() if role in ("matrix", "expert")}
    assert {each[: -len("_lora_A")] for each in trained} == matrices - {name for name in kinds if is_adapter(name)}
    for each in trained:
        parameter = model.get_parameter(each)
        if each.endswith("lora_B"):
            assert not parameter.any(), each
        else:
            bound = parameter.shape[-1] ** -0.5
            assert 0.95 * bound < parameter.abs().max() <= bound, each


NAMES = [
    ("qwen3_moe", ["gate_proj", "w2"], {"w1", "w2"}),
    ("gpt_oss", ["gate_up_proj", "o_proj"], {"w1", "w3", "wo"}),
    ("deepseek_v3", ["kv_a_proj_with_mqa", "wkv_b", "up_proj"], {"wkv_a", "wkv_b", "w3"}),
]


@pytest.mark.parametrize(("name", "asked", "wanted"), NAMES)
def test_targets_have_our_names_or_those_of_hugging_face(name: str, asked: list[str], wanted: set[str]) -> None:
    model = adapted(name, target_modules=asked)
    found = {each for each, parameter in model.named_parameters() if parameter.requires_grad}
    assert {each.replace("_lora", ".lora").split(".")[-2] for each in found} == wanted


def test_a_token_is_multiplied_by_the_adapters_of_its_experts() -> None:
    """Of rank r, beside w1, w2, w3 of C experts: 6 C (3 r (D + F)) FLOPs a layer, and a third less of the matrices."""
    sizes: Any = MODELS["qwen3_moe"][1]["tiny"]
    flops = {
        rank: adapted("qwen3_moe", rank=rank, target_modules=["w1", "w2", "w3"]).flops_per_token(64)[0]
        for rank in (4, 8)
    }
    assert flops[8] - flops[4] == sizes.n_layers * 6 * sizes.top_k * 3 * 4 * (sizes.dim + sizes.expert_dim)


LAYOUTS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "experts, tp 2 x fsdp 2, ep 2": (4, MOE, (*TP, *FSDP, *EP)),
    "experts, fsdp 2, ep 2, compiled": (
        2,
        MOE,
        (*FSDP, *EP, "--compile.enable", "true", "--compile.backend", "aot_eager"),
    ),
    "experts, pp 2, gradients of weights apart": (
        2,
        (*MOE, "--model.flavor", "long5"),
        (*PP, *MICRO, "--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"),
    ),
    "latents of queries too, tp 2": (2, (*LATENTS, *THIRD), TP),
    "latents, tp 2, whole": (2, LATENTS, (*TP, "--parallelism.sequence_parallel", "false")),
    "biases, tp 2, ep 2": (2, ("--model.name", "gpt_oss", *LORA), (*TP, *EP)),
}


@functools.cache
def one_process(*words: str) -> Any:
    return observe(*words)


@pytest.mark.parametrize(("ranks", "run", "words"), LAYOUTS.values(), ids=LAYOUTS)
def test_adapters_are_the_same_run_at_every_layout(ranks: int, run: tuple[str, ...], words: tuple[str, ...]) -> None:
    reference, observed = one_process(*run), observe(*run, *words, ranks=ranks)
    assert {*reference.gradients} == {name for name in reference.weights if is_adapter(name)}
    assert broken_bars(observed, reference) == {}
    for name in reference.weights.keys() - reference.gradients.keys():
        assert torch.equal(observed.weights[name], reference.first_weights[name]), name


def plant_six_experts() -> None:
    flavors: Any = MODELS["qwen3_moe"][1]
    flavors["six"] = replace(flavors["tiny"], n_experts=6)


def test_ranks_share_the_columns_of_adapters_where_experts_and_ranks_of_them_are_too_few() -> None:
    """6 experts and rank 3 on 4 ranks: neither are shared evenly."""
    run = (*MOE[:2], "--lora.rank", "3", "--model.flavor", "six")
    one = observe(*run, mutate=plant_six_experts)
    four = observe(*run, "--training.local_batch_size", "9", ranks=4, mutate=plant_six_experts)
    assert broken_bars(four, one) == {}


FAULTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, str, str, str]]] = {
    "adapters of experts local to a rank of tp": (
        "gradient",
        MOE,
        TP,
        ("parallelize.data", "_placements", "in module.parameters():", "in (module.w1, module.w2, module.w3):"),
    ),
    "the norm leaves adapters of experts out": (
        "gradient norm",
        MOE,
        (*FSDP, *EP),
        ("components.optim.optimizer", "local_gradients", "is not None:", "is not None and parameter.ndim < 3:"),
    ),
    "A of latents local to a rank": (
        "gradient",
        LATENTS,
        TP,
        ("parallelize.tensor", "_with_adapter", "_own(module.lora_A)", "module.lora_A.to_local()"),
    ),
    "a bound of the rank of A": (
        "weights at step 0",
        MOE,
        (*FSDP, *EP),
        ("models.transformer", "Transformer.init_std", "shape[-1]", "shape[1]"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    figure, run, words, old = FAULTS[fault]
    observed = observe(*run, *words, ranks=2, mutate=functools.partial(rewrite, *old))
    assert figure in broken_bars(observed, one_process(*run))


THAWED = {
    "tp": (TP, ("parallelize.tensor", "apply_tensor_parallel", "set_trained(model)", "pass")),
    "ep": (
        (*FSDP, *EP),
        ("parallelize.expert", "_share_out", ", requires_grad=weight.requires_grad", ""),
    ),
}


@pytest.mark.parametrize(("words", "old"), THAWED.values(), ids=THAWED)
def test_experts_that_a_layout_thaws_are_noticed(words: tuple[str, ...], old: tuple[str, str, str, str]) -> None:
    with pytest.raises(RuntimeError, match="whether it is trained"):
        observe(*MOE, *words, ranks=2, steps=0, mutate=functools.partial(rewrite, *old))
