"""Muon (arXiv:2502.16982): a matrix moves by its orthogonalised momentum, and every other parameter by AdamW.

All singular values of an orthogonalised matrix are about one. Only a whole matrix can be orthogonalised. Matrices are
shared out over the ranks that hold them: in each round a rank receives the slices of one matrix, orthogonalises it, and
sends every rank its slice back. No work is done twice.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from components.optim.counter_hash import chunks
from components.optim.rounding import Kept, RandomBits, as_rows, new_moment
from components.optim.visits import Piece, Visits
from models.random_bits import key_of
from parallelize.sharding import Slice, local_part, slices_of

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon)."""


def orthogonalise(matrix: Tensor, steps: int) -> Tensor:
    """Approximately the nearest semi-orthogonal matrix: singular values end between 0.7 and 1.2.

    Computed in the matrix's precision. Stacked matrices (E, F, D) are orthogonalised one by one.
    """
    a, b, c = _COEFFICIENTS
    product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    x = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[-2] > matrix.shape[-1] else x


class Muon(torch.optim.Optimizer):
    """Muon for matrices, and another optimizer for all other parameters. Both share the state and the groups."""

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: torch.optim.Optimizer,
        group: dist.ProcessGroup | None,
        precision: torch.dtype,
        momentum: float,
        steps: int,
        state_dtype: str = "float32",
        seed: int = 0,
        offload: bool = False,
    ) -> None:
        """group: all ranks that hold parts of these matrices; precision: dtype of the products and messages.

        state_dtype: precision of the momentum, as in new_moment; seed: seed of random rounding; offload: whether the
        momentum waits on the host.

        The key "fused" of groups says whether the device itself can skip a step with found_inf.
        """
        super().__init__(matrices, {"lr": 0.0, "weight_decay": 0.0, "fused": others.param_groups[0]["fused"]})
        self.state_dtype, self.seed, self.offload = state_dtype, seed, offload
        self.others, self.group, self.precision = others, group, precision
        self.momentum, self.steps = momentum, steps
        self.matrices = [
            (name, parameter, own)
            for own in self.param_groups
            for name, parameter in zip(own["names"], own["params"], strict=True)
        ]
        self.slices = [slices_of(parameter) for _, parameter, _ in self.matrices]
        self.rank = dist.get_rank(group) if group else 0
        shapes = {number: parameter.shape for number, (_, parameter, _) in enumerate(self.matrices)}
        self.own = [number for number, shape in shapes.items() if _is_whole(shape, self.slices[number])]
        """Numbers of the stacked parameters whose matrices are not cut. Each matrix is on one rank only."""
        shared = {number: shape for number, shape in shapes.items() if number not in self.own}
        self.shares = share_out(shared, dist.get_world_size(group) if group else 1)
        others.state = self.state
        self.param_groups += others.param_groups

    @cached_property
    def visits(self) -> Visits:
        """Visits to the matrices, in the order in which step reads their momentum."""
        rounds = itertools.chain.from_iterable(itertools.zip_longest(*self.shares))
        order = [*self.own, *(number for number in rounds if number is not None)]
        return Visits([self.matrices[number][1] for number in order], self.state, self._new_state, self.offload)

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The momentum, and the step if anything is rounded, because random rounding needs the step."""
        rounded = self.state_dtype != "float32" or parameter.dtype != torch.float32
        step = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)} if rounded else {}
        return new_moment(parameter, "momentum", self.state_dtype) | step

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update. Nothing changes if the tensor found_inf is 1; torch's fused kernels take the same tensor."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        skip = None if found_inf is None else found_inf > 0
        vars(self.others)["found_inf"] = found_inf
        self.others.step()
        pieces = itertools.chain.from_iterable(self.visits)
        for number in self.own:
            momentum = self._momentum(number, pieces, skip)
            self._move(number, orthogonalise(momentum, self.steps) if len(momentum) else momentum, skip)
        for numbers in itertools.zip_longest(*self.shares):
            sent = [None if number is None else self._momentum(number, pieces, skip) for number in numbers]
            slices = [() if number is None else self.slices[number] for number in numbers]
            results = exchange(sent, slices, lambda whole: orthogonalise(whole, self.steps), self.rank, self.group)
            for number, result in zip(numbers, results, strict=True):
                if number is not None:
                    self._move(number, result, skip)
        left = [*pieces]  # the end of the iteration sends the last bucket back
        assert not left

    def _momentum(self, number: int, pieces: Iterator[Piece], skip: Tensor | None) -> Tensor:
        """This rank's slice of Nesterov's momentum, not yet orthogonalised. pieces: this matrix's pieces come first."""
        name, parameter, _ = self.matrices[number]
        step, key = self.state[parameter].get("step"), key_of(self.seed, name)
        if step is not None:
            step.add_(1 if skip is None else ~skip)
        _, local = local_part(parameter)
        ahead = torch.empty_like(local, dtype=self.precision, memory_format=torch.contiguous_format)
        for piece in pieces:
            assert piece.parameter is parameter
            assert parameter.grad is not None
            kept, gradients = Kept.of(piece.state, "momentum", 1), as_rows(piece.of(parameter.grad))
            of_piece = as_rows(ahead)[piece.rows]
            for rows, indices in chunks(parameter, part=piece.rows):
                gradient = gradients[rows].to(torch.float32)
                own = gradient * (1 - self.momentum)
                momentum = kept.read(rows).mul_(self.momentum).add_(own)
                of_piece[rows].copy_(own.add_(momentum * self.momentum))
                kept.write(rows, momentum, RandomBits(indices, key, step), skip)
            if piece.last:
                break
        return ahead

    def _move(self, number: int, direction: Tensor, skip: Tensor | None) -> None:
        """Decay, and a step whose elements are about as large as AdamW's: 0.2 in the mean square."""
        name, parameter, group = self.matrices[number]
        weights, step = Kept.of({"weight": parameter}, "weight", 0), self.state[parameter].get("step")
        rate = group["lr"] * 0.2 * max(parameter.shape[-2:]) ** 0.5
        directions = direction.reshape(weights.values.shape)
        for rows, indices in chunks(parameter):
            weight = weights.read(rows).mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(directions[rows].to(torch.float32) * rate)
            weights.write(rows, weight, RandomBits(indices, key_of(self.seed, name), step), skip)


