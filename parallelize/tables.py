"""Orders of a pipeline's actions as plain data: when each action runs, and an order for parts of sequences."""

from collections.abc import Iterator
from typing import NamedTuple

Action = tuple[str, int, int]
"""Kind, stage and micro-batch. Kinds are F (forward), I (gradient of inputs), W (of weights) and B (both)."""
Step = tuple[Action, ...]
"""One action, or a forward and a backward that torch runs as one, whose results come when both are done."""


class Box(NamedTuple):
    """An action of a rank; times in units."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: int
    end: int


def order_of_parts(pp: int, micro_batches: int, splits: int) -> list[list[Step]]:
    """1F1B with micro-batches cut along the sequence (arXiv:2406.03488): the steps of each rank, one stage a rank.

    Part p of micro-batch m is number m * splits + p. Forward goes through the parts of a sequence from the first to the
    last, since a part sees the keys of earlier ones; backward from the last to the first.
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


def simulate(orders: list[list[Step]]) -> list[Box]:
    """When each action runs. Raises ValueError if ranks wait for each other for ever."""
    done: dict[Action, int] = {}
    boxes: list[Box] = []
    waiting, free = [list(order) for order in orders], [0] * len(orders)
    last = max(stage for order in orders for step in order for _, stage, _ in step)
    while any(waiting):
        before = len(boxes)
        for rank, order in enumerate(waiting):
            while order and all(action in done for action in _needed(order[0], last)):
                step = order.pop(0)
                start = max([free[rank], *(done[action] for action in _needed(step, last))])
                for kind, stage, micro_batch in step:
                    boxes.append(Box(rank, kind, stage, micro_batch, start, start + _UNITS[kind]))
                    start += _UNITS[kind]
                free[rank] = start
                done |= {("I" if kind == "B" else kind, stage, number): start for kind, stage, number in step}
        if len(boxes) == before:
            raise ValueError(f"ranks wait for ever, for {[order[0] for order in waiting if order]}")
    return boxes


_UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}


def _needed(step: Step, last: int) -> Iterator[Action]:
    for kind, stage, micro_batch in step:
        if kind == "F" and stage > 0:
            yield "F", stage - 1, micro_batch
        elif kind in ("B", "I"):
            yield ("F", stage, micro_batch) if stage == last else ("I", stage + 1, micro_batch)
