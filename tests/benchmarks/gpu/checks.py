"""Checks of fast paths on a GPU, each a row of its own; any number of them may run at once."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from components.commands.figures import figures
from components.config import ConfigError
from tests.benchmarks.gpu.rows import PATHS, SAME_BITS, SIZES, FastPath, SameBits
from tests.harness import observe
from tests.limits import TimeLimit

Row = dict[str, Any]
Work = tuple[str, Callable[[], Row]]
"""A row's name, and what makes the row."""


def check(path: FastPath) -> Row:
    """Errors of loss and worst gradient against float32 on the CPU; or why the path is refused on this device."""
    run = (*SIZES, *path.run)
    float32 = ("--training.mixed_precision_param", "float32")
    try:
        reference = observe(*run, *float32, steps=1, environment={"CUDA_VISIBLE_DEVICES": ""})
        found = figures(observe(*run, *path.words, steps=1), reference)
    except (RuntimeError, TimeLimit) as error:
        said = str(error).strip().splitlines()[-1]
        refused = ConfigError.__name__ in said
        return {"verdict": "refused" if refused else "error", "why": said.rpartition(f"{ConfigError.__name__}: ")[2]}
    errors = {"loss": found["loss"], "gradient": found["gradient"]}
    held = all(error <= bar for error, bar in zip(errors.values(), path.bars, strict=True))
    return {"verdict": "holds" if held else "broken", **errors}


def check_bits(same: SameBits) -> Row:
    """How many parameters differ after three steps beside what may change none."""
    given = (*SIZES, *same.run)
    try:
        before = observe(*given, steps=3).weights
        after = observe(*given, *same.words, steps=3, mutate=same.mutate).weights
    except (RuntimeError, TimeLimit) as error:
        return {"verdict": "error", "why": str(error).strip().splitlines()[-1]}
    differ = sum(not torch.equal(before[name], weight) for name, weight in after.items())
    return {"verdict": "broken" if differ else "holds", "differ": differ}


def checks() -> Iterator[Work]:
    for path in PATHS:
        yield path.name, partial(check, path)
    for same in SAME_BITS:
        yield same.name, partial(check_bits, same)


def unless_late(last: float, make: Callable[[], Row]) -> Row | None:
    """The row with the seconds that it took, if it is not too late to begin."""
    begun = time.monotonic()
    return make() | {"took": round(time.monotonic() - begun, 1)} if begun <= last else None


def at_once(processes: int, last: float, wanted: Sequence[Work]) -> Iterator[tuple[str, Row | None]]:
    """Names and rows as they come; None for what would have begun after the last moment (of time.monotonic)."""
    if processes == 1:
        yield from ((name, unless_late(last, make)) for name, make in wanted)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        names = {pool.submit(unless_late, last, make): name for name, make in wanted}
        yield from ((names[row], row.result()) for row in as_completed(names))
