"""Layouts as they are drawn."""

import pytest

from parallelize.mesh import Degrees, draw_layout

DRAWINGS = {
    Degrees(): "one rank",
    Degrees(dp_replicate=2): """\
ranks: in [ ] dp_replicate
  [0 1]""",
    Degrees(dp_replicate=2, dp_shard=3): """\
ranks: in [ ] dp_shard, across dp_replicate
  [0 1 2] [3 4 5]""",
    Degrees(dp_shard=2, cp=2, tp=2): """\
ranks: in [ ] tp, across cp
  dp_shard 0 [0 1] [2 3]
  dp_shard 1 [4 5] [6 7]""",
    Degrees(dp_replicate=2, dp_shard=2, cp=2, tp=2): """\
ranks: in [ ] tp, across cp
  dp_replicate 0 dp_shard 0 [ 0  1] [ 2  3]
  dp_replicate 0 dp_shard 1 [ 4  5] [ 6  7]
  dp_replicate 1 dp_shard 0 [ 8  9] [10 11]
  dp_replicate 1 dp_shard 1 [12 13] [14 15]""",
}


@pytest.mark.parametrize("degrees", DRAWINGS, ids=str)
def test_a_layout_is_drawn(degrees: Degrees) -> None:
    assert draw_layout(degrees) == DRAWINGS[degrees]


def test_a_large_layout_is_cut_short() -> None:
    drawn = draw_layout(Degrees(dp_shard=64, cp=16, tp=16)).splitlines()
    assert len(drawn) == 18
    assert drawn[1].startswith("  dp_shard 0 [    0     1     2     3     4     5     6     7 ...] [")
    assert drawn[1].endswith("] ...")
    assert drawn[-1] == "  ..."
