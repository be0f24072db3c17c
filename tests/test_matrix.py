"""A spread of the matrix of layouts: every pair of settings occurs in it."""

import itertools
from collections import Counter

import pytest

from tests.layouts import AXES, NEEDS, Layout, layout, main_layouts
from tests.matrix import measure
from tests.spread import GIVEN, cover, of_the_tests, pairs, settings_of

SPREAD = of_the_tests()
IN_QUICK = cover(SPREAD)
MARKS = pytest.mark.slow, pytest.mark.quick
CASES = [pytest.param(each, marks=MARKS[each in IN_QUICK], id=str(each)) for each in SPREAD]


@pytest.mark.parametrize("each", CASES)
def test_a_layout_is_the_run_of_one_process_or_refused(each: Layout) -> None:
    (result,) = measure([each])
    assert result.verdict in ("proven", "refused"), result.error or result.broken


def test_the_spread_has_every_pair_of_settings() -> None:
    """But for those of which one makes no difference, that a rule refuses, or that take more ranks.

    After a change of axes or rules: python -m tests.spread.
    """
    found = {pair for each in SPREAD for pair in itertools.combinations(each.cell, 2)}
    idle = {("tp", "1"), ("cp", "1"), ("pp", "1"), ("compile", "true")}
    missing = [pair for pair in pairs() if pair not in found and not {*pair} & idle]
    degrees = dict.fromkeys(("dp", "tp", "cp", "pp"), "1")
    for pair in missing:
        needed = {NEEDS[axis]: AXES[NEEDS[axis]][1] for axis, _ in pair if axis in NEEDS}
        least = layout(**degrees | needed | dict(pair))
        assert least.ranks > 4 or not {*pair} <= {*least.cell} or least.refusal(), pair


def test_the_quick_command_has_every_setting() -> None:
    """Each setting of each axis makes a difference in an accepted layout of the quick command."""
    wanted = {(axis, value) for axis, values in AXES.items() for value in values}
    assert wanted <= set().union(*(settings_of(each) for each in IN_QUICK if not each.refusal()))
    assert sum(each.ranks > 1 for each in IN_QUICK) >= 60


def test_each_layout_of_the_spread_has_a_pair_of_its_own() -> None:
    times = Counter(pair for each in SPREAD for pair in itertools.combinations(each.cell, 2))
    for each in SPREAD:
        assert each in GIVEN or any(times[pair] == 1 for pair in itertools.combinations(each.cell, 2)), each


def test_settings_without_effect_are_left_out() -> None:
    layouts = main_layouts()
    assert len(layouts) == len(set(layouts)) > 600
    for one, other in itertools.combinations([each.overrides() for each in layouts[:50]], 2):
        assert one != other
