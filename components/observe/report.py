"""Curves of runs as panels, drawn into one PNG or into one self-contained HTML page, which can be mailed."""

import base64
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jinja2

from components.config.files import read_json_if_whole, write_page

Points = tuple[Sequence[float], Sequence[float | None]]
"""x and y; a y of None is a gap."""

# Colours that colour-blind readers tell apart (M. Okabe and K. Ito), then matplotlib's own.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8c564b", "#7f7f7f", "#17becf")
SIZE = (4.8, 3.0)
"""Inches of a panel: small, so that its words can be read on a phone."""


class Picture(Protocol):
    title: str
    size: tuple[float, float]

    def draw(self, axes: Any) -> None:
        """Draw into matplotlib's axes."""


@dataclass
class Panel:
    """One picture: lines by name, over steps."""

    title: str
    unit: str
    lines: Mapping[str, Points]
    log: bool = False
    shades: bool = False
    """Lines are one quantity in successive layers, coloured by depth; the legend names only the first and last."""
    limits: Mapping[str, Points] = field(default_factory=dict)
    """Dashed lines; the space under the first line, where values are good, is shaded."""
    named: bool = False
    """Show the legend also for a single line."""
    size: tuple[float, float] = SIZE
    xlabel: str = "step"
    log_x: bool = False
    ticks: Sequence[str] = ()
    """Names of x = 0, 1, ..."""
    dots: Points = ((), ())
    """Single values beside the lines."""

    def draw(self, axes: Any) -> None:
        """Draw into matplotlib's axes; lines beyond the number of colours are grey."""
        from matplotlib import colormaps
        from matplotlib.ticker import MaxNLocator

        last = len(self.lines) - 1
        for number, (name, (x, y)) in enumerate(self.lines.items()):
            if self.shades:
                style: dict[str, Any] = {"color": colormaps["viridis"](0.9 * number / max(1, last))}
                style |= {"label": plain(name)} if number in (0, last) else {}
            elif number < len(COLOURS):
                # Dashes make lines visible that lie on top of each other.
                style = {
                    "color": COLOURS[number],
                    "label": plain(name),
                    "ls": (0, (4, 1.5 + number % 4)) if number else "-",
                }
            else:
                style = {"color": "#bbbbbb", "lw": 0.8, "zorder": 1, "label": None if number < last else "others"}
            values = [math.nan if value is None or (self.log and value <= 0) else value for value in y]
            axes.plot(x, values, **{"lw": 1.3, "marker": "o" if len(values) < 12 else "", "ms": 3} | style)
        for number, (name, (x, y)) in enumerate(self.limits.items()):
            axes.plot(x, y, "--", color="#999999" if number else "#333333", lw=1, label=plain(name))
            if number == 0:
                axes.fill_between(x, y, color="#009E73", alpha=0.1, lw=0)
        axes.plot(*self.dots, "o", color="#999999", ms=3, zorder=1)
        drawn = [*self.lines.values(), *self.limits.values()]
        if self.log and any(value and value > 0 for _, y in drawn for value in y):
            axes.set_yscale("log")
        if self.ticks:
            axes.set_xticks(range(len(self.ticks)), [plain(name) for name in self.ticks])
        elif self.log_x:
            axes.set_xscale("log", base=2)
            ticks = sorted({value for x, _ in drawn for value in x})
            shown = ticks[:: max(1, len(ticks) // 5)]
            axes.set_xticks(shown, [f"{value:g}" for value in shown])
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=self.xlabel == "step", nbins=6))
        axes.set_title(plain(self.title), fontsize=11)
        axes.set(xlabel=self.xlabel, ylabel=self.unit)
        axes.grid(alpha=0.3)
        names = axes.get_legend_handles_labels()[1]
        if len(names) > 1 or (names and self.named):
            columns = 3 if max(map(len, names)) < 18 else 2
            below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "frameon": False}
            axes.legend(fontsize=8, **(below | {"ncols": columns} if len(names) > 4 else {}))


def plain(text: str) -> str:
    """Escapes text: matplotlib would draw text between two $ as a formula, and leave out labels that begin with _."""
    return " " * text.startswith("_") + text.replace("$", r"\$")


