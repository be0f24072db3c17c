"""Optimizers, the learning rate at a step, the gradient norm, and the update, which a guard may skip."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adam import adam

from components.config import JobConfig, LRScheduler, Optimizer
from components.optim.muon import Muon
from components.optim.rounded_adam import RoundedAdam
from components.optim.visits import Visits
from models.mup import Scale
from models.parameters import Kind, Role
from parallelize.mesh import Mesh
from parallelize.sharding import exact_norms, is_copy, local_part


@dataclass(frozen=True)
class Shared:
    """Facts of the run for an optimizer that needs whole matrices."""

    ranks: dist.ProcessGroup | None = None
    """The ranks that hold parts of the same parameters; None for this rank alone."""
    precision: torch.dtype = torch.float32
    """Precision of forward and backward."""
    seed: int = 0
    """Seed of random rounding."""


def _adam(config: Optimizer) -> dict[str, Any]:
    kernel = {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}
    return {"betas": (config.beta1, config.beta2), "eps": config.eps, **kernel}


class _OfLocalParts(torch.optim.Adam):
    """Adam over the local shards of DTensors, because each element's update needs that element alone.

    DTensor's dispatch of the first step of every shape takes longer than the whole step of a small model.
    """

    offload = False
    """Whether moments wait on the host; to be set before the first step."""

    @functools.cached_property
    def visits(self) -> Visits:
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}

        def new_state(parameter: Tensor) -> dict[str, Tensor]:
            device = parameter.device if groups[parameter]["fused"] else None
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            return {"step": torch.zeros((), dtype=torch.float32, device=device), **moments}

        return Visits([*groups], self.state, new_state, self.offload)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update, by torch's functional adam. Nothing changes if the tensor found_inf is 1."""
        members = [{*group["params"]} for group in self.param_groups]
        found_inf = getattr(self, "found_inf", None)
        for bucket in self.visits:
            for group, parameters in zip(self.param_groups, members, strict=True):
                own = [each for each in bucket if each.parameter in parameters and each.parameter.grad is not None]
                weights = [each.of(each.parameter) for each in own]
                gradients = [each.of(each.parameter.grad) for each in own]  # type: ignore[arg-type]
                first, second = ([local_part(each.state[f"exp_avg{of}"])[1] for each in own] for of in ("", "_sq"))
                # A parameter's last piece counts the step for all of its pieces.
                steps = [each.state["step"] if each.last else each.state["step"].clone() for each in own]
                given = {key: group[key] for key in _OF_TORCH} | dict(zip(("beta1", "beta2"), group["betas"]))
                adam(weights, gradients, first, second, [], steps, found_inf=found_inf, **given)


_OF_TORCH = (
    *("lr", "weight_decay", "eps", "foreach", "fused", "capturable", "differentiable"),
    *("amsgrad", "maximize", "decoupled_weight_decay"),
)
"""Settings of a group that torch's function takes."""


class Adam(_OfLocalParts, torch.optim.Adam):
    """torch's Adam, over local shards."""


class AdamW(_OfLocalParts, torch.optim.AdamW):
    """torch's AdamW, over local shards."""


def shared_by(config: JobConfig, mesh: Mesh) -> Shared:
    """Called by every rank: it makes a process group if the optimizer needs one."""
    several = config.optimizer.name == "Muon" and mesh.degrees.world_size > mesh.degrees.pp
    precision = getattr(torch, config.training.mixed_precision_param)
    return Shared(mesh["holders"].get_group() if several else None, precision, config.debug.seed)


def _adam_of(groups: list[dict[str, Any]], config: Optimizer, shared: Shared) -> torch.optim.Optimizer:
    """torch's Adam or AdamW, if weights and moments are float32; else RoundedAdam."""
    decoupled = config.name != "Adam"
    if config.state_dtype != "float32" or any(each.dtype != torch.float32 for own in groups for each in own["params"]):
        betas = (config.beta1, config.beta2)
        rest = shared.seed, config.state_dtype, decoupled, config.state_offload
        return RoundedAdam(groups, betas, config.eps, *rest)
    optimizer = (AdamW if decoupled else Adam)(groups, **_adam(config))
    optimizer.offload = config.state_offload
    return optimizer


