"""Degrees, which are plain integers, and their DeviceMesh. torch is imported only to build the mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
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
    ep: int = 1
    """Ranks that divide the experts of a layer. The mesh efsdp x ep has the same ranks as fsdp x tp."""

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def efsdp(self) -> int:
        """Ranks among which FSDP shards the same experts."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @property
    def batch_ranks(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self, name)}" for name in (*_KEYS, "ep") if getattr(self, name) > 1]
        return " · ".join(parts) or "one rank"


def minimum_ranks(config: JobConfig) -> int:
    """The fewest ranks of the layout: the product of the degrees, with -1 counted as 1."""
    return math.prod(max(getattr(config.parallelism, key), 1) for key in _KEYS.values())


def resolve_degrees(config: JobConfig, world_size: int) -> Degrees:
    """The degrees for world_size ranks.

    Raises ConfigError if the product of the degrees is not world_size. The message has the nearest layouts that fit.
    """
    given = {name: getattr(config.parallelism, key) for name, key in _KEYS.items()}
    needed = minimum_ranks(config)
    free = next((name for name, size in given.items() if size == -1), None)
    if free and world_size % needed == 0:
        given[free] = world_size // needed
    degrees = Degrees(**given, ep=config.parallelism.expert_parallel_degree)
    if degrees.world_size == world_size:
        return degrees
    shown = " x ".join(f"{_KEYS[name]} {size}" for name, size in given.items() if size != 1) or "all degrees 1"
    key = "parallelism." + next((key for name, key in _KEYS.items() if given[name] > 1), _KEYS["dp_shard"])
    makes, fits = f"a multiple of {needed}" if free else needed, "; ".join(_nearest(given, world_size))
    raise ConfigError(
        mistake(config, key, f"{shown} makes {makes} ranks, but there are {world_size}. What fits: {fits}")
    )


def _nearest(given: dict[str, int], world_size: int) -> list[str]:
    """Changes of one degree that make the product fit, smallest first; and a number of ranks that fits."""
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


def global_batch_size(config: JobConfig, degrees: Degrees) -> int:
    """Sequences per optimizer step: training.global_batch_size, by default local_batch_size on every batch rank."""
    if config.training.global_batch_size != -1:
        return config.training.global_batch_size
    return config.training.local_batch_size * degrees.batch_ranks


_ON_DEMAND = (("pp", "dp_replicate", "efsdp", "ep"), ("pp", "holders"))
"""Dimensions of meshes that only some runs need."""


class Mesh:
    """The ranks by dimension: pp, dp_replicate, dp_shard, cp, tp; and fsdp = dp_shard x cp, which shards the weights.

    For experts the ranks of fsdp x tp are arranged as efsdp x ep. Neighbours along ep divide the experts of a layer.
    Ranks along efsdp hold shards of the same experts. holders are all ranks that hold parts of the same stages.
    Needs an initialised process group.
    """

    def __init__(self, degrees: Degrees, device_type: str, pipeline_first: bool = False) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        sizes = {"dp_replicate": degrees.dp_replicate, "fsdp": degrees.dp_shard * degrees.cp}
        sizes = sizes | {"pp": degrees.pp} if pipeline_first else {"pp": degrees.pp} | sizes
        sizes |= {"tp": degrees.tp}
        self._weights = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        fsdp = tuple(sizes).index("fsdp")  # torch 2.11 accepts no name here
        self._batch = self._weights._unflatten(fsdp, (degrees.dp_shard, degrees.cp), ("dp_shard", "cp"))
        self._slices: dict[str | tuple[str, ...], DeviceMesh] = {}
        self._made: dict[str, DeviceMesh] = {}
        """Meshes of _ON_DEMAND, by dimension."""
        self.degrees, self.device_type = degrees, device_type

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        if names not in self._slices:  # each slice that torch makes is a new object, at some cost
            asked = {names} if isinstance(names, str) else set(names)
            whole = self._batch if asked & {"dp_shard", "cp"} else self._weights
            for own in _ON_DEMAND:
                whole = self._on_demand(own) if asked & ({*own} - {"pp", "dp_replicate"}) else whole
            self._slices[names] = whole[names]
        return self._slices[names]

    def _on_demand(self, names: tuple[str, ...]) -> DeviceMesh:
        """The mesh of the same ranks with these dimensions. All ranks make the first call, because it makes groups."""
        if names[-1] not in self._made:
            from torch.distributed.device_mesh import DeviceMesh

            degrees = self.degrees
            sizes = {"pp": degrees.pp, "dp_replicate": degrees.dp_replicate, "efsdp": degrees.efsdp, "ep": degrees.ep}
            ranks = self._weights.mesh.movedim((self._weights.mesh_dim_names or ()).index("pp"), 0)
            ranks = ranks.reshape([sizes.get(name, -1) for name in names])
            self._made |= dict.fromkeys(names, DeviceMesh(self.device_type, ranks, mesh_dim_names=names))
        return self._made[names[-1]]

    def groups(self) -> dict[str, ProcessGroup]:
        """This rank's process group by dimension. Groups of experts and holders are absent before they are made."""
        names = ["pp", "dp_replicate", "fsdp", "dp_shard", "cp", "tp"]
        names += [name for name in ("efsdp", "ep", "holders") if name in self._made]
        return {name: self[name].get_group() for name in names}

    def peers(self, name: str) -> list[list[int]]:
        """The ranks of every group along pp, dp_replicate, fsdp or tp, also of those that this rank is not in."""
        dimension = (self._weights.mesh_dim_names or ()).index(name)
        return self._weights.mesh.movedim(dimension, -1).flatten(end_dim=-2).tolist()