def draw(panels: Sequence[Picture], path: Path, columns: int = 2) -> None:
    """All panels as one PNG, each of the first one's size. Raises OSError."""
    figure, all_axes = _figure(len(panels), columns, panels[0].size)
    for panel, axes in zip(panels, all_axes, strict=False):
        panel.draw(axes)
    figure.savefig(path, dpi=160, bbox_inches="tight")


_LOSSES = {"loss": "training", "validation_loss": "validation", "validation_loss_ema": "validation of the average"}
"""Field of a row -> its name in loss.png."""


def draw_loss(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Training and validation loss by step, as a PNG."""
    lines = {}
    for key, label in _LOSSES.items():
        steps, losses = points(rows, key)
        if steps:
            lines[f"{label}: {losses[-1]:.3f}"] = (steps, losses)
    draw([Panel(title, "loss (nats a token)", lines, named=True)], path)


def page(path: Path, title: str, sections: Iterable["Section"]) -> None:
    """Write the page. Raises OSError, also if a file is there that is no page."""
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    template = jinja2.Environment(loader=folder, autoescape=True, trim_blocks=True).get_template("page.html")
    write_page(path, template.render(title=title, sections=list(sections), picture=_as_address))


@dataclass
class Section:
    """A part of a page; empty fields are left out."""

    title: str
    text: str = ""
    table: Sequence[Sequence[str]] = ()
    """Rows; the first names the columns."""
    panels: Sequence[Picture] = ()
    drawings: dict[str, str] = field(default_factory=dict)
    """Drawings in characters, by name."""
    verdict: bool | None = None
    """Whether the text is good news or bad."""


def _figure(panels: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, panels)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for left in axes[panels:]:
        left.axis("off")
    return figure, axes


def _as_address(panel: Picture) -> str:
    """The panel as a data: URL of an SVG image."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.hashsalt": panel.title}):  # the same page each time
        figure, (axes,) = _figure(1, 1, panel.size)
        panel.draw(axes)
        figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue().encode()).decode()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, without lines that a kill has cut short or a bad disk has changed."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def points(rows: Iterable[dict[str, Any]], *path: str) -> Points:
    """Steps and the values of a key at them; the path of a nested one has several keys."""
    found = []
    for row in rows:
        value: Any = row
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found.append((row["step"], value))
    return [step for step, _ in found], [value for _, value in found]


CURVES = {
    "loss": ("training loss", "nats a token"),
    "unregularized_loss": ("training loss without terms", "nats a token"),
    "validation_loss": ("validation loss", "nats a token"),
    "validation_loss_ema": ("validation loss of the weights' average", "nats a token"),
    "validation_text_loss": ("validation loss of text", "nats a token"),
    "reward_margin": ("reward margin", "chosen - rejected"),
    "reward_accuracy": ("reward accuracy", "share of pairs"),
    "logp_chosen": ("log-probability of the chosen", "nats"),
    "logp_rejected": ("log-probability of the rejected", "nats"),
    "reference_drift": ("drift from the reference", "nats"),
    "validation_reward_margin": ("reward margin of held-out pairs", "chosen - rejected"),
    "validation_reward_accuracy": ("reward accuracy of held-out pairs", "share of pairs"),
    "grad_norm": ("gradient norm", "before clipping"),
    "lr": ("learning rate", ""),
    "tokens_per_second": ("speed", "tokens a second, all ranks"),
    "memory_gib": ("memory of rank 0, at its peak", "GiB"),
}
BY_SOURCE = {
    "loss_by_source": "training loss by source",
    "validation_loss_by_source": "validation loss by source",
}
DYNAMICS = {
    "gradient_norm": ("gradient norm by layer", "before clipping"),
    "weight_norm": ("weight norm by layer", ""),
    "update_ratio": ("update / weights by layer", "norms"),
    "attention_logit_max": ("largest attention logit by layer", ""),
    "expert_load_max": ("busiest expert by layer", "over the mean"),
    "router_entropy": ("entropy of the router by layer", "nats"),
}


def curve_panels(runs: dict[str, list[dict[str, Any]]]) -> list[Panel]:
    """A panel for each quantity of CURVES that any run has logged, with a line for each run that logged it."""
    lines = {key: {name: points(rows, key) for name, rows in runs.items()} for key in CURVES}
    drawn = {key: {name: line for name, line in named.items() if line[0]} for key, named in lines.items()}
    return [Panel(*CURVES[key], named) for key, named in drawn.items() if named]


