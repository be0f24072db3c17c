"""Pictures of a plan as one HTML page or as PNGs: memory by rank, the schedule, the mesh on its nodes, all layouts."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from components.config import ConfigError
from components.observe.report import COLOURS, Section, draw, page, plain
from parallelize.layouts import Layout
from parallelize.mesh import Degrees
from parallelize.plan.memory import LINES, memory
from parallelize.plan.search import Plan, Planner
from parallelize.plan.time import action_times, timeline
from parallelize.tables import Box
from parallelize.timeline import COLOURS as KINDS
from parallelize.timeline import SENT, WORDS, draw_rows

IDLE = "#e4e7eb"
_HEADINGS = {"memory": "Memory by rank", "schedule": "Schedule", "mesh": "Mesh on its nodes", "layouts": "All layouts"}
_BELOW: dict[str, Any] = {"loc": "upper center", "frameon": False, "fontsize": 8}
_SHOWN = 32
"""Ranks that the picture of the mesh shows, or those of one node if they are more."""


def _ticks(ranks: int) -> range:
    return range(0, ranks, -(-ranks // 16))


def _limit(largest: float, there: float) -> float:
    """End of an axis of GiB: beyond a device's memory, unless little of it is used."""
    return 1.3 * largest if largest < there / 4 else 1.05 * max(there, largest)


@dataclass
class Memory:
    """Stacked bars of memory by kind, one for each rank of the pipeline."""

    title: str
    ranks: Sequence[dict[str, float]]
    """GiB as in memory.memory."""
    there: float
    reserved: float

    @property
    def size(self) -> tuple[float, float]:
        return min(10.0, 5 + 0.15 * len(self.ranks)), 3.6

    def draw(self, axes: Any) -> None:
        bottom, places = [0.0] * len(self.ranks), range(len(self.ranks))
        for name, colour in [*zip(LINES, COLOURS, strict=False), ("reserved", "#bbbbbb")]:
            heights = [gib.get(name, self.reserved) for gib in self.ranks]
            axes.bar(places, heights, 0.8, bottom, color=colour, label=f"{name}, at most {max(heights):.3g}")
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        axes.axhline(self.there, color="#333333", lw=1, ls="--", label=f"memory of a device, {self.there:g}")
        axes.set_title(plain(self.title), fontsize=10)
        axes.set(
            xlabel="rank of the pipeline", ylabel="GiB", xlim=(-1, len(self.ranks)), xticks=_ticks(len(self.ranks))
        )
        axes.set_ylim(0, _limit(max(bottom), self.there))
        axes.legend(**_BELOW, ncols=3, bbox_to_anchor=(0.5, -0.16))


@dataclass
class Schedule:
    """Actions of each rank of the pipeline over time."""

    title: str
    boxes: list[Box]
    shares: dict[tuple[str, int], float]
    """(kind, stage) -> share of an action's time in which the rank waits for messages."""

    @property
    def size(self) -> tuple[float, float]:
        ranks = 1 + max(box.rank for box in self.boxes)
        return min(20.0, max(9.0, 0.1 * len(self.boxes) / ranks)), min(9.0, 1.4 + 0.28 * ranks)

    def draw(self, axes: Any) -> None:
        from matplotlib.patches import Patch

        ranks, end = 1 + max(box.rank for box in self.boxes), max(box.end for box in self.boxes)
        axes.barh(range(ranks), end, 0.86, color=IDLE)
        draw_rows(axes, self.boxes, messages=lambda box: self.shares[box.kind, box.stage])
        axes.set_title(plain(self.title), fontsize=10)
        axes.set(xlabel="seconds", ylabel="rank", xlim=(0, end), ylim=(ranks - 0.5, -0.5), yticks=_ticks(ranks))
        drawn = {box.kind for box in self.boxes}
        legend = {WORDS[kind]: colour for kind, colour in KINDS.items() if kind in drawn}
        legend |= {"messages that nothing hides": SENT, "idle, or messages between stages": IDLE}
        handles = [Patch(color=colour, label=word) for word, colour in legend.items()]
        below = -0.5 / (self.size[1] - 0.9)
        axes.legend(handles=handles, **_BELOW, ncols=len(legend), bbox_to_anchor=(0.5, below))


