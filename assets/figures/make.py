"""Draw the figures of docs/: python -m assets.figures.make. They show layouts on two or four ranks, and models."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from components.commands import sweep_report
from components.commands.sweep import parse_grid
from components.config import load_config
from components.data.loader import IGNORED, batch_of
from components.data.show import rows_of
from components.observe.report import Panel, curve_panels, draw, points, read_rows
from models import MODELS
from models.config import TransformerConfig
from parallelize.layouts import Layout
from parallelize.mesh import Degrees
from parallelize.plan.devices import find_device
from parallelize.plan.page import pictures
from parallelize.plan.search import Planner
from tests.benchmarks import mup, sweep

RANKS = ("#2f6fb5", "#e08a1e", "#3f9a5b", "#8e5aa8")
"""A colour for each rank."""
INK, GREY, SENT = "#1f2328", "#8c959f", "#c62f3b"
Box = tuple[float, float, float, float]
"""(left, top, width, height) of a part, as fractions of its tensor."""
WHOLE: Box = (0, 0, 1, 1)
BLANK = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
"""Style of the box behind a text that covers lines."""


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A white figure whose axes are hidden, with y pointing down; 100 pixels a unit."""
    figure = plt.figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def text(axes: Axes, x: float, y: float, words: str, size: float = 12, colour: str = INK, **more: Any) -> None:
    options: dict[str, Any] = {
        "ha": "center",
        "va": "center",
        "color": colour,
        "fontsize": size,
        "linespacing": 1.3,
    } | more
    axes.text(x, y, words, **options)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = GREY, ends: int = 1) -> None:
    style: dict[str, Any] = {"mutation_scale": 14, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(start, end, color=colour, arrowstyle="-|>" if ends == 1 else "<|-|>", **style))


def tensor(
    axes: Axes, x: float, y: float, size: tuple[float, float], held: Box, colour: str, partial: bool = False
) -> None:
    """A tensor as a dashed frame. The part that a rank holds is filled, or hatched if it is a partial sum."""
    width, height = size
    left, top, across, down = held[0] * width, held[1] * height, held[2] * width, held[3] * height
    axes.add_patch(Rectangle((x, y), width, height, facecolor="white", edgecolor=GREY, linestyle=(0, (3, 2))))
    fill: dict[str, Any] = {"facecolor": colour, "edgecolor": colour, "linewidth": 1.2}
    if partial:
        fill |= {"facecolor": "white", "hatch": "////"}
    axes.add_patch(Rectangle((x + left, y + top), across, down, **fill))


def draw_tensor_parallel() -> Figure:
    """Where each tensor of a layer is split or whole, on two ranks, with sequence parallel."""
    figure, axes = canvas(16, 10.1)
    text(axes, 8, 0.45, "The forward of one layer on two tensor parallel ranks", 19, weight="bold")
    attention = ("attention_norm", "input", "q, k, v\nown heads", "attention\nown heads", "output\nof wo")
    feed_forward = ("ffn_norm", "input", "of w1 and w3\nown columns", "silu · product\nown columns", "output\nof w2")
    _draw_half(axes, 1.05, "attention", attention, "wq wk wv", "wo")
    _draw_half(axes, 5.3, "feed-forward", feed_forward, "w1 w3", "w2")
    legend = {1.3: "held", 3.0: "on the other rank", 6.0: "partial sum"}
    for x, word in legend.items():
        held = (0, 0, 0, 0) if word == "on the other rank" else WHOLE
        tensor(axes, x, 9.45, (0.5, 0.34), held, GREY, partial=word == "partial sum")
        text(axes, x + 0.62, 9.62, word, ha="left")
    text(axes, 8.4, 9.62, "what ranks send", colour=SENT, ha="left", weight="bold")
    text(axes, 10.7, 9.62, "a tensor: its sequence down, its width across", ha="left")
    return figure


