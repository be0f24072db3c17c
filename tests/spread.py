"""A spread of the layouts: every pair of settings occurs, in layouts that take little time together.

python -m tests.spread      writes tests/spread.json, the layouts of the tests, in a minute: each run of them reads it
"""

import heapq
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.layouts import AXES, DRAWN, FAMILIES, MESH, MOST_RANKS, Layout, any_layout, layout

GIVEN = [
    *(
        layout(model=name, **given)
        for name in FAMILIES
        for given in (
            {"dp": "fsdp 2", "tp": "2", "ep": "2", "document_mask": "true"},
            {"cp": "2", "pp": "2", "schedule": "Interleaved1F1B", "length": "33"},
        )
    ),
    layout(dp="hsdp 2x2", tp="2"),
    layout(dp="ddp 2", tp="4", method="ring alltoall"),
    layout(dp="fsdp 2", cp="4", method="ulysses", document_mask="true"),
    layout(dp="fsdp 2", pp="4", schedule="Interleaved1F1B", pipeline_first="true"),
    layout(tp="2", cp="2", pp="2", schedule="ZBVZeroBubble", sequence_parallel="false"),
    layout(dp="fsdp 2", tp="2", pp="2", schedule="DualPipeV", accumulation="3"),
    layout(dp="fsdp 2", tp="2", cp="2", pp="2", schedule="Interleaved1F1B"),
    layout(dp="fsdp 2", accumulation="3", compile="true"),
    layout(pp="2"),
]
"""Layouts in every spread of the tests: of other families, of more than four ranks, and with what no pair needs."""
QUICK = 64
"""Layouts of the quick command, of two ranks or more."""
_LAID_OUT = ("dp", "tp", "cp", "pp", "ep", "schedule")
_FILE = Path(__file__).with_suffix(".json")

_NUMBER = {setting: number for number, setting in enumerate((axis, v) for axis in AXES for v in AXES[axis])}


def pairs() -> list[tuple[tuple[str, str], ...]]:
    """Every two settings of two axes; of DRAWN axes, with each degree and schedule."""
    return [
        pair
        for axes in itertools.combinations(AXES, 2)
        if not DRAWN & {*axes} or {*_LAID_OUT} & {*axes}
        for pair in itertools.product(*([(axis, value) for value in AXES[axis]] for axis in axes))
    ]


def _settings(each: Layout) -> tuple[np.ndarray, ...]:
    """Where the pairs of a layout are in a table of all pairs; a setting that no axis has is the last row."""
    numbers = [_NUMBER.get(setting, len(_NUMBER)) for setting in each.cell]
    return np.ix_(numbers, numbers)


def spread(
    seed: int = 0, most_ranks: int = MOST_RANKS, given: Sequence[Layout] = (), tries: tuple[int, ...] = (8, 60)
) -> list[Layout]:
    """Layouts that no rule refuses, in which each pair of settings occurs that makes a difference.

    Pairs of the given layouts are left out. None is compiled, which takes several times as long:
    tests/test_parallelize_compile.py compiles under every axis. So many layouts are drawn for each missing pair, then
    once more for those that are still missing; the next chosen has most of the missing pairs for what it takes. At the
    end those go whose pairs all occur in others.
    """
    wanted = np.zeros((len(_NUMBER) + 1,) * 2, dtype=bool)
    for one, other in pairs():
        wanted[_NUMBER[one], _NUMBER[other]] = ("compile", "true") not in (one, other)
    missing, draw, chosen = wanted.copy(), random.Random(seed), list[Layout]()
    for each in given:
        missing[_settings(each)] = False

    def worth(each: Layout) -> float:
        return float(missing[_settings(each)].sum()) / each.cost

    for count in tries:
        sought = [pair for pair in pairs() if missing[_NUMBER[pair[0]], _NUMBER[pair[1]]] for _ in range(count)]
        drawn = dict.fromkeys(any_layout(draw, small=True, **{"compile": "false"} | dict(pair)) for pair in sought)
        queue = [(-worth(each), number, each) for number, each in enumerate(drawn) if each.ranks <= most_ranks]
        heapq.heapify(queue)
        while queue and queue[0][0]:
            _, number, best = heapq.heappop(queue)
            now = worth(best)  # less than before, if others have its pairs by now
            if queue and -now > queue[0][0]:
                heapq.heappush(queue, (-now, number, best))
            elif now and not best.refusal():
                chosen.append(best)
                missing[_settings(best)] = False
    times = np.zeros(wanted.shape, dtype=int)
    for each in (*given, *chosen):
        times[_settings(each)] += 1
    for each in sorted(chosen, key=lambda each: -each.cost):
        own = _settings(each)
        if not (wanted[own] & (times[own] == 1)).any():
            chosen.remove(each)
            times[own] -= 1
    return chosen


def of_the_tests() -> list[Layout]:
    """The layouts of tests/spread.json and GIVEN, few ranks first; layouts of one mesh are together."""
    found = [layout(**settings) for settings in json.loads(_FILE.read_text(encoding="utf-8"))]
    return sorted([*found, *GIVEN], key=lambda each: (each.ranks, *(each[axis] for axis in MESH)))


def settings_of(each: Layout) -> set[tuple[str, str]]:
    """Axis and setting, where another setting would make another layout."""
    cell = dict(each.cell)
    return {
        (axis, value)
        for axis, value in each.cell
        if any(layout(**cell | {axis: other}) != each for other in AXES[axis] if other != value)
    }


def cover(layouts: Sequence[Layout], least: int = QUICK) -> list[Layout]:
    """Some of these layouts, with each setting that any of them has; then, up to `least`, with most pairs of settings.

    Greedy: the next has most that is new for what it takes.
    """
    settings = {each: settings_of(each) for each in layouts}
    chosen = _more([], settings, len(layouts))
    return _more(chosen, {each: {*itertools.combinations(sorted(settings[each]), 2)} for each in layouts}, least)


def _more(chosen: list[Layout], parts: dict[Layout, set[Any]], most: int) -> list[Layout]:
    """Add layouts to the chosen ones until every part of every layout is covered, or `most` layouts are chosen."""
    missing = set().union(*parts.values()).difference(*(parts[each] for each in chosen))
    while missing and len(chosen) < most:
        rest = [each for each in parts if each not in chosen]
        chosen = [*chosen, max(rest, key=lambda each: len(parts[each] & missing) / each.cost)]
        missing -= parts[chosen[-1]]
    return chosen


def main() -> None:
    """Write tests/spread.json: of each layout the settings that are not the first of their axis."""
    found = spread(most_ranks=4, given=GIVEN, tries=(60, 600))
    lines = [json.dumps({axis: value for axis, value in each.cell if value != AXES[axis][0]}) for each in found]
    _FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    print(f"{len(found)} layouts, of a cost of {sum(each.cost for each in found):,.0f}")


if __name__ == "__main__":
    main()
