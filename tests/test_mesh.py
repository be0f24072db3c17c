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
    Degrees(pp=2, dp_shard=2, tp=2, ep=4): """\
ranks: in [ ] tp, across dp_shard
  pp 0 [0 1] [2 3]
  pp 1 [4 5] [6 7]
experts: in [ ] ep, across efsdp
  pp 0 [0 1 2 3]
  pp 1 [4 5 6 7]""",
}


@pytest.mark.parametrize("degrees", DRAWINGS, ids=str)
def test_a_layout_is_drawn(degrees: Degrees) -> None:
    assert draw_layout(degrees) == DRAWINGS[degrees]


def test_experts_are_drawn_where_a_pipeline_is_inside() -> None:
    drawn = draw_layout(Degrees(pp=2, dp_shard=4, ep=2), pipeline_first=True)
    assert drawn.endswith("experts: in [ ] ep, across efsdp\n  pp 0 [0 2] [4 6]\n  pp 1 [1 3] [5 7]")


def test_a_large_layout_is_cut_short() -> None:
    drawn = draw_layout(Degrees(dp_shard=64, cp=16, tp=16)).splitlines()
    assert len(drawn) == 18
    assert drawn[1].startswith("  dp_shard 0 [    0     1     2     3     4     5     6     7 ...] [")
    assert drawn[1].endswith("] ...")
    assert drawn[-1] == "  ..."