def _draw_half(axes: Axes, y: float, title: str, inside: tuple[str, ...], first: str, last: str) -> None:
    size = (1.15, 1.0)
    places, rows = [1.2, 3.1, 5.45, 7.85, 9.85, 12.1, 14.45], (y + 0.95, y + 2.2)
    text(axes, 0.2, y, title, 15, ha="left", weight="bold")
    for label, x in zip(("hidden state", *inside, "hidden state\nplus output"), places, strict=True):
        text(axes, x + size[0] / 2, y + 0.85, label, va="bottom")
    for rank, (row, colour) in enumerate(zip(rows, RANKS, strict=False)):
        text(axes, 0.2, row + size[1] / 2, f"rank {rank}", 12.5, colour, ha="left", weight="bold")
        places_held, columns_held = (0, rank / 2, 1, 0.5), (rank / 2, 0, 0.5, 1)
        held: list[Box] = [places_held, places_held, WHOLE, columns_held, columns_held, WHOLE, places_held]
        for index, (box, x) in enumerate(zip(held, places, strict=True)):
            tensor(axes, x, row, size, box, colour, partial=index == 5)
        for before, after in pairwise(places):
            sends = before in (places[1], places[5])
            arrow(axes, (before + 1.21, row + 0.5), (after - 0.06, row + 0.5), SENT if sends else GREY)
    for index, word in ((1, "gather"), (5, "reduce-\nscatter")):
        x = (places[index] + size[0] + places[index + 1]) / 2
        for side, ends in ((-0.14, (rows[0] + 0.6, rows[1] + 0.4)), (0.14, (rows[1] + 0.4, rows[0] + 0.6))):
            arrow(axes, (x + side, ends[0]), (x + side, ends[1]), SENT)
        text(axes, x, (rows[0] + rows[1] + 1) / 2, word, 12, SENT, bbox=BLANK)
    # Weights, below the arrow where they are used.
    for index, name, how in ((2, first, "columns"), (4, last, "rows")):
        x = (places[index] + size[0] + places[index + 1]) / 2
        for rank in range(2):
            split = (rank / 2, 0, 0.5, 1) if how == "columns" else (0, rank / 2, 1, 0.5)
            tensor(axes, x - 0.42 + 0.46 * rank, rows[1] + 1.15, (0.38, 0.32), split, RANKS[rank])
        arrow(axes, (x, rows[1] + 1.1), (x, rows[1] + 0.6))
        text(axes, x, rows[1] + 1.65, f"{name} by {how}")


def draw_context_parallel() -> Figure:
    """Who has which pieces of a sequence, and what ranks send."""
    figure, axes = canvas(16, 12.4)
    text(axes, 8, 0.42, "One sequence on four context parallel ranks: who has which piece", 19, weight="bold")
    unbalanced, balanced = (0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 2, 3, 3, 2, 1, 0)
    _draw_grid(axes, 1.95, 1.25, "none", unbalanced)
    _draw_grid(axes, 10.35, 1.25, "headtail", balanced)
    for rank, colour in enumerate(RANKS):
        axes.add_patch(Rectangle((7.0, 2.3 + 0.42 * rank), 0.32, 0.28, color=colour))
        text(axes, 7.45, 2.44 + 0.42 * rank, f"rank {rank}", 12.5, ha="left")
    text(axes, 8, 7.85, "What each rank sends, for the attention of one layer", 16, weight="bold")
    _draw_ring(axes, 2.7, 9.75)
    _draw_gather(axes, 8.0, 9.75)
    _draw_ulysses(axes, 13.1, 9.75)
    return figure


