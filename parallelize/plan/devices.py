"""Devices and the clusters that they come in: devices.toml, or a file of the user's with the same keys."""

import tomllib
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from annotated_types import Gt
from pydantic.dataclasses import dataclass

from components.config import ConfigError

_Positive = Annotated[float, Gt(0)]
_Share = Annotated[float, Gt(0), pydantic.Field(le=1)]
_STRICT = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
Dtype = Literal["bfloat16", "float8", "float32"]


@dataclass(frozen=True, config=_STRICT)
class Link:
    """Bandwidth and latency between two ranks, in one direction."""

    gb_s: _Positive
    latency_us: _Positive


@dataclass(frozen=True, config=_STRICT)
class Device:
    """A device and its cluster; devices.toml says what each number means."""

    memory_gib: _Positive
    tflops: Mapping[Dtype, _Positive]
    achieved: Mapping[Dtype, _Share]
    attention: _Share
    memory_gb_s: _Positive
    memory_share: _Share
    kernel_us: Annotated[float, pydantic.Field(ge=0)]
    host_gb_s: _Positive
    overlap: Annotated[float, pydantic.Field(ge=0, le=1)]
    ranks_per_node: Annotated[int, Gt(0)]
    node: Link
    network: Link
    kernels: Literal["cuda", "cpu"]
    reserved_gib: Annotated[float, pydantic.Field(ge=0)] = 0
    dtensor_us: Annotated[float, pydantic.Field(ge=0)] = 0
    names: list[str] = field(default_factory=list)

    def rate(self, dtype: str) -> float:
        """FLOP/s of a large product. A device without float8 computes in bfloat16."""
        known = dtype if dtype in self.tflops else "bfloat16"
        return self.tflops[known] * 1e12 * self.achieved[known]  # type: ignore[index]

    @property
    def bandwidth(self) -> float:
        """Bytes that large operations read and write in a second."""
        return self.memory_gb_s * 1e9 * self.memory_share

    def product(self, m: float, k: float, n: float, dtype: str, size: float, groups: int = 1) -> float:
        """Seconds of `groups` products (m, k) x (k, n) in one kernel, of elements of `size` bytes.

        The slower of arithmetic and memory, and the fixed cost of a kernel.
        """
        moved = groups * (m * k + k * n + m * n) * size / self.bandwidth
        return max(groups * 2 * m * k * n / self.rate(dtype), moved) + self.kernel_us * 1e-6

    def nodes(self, span: int) -> int:
        """Nodes that a group of `span` neighbouring ranks has; two if groups of this size do not fill a node evenly."""
        return max(-(-span // self.ranks_per_node), 2 if self.ranks_per_node % span else 1)

    def gather(self, size: float, ranks: int, span: int) -> float:
        """Seconds of an all-gather or a reduce-scatter in a ring, of `size` bytes in all, in `span` neighbouring ranks.

        Each of the group's ranks in a node has a connection to the network of its own, which the ring uses.
        """
        nodes = self.nodes(span)
        crossing = min(nodes, ranks - 1) if nodes > 1 else 0
        within = max(1, ranks // nodes)
        speed = min(self.network.gb_s * within, self.node.gb_s) if crossing else self.node.gb_s
        latency = crossing * self.network.latency_us + (ranks - 1 - crossing) * self.node.latency_us
        return size * (ranks - 1) / ranks / (speed * 1e9) + latency * 1e-6

    def exchange(self, size: float, ranks: int, span: int) -> float:
        """Seconds of an all-to-all: a rank sends `size` bytes in equal parts to all ranks, itself among them."""
        within = max(1, ranks // self.nodes(span))
        away, near = size * (ranks - within) / ranks, size * (within - 1) / ranks
        latency = self.network.latency_us if ranks > within else self.node.latency_us
        return max(away / self.network.gb_s, near / self.node.gb_s) * 1e-9 + latency * 1e-6

    def send(self, size: float, span: int) -> float:
        """Seconds of a message to a rank among `span` neighbouring ranks."""
        link = self.node if self.nodes(span) == 1 else self.network
        return size / (link.gb_s * 1e9) + link.latency_us * 1e-6

    def exposed(self, message: float, hidden_by: float) -> float:
        """Time that a message adds to the work beside it; that work keeps the share `overlap` of its speed."""
        return max(0.0, message - hidden_by) + (1 - self.overlap) * min(message, hidden_by)


def find_device(name: str) -> Device:
    """A device by its name in devices.toml, or of a TOML file that has one table. Raises ConfigError."""
    own = name.endswith(".toml")
    path = Path(name) if own else Path(__file__).with_name("devices.toml")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--device {name}: {error}") from None
    if own and len(tables) != 1:
        raise ConfigError(f"--device {name}: the file has {len(tables)} tables; use one table, with a device's name")
    if not own and name not in tables:
        raise ConfigError(f"--device {name}: not one of {', '.join(tables)}; or name a .toml file with a device")
    try:
        found = pydantic.TypeAdapter(Device).validate_python(tables[next(iter(tables)) if own else name])
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the table"
        raise ConfigError(f"--device {name}: {place}: {first['msg']}; devices.toml has examples") from None
    if found.tflops.keys() != found.achieved.keys():
        raise ConfigError(f"--device {name}: tflops and achieved: give both for the same precisions")
    return found


def name_of_gpu(gpu: str) -> str:
    """The name in devices.toml of CUDA's name of a GPU; "cpu" for no GPU. Raises ConfigError for an unknown one."""
    tables = tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))
    found = [name for name, table in tables.items() if gpu in table.get("names", ())] if gpu else ["cpu"]
    if not found:
        raise ConfigError(f"{gpu}: no device of devices.toml has this name; name one of them, or a .toml file")
    return found[0]
