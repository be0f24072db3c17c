"""Work that all ranks do together. If a rank fails, every rank learns of it, so no rank waits for the failed rank."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from components.config import ConfigError, JobConfig, mistake
from components.config.outputs import Job
from parallelize.groups import gather, patient_group


def check_filled(config: JobConfig) -> None:
    """Raises ConfigError on every rank if nodes have filled in different layouts (parallelism.auto)."""
    if config.parallelism.auto and len({*gather(str(replace(config, job=Job(), origins={})))}) > 1:
        reason = "nodes have filled in different layouts: give them the same dump folder, job file and kind of device"
        raise ConfigError(mistake(config, "parallelism.auto", reason))


def together(action: Callable[[], Any], first_only: bool = False, group: dist.ProcessGroup | None = None) -> list:
    """Run action on every rank, or on the first alone; returns all ranks' results to every rank.

    If action fails on any rank, every rank raises ConfigError if a rank raised ConfigError, and OSError otherwise. By
    default ranks wait for each other in a separate group, because training's groups have a short timeout.
    """
    value, error, refused = None, None, None
    if dist.get_rank() == 0 or not first_only:
        try:
            value = action()
        except ConfigError as failure:
            refused = failure.messages
        except (Exception, dcp.CheckpointException) as failure:
            own = failures(failure).get(dist.get_rank())
            error = cause(own) if own else None
    reports: list = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (value, error, refused), group=group or _group(dist.group.WORLD))
    if messages := [message for _, _, refused in reports for message in refused or ()]:
        raise ConfigError([*dict.fromkeys(messages)])
    if errors := [f"rank {rank}: {error}" for rank, (_, error, _) in enumerate(reports) if error]:
        raise OSError("; ".join(errors))
    return [value for value, _, _ in reports]


def from_first(action: Callable[[], Any]) -> Any:
    """The first rank's result of action, which may be large, on every rank. Raises as `together` does."""
    made: list[Any] = []
    together(lambda: made.append(action()), first_only=True)
    made = made or [None]
    dist.broadcast_object_list(made, group=_group(dist.group.WORLD))
    return made[0]


@functools.cache
def _group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group in which ranks wait by default; made once for all ranks of world."""
    return patient_group()


def read_together(action: Callable[[], Any], first_only: bool = False, group: dist.ProcessGroup | None = None) -> list:
    """Like together, for actions that only read. A failed read raises ConfigError, but the file may be intact."""
    try:
        return together(action, first_only, group)
    except OSError as error:
        remedy = "nothing was renamed or begun; start the same command again when the store answers"
        raise ConfigError(f"a checkpoint cannot be read: {error}: {remedy}") from error


def failures(failure: BaseException) -> dict[int, BaseException]:
    """Failures by rank: torch raises the wrapped failures of all ranks on each rank."""
    if isinstance(failure, dcp.CheckpointException):
        return {rank: error for rank, (error, _) in failure.failures.items()}
    return {dist.get_rank(): failure}


def cause(failure: BaseException) -> str:
    """The first line of an error's message."""
    return next(iter(str(failure).splitlines()), repr(failure))