def _draw_grid(axes: Axes, x: float, y: float, name: str, owners: tuple[int, ...]) -> None:
    """Causal attention, coloured by the rank that has the query, and each rank's share of the work."""
    cell = 0.57
    side = cell * len(owners)
    text(axes, x + side / 2, y - 0.12, f'context_parallel_load_balancer = "{name}"', 13, weight="bold")
    text(axes, x + side / 2, y + 0.2, "keys", 12)
    text(axes, x - 0.85, y + 0.9 + side / 2, "queries", 12, rotation=90)
    work = [0.0] * 4
    for place, rank in enumerate(owners):
        colour, at, top = RANKS[rank], x + place * cell, y + 0.9 + place * cell
        axes.add_patch(Rectangle((at, y + 0.42), cell, 0.32, facecolor=colour, edgecolor="white"))
        axes.add_patch(Rectangle((x - 0.62, top), 0.42, cell, facecolor=colour, edgecolor="white"))
        text(axes, at + cell / 2, y + 0.58, str(place), 11, "white")
        text(axes, x - 0.41, top + cell / 2, str(place), 11, "white")
        for key in range(len(owners)):
            left = x + key * cell
            axes.add_patch(Rectangle((left, top), cell, cell, facecolor="white", edgecolor="#d0d7de", linewidth=0.8))
            if key < place:
                axes.add_patch(Rectangle((left, top), cell, cell, facecolor=colour, edgecolor="white", linewidth=0.8))
            elif key == place:
                axes.fill([left, left, left + cell], [top, top + cell, top + cell], color=colour, linewidth=0)
        work[rank] += place + 0.5
    base = y + 0.9 + side + 0.35
    for rank, share in enumerate(work):
        middle = x + (rank + 0.5) * side / 4
        text(axes, middle, base, f"{100 * share / sum(work):.0f} %", 13, RANKS[rank], weight="bold")
    text(axes, x - 0.15, base, "work\n(ring)", 12, ha="right")


def _nodes(x: float, y: float) -> list[tuple[float, float]]:
    return [(x - 0.95, y - 0.75), (x + 0.95, y - 0.75), (x + 0.95, y + 0.75), (x - 0.95, y + 0.75)]


def _draw_ranks(axes: Axes, places: list[tuple[float, float]]) -> None:
    for rank, (x, y) in enumerate(places):
        axes.add_patch(Rectangle((x - 0.3, y - 0.25), 0.6, 0.5, facecolor=RANKS[rank], edgecolor="white", zorder=3))
        text(axes, x, y, str(rank), 13, "white", weight="bold", zorder=4)


def _captions(axes: Axes, x: float, title: str, lines: str) -> None:
    text(axes, x, 8.4, title, 14, weight="bold")
    text(axes, x, 11.65, lines, 12)


def _draw_ring(axes: Axes, x: float, y: float) -> None:
    places = _nodes(x, y)
    (west, north), (east, south) = places[0], places[2]
    arrow(axes, (west + 0.34, north), (east - 0.34, north), SENT)
    arrow(axes, (east, north + 0.3), (east, south - 0.3), SENT)
    arrow(axes, (east - 0.34, south), (west + 0.34, south), SENT)
    arrow(axes, (west, south - 0.3), (west, north + 0.3), SENT)
    text(axes, x, y, "k, v", 14, SENT)
    _draw_ranks(axes, places)
    _captions(
        axes,
        x,
        "ring",
        "k and v of each rank visit all the others,\nforward and again backward;\nthere with their gradients",
    )


def _draw_gather(axes: Axes, x: float, y: float) -> None:
    places = _nodes(x, y)
    (west, north), (east, south) = places[0], places[2]
    for height in (north, south):
        arrow(axes, (west + 0.34, height), (east - 0.34, height), SENT, ends=2)
    for side in (west, east):
        arrow(axes, (side, north + 0.3), (side, south - 0.3), SENT, ends=2)
    arrow(axes, (west + 0.34, north + 0.28), (east - 0.34, south - 0.28), SENT, ends=2)
    arrow(axes, (east - 0.34, north + 0.28), (west + 0.34, south - 0.28), SENT, ends=2)
    text(axes, x, y, "k, v", 14, SENT, bbox=BLANK)
    _draw_ranks(axes, places)
    _captions(
        axes,
        x,
        "allgather_kv",
        "every rank gets all of k and v, once;\nbackward, their gradients are summed\nto where they came from",
    )