def draw_layout(degrees: Degrees, pipeline_first: bool = False) -> str:
    """A drawing of the mesh, as lines of text: a pair of brackets holds the ranks along the innermost dimension.

    The two innermost dimensions larger than 1 make a row; each index into the outer dimensions has its row. With expert
    parallel a second drawing shows the same ranks as efsdp x ep.
    """
    order = ("dp_replicate", "dp_shard", "cp", "pp", "tp") if pipeline_first else tuple(_KEYS)
    used = [name for name in order if getattr(degrees, name) > 1]
    if not used:
        return "one rank"
    *outer, across, inside = ["", *used] if len(used) == 1 else used
    in_group, groups = getattr(degrees, inside), getattr(degrees, across, 1)
    places = itertools.product(*(range(getattr(degrees, name)) for name in outer))
    labels = [[f"{name} {place}" for name, place in zip(outer, each, strict=True)] for each in places]
    brackets = [range(first, first + in_group) for first in range(0, degrees.world_size, in_group)]
    rows = [brackets[first : first + groups] for first in range(0, len(brackets), groups)]
    drawn = _drawn(f"ranks: in [ ] {inside}", across, labels, rows)
    if degrees.ep == 1:
        return drawn
    return drawn + "\n" + _drawn("experts: in [ ] ep", "efsdp", *_shared_experts(degrees, pipeline_first))


Brackets = Sequence[Sequence[int]]
"""The ranks of each pair of brackets in a row."""


def _drawn(title: str, across: str, labels: list[list[str]], rows: Sequence[Brackets]) -> str:
    width, shown = len(str(rows[-1][-1][-1])), 8
    lines = [title + (f", across {across}" if across else "")]
    for label, groups in list(zip(labels, rows, strict=True))[: 2 * shown]:
        drawn = []
        for group in groups[:shown]:
            members = [f"{rank:{width}}" for rank in group[:shown]]
            drawn.append(f"[{' '.join(members)}{' ...' if len(group) > shown else ''}]")
        lines.append("  " + " ".join([*label, *drawn, *(["..."] if len(groups) > shown else [])]))
    return "\n".join(lines + ["  ..."] * (len(rows) > 2 * shown))


def _shared_experts(degrees: Degrees, pipeline_first: bool) -> tuple[list[list[str]], list[Brackets]]:
    """Labels, and the groups of ranks that divide the experts of a layer, for each stage and each replica."""
    labels: list[list[str]] = []
    rows: list[Brackets] = []
    shards = degrees.dp_shard * degrees.cp
    for pp, replica in itertools.product(range(degrees.pp), range(degrees.dp_replicate)):
        ranks = []
        for shard, tp in itertools.product(range(shards), range(degrees.tp)):
            outer = (pp * degrees.dp_replicate + replica) * shards + shard
            if pipeline_first:
                outer = (replica * shards + shard) * degrees.pp + pp
            ranks.append(outer * degrees.tp + tp)
        labels.append([f"pp {pp}"] * (degrees.pp > 1) + [f"dp_replicate {replica}"] * (degrees.dp_replicate > 1))
        rows.append([ranks[first : first + degrees.ep] for first in range(0, len(ranks), degrees.ep)])
    return labels, rows


def batch_rank(mesh: Mesh) -> int:
    """The number of this rank's part of the global batch, which has Degrees.batch_ranks parts."""
    shard = mesh["dp_shard"]
    return mesh["dp_replicate"].get_local_rank() * shard.size() + shard.get_local_rank()


def sum_over_token_ranks(value: Tensor, mesh: Mesh) -> Tensor:
    """Sum in place, on every rank, over the ranks that see different tokens and over the stages of a pipeline.

    Only the last stage knows a loss; the others have 0.
    """
    from torch.distributed import all_reduce

    for name in ("pp", "dp_replicate", "fsdp"):
        all_reduce(value, group=mesh[name].get_group())
    return value
