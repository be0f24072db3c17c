"""The base of adapters: frozen weights, which checkpoints do not hold. Each start makes or reads them again.

The base is the weights at checkpoint.initial_load_path, by default the run's own weights at step 0. A checkpoint has
the hash of its base.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.config import Checkpoint, ConfigError
from components.optim.counter_hash import chunks
from components.state.checkpoint import Checkpointer
from components.state.folder import peek
from components.state.init import initialize_weights
from components.state.packed import numbers_of
from components.state.tensors import load_tensors
from models.parameters import is_adapter
from models.random_bits import key_of, mixed
from parallelize.sharding import is_copy, local_part


def read_base(checkpointer: Checkpointer, across_stages: dist.ProcessGroup) -> None:
    """Load the base from initial_load_path, if it is set. If checkpoints are enabled, they get the base's hash."""
    checkpointer.load_initial()
    if checkpointer.config.enable:
        checkpointer.base = hash_of_base(checkpointer.stages, across_stages)


def hash_of_base(stages: list[nn.Module], across_stages: dist.ProcessGroup | None = None) -> str:
    """A hash of the frozen weights' names, places and float32 values: the same at every layout, in 16 digits.

    across_stages: the ranks of a pipeline. Called by all ranks together.
    """
    sums: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if not is_adapter(name) and not is_copy(parameter):
                groups, _ = local_part(parameter)
                sums[groups].append(_sum_of_hashes(numbers_of(parameter.detach()), key_of(name)))
    total = torch.zeros((), dtype=torch.int64, device=next(stages[0].parameters()).device)
    for groups, own in sums.items():
        part = torch.stack(own).sum()
        for group in groups:
            dist.all_reduce(part, group=group)
        total += part
    if across_stages is not None:
        dist.all_reduce(total, group=across_stages)
    return f"{int(total) & (1 << 64) - 1:016x}"


def _sum_of_hashes(parameter: Tensor, key: int) -> Tensor:
    """The sum of the hashes of this rank's elements, modulo 2^64, which does not depend on their order."""
    _, local = local_part(parameter)
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for rows, indices in chunks(parameter):
        bits = local.view(-1, local.shape[-1])[rows].to(torch.float32).view(torch.int32)
        total += mixed(mixed(indices(), key) + bits, key).sum()
    return total


def precisions(model: nn.Module) -> dict[str, torch.dtype]:
    """Name of a parameter -> its precision."""
    return {name: each.dtype for name, each in model.named_parameters()}


def load_run(model: Any, config: dict[str, Any], checkpoint: Path, of_run: dict[str, torch.dtype]) -> None:
    """Fill a model, or this rank's slices of it, from a checkpoint of the run with this job file (run.json).

    With adapters, the base is made from the run's seed, or read from the run's initial_load_path. Raises ConfigError if
    anything does not fit, or if the base is another one, which is known only in the precisions of the run.

    of_run: precisions of the run's model, which may differ from those of this one.
    """
    if model.adapted:
        table = config["checkpoint"]
        initialize_weights(model, model.init_std, config["debug"]["seed"])
        given = Checkpoint(**{key: table[key] for key in ("initial_load_path", "initial_load_in_hf")})
        Checkpointer(Path(), given, [model], torch.optim.SGD(model.parameters())).load_initial()
        if precisions(model) == of_run:
            _check_base(model, checkpoint)
    kept = {name: each.detach() for name, each in model.named_parameters() if is_adapter(name) or not model.adapted}
    load_tensors({f"model.{name}": tensor for name, tensor in kept.items()}, checkpoint, convert=True)


def _check_base(model: Any, checkpoint: Path) -> None:
    """Raises ConfigError if the model's base, in the run's precision, is not the base of the checkpoint's adapters."""
    here, there = hash_of_base([model]), (peek(checkpoint) or {}).get("base")
    if here != there:
        raise ConfigError(f"{checkpoint}: its adapters were trained on another base, {there}; here it is {here}")
