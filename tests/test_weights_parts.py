"""Parameters that are parts of a tensor of a Hugging Face folder: the bytes of gpt-oss's experts, there and back."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from components.config import Checkpoint, ConfigError
from components.state import weights
from components.state.checkpoint import Checkpointer
from models.hugging_face import Part, hugging_face_name
from parallelize.sharding import own_slice
from tests.ranks import Ranks

EXPERTS, DIM, WIDTH = 3, 64, 32
SHAPES = {
    "w1": (EXPERTS, WIDTH, DIM),
    "w2": (EXPERTS, DIM, WIDTH),
    "w3": (EXPERTS, WIDTH, DIM),
    "b1": (EXPERTS, WIDTH),
    "b2": (EXPERTS, DIM),
    "b3": (EXPERTS, WIDTH),
}
HERE, THERE = "layers.*.feed_forward.experts", "model.layers.*.mlp.experts"
NAMES: Mapping[str, str | Part] = {
    f"{HERE}.w1": Part(f"{THERE}.gate_up_proj", transposed=True, first=0, step=2),
    f"{HERE}.w2": Part(f"{THERE}.down_proj", transposed=True),
    f"{HERE}.w3": Part(f"{THERE}.gate_up_proj", transposed=True, first=1, step=2),
    f"{HERE}.b1": Part(f"{THERE}.gate_up_proj_bias", first=0, step=2),
    f"{HERE}.b2": f"{THERE}.down_proj_bias",
    f"{HERE}.b3": Part(f"{THERE}.gate_up_proj_bias", first=1, step=2),
    "norm": "model.norm",
}


class Experts(nn.Module):
    """The experts of two layers, by gpt-oss's names, and a norm."""

    names: ClassVar[Mapping[str, str | Part]] = NAMES

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): nn.Module() for layer in range(2)})
        for layer in self.layers.values():
            layer.feed_forward = nn.Module()
            layer.feed_forward.experts = nn.Module()
            for name, shape in SHAPES.items():
                layer.feed_forward.experts.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.norm = nn.RMSNorm(DIM)

    def hf_name(self, name: str) -> str | Part:
        return hugging_face_name(name, self.names)

    def hf_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def hf_copies(self, name: str) -> list[str]:
        return []

    def hf_ignores(self, there: str, mtp_layers: int = 0) -> bool:
        return False

    def hf_config(self) -> dict[str, Any]:
        return {"model_type": "experts"}

    def hf_lost(self) -> dict[str, tuple[Any, Any]]:
        return {}

    def hf_misfits(self, given: dict[str, Any]) -> list[str]:
        return []


class HalfOfExperts(Experts):
    names: ClassVar[Mapping[str, str | Part]] = {**NAMES, f"{HERE}.w3": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"gate_up_proj": (DIM, 2 * WIDTH), "down_proj": (WIDTH, DIM)}
    shapes |= {"gate_up_proj_bias": (2 * WIDTH,), "down_proj_bias": (DIM,)}
    tensors = {
        f"model.layers.{layer}.mlp.experts.{name}": torch.randn(EXPERTS, *shape).bfloat16()
        for layer in range(2)
        for name, shape in shapes.items()
    }
    path = tmp_path_factory.mktemp("hub")
    save_file(tensors | {"model.norm.weight": torch.randn(DIM).bfloat16()}, path / "model.safetensors")
    return path


def expected(folder: Path) -> dict[str, Tensor]:
    there, found = load_file(folder / "model.safetensors"), {}
    for layer in range(2):
        theirs, ours = f"model.layers.{layer}.mlp.experts", f"layers.{layer}.feed_forward.experts"
        for column, number in enumerate("13"):
            found[f"{ours}.w{number}"] = there[f"{theirs}.gate_up_proj"][:, :, column::2].mT
            found[f"{ours}.b{number}"] = there[f"{theirs}.gate_up_proj_bias"][:, column::2]
        found[f"{ours}.w2"], found[f"{ours}.b2"] = there[f"{theirs}.down_proj"].mT, there[f"{theirs}.down_proj_bias"]
    return found | {"norm.weight": there["model.norm.weight"]}


def there_and_back(case: Any, device: torch.device, source: Path, folder: Path, run: Path) -> None:
    """Import source, whose numbers are those of folder, and export; case: the dimension along which ranks split."""
    ranks = torch.distributed.get_world_size()
    model = Experts()
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda tensor: Shard(case if tensor.ndim == 3 else 0))
    weights.load_weights([model], source)
    right = expected(folder)
    for name, parameter in model.named_parameters():
        local, offset = own_slice(parameter.detach())
        where = tuple(slice(first, first + size) for first, size in zip(offset, local.shape, strict=True))
        assert local.equal(right[name].float()[where]), name
    Checkpointer(run, Checkpoint(), [model], torch.optim.SGD(model.parameters())).save(7, {}, model_only=True)
    weights.FILE_BYTES = 30_000
    with torch.device("meta"):
        whole = Experts()
    weights.export(whole, run / "step-7", run / "exported", "assets/tokenizer", torch.bfloat16)


@pytest.mark.parametrize(("ranks", "split"), [(1, 0), (2, 0), (2, 1), (2, 2)])
def test_import_and_export_keep_every_byte(folder: Path, ranks: int, split: int, tmp_path: Path) -> None:
    with torch.device("meta"):
        assert not weights.check_weights(Experts(), folder)
    import_and_export(ranks, split, folder, folder, tmp_path)


def import_and_export(ranks: int, split: int, source: Path, folder: Path, tmp_path: Path) -> None:
    world = Ranks(ranks, partial(there_and_back, source=source, folder=folder, run=tmp_path), {})
    failed = world.run(split)
    world.end()
    assert failed is None
    before = load_file(folder / "model.safetensors")
    files = [*(tmp_path / "exported").glob("*.safetensors")]
    assert len(files) > 2
    parts = [load_file(file) for file in files]
    after = {name: tensor for part in parts for name, tensor in part.items()}
    assert sum(map(len, parts)) == len(after)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert tensor.view(torch.uint8).equal(after[name].view(torch.uint8)), name
    index = json.loads((tmp_path / "exported" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "exported" / file)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())


def test_the_shape_of_the_whole_tensor_is_checked(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.ones(EXPERTS, DIM, 2 * WIDTH + 1)
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.device("meta"), pytest.raises(ConfigError) as caught:
        weights.check_weights(Experts(), tmp_path)
    assert caught.value.messages == [
        f"{tmp_path}: model.layers.1.mlp.experts.gate_up_proj is (3, 64, 65) there and (3, 64, 64) here"
    ]


@pytest.mark.parametrize("rows", [(2, 7), (0, 2), (0, 9)])
def test_a_part_of_the_rows_is_a_slice_of_the_tensor(rows: tuple[int, int]) -> None:
    whole, part = torch.arange(36).view(9, 4), Part("x", rows=range(*rows), all_rows=9)
    mine = whole[slice(*rows)]
    assert part.whole_shape(tuple(mine.shape)) == (9, 4)
    assert part.of(whole).equal(mine)
    for where in ((slice(0, 2), slice(0, 4)), (slice(1, len(mine)), slice(1, 3)), (slice(1, 1), slice(0, 4))):
        assert part.turned(whole[part.where(where)]).equal(mine[where])


def test_a_family_that_names_a_part_of_a_tensor_alone_has_no_export() -> None:
    with torch.device("meta"), pytest.raises(AssertionError, match="not a whole tensor"):
        weights._files(HalfOfExperts(), torch.bfloat16)