@dataclass
class Nodes:
    """The first ranks on their nodes: a row for each dimension of the mesh, with each rank's place along it."""

    title: str
    degrees: Degrees
    pipeline_first: bool
    node: int
    """Ranks of a node."""

    @property
    def places(self) -> dict[str, list[int]]:
        """Dimension -> the place of each rank along it, for dimensions of several ranks; innermost first."""
        degrees = self.degrees
        inner = ["tp", "pp", "cp", "dp_shard", "dp_replicate"] if self.pipeline_first else []
        strides, stride = dict[str, int](), 1
        for name in inner or ["tp", "cp", "dp_shard", "dp_replicate", "pp"]:
            strides[name] = stride
            stride *= getattr(degrees, name)
        every = range(degrees.world_size)
        found = {name: [rank // step % getattr(degrees, name) for rank in every] for name, step in strides.items()}
        shards = [shard * degrees.cp + cp for shard, cp in zip(found["dp_shard"], found["cp"], strict=True)]
        found["ep"] = [(each * degrees.tp + tp) % degrees.ep for each, tp in zip(shards, found["tp"], strict=True)]
        return {name: places for name, places in found.items() if getattr(degrees, name) > 1}

    def nodes_of(self, name: str) -> int:
        """Nodes on which the first group along a dimension lies."""
        places = self.places
        fixed = {"dp_replicate", "pp"} & {*places} if name == "ep" else {*places} - {name, "ep"}
        group = [rank for rank in range(self.degrees.world_size) if not any(places[each][rank] for each in fixed)]
        return len({rank // self.node for rank in group[: getattr(self.degrees, name)]})

    @property
    def size(self) -> tuple[float, float]:
        return 10.0, 1.3 + 0.5 * max(1, len(self.places))

    def draw(self, axes: Any) -> None:
        from matplotlib import colormaps

        places, world = self.places or {"rank": [0]}, self.degrees.world_size
        shown = min(world, max(self.node, _SHOWN // self.node * self.node))
        for row, own in enumerate(places.values()):
            most = max(own) or 1
            for rank in range(shown):
                colour = colormaps["viridis"](0.15 + 0.8 * own[rank] / most)
                axes.bar(rank, 0.8, 0.94, row - 0.4, color=colour)
                dark = own[rank] / most < 0.55
                axes.text(rank, row, own[rank], ha="center", va="center", fontsize=7, color="w" if dark else "k")
        for node in range(-(-shown // self.node)):
            axes.axvline(node * self.node - 0.5, color="#333333", lw=1.2)
            middle = (node * self.node + min(shown, (node + 1) * self.node) - 1) / 2
            axes.text(middle, -0.6, f"node {node}", ha="center", fontsize=8)
        nodes = {name: self.nodes_of(name) if name != "rank" else 1 for name in places}
        labels = [f"{name} {max(own) + 1}: {_on(nodes[name])}" for name, own in places.items()]
        rest = f"; {world - shown:,} more ranks on {-(-(world - shown) // self.node):,} more nodes" * (world > shown)
        axes.set_title(plain(self.title), fontsize=10, pad=14)
        axes.set(yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - 0.5, -0.9))
        axes.set(xlim=(-0.5, max(shown, 8) - 0.5), xticks=[0, shown - 1] if shown > 1 else [0])
        axes.set_xlabel(f"rank{rest}", fontsize=9)
        axes.tick_params(labelsize=8, length=0)
        axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _on(nodes: int) -> str:
    return "inside a node" if nodes == 1 else f"across {nodes:,} nodes"


@dataclass
class Cloud:
    """All layouts by memory and speed; colours say which axes a layout has, and a star marks the best."""

    title: str
    plans: Sequence[Plan]
    best: Plan
    size: tuple[float, float] = (7.0, 4.2)

    def draw(self, axes: Any) -> None:
        kinds: dict[str, list[Plan]] = {"data parallel alone": [], "tensor": [], "context": [], "pipeline": []}
        for plan in self.plans:
            degrees = plan.degrees
            axis = "pipeline" if degrees.pp > 1 else "context" if degrees.cp > 1 else "tensor"
            kinds[axis if degrees.pp * degrees.cp * degrees.tp > 1 else "data parallel alone"].append(plan)
        for (name, plans), colour in zip(kinds.items(), COLOURS, strict=False):
            x, y = [plan.gib["total"] for plan in plans], [plan.tokens_per_second for plan in plans]
            few = len(self.plans) < 200
            label = name if name in ("data parallel alone", "pipeline") else f"{name} parallel, no pipeline"
            if plans:
                axes.scatter(x, y, 16 if few else 5, color=colour, label=f"{label}: {len(plans):,}", rasterized=not few)
        there = self.best.device.memory_gib - self.best.device.reserved_gib
        axes.axvline(there, color="#333333", lw=1, ls="--", label=f"{there:.1f} GiB of a device")
        star = {"marker": "*", "s": 220, "color": COLOURS[4], "edgecolor": "black", "zorder": 3}
        best = f"{Layout(self.best.degrees)}: {self.best.tokens_per_second:,.0f} tokens/s"
        axes.scatter([self.best.gib["total"]], [self.best.tokens_per_second], label=best, **star)
        axes.set_title(plain(self.title), fontsize=10)
        axes.set(xlabel="GiB on the rank that needs most", ylabel="tokens/s a device")
        axes.set(
            xlim=(0, _limit(max(plan.gib["total"] for plan in self.plans), there)),
            ylim=(0, 1.1 * max(plan.tokens_per_second for plan in self.plans)),
        )
        axes.grid(alpha=0.3)
        axes.legend(**_BELOW, ncols=2, bbox_to_anchor=(0.5, -0.14))


def schedule_of(plan: Plan) -> Schedule:
    """The first micro-batches of a turn, or one micro-batch without a pipeline."""
    boxes, mean = timeline(plan.place, plan.device)
    shares = {(kind, number): action_times(kind, number, both).sent for number, both in mean.items() for kind in KINDS}
    if plan.degrees.pp == 1:
        return Schedule("One micro-batch of a rank", boxes, shares)
    parallelism = plan.job.parallelism
    drawn, count = 1 + max(box.micro_batch for box in boxes), plan.place.micro_batches
    count *= parallelism.pipeline_parallel_sequence_splits
    idle = 1 - sum(box.end - box.start for box in boxes) / (plan.degrees.pp * max(box.end for box in boxes))
    title = f"{parallelism.pipeline_parallel_schedule}, {drawn} of {count} micro-batches: idle {idle:.1%}"
    return Schedule(title, boxes, shares)


def pictures(plan: Plan, planner: Planner) -> dict[str, Any]:
    """Picture by a name of _HEADINGS."""
    gib = [memory(plan.place, rank) for rank in range(plan.degrees.pp)]
    device, first = plan.device, plan.job.parallelism.pipeline_first
    worst = max(each["total"] for each in gib) + device.reserved_gib
    title = f"Memory: {worst:.1f} of {device.memory_gib:g} GiB"
    return {
        "memory": Memory(title, gib, device.memory_gib, device.reserved_gib),
        "schedule": schedule_of(plan),
        "mesh": Nodes("Places of ranks along each dimension", plan.degrees, first, device.ranks_per_node),
        "layouts": Cloud(f"Layouts that fit, of {planner.tried:,}", planner.timed, plan),
    }


def write(plan: Plan, planner: Planner, options: argparse.Namespace) -> None:
    """Write options.html and the PNGs of the folder options.png. Raises ConfigError."""
    drawn = pictures(plan, planner)
    settings = [["key", "value"], *([key, str(value)] for key, value in plan.settings.items())]
    title = f"{Layout(plan.degrees)}: {plan.job.job.description or plan.job.model.flavor} on {planner.ranks:,} devices"
    option = "html"
    try:
        if options.html:
            sections = [Section(_HEADINGS[name], panels=[each]) for name, each in drawn.items()]
            page(options.html, title, [*sections, Section("Keys", table=settings)])
        option = "png"
        if options.png:
            options.png.mkdir(parents=True, exist_ok=True)
            for name, each in drawn.items():
                draw([each], options.png / f"{name}.png", 1)
    except OSError as error:
        raise ConfigError(f"--{option}: {error}") from None
