"""What a comparison found: a table for the console, Markdown for a pull request, a page and a picture to look at."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from components.observe.report import COLOURS, SIZE, Panel, Points, Section, about_cells, draw, page
from tests.convergence.sides import SERIES, Curve
from tests.convergence.verdict import BAND, Distance, Floor, differences, distances, first_outside, who_moved

NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass
class Bars:
    """One picture: a bar for each name."""

    title: str
    unit: str
    values: Mapping[str, float]
    size: tuple[float, float] = SIZE

    def draw(self, axes: Any) -> None:
        """Draw into matplotlib's axes."""
        bars = axes.barh(list(self.values), list(self.values.values()), color=COLOURS[0], height=0.6)
        axes.bar_label(bars, [f"{value:,.4g}" for value in self.values.values()], fontsize=7, padding=2)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.tick_params(axis="y", labelsize=8 if len(self.values) < 12 else 6)
        axes.set_title(self.title, fontsize=11)
        axes.set_xlabel(self.unit)


@dataclass
class Comparison:
    """Curves of one recipe, all against the reference."""

    title: str
    reference: Curve
    disturbed: list[Curve]
    floor: Floor
    curves: list[Curve]
    failures: dict[str, str]
    """Sides that did not end well: the reason by name."""
    golden: Curve | None = None
    golden_changes: Sequence[str] = ()
    """What decides the run and is not as it was for the golden curve."""

    @property
    def all_curves(self) -> list[Curve]:
        return [*self.curves, *([self.golden] if self.golden else [])]

    def found(self, curve: Curve) -> dict[str, Distance]:
        return distances(curve, self.reference, self.floor)

    @property
    def outside(self) -> list[Curve]:
        return [curve for curve in self.all_curves if first_outside(self.found(curve)) is not None]

    @property
    def same(self) -> bool:
        return not (self.outside or self.failures or self.golden_changes)

    def sentences(self) -> list[str]:
        """The verdict: one sentence if all is well, else one for each thing that is not."""
        lines = [f"{text}: did not end: {reason.splitlines()[0]}" for text, reason in self.failures.items()]
        lines += [
            f"golden: made for another run: {change}; --refresh, if it is meant" for change in self.golden_changes
        ]
        for curve in self.outside:
            found = self.found(curve)
            step = first_outside(found)
            left = [NAMES[name] for name, distance in found.items() if distance.leaves_band is not None]
            witnesses = [other for other in self.all_curves if other is not curve]
            moved = who_moved(curve, self.reference, witnesses, self.floor)
            lines.append(
                f"{curve.text}: not the run of {self.reference.text}: {' and '.join(left)} left the band, first at "
                f"step {step}; what moved: {moved}"
            )
        if lines:
            return lines
        sides = "1 side" if len(self.curves) == 1 else f"{len(self.curves)} sides"
        known = "and the golden curve" if self.golden else "(it has no golden curve)"
        return [f"the same run: {sides} {known} within {BAND:g} x the noise floor"]

    def table(self) -> list[list[str]]:
        """A row for each curve; the first row names the columns."""
        rows = [["side", "", *(f"{NAMES[name]}, x floor (step)" for name in SERIES), "leaves", "tokens/s", "GiB"]]
        rows.append([self.reference.text, "reference", "", "", "", *_cost(self.reference)])
        for curve in self.all_curves:
            found = self.found(curve)
            step = first_outside(found)
            cells = [_times(found[name]) for name in SERIES]
            word, leaves = ("same", "") if step is None else ("DIFFERS", f"step {step}")
            rows.append([curve.text, word, *cells, leaves, *_cost(curve)])
        rows += [[text, "FAILED", *[""] * 5] for text in self.failures]
        return rows

    def panels(self) -> list[Panel | Bars]:
        """Curves, their relative differences on a log scale with the band, speed and memory."""
        # Those that are furthest off come first: they have colours where there are many.
        others = sorted(self.all_curves, key=lambda curve: -max(each.worst for each in self.found(curve).values()))
        shown = [self.reference, *others]
        panels: list[Panel | Bars] = []
        for name in SERIES:
            lines = {_short(curve.text): _by_step(getattr(curve, name)) for curve in shown}
            panels.append(Panel(NAMES[name], "", lines, named=True))
        for name in SERIES:
            lines = {_short(curve.text): _by_step(differences(curve, self.reference)[name]) for curve in others}
            bounds = {"band": [BAND * value for value in self.floor[name]], "noise floor": self.floor[name]}
            limits = {text: _by_step(values) for text, values in bounds.items()}
            title = f"{NAMES[name]}: difference from {self.reference.text}"
            panels.append(Panel(title, "relative", lines, log=True, limits=limits))
        ran = [self.reference, *self.curves]
        speeds = {_short(curve.text): median(curve.tokens_per_second) for curve in ran}
        panels.append(Bars("speed", "tokens a second", speeds))
        memory = {_short(curve.text): curve.memory_gib for curve in ran}
        panels.append(Bars("memory of rank 0, at its peak", "GiB", memory))
        return panels