_OF_MUON = ("matrix", "expert", "adapter")


def _muon(groups: list[dict[str, Any]], config: Optimizer, shared: Shared) -> torch.optim.Optimizer:
    matrices = [group for group in groups if group["role"] in _OF_MUON]
    others = [group for group in groups if group["role"] not in _OF_MUON]
    return Muon(
        matrices,
        _adam_of(others, config, shared),
        shared.ranks,
        shared.precision,
        config.momentum,
        config.newton_schulz_steps,
        config.state_dtype,
        shared.seed,
        config.state_offload,
    )


MakeOptimizer = Callable[[list[dict[str, Any]], Optimizer, Shared], torch.optim.Optimizer]
"""(parameter groups, one per role with its weight decay; the table [optimizer]; Shared) -> the optimizer."""
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": _adam_of,
    "Adam": _adam_of,
    "Muon": _muon,
}
"""optimizer.name -> how it is made."""

RATE_SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "rex": lambda progress: (1 - progress) / (1 - progress / 2),
    "constant": lambda progress: 1.0,
}
"""lr_scheduler.decay_type -> function from the decay's progress (0 to 1) to the share of the rate left (1 to 0)."""


def build_optimizer(stages: list[nn.Module], config: Optimizer, shared: Shared | None = None) -> torch.optim.Optimizer:
    """The optimizer of the trained parameters of all stages, which are grouped by role and by factor of the rate."""
    parameters: dict[tuple[Role, float], list[tuple[str, nn.Parameter]]] = {(role, 1.0): [] for role in get_args(Role)}
    for role, name, parameter, scale in scaled(stages):
        factor = scale.orthogonal_rate if config.name == "Muon" and role in _OF_MUON else scale.rate
        parameters.setdefault((role, factor), []).append((name, parameter))
    groups = [_group(role, members, config, factor) for (role, factor), members in parameters.items()]
    return OPTIMIZERS[config.name](groups, config, shared or Shared())


def trained(stages: Iterable[nn.Module]) -> Iterator[tuple[Role, str, nn.Parameter]]:
    """Yields (role, layout-free name, parameter) of the trained parameters of all stages."""
    return ((role, name, parameter) for role, name, parameter, _ in scaled(stages))


def scaled(stages: Iterable[nn.Module]) -> Iterator[tuple[Role, str, nn.Parameter, Scale]]:
    """Yields (role, layout-free name, parameter, factors by width) of the trained parameters of all stages."""
    for stage in stages:
        for name, parameter in stage.named_parameters():
            kind: Kind = stage.kind(name)  # type: ignore[operator]
            if kind.trained:
                yield kind.role, name, parameter, stage.scale(name)  # type: ignore[operator]


def _group(
    role: Role, parameters: list[tuple[str, nn.Parameter]], config: Optimizer, factor: float = 1.0
) -> dict[str, Any]:
    """The parameters whose rate has this factor by width; rate x decay is the same at every width."""
    own = getattr(config, role)
    decay = (config.weight_decay if own.weight_decay is None else own.weight_decay) / factor
    members = {"params": [parameter for _, parameter in parameters], "names": [name for name, _ in parameters]}
    return members | {"role": role, "lr": config.lr, "rate": own.lr_factor * factor, "weight_decay": decay}


def state_bytes(stages: Iterable[nn.Module], config: Optimizer) -> int:
    """Bytes that the optimizer keeps of this rank's parts of all parameters that it trains."""
    return sum(_state_bytes(role, parameter, config) for role, _, parameter in trained(stages))


def _state_bytes(role: Role, parameter: Tensor, config: Optimizer) -> int:
    _, local = local_part(parameter)
    columns = parameter.shape[-1]
    return row_bytes(role, parameter.ndim, columns, parameter.dtype, config) * local.numel() // columns


def staged_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the device's buffers for states that are offloaded to the host; 0 before the first step."""
    own = vars(optimizer)
    inner = staged_bytes(own["others"]) if "others" in own else 0
    return inner + (own["visits"].staged_bytes if "visits" in own else 0)


