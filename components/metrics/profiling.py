"""Profiler traces and CUDA memory snapshots, on request."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from components.config import Profiling


@contextmanager
def profiling(config: Profiling, dump_folder: Path, rank: int) -> Iterator[Callable[[int], None]]:
    """Yields what to call at the end of each step with its number; does nothing unless asked for."""
    with ExitStack() as stack:
        at_step_end: list[Callable[[int], None]] = []
        if config.enable_profiling:
            at_step_end.append(_traces(config, dump_folder / config.save_traces_folder, rank, stack))
        if config.enable_memory_snapshot:
            at_step_end.append(_snapshots(config, dump_folder / config.save_memory_snapshot_folder, rank))

        def step_end(step: int) -> None:
            for call in at_step_end:
                call(step)

        yield step_end


def _traces(config: Profiling, folder: Path, rank: int, stack: ExitStack) -> Callable[[int], None]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    wait = config.profile_freq - config.profiler_active - config.profiler_warmup
    current = 0

    def write(profiler: torch.profiler.profile) -> None:
        target = folder / f"step-{current}"
        target.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(target / f"rank_{rank}.json.gz"))

    profiler = stack.enter_context(
        torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=wait, warmup=config.profiler_warmup, active=config.profiler_active),
            on_trace_ready=write,
            record_shapes=True,
        )
    )

    def step_end(step: int) -> None:
        nonlocal current
        current = step
        profiler.step()

    return step_end


def _snapshots(config: Profiling, folder: Path, rank: int) -> Callable[[int], None]:
    torch.cuda.memory._record_memory_history(max_entries=100_000)

    def step_end(step: int) -> None:
        if step % config.profile_freq == 0:
            target = folder / f"step-{step}"
            target.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(target / f"rank_{rank}.pickle"))

    return step_end