def _draw_ulysses(axes: Axes, x: float, y: float) -> None:
    cell = 0.4
    for place, by_head in ((x - 2.0, False), (x + 0.8, True)):
        for sequence in range(4):
            for head in range(4):
                colour = RANKS[head if by_head else sequence]
                corner = (place + cell * head, y - 2 * cell + cell * sequence)
                axes.add_patch(Rectangle(corner, cell, cell, facecolor=colour, edgecolor="white"))
        text(axes, place + 2 * cell, y - 2 * cell - 0.2, "heads", 12)
        if not by_head:
            text(axes, place - 0.2, y, "sequence", 12, rotation=90)
    arrow(axes, (x - 0.25, y - 0.2), (x + 0.65, y - 0.2), SENT)
    arrow(axes, (x + 0.65, y + 0.2), (x - 0.25, y + 0.2), SENT)
    text(axes, x + 0.2, y - 0.45, "q, k, v", 13, SENT)
    text(axes, x + 0.2, y + 0.45, "result", 13, SENT)
    _captions(
        axes,
        x,
        "ulysses",
        "q, k, v go to the rank that has the head,\nresults come back;\nbackward, four gradients the other way",
    )


SEQUENCE, LAYERS = 8192, 12
"""Length of the sequence, and number of first layers, that draw_visible shows."""


def visible_rows() -> list[tuple[str, str, list[int]]]:
    """(models, visible keys of a query in words, the maximum number of visible keys in each of the first layers).

    The rows cover published sizes, whose names begin with a digit. Sizes that see the same keys share a row.
    """
    rows: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for family, (_, flavors) in MODELS.items():
        alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for size, config in flavors.items():
            if size[0].isdigit():
                alike.setdefault(_seen(config), []).append(size)
        for seen, sizes in alike.items():
            rows.setdefault(seen, []).append(family if len(alike) == 1 else f"{family} {', '.join(sizes)}")
    return [("\n".join(names), words, [*tokens]) for (words, tokens), names in rows.items()]


def _seen(config: TransformerConfig) -> tuple[str, tuple[int, ...]]:
    """The visible keys of a query in words, and the maximum number of visible keys in each layer."""
    if config.window is None or config.window >= SEQUENCE:
        return "all up to\nits own", (SEQUENCE,) * LAYERS
    words = f"the last {config.window:,}" + (f",\nall in 1 layer of {config.full_every}" if config.full_every else "")
    return words, tuple(config.window if config.has_window(layer) else SEQUENCE for layer in range(LAYERS))


def draw_visible() -> Figure:
    """The keys that queries see in each layer. Models that see the same keys share a row."""
    rows, cell, left, top = visible_rows(), 0.78, 3.4, 1.5
    heights = [max(0.92, 0.3 * len(models.splitlines())) for models, _, _ in rows]
    figure, axes = canvas(15.9, top + sum(heights) + 0.25)
    text(axes, 7.6, 0.4, f"Which keys a query sees, in a sequence of {SEQUENCE:,} tokens", 18, weight="bold")
    text(axes, 7.6, 0.76, "queries downwards, keys to the right", colour=GREY)
    text(axes, left - 0.2, 1.2, "layer", ha="right")
    for layer in range(LAYERS):
        text(axes, left + (layer + 0.5) * 0.84, 1.2, str(layer))
    for (models, words, tokens), height in zip(rows, heights, strict=True):
        middle = top + height / 2
        text(axes, 0.2, middle, models, 13, ha="left", weight="bold")
        text(axes, left + LAYERS * 0.84 + 0.12, middle, words, ha="left")
        for layer, count in enumerate(tokens):
            x, y, width = left + 0.84 * layer, middle - cell / 2, cell * count / SEQUENCE
            axes.add_patch(Rectangle((x, y), cell, cell, facecolor="white", edgecolor="#d0d7de", linewidth=0.8))
            corners = [(x, y), (x + cell, y + cell), (x + cell - width, y + cell), (x, y + width)]
            axes.fill(*zip(*corners, strict=True), color=RANKS[count < SEQUENCE], linewidth=0.8)
        top += height
    return figure


