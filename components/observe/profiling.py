"""Profiler traces and CUDA memory snapshots, on request."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from components.config import Profiling


@contextmanager
def profiling(config: Profiling, dump_folder: Path, rank: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with each step's number at the step's end. By default the function does nothing."""
    current = 0

    def target(folder: str, ending: str) -> str:
        path = dump_folder / folder / f"step-{current}" / f"rank_{rank}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return str(path)

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(target(config.save_traces_folder, "json.gz"))

    def step_end(step: int) -> None:
        nonlocal current
        current = step
        if profiler:
            profiler.step()
        if config.enable_memory_snapshot and step % config.profile_freq == 0:
            torch.cuda.memory._dump_snapshot(target(config.save_memory_snapshot_folder, "pickle"))

    if config.enable_memory_snapshot:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    with _profiler(config, write) if config.enable_profiling else nullcontext() as profiler:
        yield step_end


def _profiler(config: Profiling, write: Callable[[torch.profiler.profile], None]) -> torch.profiler.profile:
    kinds = torch.profiler.ProfilerActivity
    wait = config.profile_freq - config.profiler_active - config.profiler_warmup
    return torch.profiler.profile(
        activities=[kinds.CPU, kinds.CUDA] if torch.cuda.is_available() else [kinds.CPU],
        schedule=torch.profiler.schedule(wait=wait, warmup=config.profiler_warmup, active=config.profiler_active),
        on_trace_ready=write,
        record_shapes=True,
    )