def _is_whole(shape: torch.Size, slices: Sequence[Slice]) -> bool:
    whole = all(piece.shape[1:] == shape[1:] for piece in slices if math.prod(piece.shape))
    return len(shape) == 3 and whole and sum(piece.shape[0] for piece in slices) == shape[0]


def share_out(shapes: Mapping[int, torch.Size], ranks: int) -> list[list[int]]:
    """Numbers of the matrices for each rank. Matrices are assigned, largest first, to the rank with the least work."""
    work = {number: shape.numel() * min(shape[-2:]) for number, shape in shapes.items()}
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(shapes, key=lambda number: -work[number]):
        least = loads.index(min(loads))
        shares[least].append(number)
        loads[least] += work[number]
    return shares


def exchange(
    sent: Sequence[Tensor | None],
    slices: Sequence[Sequence[Slice]],
    work: Callable[[Tensor], Tensor],
    rank: int,
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Gather matrix r on rank r, apply work to it there, and return this rank's slices of all results.

    sent: this rank's slice of each matrix; slices: all ranks' slices of each matrix. If there is no matrix for rank r,
    sent[r] is None and slices[r] is empty. If several ranks hold the same slice, one of them sends it.
    """
    if len(sent) == 1:
        return [work(each) for each in sent if each is not None]
    senders = [_one_of_each(of_one, turn) for turn, of_one in enumerate(slices)]
    nothing = next(each for each in sent if each is not None).new_empty(0)
    given = [nothing if each is None or rank not in senders[to] else each.flatten() for to, each in enumerate(sent)]
    own = slices[rank]
    sizes = [math.prod(own[other].shape) if other in senders[rank] else 0 for other in range(len(sent))]
    received = _all_to_all(given, sizes, group)
    back = [nothing] * len(sent)
    if own:
        ends = [[first + size for first, size in zip(*piece, strict=True)] for piece in own]
        whole = nothing.new_empty([max(end) for end in zip(*ends, strict=True)])
        for other in senders[rank]:
            own[other].of(whole).copy_(received[other].view(own[other].shape))
        result = work(whole)
        back = [piece.of(result).flatten() for piece in own]
    sizes = [math.prod(of_one[rank].shape) if of_one else 0 for of_one in slices]
    results = _all_to_all(back, sizes, group)
    return [each.view(of_one[rank].shape) if of_one else each for each, of_one in zip(results, slices, strict=True)]


def _one_of_each(pieces: Sequence[Slice], turn: int) -> set[int]:
    """Picks one sender for each duplicated slice, rotating with `turn`."""
    holders: dict[Slice, list[int]] = defaultdict(list)
    for rank, piece in enumerate(pieces):
        if math.prod(piece.shape):
            holders[piece].append(rank)
    return {ranks[turn % len(ranks)] for ranks in holders.values()}


def _all_to_all(sent: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
    """The tensors received from each rank of the group, with these numbers of elements."""
    received = sent[0].new_empty(sum(sizes))
    dist.all_to_all_single(received, torch.cat([*sent]), [*sizes], [len(each) for each in sent], group=group)
    return received.split([*sizes])