def draw_chat_rows(shown: int = 6) -> Figure:
    """The first rows of the bundled chats: one chat a row above, packed below."""
    figure, axes = canvas(10, 4.9)
    colours = {"trained": RANKS[2], "seen, not trained": "#c9d7ea", "padding": "#f0f1f3"}
    for top, packing in ((0.45, "none"), (2.65, "best_fit")):
        config = load_config(["--job.config_file", "recipes/llama_debug_sft.toml", "--chat.packing", packing])
        rows = rows_of(config)
        full = rows.num_tokens / (len(rows) * (rows.seq_len + 1))
        text(axes, 0.3, top - 0.2, f'chat.packing = "{packing}": {len(rows)} rows, {full:.0%} full', ha="left")
        width = 9.4 / rows.seq_len
        for number in range(shown):
            batch = batch_of(rows, np.array([number]), document_mask=True)
            positions, labels = batch["positions"][0].tolist(), batch["labels"][0].tolist()
            y = top + 0.3 * number
            for at, position in enumerate(positions):
                kind = "padding" if position < 0 else "trained" if labels[at - 1] != IGNORED else "seen, not trained"
                if at == 0:
                    kind = "seen, not trained"
                colour = colours[kind]
                axes.add_patch(Rectangle((0.3 + at * width, y), width * 1.05, 0.22, facecolor=colour, linewidth=0))
                if position == 0:
                    axes.plot([0.3 + at * width] * 2, [y - 0.02, y + 0.24], color=INK, linewidth=1.4)
    for number, (kind, colour) in enumerate(colours.items()):
        axes.add_patch(Rectangle((0.3 + 2.4 * number, 4.5), 0.3, 0.2, facecolor=colour, linewidth=0))
        text(axes, 0.7 + 2.4 * number, 4.6, kind, ha="left", size=11)
    text(axes, 7.7, 4.6, "| a chat begins, at position 0", ha="left", size=11)
    return figure


