"""FP8 and MXFP4 weights: transformers' numbers at every slice and layout, and each rank reads no more than its own."""

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import train
from components.commands.generate import build, open_source
from components.commands.start import check_initial_weights
from components.config import ConfigError, Model, load_config
from components.state import weights
from components.state.quantized import Fp8, Mxfp4, Quantization
from models import meta_model
from parallelize.groups import gather
from parallelize.sharding import own_slice
from tests.harness import observe
from tests.ranks import group_of_one
from tests.small import RECIPE, SMALL
from tests.test_weights import LAYOUTS, start_from
from tests.test_weights_parts import Experts, import_and_export

transformers = pytest.importorskip("transformers")
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

QUANTIZED = ("--checkpoint.initial_load_in_hf_quantized", "true")


class Counted:
    """A tensor of a file, and how many of its elements have been read."""

    total = 0

    def __init__(self, stored: Any) -> None:
        self.stored, self.elements = stored, 0

    def get_shape(self) -> list[int]:
        return [*(self.stored.shape if isinstance(self.stored, Tensor) else self.stored.get_shape())]

    def get_dtype(self) -> str:
        return str(self.stored.get_dtype())

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        found: Tensor = self.stored[where]
        self.elements += found.numel()
        Counted.total += found.numel()
        return found


