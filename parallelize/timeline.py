"""Draws when each rank of a pipeline does what, from torch's own schedules, and prints how long ranks are idle.

python -m parallelize.timeline 1F1B ZBVZeroBubble --pp 4 --microbatches 8 --output schedules.png

For a stage and a micro-batch, forward, the gradient of inputs and the gradient of weights take one unit of time each;
messages take none. A rank does its actions in the schedule's order, each as soon as its inputs are there.
"""

import argparse
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from components.config import Parallelism
from components.config.bounds import path_argument
from parallelize.schedules import SCHEDULES, stages_of_rank
from parallelize.tables import Box, Order, Step, order_of_parts, read_table, simulate


def actions(name: str, pp: int, micro_batches: int, stages_a_rank: int = 2) -> Order:
    """The steps of each rank, in order. Raises ValueError for a number of micro-batches that the schedule refuses.

    stages_a_rank is used only if the schedule allows more than two stages a rank.
    """
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.testing._internal.distributed.fake_pg import FakeStore

    schedule = SCHEDULES[name]
    count = pp * int(max(schedule.stages_a_rank[0], min(stages_a_rank, schedule.stages_a_rank[1])))
    settings = Parallelism(pipeline_parallel_schedule=name, pipeline_parallel_degree=pp)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=pp)
    try:
        numbers, cpu = stages_of_rank(settings, 0, count), torch.device("cpu")
        stages = [PipelineStage(nn.Identity(), number, count, cpu) for number in numbers]
        made = schedule.load()(
            stages[0] if schedule.one_stage else stages, n_microbatches=micro_batches, loss_fn=lambda loss, _: loss
        )
        orders = [_steps(made.pipeline_order[rank]) for rank in range(pp)]
    finally:
        dist.destroy_process_group()
    # torch runs one-stage schedules without their tables. 1F1B's table numbers the last rank's forwards from 1.
    return [_forwards_from_0(order) for order in orders] if schedule.one_stage else orders


def _steps(order: list[Any]) -> list[Step]:
    """torch's order without gaps and messages."""
    steps = []
    for action in filter(None, order):
        found = [re.fullmatch(r"(\d+)([FIWB])(\d+)", str(part)) for part in action.sub_actions or (action,)]
        steps.append(tuple((match[2], int(match[1]), int(match[3])) for match in found if match))
    return [step for step in steps if step]


def _forwards_from_0(order: list[Step]) -> list[Step]:
    count = itertools.count()
    return [((kind, stage, next(count) if kind == "F" else number),) for ((kind, stage, number),) in order]


def idle(boxes: list[Box]) -> float:
    """Idle time over working time of all ranks, from the first action of any rank to the last one."""
    ranks = 1 + max(box.rank for box in boxes)
    return max(box.end for box in boxes) * ranks / sum(box.end - box.start for box in boxes) - 1


def most_alive(boxes: list[Box], rank: int) -> int:
    """The largest number of (stage, micro-batch) whose activations a rank holds at once."""
    mine = [box for box in boxes if box.rank == rank]
    # The gradient of weights frees activations. At equal times -1 sorts first, so ends come before starts.
    freed = [(box.end, -1) for box in mine if box.kind in ("B", "W")]
    changes = sorted(freed + [(box.start, 1) for box in mine if box.kind == "F"])
    return max(itertools.accumulate(change for _, change in changes))


COLOURS = {"F": "#2f6fb5", "B": "#3f9a5b", "I": "#e08a1e", "W": "#8e5aa8"}
WORDS = {"F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights"}
SENT = "#c62f3b"
"""Colour of messages."""


_MOST_NUMBERED = 1000
"""Boxes of a picture that have numbers; more are also drawn as pixels, because each takes bytes in an SVG."""