def _short(text: str) -> str:
    """A side's name for a picture: of a setting its value, where that says enough."""
    words: list[str] = []
    for word in text.split():
        if word.startswith("--"):
            words.append(word[2:].rpartition(".")[0] if word.endswith(".enable") else word[2:].rpartition(".")[2])
        elif words and "_" in words[-1] and word not in ("true", "false") and not word.isdecimal():
            words[-1] = word
        else:
            words.append(word)
    return " ".join(words)


def _times(distance: Distance) -> str:
    return f"{distance.worst:.2g} ({distance.worst_step})" if distance.worst else "0"


def _cost(curve: Curve) -> list[str]:
    if not curve.tokens_per_second:
        return ["", ""]
    return [f"{median(curve.tokens_per_second):,.0f}", f"{curve.memory_gib:.2f}"]


def _by_step(values: Sequence[float]) -> Points:
    return range(1, len(values) + 1), [value if math.isfinite(value) else None for value in values]


def as_text(table: Sequence[Sequence[str]]) -> str:
    """The table in columns, for a console."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def as_markdown(table: Sequence[Sequence[str]]) -> str:
    first, *rows = table
    lines = [first, ["---"] * len(first), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


_NOISE = (
    "The reference, run again with its rounding disturbed: sums in another order, or every weight moved to its nearest "
    "neighbour. The noise floor at a step is the largest difference that any of these had until then."
)
_KEPT = " This floor is the golden curve's: it was measured when that curve was made, on this kind of device."


def write(comparison: Comparison, folder: Path, command: str) -> None:
    """report.html, report.png, summary.md and result.json in this folder. Raises OSError."""
    found, text = comparison, "\n".join(comparison.sentences())
    shown = [found.reference, *found.curves]
    about = [["side", "layout", "ranks", "device", "torch", "revision"]]
    about += [[curve.text, *about_cells(curve.about)] for curve in shown]
    noise = [["disturbed", *(f"{NAMES[name]}, largest" for name in SERIES)]] if found.disturbed else []
    for curve in found.disturbed:
        noise.append([curve.text, *(f"{max(values):.1e}" for values in differences(curve, found.reference).values())])
    sections = [
        Section("Verdict", text, verdict=found.same),
        Section("Each against the reference", table=found.table()),
        Section("Curves", panels=found.panels()),
        Section("What rounding alone does", _NOISE + ("" if noise else _KEPT), table=noise),
        Section("Layouts", drawings={curve.text: curve.drawing for curve in shown if curve.drawing}),
        Section("Made by", command, table=about),
        *(Section(f"{side} did not end", reason) for side, reason in found.failures.items()),
    ]  # fmt: skip
    page(folder / "report.html", f"{found.title}: {'the same run' if found.same else 'NOT the same run'}", sections)
    draw(found.panels(), folder / "report.png")
    head = f"### {'✅' if found.same else '❌'} {found.title}"
    summary = [head, *found.sentences(), as_markdown(found.table()), f"`{command}`"]
    (folder / "summary.md").write_text("\n\n".join(summary) + "\n", encoding="utf-8")
    result = {
        "same": found.same,
        "verdict": found.sentences(),
        "floor": {name: list(values) for name, values in found.floor.items()},
        "sides": {
            curve.text: {name: getattr(curve, name) for name in SERIES}
            | {f"{name}_times_floor": list(distance.by_step) for name, distance in found.found(curve).items()}
            for curve in [found.reference, *found.all_curves]
        },
    }
    (folder / "result.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