def source_panels(rows: list[dict[str, Any]]) -> list[Panel]:
    """The losses of a mixture's sources with a line for each source; empty without a mixture."""
    names = {key: dict.fromkeys(name for row in rows for name in row.get(key, ())) for key in BY_SOURCE}
    lines = {key: {name: points(rows, key, name) for name in own} for key, own in names.items()}
    return [Panel(BY_SOURCE[key], "nats a token", named, named=True) for key, named in lines.items() if named]


def evaluation_panels(rows: list[dict[str, Any]]) -> list[Panel]:
    """A panel for each metric of tasks ([evaluation]), with a line for each task; empty without tasks."""
    named = [name.rpartition("/") for name in dict.fromkeys(name for row in rows for name in row.get("evaluation", ()))]
    return [
        Panel(
            metric,
            "",
            {task: points(rows, "evaluation", f"{task}/{metric}") for task, _, own in named if own == metric},
            named=True,
        )
        for metric in dict.fromkeys(metric for *_, metric in named)
    ]


def dynamics_panels(rows: list[dict[str, Any]]) -> list[Panel]:
    """One run's dynamics (metrics.dynamics_freq) with a line for each layer; empty if they are off."""
    tables: dict[str, Any] = next((row["dynamics"] for row in rows if "dynamics" in row), {})
    lines = {key: {name: points(rows, "dynamics", key, name) for name in tables.get(key, {})} for key in DYNAMICS}
    return [Panel(*DYNAMICS[key], named, log=True, shades=True) for key, named in lines.items() if named]


def run_report(folders: Sequence[Path], path: Path) -> None:
    """The page of one run, or of several runs in the same panels, from their dump folders.

    Raises OSError if the page cannot be written, ValueError if a folder has no metrics.jsonl with rows.
    """
    short = {folder.resolve().name: folder for folder in folders}
    named = short if len(short) == len(folders) else {str(folder): folder for folder in folders}
    runs = {name: read_rows(folder / "metrics.jsonl") for name, folder in named.items()}
    for name, rows in runs.items():
        if not rows:
            raise ValueError(f"{named[name] / 'metrics.jsonl'}: no rows: not the dump folder of a run that has logged")
    about = {name: _read_run(folder) for name, folder in named.items()}
    table = [["run", "steps", "loss", "tokens/s", "layout", "ranks", "device", "torch", "revision"]]
    for name, rows in runs.items():
        losses, speeds = points(rows, "loss"), points(rows, "tokens_per_second")
        loss = f"{losses[1][-1]:.4f}" if losses[1] else ""
        middle = sorted(value for value in speeds[1] if value is not None)
        speed = f"{middle[len(middle) // 2]:,.0f}" if middle else ""
        table.append([name, str(max(row["step"] for row in rows)), loss, speed, *about_cells(about[name])])
    sections = [Section("Runs", table=table), Section("Curves", panels=curve_panels(runs))]
    several = len(runs) > 1
    for name, rows in runs.items():
        for title, panels in (
            (f"Sources of {name}" if several else "Sources of the mixture", source_panels(rows)),
            (f"Tasks of {name}" if several else "Tasks", evaluation_panels(rows)),
            (f"Inside {name}" if several else "Inside the model", dynamics_panels(rows)),
        ):
            if panels:
                sections.append(Section(title, panels=panels))
    title = " against ".join(runs) if len(runs) > 1 else about[next(iter(runs))].get("description") or next(iter(runs))
    page(path, title, sections)


def about_cells(about: dict[str, Any]) -> list[str]:
    """Layout, ranks, device, torch and git revision of a run.json, as strings."""
    git, versions = (found if isinstance(found := about.get(key), dict) else {} for key in ("git", "versions"))
    revision = str(git.get("revision") or "")[:10] + ("+" if git.get("dirty") else "")
    layout, ranks, device = (str(about.get(key, "")) for key in ("layout", "ranks", "device"))
    return [layout, ranks, device, str(versions.get("torch", "")), revision]


def _read_run(folder: Path) -> dict[str, Any]:
    try:
        return read_json_if_whole(folder / "run.json")
    except OSError:
        return {}