def _stages_a_rank(boxes: list[Box]) -> int:
    return -(-(1 + max(box.stage for box in boxes)) // (1 + max(box.rank for box in boxes)))


def draw_rows(axes: Any, boxes: list[Box], unit: float = 1, messages: Callable[[Box], float] = lambda _: 0.0) -> None:
    """A row for each rank with its actions in units of time, into matplotlib's axes.

    messages: the share of an action's time in which the rank waits for messages; it is drawn at the action's end. Boxes
    that are wide enough have the number of their micro-batch.
    """
    ranks, stages, few = 1 + max(box.rank for box in boxes), _stages_a_rank(boxes), len(boxes) <= _MOST_NUMBERED
    inch = max(box.end for box in boxes) / unit / (0.9 * axes.figure.get_figwidth())
    rows: dict[tuple[int, str, int], list[tuple[float, float]]] = {}
    for box in boxes:
        start, width, share = box.start / unit, (box.end - box.start) / unit, messages(box)
        rows.setdefault((box.rank, box.kind, box.stage // ranks), []).append((start, width * (1 - share)))
        if share:
            rows.setdefault((box.rank, SENT, 0), []).append((start + width * (1 - share), width * share))
        if few and width * (1 - share) > 0.06 * len(str(box.micro_batch)) * inch:
            middle: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6, "color": "white"}
            axes.text(start + width * (1 - share) / 2, box.rank, str(box.micro_batch), clip_on=True, **middle)
    for (rank, kind, turn), spans in rows.items():
        style: dict[str, Any] = {"edgecolor": "white" if few else "none", "linewidth": 0.8, "rasterized": not few}
        colour = COLOURS.get(kind, SENT)
        axes.broken_barh(spans, (rank - 0.43, 0.86), facecolor=colour, alpha=1 - 0.5 * turn / stages, **style)
    axes.tick_params(labelsize=8, length=0)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def draw(timelines: dict[str, list[Box]], path: Path, parts: Mapping[str, int] = MappingProxyType({})) -> None:
    """A PNG with a panel for each schedule: a row for each rank, time to the right, micro-batches as numbers.

    The unit of time is one forward of all layers of a rank, in every panel; a rank's later stages are paler.

    parts: schedule -> the parts of each sequence, if this schedule's numbers are those of parts.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    ranks = 1 + max(box.rank for boxes in timelines.values() for box in boxes)
    units = {name: _stages_a_rank(boxes) * parts.get(name, 1) for name, boxes in timelines.items()}
    length = max(box.end / units[name] for name, boxes in timelines.items() for box in boxes)
    size = (max(10.0, min(0.4 * length, 40.0)), (0.34 * ranks + 0.6) * len(timelines) + 0.5)
    figure, panels = plt.subplots(len(timelines), 1, figsize=size, squeeze=False, facecolor="white", sharex=True)
    for (name, boxes), axes in zip(timelines.items(), panels[:, 0], strict=True):
        scale = units[name]
        draw_rows(axes, boxes, scale)
        alive = ", ".join(f"{most_alive(boxes, rank) / scale:g}" for rank in range(ranks))
        words = f"{name}: idle {idle(boxes):.1%} of working time; micro-batches alive on each rank {alive}"
        axes.set_title(words, loc="left", fontsize=9)
        axes.set(yticks=range(ranks), yticklabels=[f"pp {rank}" for rank in range(ranks)], xlim=(0, length))
    kinds = [kind for kind in COLOURS if any(box.kind == kind for boxes in timelines.values() for box in boxes)]
    handles = [Patch(color=COLOURS[kind], label=WORDS[kind]) for kind in kinds]
    figure.legend(handles=handles, loc="lower right", ncols=len(kinds), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.35 / size[1], 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="+", metavar="schedule", help=f"{', '.join(SCHEDULES)}, or a .csv")
    parser.add_argument("--pp", type=int, default=4, help="ranks of the pipeline (default 4)")
    parser.add_argument("--microbatches", type=int, default=8, help="default 8")
    parser.add_argument("--splits", type=int, default=1, help="also 1F1B with sequences in so many parts")
    parser.add_argument("--stages", type=int, default=2, help="of a rank, where the schedule has more than one (2)")
    parser.add_argument("--output", type=path_argument, default=Path("schedules.png"))
    options = parser.parse_args()
    timelines: dict[str, list[Box]] = {}
    units: dict[str, int] = {}
    for name in options.schedules:
        try:
            if name.endswith(".csv"):
                timelines[name] = simulate(read_table(name) or parser.error(f"{name}: no action"))
            elif name not in SCHEDULES:
                parser.error(f"{name}: not one of {', '.join(SCHEDULES)}, and no .csv")
            else:
                timelines[name] = simulate(actions(name, options.pp, options.microbatches, options.stages))
        except (OSError, ValueError, AssertionError) as error:
            parser.error(f"{name}: {error}")
    if options.splits > 1:
        name = f"1F1B, sequences in {options.splits} parts"
        timelines[name] = simulate(order_of_parts(options.pp, options.microbatches, options.splits))
        units[name] = options.splits
    for name, boxes in timelines.items():
        print(f"{name}: idle {idle(boxes):.1%} of working time")
    draw(timelines, options.output, units)
    print(f"drawn in {options.output}")


if __name__ == "__main__":
    main()
