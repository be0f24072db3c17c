"""A spread of the matrix of layouts: every pair of settings occurs in it."""

import functools
import itertools
from collections import Counter

import pytest

from tests.layouts import FAMILIES, NEEDS, Layout, layout, main_layouts
from tests.matrix import Result, measure
from tests.spread import pairs, spread

LARGE = [
    layout(dp="hsdp 2x2", tp="2"),
    layout(dp="ddp 2", tp="4", method="ring alltoall"),
    layout(dp="fsdp 2", cp="4", method="ulysses", document_mask="true"),
    layout(dp="fsdp 2", pp="4", schedule="Interleaved1F1B", pipeline_first="true"),
    layout(tp="2", cp="2", pp="2", schedule="ZBVZeroBubble", sequence_parallel="false"),
    layout(dp="fsdp 2", tp="2", pp="2", schedule="DualPipeV", accumulation="3"),
    layout(dp="fsdp 2", tp="2", cp="2", pp="2", schedule="Interleaved1F1B"),
]
OTHER_FAMILIES = [
    layout(model=name, **given)
    for name in FAMILIES
    for given in (
        {"dp": "fsdp 2", "tp": "2", "ep": "2", "document_mask": "true"},
        {"cp": "2", "pp": "2", "schedule": "Interleaved1F1B", "length": "33"},
    )
]
GIVEN = [*OTHER_FAMILIES, *LARGE]
SPREAD: list[Layout] = [*sorted(spread(most_ranks=4, given=GIVEN), key=lambda each: each.ranks), *GIVEN]


@functools.cache
def results(ranks: int) -> dict[Layout, Result]:
    """Layouts of as many ranks share processes."""
    return {result.layout: result for result in measure([each for each in SPREAD if each.ranks == ranks])}


@pytest.mark.parametrize("each", SPREAD, ids=str)
def test_a_layout_is_the_run_of_one_process_or_refused(each: Layout) -> None:
    result = results(each.ranks)[each]
    assert result.verdict in ("proven", "refused"), result.error or result.broken


def test_the_spread_has_every_pair_of_settings() -> None:
    """But for those of which one makes no difference, that a rule refuses, or that take more ranks."""
    found = {pair for each in SPREAD for pair in itertools.combinations(each.cell, 2)}
    idle = {("tp", "1"), ("cp", "1"), ("pp", "1"), ("compile", "true")}
    missing = [pair for pair in pairs() if pair not in found and not {*pair} & idle]
    degrees = dict.fromkeys(("dp", "tp", "cp", "pp"), "1")
    for pair in missing:
        needed = {NEEDS[axis]: "2" for axis, _ in pair if axis in NEEDS}
        least = layout(**degrees | needed | dict(pair))
        assert least.ranks > 4 or not {*pair} <= {*least.cell} or least.refusal(), pair


def test_each_layout_of_the_spread_has_a_pair_of_its_own() -> None:
    times = Counter(pair for each in SPREAD for pair in itertools.combinations(each.cell, 2))
    for each in SPREAD:
        assert each in GIVEN or any(times[pair] == 1 for pair in itertools.combinations(each.cell, 2)), each


def test_settings_without_effect_are_left_out() -> None:
    layouts = main_layouts()
    assert len(layouts) == len(set(layouts)) > 600
    for one, other in itertools.combinations([each.overrides() for each in layouts[:50]], 2):
        assert one != other
