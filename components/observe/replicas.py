"""Silent corruption: ranks that should hold the same bits compare hashes of their weights and moments."""

import itertools
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from components.launch.exit_codes import ExitCode
from parallelize.groups import gather
from parallelize.mesh import Mesh
from parallelize.sharding import settle

_COLUMNS = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DIMENSIONS = ("dp_replicate", "fsdp", "tp")
"""Mesh dimensions along which ranks may hold the same bits. A tied table at both ends of a pipeline is not compared."""

Held = tuple[str, frozenset[str], Tensor]
"""Name of a tensor, the mesh dimensions along which ranks hold the same bits of it, and this rank's part."""


class Replicas:
    """Compares every freq steps; check is called by all ranks together."""

    def __init__(
        self,
        freq: int,
        stages: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        device: torch.device,
        averages: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
    ) -> None:
        """freq: steps between two comparisons, 0 for never; averages: of parameters, which are compared too."""
        self.stages, self.optimizer, self.mesh, self.device = stages, optimizer, mesh, device
        self.averages = averages
        self.dimensions = [name for name in _DIMENSIONS if mesh[name].size() > 1]
        self.freq = freq if self.dimensions else 0

    def check(self, step: int, saving: bool) -> None:
        """Compare, if the step is due or is about to be saved. Waits for the device.

        Raises SystemExit on every rank if ranks differ, after naming those that do.
        """
        if not self.freq or (step % self.freq and not saving):
            return
        settle()
        table = gather(self._hashes())
        groups = [(name, peers) for name in self.dimensions for peers in self.mesh.peers(name)]
        hashes = [{rank: table[rank][name] for rank in peers} for name, peers in groups]
        if bad := [number for number, group in enumerate(hashes) if len(set(group.values())) > 1]:
            self._report(step, suspects([hashes[number] for number in bad]), [groups[number] for number in bad])
            raise SystemExit(ExitCode.CORRUPT)

    def _held(self) -> Iterator[Held]:
        everywhere = frozenset(self.dimensions)
        for name, parameter in (each for stage in self.stages for each in stage.named_parameters()):
            state = {f"{name} ({key})": value for key, value in self.optimizer.state.get(parameter, {}).items()}
            if parameter in self.averages:
                state[f"{name} (average)"] = self.averages[parameter]
            for label, tensor in {name: parameter.detach(), **state}.items():
                if isinstance(tensor, DTensor):
                    names, placements = tensor.device_mesh.mesh_dim_names or (), tensor.placements
                    split = {name for name, placement in zip(names, placements) if not placement.is_replicate()}
                    held = everywhere if "holders" in names else everywhere & {*names}
                    yield label, held - split, tensor.to_local()
                elif isinstance(tensor, Tensor):
                    yield label, everywhere, tensor

    def _hashes(self) -> dict[str, int]:
        """Mesh dimension -> hash of all tensors that its ranks hold alike; one flipped bit changes the hash."""
        sums: dict[frozenset[str], list[Tensor]] = {}
        for _, dimensions, tensor in self._held():
            if dimensions:
                sums.setdefault(dimensions, []).append(column_sums(tensor).to(self.device, non_blocking=True))
        mixed = {dimensions: mix(torch.stack(columns)) for dimensions, columns in sums.items()}
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        each = [sum((mix for held, mix in mixed.items() if name in held), zero) for name in self.dimensions]
        return dict(zip(self.dimensions, torch.stack(each).tolist(), strict=True))

    def _report(self, step: int, wrong: list[int], bad: list[tuple[str, list[int]]]) -> None:
        """Name the ranks, their hosts, and the tensors."""
        own = {label: (int(mix(column_sums(tensor)[None])), held) for label, held, tensor in self._held()}
        everyone = gather((socket.gethostname(), own))
        if dist.get_rank():
            return
        labels = [
            label
            for name, peers in bad
            for label, (_, held) in everyone[peers[0]][1].items()
            if name in held and len({everyone[rank][1][label] for rank in peers}) > 1
        ]
        names = ", ".join(f"rank {rank} on {everyone[rank][0]}" for rank in wrong)
        where = "; ".join(f"{name}: ranks {', '.join(map(str, peers))}" for name, peers in bad)
        shown = list(dict.fromkeys(labels))
        print(
            f"step {step}: {names}: other bits than replicas have ({where}) in {', '.join(shown[:4])}"
            + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
            + ("; of two replicas either may be the wrong one" if len(wrong) > 1 else "")
            + ". Memory or a computation was corrupted. Stopped without saving",
            file=sys.stderr,
        )


def column_sums(tensor: Tensor) -> Tensor:
    """(1024,) int64: sums of a tensor's bit patterns, as integers; every 1024th element goes to the same sum."""
    bits = tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])
    whole = bits.numel() - bits.numel() % _COLUMNS
    sums = bits[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    sums[: bits.numel() - whole] += bits[whole:]
    return sums


def mix(sums: Tensor) -> Tensor:
    """One int64 of (tensors, 1024) sums. Factors are odd, so a change of one sum by a power of two never vanishes."""
    tensors, columns = (2 * torch.arange(size, device=sums.device) + 1 for size in sums.shape)
    return (sums * tensors[:, None] * columns).sum()


def suspects(groups: list[dict[int, int]]) -> list[int]:
    """The ranks most likely wrong, given groups {rank: hash} whose hashes should be equal and are not.

    Each group suspects the ranks without the majority's hash, or all its ranks if there is no majority. The result
    takes from each group the suspects that the largest number of groups suspects.
    """
    found = []
    for group in groups:
        value, count = Counter(group.values()).most_common(1)[0]
        found.append([rank for rank in group if group[rank] != value] if 2 * count > len(group) else list(group))
    times = Counter(itertools.chain(*found))
    return sorted({rank for ranks in found for rank in ranks if times[rank] == max(times[each] for each in ranks)})
