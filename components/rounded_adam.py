"""AdamW and Adam that compute in float32, with weights and moments kept in fewer bits (rounding.py)."""

from typing import Any

import torch
from torch import Tensor

from components.counter_hash import chunks, key_of
from components.rounding import Kept, RandomBits, new_moment
from parallelize.sharding import local_part


class RoundedAdam(torch.optim.Optimizer):
    """The update of torch's, element by element, by operations that round alike whatever is beside an element.

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
    ) -> None:
        """state_dtype: of moments, as new_moment has it; decoupled: AdamW's weight decay, not Adam's.

        The key "fused" of groups tells that a step with found_inf is left to the device.
        """
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "fused": True})
        self.betas, self.eps, self.seed = betas, eps, seed
        self.state_dtype, self.decoupled = state_dtype, decoupled

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update. Where found_inf, a tensor that torch's fused kernels take too, is 1, nothing changes."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        skip = None if found_inf is None else found_inf > 0
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is not None:
                    self._update(name, parameter, group, skip)

    def _update(self, name: str, parameter: Tensor, group: dict[str, Any], skip: Tensor | None) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= new_moment(parameter, "exp_avg", self.state_dtype)
            state |= new_moment(parameter, "exp_avg_sq", self.state_dtype, signed=False)
        weights = Kept.of({"weight": parameter}, "weight", 0)
        gradients = local_part(parameter.grad)[1].view(weights.values.shape)  # type: ignore[arg-type]
        first, second = Kept.of(state, "exp_avg", 1), Kept.of(state, "exp_avg_sq", 2)
        step, (beta1, beta2), decay = state["step"] + 1, self.betas, group["lr"] * group["weight_decay"]
        rate, key = group["lr"] / (1 - beta1**step), key_of(self.seed, name)
        for rows, indices in chunks(parameter):
            bits = RandomBits(indices, key, step)
            weight, gradient = weights.read(rows), gradients[rows].to(torch.float32)
            if self.decoupled:
                weight.mul_(1 - decay)
            else:
                gradient = gradient + weight * group["weight_decay"]
            # No lerp, addcmul or addcdiv: their last bit depends on where an element stands among its neighbours.
            mean = first.read(rows).mul_(beta1).add_(gradient * (1 - beta1))
            square = second.read(rows).mul_(beta2).add_((gradient * gradient).mul_(1 - beta2))
            weight.sub_((mean * rate).div_((square / (1 - beta2**step)).sqrt_().add_(self.eps)))
            weights.write(rows, weight, bits, skip)
            first.write(rows, mean, bits, skip)
            second.write(rows, square, bits, skip)
        state["step"].copy_(step if skip is None else torch.where(skip, state["step"], step))
