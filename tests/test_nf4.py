"""Packed bases: the levels of NF4, what backward keeps, the same run at every layout; and a fault that is found."""

import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import train
from components.commands.figures import Observation, broken_bars
from components.commands.observed import whole_weights
from components.config import ConfigError, Lora, Model, load_config
from components.state.init import initialize_weights
from components.state.packed import to_fill
from components.state.weights import export
from models import meta_model
from models.lora import AdaptedLinear, FrozenLinear, merged
from models.nf4 import _LEVELS, linear, pack, packed_shape, scales_of, unpack
from parallelize.mesh import resolve_degrees
from parallelize.rules import check_layout
from parallelize.sharding import own_slice
from tests.harness import observe, rewrite
from tests.ranks import group_of_one
from tests.small import SMALL

NF4 = ("--model.flavor", "many_heads_wide", "--lora.rank", "4", "--lora.alpha", "8", "--lora.base", "nf4")
TP = ("--parallelism.tensor_parallel_degree", "2")
EXPERTS = ("--model.name", "qwen3_moe")
PP = ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_microbatch_size", "9")


def weights(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02


def test_a_number_is_the_nearest_level_of_its_block() -> None:
    numbers = weights(3, 5, 256)
    unpacked, scales = unpack(pack(numbers)), scales_of(pack(numbers)).float()
    assert pack(numbers).shape == packed_shape(numbers.shape) == (3, 5, 136)
    torch.testing.assert_close(scales, numbers.abs().unflatten(-1, (-1, 64)).amax(-1), rtol=2**-8, atol=0)
    assert (
        len({round(level, 4) for level in (unpacked.unflatten(-1, (-1, 64)) / scales[..., None]).unique().tolist()})
        == 16
    )
    possible = torch.tensor(_LEVELS) * scales[..., None, None]
    nearest = (numbers.unflatten(-1, (-1, 64))[..., None] - possible).abs().amin(-1)
    torch.testing.assert_close((unpacked - numbers).abs().unflatten(-1, (-1, 64)), nearest, rtol=1e-4, atol=1e-8)


def test_it_is_as_near_as_torchao() -> None:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    for numbers in (weights(256, 1024), weights(256, 1024) ** 3):
        theirs = (to_nf4(numbers.clone()).get_original_weight() - numbers).abs().mean().item()
        assert (unpack(pack(numbers)) - numbers).abs().mean().item() == pytest.approx(theirs, rel=0.02)


def test_a_slice_has_the_bytes_of_the_whole() -> None:
    numbers = weights(10, 256)
    assert torch.equal(pack(numbers[3:5, 64:192]), pack(numbers)[3:5, 34:102])
    assert torch.equal(pack(unpack(pack(numbers))), pack(numbers))


def test_blocks_of_zeros_and_of_what_is_not_finite() -> None:
    assert not unpack(pack(torch.zeros(2, 64))).any()
    numbers = torch.ones(2, 128)
    numbers[0, 3], numbers[1, 64] = math.nan, math.inf
    assert scales_of(pack(numbers)).isfinite().tolist() == [[False, True], [True, False]]


def test_a_product_is_that_of_the_numbers_and_keeps_the_packed_ones() -> None:
    packed, bias, x = pack(weights(96, 128)), weights(96), weights(7, 128).requires_grad_()
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]
        y = linear(x, packed, bias)
    assert sum(tensor.nbytes for tensor in kept) <= packed.nbytes + x.nbytes
    reference = x.detach().clone().requires_grad_()
    expected = torch.nn.functional.linear(reference, unpack(packed), bias)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, reference.grad)


def kept(base: str) -> Any:
    asked = Model(name="llama", flavor="tiny_wide", lora=Lora(rank=4, base=base, target_modules=["wq"]))  # type: ignore[arg-type]
    model = meta_model(asked, "float32").to_empty(device="cpu")
    initialize_weights(model, lambda name: 0.1 if name.endswith("lora_B") else model.init_std(name), 0)
    return model


def test_matrices_of_the_layers_are_packed_and_the_rest_of_the_base_is_in_bfloat16() -> None:
    for name, parameter in kept("nf4").named_parameters():
        role = kept("nf4").kind(name).role
        expected = {"matrix": torch.uint8, "adapter": torch.float32}.get(role, torch.bfloat16)
        assert parameter.dtype == expected, name
    assert {each.dtype for each in kept("bfloat16").parameters()} == {torch.float32, torch.bfloat16}
    assert {each.dtype for each in kept("float32").parameters()} == {torch.float32}


