"""Degrees, plain integers, and the DeviceMesh that they make. torch is imported only to build the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from components.config import ConfigError, JobConfig, mistake

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_KEYS = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}


@dataclass(frozen=True)
class Degrees:
    """Sizes of the mesh dimensions, outermost first."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        return math.prod(astuple(self))

    @property
    def batch_ranks(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self, name)}" for name in _KEYS if getattr(self, name) > 1]
        return " · ".join(parts) or "one rank"


def minimum_ranks(config: JobConfig) -> int:
    """Ranks that the layout needs at the least: the product of the degrees, with -1 counted as 1."""
    return math.prod(max(getattr(config.parallelism, key), 1) for key in _KEYS.values())


def resolve_degrees(config: JobConfig, world_size: int) -> Degrees:
    """The degrees for this many ranks.

    Raises:
        ConfigError: their product is not world_size; names the nearest layouts that fit.
    """
    given = {name: getattr(config.parallelism, key) for name, key in _KEYS.items()}
    needed = minimum_ranks(config)
    free = next((name for name, size in given.items() if size == -1), None)
    if free and world_size % needed == 0:
        given[free] = world_size // needed
    degrees = Degrees(**given)
    if degrees.world_size == world_size:
        return degrees
    shown = " x ".join(f"{_KEYS[name]} {size}" for name, size in given.items() if size != 1) or "all degrees 1"
    key = "parallelism." + next((key for name, key in _KEYS.items() if given[name] > 1), _KEYS["dp_shard"])
    fits = "; ".join(_nearest(given, world_size))
    raise ConfigError(
        mistake(config, key, f"{shown} makes {_product(given)} ranks, but there are {world_size}. What fits: {fits}")
    )


def _product(given: dict[str, int]) -> str:
    fixed = math.prod(size for size in given.values() if size != -1)
    return f"a multiple of {fixed}" if -1 in given.values() else str(fixed)


def _nearest(given: dict[str, int], world_size: int) -> list[str]:
    """Changes of one degree that make the product fit, smallest first; and the number of ranks that fits."""
    free = -1 in given.values()
    found = []
    for name, key in _KEYS.items():
        others = math.prod(size for other, size in given.items() if other != name and size != -1)
        for size in range(1, world_size // others + 1) if given[name] != -1 else ():
            rest = world_size % (others * size) if free else world_size - others * size
            if rest == 0 and size != given[name]:
                found.append((abs(size - given[name]), f"{key} = {size}"))
    unit = math.prod(size for size in given.values() if size != -1)
    ranks = max(1, round(world_size / unit)) * unit if free else unit
    return [text for _, text in sorted(found)[:3]] + [f"NGPU={ranks}"]


class Mesh:
    """The ranks by dimension: pp, dp_replicate, dp_shard, cp, tp; and fsdp = dp_shard x cp, which shares the weights.

    Needs an initialised process group.
    """

    def __init__(self, degrees: Degrees, device_type: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        sizes = (degrees.pp, degrees.dp_replicate, degrees.dp_shard * degrees.cp, degrees.tp)
        self._weights = init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
        self._batch = self._weights._unflatten("fsdp", (degrees.dp_shard, degrees.cp), ("dp_shard", "cp"))
        self.device_type = device_type

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        owner = (
            self._batch if {"dp_shard", "cp"} & {*(names if isinstance(names, tuple) else (names,))} else self._weights
        )
        return owner[names]

    def groups(self) -> dict[str, ProcessGroup]:
        """The process group of each dimension that this rank is in."""
        return {name: self[name].get_group() for name in ("pp", "dp_replicate", "fsdp", "dp_shard", "cp", "tp")}


def draw_layout(degrees: Degrees, parameters: Sequence[Tensor], accumulation: int) -> str:
    """Which rank sits where, and the bytes that this rank keeps, as lines of text."""
    from torch.distributed.tensor import DTensor

    local = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in parameters]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in local)
    # Micro-batches add up unsharded, so that gradients are reduced once a step.
    gradients = weights if accumulation == 1 else 4 * sum(parameter.numel() for parameter in parameters)
    ranks = range(degrees.batch_ranks)
    width = max(3, len(str(ranks[-1])) + 1)
    shown = 16  # of each dimension
    lines = []
    if degrees.world_size > 1:
        lines = ["ranks: across dp_shard, down dp_replicate"]
        for replica in range(min(degrees.dp_replicate, shown)):
            row = ranks[replica * degrees.dp_shard :][: min(degrees.dp_shard, shown)]
            lines.append(
                "  " + "".join(f"{rank:{width}}" for rank in row) + (" ..." if degrees.dp_shard > shown else "")
            )
        lines += ["  ..."] if degrees.dp_replicate > shown else []
    kept = {"weights": weights, "gradients": gradients, "optimizer state": 2 * weights}
    lines.append("a rank keeps " + ", ".join(f"{_size(size)} of {name}" for name, size in kept.items()))
    return "\n".join(lines)


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def batch_rank(mesh: Mesh) -> int:
    """Which part of the global batch this rank sees, of Degrees.batch_ranks."""
    shard = mesh["dp_shard"]
    return mesh["dp_replicate"].get_local_rank() * shard.size() + shard.get_local_rank()


def sum_over_token_ranks(value: Tensor, mesh: Mesh) -> Tensor:
    """The sum, in place and on every rank, over the ranks that see different tokens."""
    from torch.distributed import all_reduce

    for name in ("dp_replicate", "fsdp"):
        all_reduce(value, group=mesh[name].get_group())
    return value