@functools.cache
def row_bytes(role: Role, dimensions: int, columns: int, dtype: torch.dtype, config: Optimizer) -> int:
    """Bytes that the optimizer keeps for a row or a vector. The bytes are measured after a step on such a row."""
    row = nn.Parameter(torch.zeros([1] * (dimensions - 1) + [columns], dtype=dtype))
    row.grad = torch.zeros_like(row)
    groups = [_group(each, [("row", row)] if each == role else [], config) for each in get_args(Role)]
    optimizer = OPTIMIZERS[config.name](groups, config, Shared())
    optimizer.step()
    kept = optimizer.state[row].values()
    return sum(value.nbytes for value in kept if isinstance(value, Tensor) and value.ndim)


def learning_rate(step: int, config: LRScheduler, peak: float, training_steps: int) -> float:
    """The learning rate of a step, counted from 1: warm-up to the peak, stable, then decay to its minimum.

    The rate is a function of the step alone, so a checkpoint need not save it. A run may end during its warm-up.
    """
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    total = config.total_steps or training_steps
    decay_steps = total - config.warmup_steps
    if config.decay_ratio is not None:
        decay_steps = min(decay_steps, round(total * config.decay_ratio))
    progress = max(0, step - (total - decay_steps)) / max(1, decay_steps)
    shape = RATE_SCHEDULES[config.decay_type](progress)
    return peak * (config.min_lr_factor + (1 - config.min_lr_factor) * shape)


def rate_settings(config: JobConfig) -> dict[str, Any]:
    """Key -> value of every setting on which a step's learning rates depend. A checkpoint keeps them."""
    schedule = asdict(config.lr_scheduler) | {"total_steps": config.lr_scheduler.total_steps or config.training.steps}
    roles = {f"optimizer.{role}.lr_factor": getattr(config.optimizer, role).lr_factor for role in get_args(Role)}
    width = {"optimizer.mup_base": config.optimizer.mup_base}
    return {
        "optimizer.lr": config.optimizer.lr,
        **width,
        **roles,
        **{f"lr_scheduler.{key}": schedule[key] for key in schedule},
    }


def local_gradients(parameters: Sequence[Tensor]) -> dict[tuple[dist.ProcessGroup, ...], list[Tensor]]:
    """This rank's parts of the gradients, by the groups over whose ranks they are split."""
    parts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            groups, gradient = local_part(parameter.grad)
            parts[groups].append(gradient)
    return parts


def clip_gradients(
    parameters: Sequence[Tensor],
    max_norm: float,
    stages: dist.ProcessGroup | None = None,
    own_norms: list[Tensor] | None = None,
) -> Tensor:
    """Scale all gradients so that their norm is at most max_norm; returns the norm that they had.

    The norm covers all parameters, also those of other pipeline stages, and is the same on every rank and at every
    layout. A copy of another stage's parameter is scaled, but not counted. A pipeline's rank may have no gradient at
    all. own_norms receives the norms of this rank's gradient shards before they are scaled, in the order of
    local_gradients and without copies.
    """
    copies = [parameter for parameter in parameters if is_copy(parameter)]
    parts = local_gradients([parameter for parameter in parameters if not is_copy(parameter)])
    squares = []
    for groups, gradients in parts.items():
        norms = exact_norms(gradients)
        if own_norms is not None:
            own_norms.extend(norms)
        square = torch.stack(norms).square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    total = torch.stack(squares or [torch.zeros((), dtype=torch.float64, device=parameters[0].device)]).sum()
    if stages is not None:
        dist.all_reduce(total, group=stages)
    norm = total.sqrt().float()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradients in (*parts.values(), *local_gradients(copies).values()):
        torch._foreach_mul_(gradients, factor)
    return norm


def update(optimizer: torch.optim.Optimizer, lr: float, accepted: Tensor) -> None:
    """One step at this learning rate; where `accepted` is false, weights and moments keep every bit.

    An optimizer with "fused" groups decides on the device. For others the host waits and decides.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["rate"]
    if optimizer.param_groups[0].get("fused"):
        # Weights that are offloaded are updated on the host.
        devices = (parameter.device for group in optimizer.param_groups for parameter in group["params"])
        optimizer.found_inf = (~accepted).float().to(next(devices, accepted.device))  # type: ignore[attr-defined]
        optimizer.step()
    elif accepted.item():
        optimizer.step()
