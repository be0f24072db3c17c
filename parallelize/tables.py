"""Orders of a pipeline's actions as plain data: reads them from a file, makes them, checks them and simulates them."""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

Action = tuple[str, int, int]
"""Kind, stage and micro-batch. Kinds are F (forward), I (gradient of inputs), W (of weights) and B (both)."""
Step = tuple[Action, ...]
"""One action, or a forward and a backward that torch runs as one; both results are ready when both are done."""
Order = list[list[Step]]
"""The steps of each rank."""


class Box(NamedTuple):
    """An action of a rank; times in units, or in seconds."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


def order_of_parts(pp: int, micro_batches: int, splits: int) -> Order:
    """1F1B with micro-batches cut along the sequence (arXiv:2406.03488): the steps of each rank, one stage a rank.

    Part p of micro-batch m is number m * splits + p. Forward goes through the parts of a sequence from the first to the
    last, because a part sees the keys of earlier parts. Backward goes from the last to the first.
    """
    count = micro_batches * splits
    backward = [first + part for first in range(0, count, splits) for part in reversed(range(splits))]
    orders = []
    for rank in range(pp):
        ahead = min(count, pp - 1 - rank + splits - 1)
        first: list[Step] = [(("F", rank, number),) for number in range(count)]
        second: list[Step] = [(("B", rank, number),) for number in backward]
        both = [step for pair in zip(first[ahead:], second) for step in pair]
        orders.append([*first[:ahead], *both, *second[count - ahead :]])
    return orders


@cache
def read_table(path: str) -> Order:
    """The steps in a file that has a row per rank, as torch writes them. Empty cells are idle; empty rows are skipped.

    An action is its stage, kind and micro-batch (0F1). Two actions that run as one are (0F1;3B0)OVERLAP_F_B. Raises
    ValueError with the row and the cell that are wrong, OSError for a file that cannot be read.
    """
    file = Path(path)
    if file.exists() and not file.is_file():
        raise ValueError("it is no file")
    try:
        rows = list(csv.reader(file.read_text(encoding="utf-8-sig").splitlines()))
    except csv.Error as error:
        raise ValueError(str(error)) from None
    found = [
        [_step(cell.strip(), f"row {row}, cell {column}") for column, cell in enumerate(cells, 1) if cell.strip()]
        for row, cells in enumerate(rows, 1)
    ]
    return [order for order in found if order]


def stages_of_table(path: str) -> list[list[int]]:
    """The stages of each rank."""
    return [sorted({stage for step in order for _, stage, _ in step}) for order in read_table(path)]


def _step(cell: str, where: str) -> Step:
    both = re.fullmatch(r"\((.*);(.*)\)OVERLAP_F_B", cell)
    actions = [
        re.fullmatch(r"(\d{1,6})([FIWB])(\d{1,6})", part.strip()) for part in (both.groups() if both else (cell,))
    ]
    step = tuple((each[2], int(each[1]), int(each[3])) for each in actions if each)
    if len(step) < len(actions):
        raise ValueError(f"{where}: {cell[:40]!r} is no action; 0F1 is one: stage 0, kind F, B, I or W, micro-batch 1")
    return step


def written(step: Step) -> str:
    """The step, written as in a file."""
    actions = [f"{stage}{kind}{number}" for kind, stage, number in step]
    return actions[0] if len(actions) == 1 else f"({';'.join(actions)})OVERLAP_F_B"


def wrong_with(orders: Order, pp: int, micro_batches: int) -> str:
    """Why a table does not suit these numbers of ranks and micro-batches; empty if it does."""
    if len(orders) != pp:
        return f"it has rows for {len(orders)} ranks, not for {pp}"
    ranks: dict[int, int] = {}
    counts: Counter[tuple[str, int, int]] = Counter()
    for rank, order in enumerate(orders):
        seen: set[tuple[str, int, int]] = set()
        for kind, stage, number in (action for step in order for action in step):
            if ranks.setdefault(stage, rank) != rank:
                return f"stage {stage} is on ranks {ranks[stage]} and {rank}"
            before = {"B": "F", "I": "F", "W": "I"}.get(kind)
            if before and (before, stage, number) not in seen:
                return f"{stage}{kind}{number} comes before {stage}{before}{number}"
            seen.add((kind, stage, number))
            counts[kind, stage, number] += 1
    last = max(ranks)
    if missing := sorted(set(range(last)) - ranks.keys()):
        return f"stage {missing[0]} is on no rank"
    if twice := [action for action, count in counts.items() if count > 1]:
        return "{1}{0}{2} is there twice".format(*twice[0])
    for stage in ranks:
        for number in range(micro_batches):
            kinds = "".join(kind for kind in "FBIW" if (kind, stage, number) in counts)
            if kinds not in ("FB", "FIW"):
                return f"stage {stage}, micro-batch {number}: {kinds or 'no action'} instead of F and B, or F, I and W"
    if beyond := [number for _, _, number in counts if number >= micro_batches]:
        return f"micro-batch {min(beyond)} is one too many: there are {micro_batches}, counted from 0"
    forwards = [number for step in orders[ranks[last]] for kind, stage, number in step if (kind, stage) == ("F", last)]
    if forwards != sorted(forwards):
        return f"the last stage, {last}, has to take micro-batches in order"
    try:
        simulate(orders)
    except ValueError as error:
        return str(error)
    return ""


def simulate(orders: Order, time: Callable[[str, int], float] | None = None, message: float = 0) -> list[Box]:
    """When each action runs. Raises ValueError if ranks wait for each other for ever.

    time: (kind, stage) -> the time of an action, by default in units; message: the time of a message between stages.
    """
    time = time or (lambda kind, _: _UNITS[kind])
    done: dict[Action, float] = {}
    boxes: list[Box] = []
    waiting, free = [list(order)[::-1] for order in orders], [0.0] * len(orders)
    last = max(stage for order in orders for step in order for _, stage, _ in step)
    while any(waiting):
        before = len(boxes)
        for rank, order in enumerate(waiting):
            while order and all(action in done for action in _needed(order[-1], last)):
                step = order.pop()
                start = max([free[rank], *(done[action] + message for action in _needed(step, last))])
                for kind, stage, micro_batch in step:
                    boxes.append(Box(rank, kind, stage, micro_batch, start, start + time(kind, stage)))
                    start += time(kind, stage)
                free[rank] = start
                done |= {("I" if kind == "B" else kind, stage, number): start for kind, stage, number in step}
        if len(boxes) == before:
            waits = [f"rank {rank} at {written(order[-1])}" for rank, order in enumerate(waiting) if order]
            raise ValueError(f"ranks wait for ever: {', '.join(waits)}")
    return boxes


_UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}


def _needed(step: Step, last: int) -> Iterator[Action]:
    for kind, stage, micro_batch in step:
        if kind == "F" and stage > 0:
            yield "F", stage - 1, micro_batch
        elif kind in ("B", "I"):
            yield ("F", stage, micro_batch) if stage == last else ("I", stage + 1, micro_batch)