def test_merged_weights_are_of_the_packed_base() -> None:
    model, whole = kept("nf4"), merged(kept("nf4"))
    for name, module in model.named_modules():
        if isinstance(module, FrozenLinear):
            expected = unpack(module.weight)
            if isinstance(module, AdaptedLinear):
                expected += 4.0 * module.lora_B.detach() @ module.lora_A.detach()
            torch.testing.assert_close(whole[f"{name}.weight"], expected)


REFUSED = {
    "the 64 columns of layers.0.attention.wo.weight, which 2 tensor parallel ranks share": (
        *("--model.flavor", "many_heads", "--lora.rank", "4", "--lora.base", "nf4"),
        *TP,
    ),
    "the 50 columns of layers.0.attention.wq.weight are no whole blocks": (
        *("--model.flavor", "odd", "--lora.rank", "4", "--lora.base", "nf4"),
    ),
    "needs lora.rank of 1 or more": ("--lora.base", "nf4"),
    'lora.base = "nf5"': ("--lora.base", "nf5"),
    "float8 would train matrices": (*NF4, "--model.converters", '["quantize.linear.float8"]'),
}


@pytest.mark.parametrize(("reason", "words"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_packed_is_refused(reason: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        check_words(words, ranks=2 if TP[0] in words else 1)


def check_words(words: tuple[str, ...], ranks: int) -> None:
    config = load_config([*SMALL, *words])
    check_layout(config, resolve_degrees(config, ranks))


LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp 2, whole": (2, (*TP, "--parallelism.sequence_parallel", "false")),
    "tp 2, one key head": (2, (*TP, "--model.flavor", "many_heads_1_key_heads_wide")),
    "tp 2, compiled": (2, (*TP, "--compile.enable", "--compile.backend", "aot_eager")),
    "tp 2, fsdp 2": (4, (*TP, "--training.local_batch_size", "18")),
    "fsdp 3": (3, ("--training.local_batch_size", "12")),
    "pp 2, ZBV": (2, (*PP, "--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble")),
    "full checkpointing, tied": (
        *(2, ("--activation_checkpoint.mode", "full", "--model.flavor", "many_heads_wide_tied", *TP)),
    ),
    "experts, fsdp 2, ep 2": (
        *(2, (*EXPERTS, "--training.local_batch_size", "18", "--parallelism.expert_parallel_degree", "2")),
    ),
    "experts, tp 2, ep 2": (2, (*EXPERTS, *TP, "--parallelism.expert_parallel_degree", "2")),
    "experts of one block of columns, tp 2": (2, (*EXPERTS, *TP, "--model.sizes.expert_dim", "64")),
    "experts, fsdp 3": (3, (*EXPERTS, "--training.local_batch_size", "12")),
    "experts with biases, tp 2": (2, ("--model.name", "gpt_oss", *TP)),
    "latents, tp 2": (2, ("--model.name", "deepseek_v3", *TP)),
    "two targets": (2, (*TP, "--lora.target_modules", '["wq", "w2"]')),
}
_OF_THE_RUN = ("--model.name", "--model.flavor", "--model.sizes.expert_dim", "--lora.target_modules", "--lora.base")


@functools.cache
def one_process(*words: str) -> Observation:
    return observe(*NF4, *words)


def of_the_run(words: tuple[str, ...]) -> tuple[str, ...]:
    """The settings that one process has too."""
    found = [number for number, word in enumerate(words) if word in _OF_THE_RUN]
    return tuple(word for number in found for word in words[number : number + 2])


@pytest.mark.parametrize("base", ["nf4", "bfloat16"])
@pytest.mark.parametrize(("ranks", "words"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_base_of_low_precision_is_the_same_run_at_every_layout(ranks: int, words: tuple[str, ...], base: str) -> None:
    words = (*words, "--lora.base", base)
    reference, observed = one_process(*of_the_run(words)), observe(*NF4, *words, ranks=ranks)
    assert {*reference.gradients} == {name for name in reference.weights if name.endswith(("lora_A", "lora_B"))}
    assert broken_bars(observed, reference) == {}
    for name in reference.weights.keys() - reference.gradients.keys():
        assert torch.equal(observed.weights[name], reference.first_weights[name]), name


def test_a_base_quantised_by_slice_is_found() -> None:
    fault = functools.partial(
        rewrite,
        "models.nf4",
        "pack",
        ".amax(dim=-1, keepdim=True)",
        ".amax(dim=(0, 2), keepdim=True).repeat(len(blocks), 1, 1)",
    )
    one, two = (
        observe(*NF4, "--training.local_batch_size", str(36 // ranks), ranks=ranks, steps=1, mutate=fault)
        for ranks in (1, 2)
    )
    assert "weights at step 0" in broken_bars(two, one)


def as_folder(run: train.Run, path: Path) -> None:
    export(meta_model(run.config.model), whole_weights(run), path, run.config.model.hf_assets_path, torch.float32)


def test_a_base_of_a_run_and_of_hugging_face_is_packed_as_it_is_read(tmp_path: Path) -> None:
    run = ("--model.flavor", "many_heads_wide", "--checkpoint.enable", "true")
    base = observe(
        *run, steps=2, folder=str(tmp_path / "run"), at_end=functools.partial(as_folder, path=tmp_path / "hf")
    )
    words = (*NF4, "--checkpoint.enable", "true", "--checkpoint.initial_load_path")
    layouts: list[tuple[int, tuple[str, ...]]] = [
        (1, (str(tmp_path / "run"),)),
        (3, (str(tmp_path / "run"), "--training.local_batch_size", "12")),
        (4, (str(tmp_path / "run"), *PP, *TP)),
        (3, (str(tmp_path / "hf"), "--checkpoint.initial_load_in_hf", "--training.local_batch_size", "12")),
    ]
    for number, (ranks, more) in enumerate(layouts):
        found = observe(*words, *more, ranks=ranks, steps=1, folder=str(tmp_path / str(number))).weights
        for name, weight in base.weights.items():
            packs = name.startswith("layers.") and "norm" not in name
            assert torch.equal(found[name], unpack(pack(weight)) if packs else weight.bfloat16()), name


def spoilt(run: train.Run, path: Path) -> None:
    run.stages[0].get_parameter("layers.0.attention.wq.weight").data[3, 5] = math.inf
    as_folder(run, path)


def test_a_base_with_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    observe("--model.flavor", "many_heads_wide", steps=0, at_end=functools.partial(spoilt, path=tmp_path))
    words = ("--checkpoint.initial_load_path", str(tmp_path), "--checkpoint.initial_load_in_hf")
    with pytest.raises(RuntimeError, match="weight holds numbers that are not finite"):
        observe(*NF4, *words, steps=0, folder=str(tmp_path / "run"))


@pytest.mark.parametrize("base", ["nf4", "bfloat16", "float32"])
def test_a_run_computes_in_bfloat16_beside_any_base(base: str) -> None:
    words = (*NF4, "--lora.base", base, "--training.mixed_precision_param", "bfloat16")
    one, two = (observe(*words, *TP[: 2 * (ranks - 1)], ranks=ranks) for ranks in (1, 2))
    exact = observe(*NF4, "--lora.base", base)
    for observed in (one, two):
        assert observed.losses == pytest.approx(exact.losses, rel=2e-3)
        assert {name: each.dtype for name, each in observed.gradients.items()} == dict.fromkeys(
            exact.gradients, torch.float32
        )
        for name, gradient in exact.gradients.items():
            assert (observed.gradients[name] - gradient).norm() <= 0.05 * gradient.norm(), name


def test_numbers_are_packed_from_the_device_on_which_they_were_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch moves numbers of an offloaded parameter to the mesh's device, which a copy stands for here."""
    numbers, from_local = torch.randn(64, 64), DTensor.from_local
    with group_of_one():
        mesh = init_device_mesh("cpu", (1,))
        parameter = from_local(torch.zeros_like(pack(numbers)), mesh, [Shard(0)])
        monkeypatch.setattr(
            DTensor, "from_local", lambda local, *rest, **options: from_local(local.clone(), *rest, **options)
        )
        with to_fill(parameter) as filled:
            own_slice(filled)[0].copy_(numbers)
        assert torch.equal(parameter.to_local(), pack(numbers))
