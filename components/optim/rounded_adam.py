"""AdamW and Adam that compute in float32, with weights and moments kept in fewer bits (rounding.py)."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from components.optim.counter_hash import chunks
from components.optim.rounding import Kept, RandomBits, as_rows, new_moment
from components.optim.visits import Piece, Visits
from models.random_bits import key_of


class RoundedAdam(torch.optim.Optimizer):
    """torch's update, by elementwise operations whose rounding does not depend on an element's neighbours.

    A group has the names of its parameters, from which random bits are made.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        betas: tuple[float, float],
        eps: float,
        seed: int,
        state_dtype: str,
        decoupled: bool = True,
        offload: bool = False,
    ) -> None:
        """state_dtype: precision of moments, as in new_moment; decoupled: AdamW's weight decay instead of Adam's;
        offload: whether moments wait on the host.

        Groups have the key "fused", because the device decides by found_inf whether a step is skipped.
        """
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "fused": True})
        self.betas, self.eps, self.seed = betas, eps, seed
        self.state_dtype, self.decoupled, self.offload = state_dtype, decoupled, offload

    @cached_property
    def visits(self) -> Visits:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return Visits(parameters, self.state, self._new_state, self.offload)

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        first = new_moment(parameter, "exp_avg", self.state_dtype)
        return {"step": step} | first | new_moment(parameter, "exp_avg_sq", self.state_dtype, signed=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update. Nothing changes if the tensor found_inf is 1; torch's fused kernels take the same tensor."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        skip = None if found_inf is None else found_inf > 0
        members = {
            parameter: (name, group)
            for group in self.param_groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
        }
        for bucket in self.visits:
            for piece in bucket:
                self._update(*members[piece.parameter], piece, skip)

    def _update(self, name: str, group: dict[str, Any], piece: Piece, skip: Tensor | None) -> None:
        parameter, state = piece.parameter, piece.state
        if parameter.grad is None:
            return
        weights, gradients = Kept(as_rows(piece.of(parameter))), as_rows(piece.of(parameter.grad))
        first, second = Kept.of(state, "exp_avg", 1), Kept.of(state, "exp_avg_sq", 2)
        step, (beta1, beta2), decay = state["step"] + 1, self.betas, group["lr"] * group["weight_decay"]
        rate, key = group["lr"] / (1 - beta1**step), key_of(self.seed, name)
        for rows, indices in chunks(parameter, part=piece.rows):
            bits = RandomBits(indices, key, step)
            weight, gradient = weights.read(rows), gradients[rows].to(torch.float32)
            if self.decoupled:
                weight.mul_(1 - decay)
            else:
                gradient = gradient + weight * group["weight_decay"]
            # No lerp, addcmul or addcdiv, because their last bit depends on an element's place in the tensor.
            mean = first.read(rows).mul_(beta1).add_(gradient * (1 - beta1))
            square = second.read(rows).mul_(beta2).add_((gradient * gradient).mul_(1 - beta2))
            weight.sub_((mean * rate).div_((square / (1 - beta2**step)).sqrt_().add_(self.eps)))
            weights.write(rows, weight, bits, skip)
            first.write(rows, mean, bits, skip)
            second.write(rows, square, bits, skip)
        if piece.last:
            state["step"].copy_(step if skip is None else torch.where(skip, state["step"], step))