def draw_averages() -> Figure:
    """Validation loss of a run with a warm-up-stable-decay schedule: of the weights, and of their moving average."""
    rows = [json.loads(line) for line in Path(__file__).with_name("averages.jsonl").read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    lines = {"validation_loss": ("weights", RANKS[0]), "validation_loss_ema": ("moving average, decay 0.98", RANKS[1])}
    for key, (name, colour) in lines.items():
        axes.plot([row["step"] for row in rows], [row[key] for row in rows], colour, marker=".", label=name)
    axes.axvspan(240, 300, color=GREY, alpha=0.2, linewidth=0, label="decay of the learning rate")
    axes.set(xlabel="step", ylabel="validation loss, nats a token", xlim=(0, 300), ylim=(3.8, 5.2))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def draw_distill(kept: int = 4) -> Figure:
    """A teacher's probabilities of next tokens: all of them, and the kept ones with one class for the others."""
    figure, axes = canvas(10, 3.6)
    rng = np.random.default_rng(0)
    teacher, student = (np.exp(np.sort(rng.normal(0, 1.4, 24))[::-1] + rng.normal(0, noise, 24)) for noise in (0, 0.5))
    teacher, student = teacher / teacher.sum(), student / student.sum()
    base, height, width = 3.0, 6.0, 0.17

    def bar(x: float, share: float, colour: str, wide: float = width) -> None:
        axes.add_patch(Rectangle((x, base - height * share), wide, height * share, facecolor=colour, linewidth=0))

    for place, share in enumerate(teacher):
        bar(0.3 + 0.19 * place, share, RANKS[0] if place < kept else "#c9d7ea")
    text(axes, 2.5, 3.25, "the teacher's probabilities of all tokens", size=11)
    arrow(axes, (4.95, 1.9), (5.5, 1.9))
    for place in range(kept + 1):
        x = 5.8 + 0.8 * place
        for number, (shares, colours) in enumerate(
            ((teacher, (RANKS[0], "#c9d7ea")), (student, (RANKS[1], "#f4dcc0")))
        ):
            share = shares[place] if place < kept else shares[kept:].sum()
            bar(x + 0.31 * number, share, colours[place == kept], 0.29)
        text(axes, x + 0.3, 3.25, "all others" if place == kept else f"token {place + 1}", size=11)
    for number, words in enumerate(("teacher", "student")):
        axes.add_patch(Rectangle((5.8 + 1.4 * number, 0.25), 0.3, 0.2, facecolor=RANKS[number], linewidth=0))
        text(axes, 6.2 + 1.4 * number, 0.35, words, ha="left", size=11)
    return figure


def draw_distilled() -> Figure:
    """Validation losses of the runs of docs/distill.md with and without a teacher, by step: a line for each seed."""
    rows = [json.loads(line) for line in Path(__file__).with_name("distilled.jsonl").read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for number, run in enumerate(dict.fromkeys(row["run"] for row in rows)):
        for seed in sorted({row["seed"] for row in rows}):
            own = [row for row in rows if (row["run"], row["seed"]) == (run, seed)]
            steps, losses = ([row[key] for row in own] for key in ("step", "validation_loss"))
            axes.plot(steps, losses, RANKS[1 - number], marker=".", label=run if seed == 0 else None)
    axes.set(xlabel="step", ylabel="validation loss, nats a token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def draw_preference() -> None:
    """Held-out pairs and rewards in the run of recipes/llama_debug_dpo.toml, whose rows preference.jsonl has."""
    rows = read_rows(Path(__file__).with_name("preference.jsonl"))
    accuracy = {"held-out pairs": points(rows, "validation_reward_accuracy")}
    rewards = {
        f"{name} pairs": points(rows, key)
        for name, key in (("training", "reward_margin"), ("held-out", "validation_reward_margin"))
    }
    logp = {side: points(rows, f"validation_logp_{side}") for side in ("chosen", "rejected")}
    losses = {"training pairs": points(rows, "loss"), "held-out pairs": points(rows, "validation_loss")}
    text = {"a book beside the pairs": points(rows, "validation_text_loss")}
    panels = [
        Panel("reward accuracy", "share of pairs", accuracy, named=True),
        Panel("reward margin", "chosen - rejected", rewards),
        Panel("log-probability of held-out completions", "nats", logp),
        Panel("drift from the reference", "nats", {"training pairs": points(rows, "reference_drift")}, named=True),
        Panel("loss of pairs", "nats a pair", losses),
        Panel("loss of text", "nats a token", text, named=True),
    ]
    draw(panels, Path(__file__).with_name("preference.png"))


def draw_plan() -> None:
    """The schedule of Llama 3.1 70B on 64 H100, as `--png` of the planner draws it."""
    layout = Layout(Degrees(pp=4, dp_shard=2, tp=8))
    words = ["--training.global_batch_size", "16", "--training.local_batch_size", "8"]
    words += ["--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"]
    job = load_config(["--job.config_file", "recipes/llama70b.toml", *words])
    planner = Planner(job, layout.degrees.world_size, find_device("h100-80g"))
    schedule = pictures(planner.plan(layout.given_to(job), layout.degrees), planner)["schedule"]
    draw([schedule], Path(__file__).with_name("plan.png"), 1)


def draw_sweep() -> None:
    """The report of the sweep of tests/benchmarks/sweep.py."""
    results, rows = sweep.read()
    panels = sweep_report.panels(results, parse_grid(sweep.GRID))
    draw([*panels, *sweep_report.losses_of(curve_panels(rows))], Path(__file__).with_name("sweep.png"))


def main() -> None:
    """Write the figures beside this file."""
    plt.rcParams["font.family"] = ["DejaVu Sans"]
    figures = {"tensor_parallel": draw_tensor_parallel(), "context_parallel": draw_context_parallel()}
    figures |= {"chat_rows": draw_chat_rows(), "averages": draw_averages(), "distill": draw_distill()}
    figures["distilled"] = draw_distilled()
    for name, figure in figures.items():
        figure.savefig(Path(__file__).with_name(f"{name}.png"), dpi=100, facecolor="white")
    draw_plan()
    draw_preference()
    draw_sweep()
    mup.figures()
    described = {"Description": json.dumps(visible_rows())}
    draw_visible().savefig(Path(__file__).with_name("visible.png"), dpi=100, facecolor="white", metadata=described)


if __name__ == "__main__":
    main()