def quantized_fp8(shape: Sequence[int], block: Sequence[int]) -> tuple[Tensor, Tensor]:
    numbers = (torch.randn(*shape) * 100).to(torch.float8_e4m3fn)
    return numbers, torch.rand([-(-size // each) for size, each in zip(shape, block, strict=True)]) / 100


def quantized_mxfp4(experts: int, across: int, rows: int) -> tuple[Tensor, Tensor]:
    numbers = torch.randint(0, 256, (experts, rows, across // 32, 16), dtype=torch.uint8)
    return numbers, torch.randint(100, 130, (experts, rows, across // 32), dtype=torch.uint8)


def same(ours: Tensor, theirs: Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32}[ours.itemsize]
    return ours.dtype == theirs.dtype and ours.view(bits).equal(theirs.view(bits))


def whole(tensor: Any) -> Tensor:
    return tensor[tuple(slice(0, size) for size in tensor.get_shape())]


def slices(shape: list[int]) -> list[tuple[slice, ...]]:
    """Begins and ends anywhere, also at the same place; the last dimension of some in steps."""
    draw = random.Random(0)
    found: list[tuple[slice, ...]] = []
    for step in [1, 2, 3] * 100:
        ends = [sorted(draw.choices(range(size + 1), k=2)) for size in shape]
        steps = [*[1] * (len(shape) - 1), step]
        found.append(tuple(slice(start, stop, step) for (start, stop), step in zip(ends, steps, strict=True)))
    assert any(each.start == each.stop for where in found for each in where)
    return found


@pytest.mark.parametrize("block", [(128, 128), (16, 40), (1, 7)])
@pytest.mark.parametrize("shape", [(300, 200), (256, 384), (1, 129), (5, 3)])
def test_fp8_is_that_of_transformers_in_every_slice(shape: tuple[int, int], block: tuple[int, int]) -> None:
    torch.manual_seed(0)
    numbers, scales = quantized_fp8(shape, block)
    right = _dequantize_fp8_weight(numbers, scales, [*block], torch.float32)
    ours = Fp8(Counted(numbers), Counted(scales), Quantization("fp8", block))
    assert ours.fits()
    assert same(whole(ours), right)
    for where in slices([*shape]):
        read = Counted(numbers), Counted(scales)
        assert same(Fp8(*read, Quantization("fp8", block))[where], right[where]), where
        assert read[0].elements == right[where].numel()
        places = [range(*part.indices(size)) for part, size in zip(where, shape, strict=True)]
        blocks = [each[-1] // size - each[0] // size + 1 for each, size in zip(places, block, strict=True) if each]
        assert read[1].elements == (blocks[0] * blocks[1] if all(places) else 0)


def test_mxfp4_is_that_of_transformers_in_every_slice() -> None:
    torch.manual_seed(0)
    numbers, scales = quantized_mxfp4(3, 160, 7)
    right = convert_moe_packed_tensors(numbers, scales)
    ours = Mxfp4(Counted(numbers), Counted(scales), Quantization("mxfp4"))
    assert ours.fits()
    assert same(whole(ours), right)
    for where in slices(ours.get_shape()):
        read = Counted(numbers), Counted(scales)
        assert same(Mxfp4(*read, Quantization("mxfp4"))[where], right[where]), where
        blocks = len({place // 32 for place in range(160)[where[1]]})
        experts, _, rows = right[where].shape
        assert [each.elements for each in read] == [experts * rows * blocks * 16, experts * rows * blocks]


def test_every_byte_with_every_scale() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8)[None, :, None].repeat(1, 1, 16)
    found, right = (
        whole(Mxfp4(Counted(numbers), Counted(scales), Quantization("mxfp4"))),
        convert_moe_packed_tensors(numbers, scales),
    )
    assert same(found[..., :255], right[..., :255])
    assert not found[..., 255].isfinite().any()


def config_of(name: str, flavor: str) -> dict[str, Any]:
    return meta_model(Model(name=name, flavor=flavor)).hf_config()


def save_model(path: Path, given: dict[str, Any], quantization: dict[str, Any]) -> dict[str, Tensor]:
    """A folder of transformers' model of a config.json with its matrices in low precision, which are returned wide."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**given), dtype=torch.bfloat16
    )
    model.save_pretrained(path, max_shard_size="10GB")
    tensors = load_file(path / "model.safetensors")
    right = dict(tensors)
    for name in sorted(tensors):
        if name.endswith("_proj.weight") and quantization["quant_method"] == "fp8":
            block = quantization["weight_block_size"]
            numbers, scales = quantized_fp8(tensors[name].shape, block)
            tensors |= {name: numbers, f"{name}_scale_inv": scales}
            right[name] = _dequantize_fp8_weight(numbers, scales, block, torch.float32)
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            numbers, scales = quantized_mxfp4(*tensors.pop(name).shape)
            tensors |= {f"{name}_blocks": numbers, f"{name}_scales": scales}
            right[name] = convert_moe_packed_tensors(numbers, scales)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return right


GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
    "layer_types": ["full_attention"],
}


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_folder_is_what_transformers_loads(method: str, tmp_path: Path) -> None:
    if method == "fp8":
        quantization: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
        asked = transformers.FineGrainedFP8Config(dequantize=True)
        right = save_model(tmp_path, config_of("llama", "wide") | {"num_hidden_layers": 1}, quantization)
    else:
        quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
        asked = transformers.Mxfp4Config(dequantize=True)
        right = save_model(tmp_path, GPT_OSS, quantization)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=asked, dtype=torch.bfloat16
    ).state_dict()
    folder = weights.Folder(tmp_path)
    assert folder.shapes() == {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    assert folder.widens
    for name, shape in folder.shapes().items():
        ours = folder.read(name, tuple(slice(0, size) for size in shape))
        assert same(ours, right[name]), name
        assert same(ours.bfloat16(), theirs[name]), name


FOLDERS = {"llama wide": [128, 128], "qwen3_moe tiny": [24, 40]}


@pytest.fixture(scope="module", params=FOLDERS)
def fp8(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A folder, named after the model, and its numbers. Matrices of the second do not divide into blocks."""
    path = tmp_path_factory.mktemp("hub") / request.param
    quantization = {"quant_method": "fp8", "weight_block_size": FOLDERS[request.param]}
    return path, save_model(path, config_of(*request.param.split()), quantization)


def ours_of(folder: Path, there: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors by our names."""
    name, flavor = folder.name.split()
    found, model = {}, meta_model(Model(name=name, flavor=flavor))
    for parameter, meta in model.named_parameters():
        theirs = model.hf_name(parameter)
        if "*" in theirs:
            found[parameter] = torch.stack([there[theirs.replace("*", str(each))] for each in range(len(meta))]).float()
        elif theirs:
            found[parameter] = there[theirs].float()
    return found


def _count_reads() -> None:
    widened = weights.widened
    vars(weights)["widened"] = lambda stored, given: widened({name: Counted(stored[name]) for name in stored}, given)


def _reads(run: train.Run) -> list[tuple[int, int]]:
    return gather((Counted.total, sum(own_slice(parameter)[0].numel() for parameter in run.parameters)))


@pytest.mark.parametrize("layout", [*LAYOUTS, "one, bfloat16"])
def test_a_run_starts_with_the_same_numbers_at_every_layout(
    fp8: tuple[Path, dict[str, Tensor]], layout: str, tmp_path: Path
) -> None:
    """And its ranks read the numbers that they keep, with few scales."""
    folder, there = fp8
    ranks, words = LAYOUTS.get(layout, (1, ("--training.dtype", "bfloat16")))
    observed = observe(
        *start_from(folder, *words, *QUANTIZED),
        ranks=ranks,
        steps=0,
        folder=str(tmp_path / "run"),
        mutate=_count_reads,
        at_end=_reads,
    )
    for name, right in ours_of(folder, there).items():
        found = observed.first_weights[name]
        assert found.equal(right.to(found.dtype)), name
    kept = observed.first_weights["layers.0.attention.wq.weight"].dtype
    assert kept == (torch.bfloat16 if "bfloat16" in layout else torch.float32)
    for read, held in observed.extra:
        assert 0 < read <= 1.05 * held


@pytest.mark.parametrize(("ranks", "split"), [(1, 0), (2, 0), (2, 1), (2, 2)])
def test_parts_of_mxfp4_tensors(ranks: int, split: int, tmp_path: Path) -> None:
    """gpt-oss's own: even and odd columns of a transposed tensor, imported and exported in 16 bits."""
    torch.manual_seed(0)
    packed: dict[str, Tensor] = {}
    wide: dict[str, Tensor] = {}
    sizes = {"gate_up_proj": (3, 64, 64), "down_proj": (3, 32, 64)}
    for layer in range(2):
        for name, shape in sizes.items():
            numbers, scales = quantized_mxfp4(*shape)
            base = f"model.layers.{layer}.mlp.experts.{name}"
            packed |= {f"{base}_blocks": numbers, f"{base}_scales": scales}
            wide[base] = convert_moe_packed_tensors(numbers, scales)
            packed[f"{base}_bias"] = wide[f"{base}_bias"] = torch.randn(3, shape[2]).bfloat16()
    packed["model.norm.weight"] = wide["model.norm.weight"] = torch.randn(64).bfloat16()
    for path, tensors in ((tmp_path / "packed", packed), (tmp_path / "wide", wide)):
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
    (tmp_path / "packed" / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    with torch.device("meta"):
        assert weights.check_weights(Experts(), tmp_path / "packed")
    import_and_export(ranks, split, tmp_path / "packed", tmp_path / "wide", tmp_path)


def test_generate_widens(fp8: tuple[Path, dict[str, Tensor]]) -> None:
    folder, there = fp8
    with group_of_one():
        model = build(open_source(folder, None), torch.device("cpu"), torch.float32)
    for name, right in ours_of(folder, there).items():
        assert model.get_parameter(name).equal(right), name


def check(folder: Path, *more: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_initial_weights(load_config(["--job.config_file", str(RECIPE), *SMALL, *start_from(folder, *more)]))
    (message,) = caught.value.messages
    return message.replace(str(folder), "FOLDER")


def test_the_key_says_what_the_folder_has(fp8: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, there = fp8
    key = "checkpoint.initial_load_in_hf_quantized"
    check_initial_weights(load_config(["--job.config_file", str(RECIPE), *SMALL, *start_from(folder, *QUANTIZED)]))
    assert check(folder) == f"default: {key} = false: FOLDER has FP8 or MXFP4 weights; true widens them"
    plain = tmp_path / folder.name
    shutil.copytree(folder, plain)
    save_file(there, plain / "model.safetensors")
    said = "command line: {key} = true: FOLDER has no FP8 or MXFP4 weights; use false"
    assert check(plain, *QUANTIZED) == said.format(key=key)


FP8 = torch.zeros(3, 5, dtype=torch.float8_e4m3fn)
BYTES = torch.zeros(2, 3, 1, 16, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("quantization", "tensors", "reason"),
    [
        (None, {"x": FP8, "x_scale_inv": torch.ones(1, 1)}, "x is F8_E4M3: use 16 to 64 bits"),
        (None, {"x": FP8.to(torch.int8)}, "x is I8: use 16 to 64 bits"),
        ({"quant_method": "fp8"}, {"x": FP8}, "x is F8_E4M3: use 16 to 64 bits"),
        ({"quant_method": "fp8"}, {"x": FP8, "x_scale_inv": torch.ones(1, 2)}, r"F32 \[1, 2\] are not"),
        ({"quant_method": "fp8"}, {"x": FP8[0], "x_scale_inv": torch.ones(1)}, r"F8_E4M3 \[5\] and F32 \[1\] are not"),
        ({"quant_method": "fp8"}, {"x": FP8.half(), "x_scale_inv": torch.ones(1, 1)}, r"F16 \[3, 5\] and"),
        ({"quant_method": "mxfp4"}, {"x_blocks": BYTES}, "x_blocks is U8"),
        ({"quant_method": "mxfp4"}, {"x_blocks": BYTES, "x_scales": BYTES[..., 0]}, None),
        ({"quant_method": "mxfp4"}, {"x_blocks": BYTES, "x_scales": BYTES[..., 0, 0]}, r"U8 \[2, 3\] are not"),
        (
            {"quant_method": "mxfp4"},
            {"x": FP8.half(), "x_blocks": BYTES, "x_scales": BYTES[..., 0]},
            "x is there twice",
        ),
        ({"quant_method": "gptq"}, {"x": FP8.half()}, "quant_method: Input should be 'fp8' or 'mxfp4'"),
        ({"quant_method": "fp8", "weight_block_size": None}, {"x": FP8.half()}, "weight_block_size: Input should be"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, {"x": FP8.half()}, "weight_block_size: Input should be"),
        ("fp8", {"x": FP8.half()}, "quantization_config: Input should be"),
    ],
)
def test_other_precisions_are_refused(
    quantization: Any, tensors: dict[str, Tensor], reason: str | None, tmp_path: Path
) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    if reason is None:
        assert weights.Folder(tmp_path).shapes() == {"x": (2, 32, 3)}
        return
    with pytest.raises(ConfigError, match=reason) as caught:
        weights.Folder(tmp_path)
    (message,) = caught.value.messages
    assert str(tmp_path) in message
    assert len(message.splitlines()) == 1
