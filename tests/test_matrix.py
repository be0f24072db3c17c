"""A spread of the matrix of layouts: every pair of settings occurs in it."""

import functools
import itertools

import pytest

from tests.matrix import Layout, Result, main_layouts, measure, pairs, spread

SPREAD: list[Layout] = sorted(spread(), key=lambda each: each.ranks)


@functools.cache
def results(ranks: int) -> dict[Layout, Result]:
    """Layouts of as many ranks share processes."""
    return {result.layout: result for result in measure([each for each in SPREAD if each.ranks == ranks])}


@pytest.mark.parametrize("layout", SPREAD, ids=str)
def test_a_layout_is_the_run_of_one_process_or_refused(layout: Layout) -> None:
    result = results(layout.ranks)[layout]
    assert result.verdict in ("proven", "refused"), result.error or result.broken


def test_the_spread_has_every_pair_of_settings() -> None:
    """But for those of which one makes no difference, or that a rule refuses."""
    found = {pair for layout in SPREAD for pair in itertools.combinations(layout.cell, 2)}
    idle = [("tp", "1"), ("cp", "1"), ("pp", "1")]
    refused = [("tied", "true"), ("reshard", "always"), ("document_mask", "true")]
    assert [pair for pair in pairs() if pair not in found and not {*pair} & {*idle, *refused}] == []


def test_settings_without_effect_are_left_out() -> None:
    layouts = main_layouts()
    assert len(layouts) == len(set(layouts)) > 1400
    for one, other in itertools.combinations([each.overrides() for each in layouts[:50]], 2):
        assert one != other
