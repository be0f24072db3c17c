"""Writes docs/composition.md and its picture from what `python -m tests.matrix` measured."""

import functools
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from components.config import ROOT
from components.observe.metrics import git_revision
from tests.layouts import AXES, MAIN_AXES, layout

Row = dict[str, Any]
"""A layout's settings by axis, its ranks, verdict, figures, refusal and seconds: a line of the results."""
PAGE, PICTURE = ROOT / "docs" / "composition.md", ROOT / "assets" / "figures" / "composition.png"
RECORD = ROOT / "assets" / "composition.jsonl"
"""Results of the last whole matrix: it takes hours, and may go on elsewhere."""


@functools.cache
def code() -> str:
    """A digest of the code that decides a result: results of other code are not read."""
    folders = [path for name in ("components", "models", "parallelize") for path in (ROOT / name).rglob("*.py")]
    files = [
        *folders,
        *(ROOT / name for name in ("train.py", *(f"tests/{n}.py" for n in ("harness", "small", "layouts")))),
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:16]


def read(path: Path) -> list[Row]:
    """Results of this code, the last one of each layout; skips the unfinished line of a killed run."""
    rows: dict[str, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["code"] == code():
            row["layout"] = dict(layout(**row["layout"]).cell)
            rows[json.dumps(row["layout"])] = row
    return list(rows.values())


def line(row: Row) -> str:
    """A row as read() takes it, without the settings that are the first of their axis."""
    settings = {axis: value for axis, value in row["layout"].items() if value != AXES[axis][0]}
    figures = {name: float(f"{value:.1e}") for name, value in row["figures"].items()}
    return json.dumps(row | {"layout": settings, "figures": figures}) + "\n"


def write(rows: list[Row], axes: dict[str, tuple[str, ...]], bars: dict[str, float], left: int = 0) -> None:
    """The page and the picture. axes: the settings of a row that are not in it, such as a model family's, are added.

    left: how many layouts of the whole matrix are not among rows.
    """
    axes = {
        axis: tuple(dict.fromkeys((*values, *(row["layout"][axis] for row in rows)))) for axis, values in axes.items()
    }
    PAGE.write_text(page(rows, axes, bars, left), encoding="utf-8")
    draw(rows, axes, bars["gradient"])


def page(rows: list[Row], axes: dict[str, tuple[str, ...]], bars: dict[str, float], left: int = 0) -> str:
    proven = [row for row in rows if row["verdict"] == "proven"]
    ranks = sorted({row["ranks"] for row in rows})
    by_ranks = Counter((row["ranks"], row["verdict"]) for row in rows)
    others = [row for row in rows if row["verdict"] not in ("proven", "refused")]
    refusals = Counter(_rule(row["refusal"]) for row in rows if row["verdict"] == "refused")
    worst = {name: max((row["figures"][name] for row in proven), default=0.0) for name in bars}
    lines = [
        "# What composes with what",
        "",
        "Written by `python -m tests.matrix --all`. Each proven layout was compared with one process, and is the same",
        "run. Each refused layout was refused by a rule before launch. [The promise](promise.md) says how layouts are",
        "compared. Each layout is a line of `assets/composition.jsonl`, with its figures.",
        "",
        f"Revision {(git_revision()['revision'] or 'unknown')[:7]}. "
        f"{len(rows):,} layouts of up to {max(ranks)} ranks on CPU with gloo, torch {torch.__version__}, float32: "
        f"{len(proven):,} proven, {sum(refusals.values()):,} refused, {len(others):,} neither.",
        *([f"{left:,} more were not run with this code: `--all --resume` runs them."] if left else []),
        "",
        "![Worst gradient error of each pair of settings](../assets/figures/composition.png)",
        "",
        "A square is a pair of settings: its row's and its column's. Its colour is the worst gradient error of",
        "all proven layouts with both settings. A square is hatched if every layout with both was refused. The reason",
        "may be a third setting, such as a zero-bubble schedule. A square is white if no layout with both was run.",
        "",
        "| ranks | proven | refused | neither | seconds a layout |",
        "|---|---|---|---|---|",
    ]
    for count in ranks:
        seconds = [row["seconds"] for row in proven if row["ranks"] == count]
        lines.append(
            f"| {count} | {by_ranks[count, 'proven']} | {by_ranks[count, 'refused']} | "
            f"{sum(row['ranks'] == count for row in others)} | {sum(seconds) / max(1, len(seconds)):.1f} |"
        )
    lines += ["", "| figure | worst of all proven layouts | bar |", "|---|---|---|"]
    lines += [f"| {name} | {_number(worst[name])} | {_number(bar)} |" for name, bar in bars.items()]
    lines += ["", "| refused by a rule on | layouts |", "|---|---|"]
    lines += [f"| `{rule}` | {count} |" for rule, count in refusals.most_common()]
    lines += ["", "The axes and their settings:", "", "| axis | settings |", "|---|---|"]
    lines += [f"| {axis} | {', '.join(values)} |" for axis, values in axes.items()]
    lines += ["", "The layouts with the largest errors:", "", "| gradient | ranks | layout |", "|---|---|---|"]
    for row in sorted(proven, key=lambda row: -row["figures"]["gradient"])[:10]:
        settings = [f"{axis} {value}" for axis, value in row["layout"].items() if value != axes[axis][0]]
        lines.append(f"| {row['figures']['gradient']:.1e} | {row['ranks']} | {' · '.join(settings) or 'one rank'} |")
    return "\n".join([*lines, *(f"\nNeither: {row['layout']}" for row in others), ""])


def _number(value: float) -> str:
    return "equal" if value == 0 else f"{value:.1e}"


def _rule(refusal: str) -> str:
    """The key that the first mistake of a refusal names: `command line: table.key = value: reason`."""
    return refusal.partition(": ")[2].partition(" = ")[0]


def draw(rows: Iterable[Row], axes: dict[str, tuple[str, ...]], bar: float) -> None:
    """The worst gradient error of each pair of settings: all settings, against those of degrees and methods.

    Pairs of two others are left out: with them the labels are too small to read at the width of a page.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    columns = [axis for axis in axes if axis in MAIN_AXES]
    order = [*columns, *(axis for axis in axes if axis not in MAIN_AXES)]
    column_settings = [(axis, value) for axis in columns for value in axes[axis]]
    row_settings = [(axis, value) for axis in order[1:] for value in axes[axis]]
    row_of = {setting: number for number, setting in enumerate(row_settings)}
    column_of = {setting: number for number, setting in enumerate(column_settings)}
    worst: dict[tuple[int, int], float] = {}
    refused: set[tuple[int, int]] = set()
    for row in rows:
        settings = [(axis, row["layout"][axis]) for axis in order]
        for one, other in itertools.combinations(settings, 2):
            if one not in column_of:
                continue
            pair = row_of[other], column_of[one]
            if row["verdict"] == "proven":
                worst[pair] = max(worst.get(pair, 0.0), row["figures"]["gradient"])
            elif row["verdict"] == "refused":
                refused.add(pair)
    errors = torch.full((len(row_settings), len(column_settings)), math.nan)
    for (down, across), value in worst.items():
        errors[down, across] = max(value, 1e-8)
    figure, panel = plt.subplots(figsize=(9, 2 + 0.16 * len(row_settings)), facecolor="white")
    shown = panel.imshow(errors.numpy(), norm=LogNorm(1e-8, bar), cmap="viridis")
    for down, across in refused - worst.keys():
        style: dict[str, Any] = {"facecolor": "#eceff2", "edgecolor": "#8c959f", "hatch": "//////", "linewidth": 0}
        panel.add_patch(Rectangle((across - 0.5, down - 0.5), 1, 1, **style))
    panel.set_xticks(range(len(column_settings)), [_label(*each) for each in column_settings], rotation=90)
    panel.set_yticks(range(len(row_settings)), [_label(*each) for each in row_settings])
    for drawn, names in ((panel.axvline, columns), (panel.axhline, order[1:])):
        for edge in itertools.accumulate(len(axes[axis]) for axis in names):
            drawn(edge - 0.5, color="white", linewidth=2.5)
    panel.tick_params(length=0, labelsize=9)
    for spine in panel.spines.values():
        spine.set_visible(False)
    scale = figure.colorbar(shown, cax=panel.inset_axes((0.5, 0.93, 0.48, 0.012)), orientation="horizontal")
    scale.set_label(f"worst gradient error; the bar is {bar:g}", fontsize=10)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=150)
    plt.close(figure)


def _label(axis: str, value: str) -> str:
    return f"{axis} {value}".replace("_", " ")
