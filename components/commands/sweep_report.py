"""The report of a sweep: a row for each point, and which differences are more than the noise of seeds."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, variance

from components.launch.exit_codes import ExitCode
from components.observe.report import Panel, Points, Section, curve_panels, draw, page, read_rows

LEVEL = 0.05
"""Share of sweeps without any difference in which a point would still be called worse."""
_ULP = 2.0**-23
VALIDATION, _TRAINING = "validation loss", "training loss, mean of the last tenth"


@dataclass(frozen=True)
class Result:
    """The end of one run."""

    name: str
    point: tuple[tuple[str, str], ...]
    seed: int
    folder: Path
    loss: float | None
    """None for a run that has diverged."""
    kind: str
    """The name of the loss, such as validation loss."""

    @property
    def said(self) -> str:
        return "diverged" if self.loss is None else f"{self.kind} {self.loss:.4f}"


def result_of(
    name: str, point: tuple[tuple[str, str], ...], seed: int, folder: Path, code: int | None, log_freq: int
) -> Result:
    """The last validation loss; without validations, the mean training loss of the last tenth of the steps.

    The training loss is without the terms that are added to it, a teacher's among them. A loss that was not finite is
    null in the rows. Steps that are logged only because a run was resumed there do not count.
    """
    rows = read_rows(folder / "metrics.jsonl")
    validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
    plain = ("label_loss", "unregularized_loss", "loss")
    training = [(row["step"], next(row[key] for key in plain if key in row)) for row in rows if "loss" in row]
    end = training[-1][0] if training else 0
    due = [loss for step, loss in training if step > 0.9 * end and (step % log_freq == 0 or step == end)]
    last = validation[-1:] or due
    diverged = code == ExitCode.NONFINITE or None in last or not last
    return Result(name, point, seed, folder, None if diverged else mean(last), VALIDATION if validation else _TRAINING)


@dataclass(frozen=True)
class Row:
    """A point: its runs together."""

    point: tuple[tuple[str, str], ...]
    losses: tuple[float, ...]
    diverged: int
    above: float | None
    """Mean loss above the best point's."""
    in_noise: float | None
    """The same in units of the noise; None if it is unknown."""
    verdict: str

    @property
    def loss(self) -> float:
        return mean(self.losses) if self.losses else math.inf


def rows_of(results: Sequence[Result]) -> list[Row]:
    """A row for each point, the best first.

    A point is worse than the best if Welch's t of their means is unlikely without a difference (Biometrika 34, 1947):
    each point has a noise of its own, because some settings are noisier than others. LEVEL is shared among all pairs of
    points, since any two might have been the best and this one. If a point has one run, the noise is pooled over all.
    """
    by_point: dict[tuple[tuple[str, str], ...], list[Result]] = {}
    for result in results:
        by_point.setdefault(result.point, []).append(result)
    losses = {point: tuple(each.loss for each in own if each.loss is not None) for point, own in by_point.items()}
    pooled = noise_of([*losses.values()])
    finite = [point for point in losses if losses[point]]
    best = min(finite, key=lambda point: mean(losses[point]), default=None)
    found = []
    for point, own in losses.items():
        diverged = len(by_point[point]) - len(own)
        if not own or best is None:
            found.append(Row(point, own, diverged, None, None, "diverged"))
            continue
        above = mean(own) - mean(losses[best])
        noise, error, freedom = _errors(own, losses[best], pooled)
        in_noise = above / noise if noise else None
        verdict = _verdict(above, error, freedom, math.comb(len(finite), 2))
        verdict = "best" if point == best else verdict
        verdict += f", {diverged} of {diverged + len(own)} diverged" if diverged else ""
        found.append(Row(point, own, diverged, above, in_noise, verdict))
    return sorted(found, key=lambda row: row.loss)


def noise_of(losses: Sequence[Sequence[float]]) -> tuple[float | None, int]:
    """The pooled standard deviation of one run over seeds, and its degrees of freedom; None if no point has two runs.

    It is at least a unit of float32, because losses cannot be told from each other any finer.
    """
    several = [own for own in losses if len(own) > 1]
    freedom = sum(len(own) - 1 for own in several)
    if not freedom:
        return None, 0
    pooled = math.sqrt(sum((len(own) - 1) * variance(own) for own in several) / freedom)
    return max(pooled, *map(_least, several)), freedom


def _least(losses: Sequence[float]) -> float:
    return _ULP * max(1e-20, *map(abs, losses))


def _errors(
    one: Sequence[float], other: Sequence[float], pooled: tuple[float | None, int]
) -> tuple[float | None, float, float]:
    """The noise of one run of two points, the error of the difference of their means, and its degrees of freedom."""
    if min(len(one), len(other)) < 2:
        noise, freedom = pooled
        return noise, (noise or 0.0) * math.sqrt(1 / len(one) + 1 / len(other)), freedom
    squares = [max(variance(each), _least(each) ** 2) for each in (one, other)]
    parts = [square / len(each) for square, each in zip(squares, (one, other), strict=True)]
    below = sum(part**2 / (len(each) - 1) for part, each in zip(parts, (one, other), strict=True))
    return math.sqrt(mean(squares)), math.sqrt(sum(parts)), sum(parts) ** 2 / below


def _verdict(above: float, error: float, freedom: float, pairs: int) -> str:
    if not error:
        return "noise unknown"
    return "worse" if chance(above / error, freedom) < LEVEL / max(1, pairs) else "within the noise"


def chance(t: float, freedom: float) -> float:
    """Probability that Student's t is further from 0 than this, by Simpson's rule over the angle atan(t / sqrt(n))."""
    angle, steps = math.atan(abs(t) / math.sqrt(freedom)), 200
    width = (math.pi / 2 - angle) / steps
    weights = [1, *itertools.islice(itertools.cycle((4, 2)), steps - 1), 1]
    area = sum(w * max(0.0, math.cos(angle + k * width)) ** (freedom - 1) for k, w in enumerate(weights)) * width / 3
    return 2 * area * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)


def table(results: Sequence[Result]) -> list[list[str]]:
    """Rows of text; the first names the columns."""
    rows = rows_of(results)
    keys = [key for key, _ in rows[0].point]
    kinds = " or ".join(dict.fromkeys(each.kind for each in results))
    found = [[*keys, kinds, "spread", "runs", "above the best", "in noise", "verdict"]]
    for row in rows:
        spread = f"{math.sqrt(variance(row.losses)):.4f}" if len(row.losses) > 1 else ""
        numbers = [f"{row.loss:.4f}" if row.losses else "", spread, str(len(row.losses) + row.diverged)]
        above = "" if row.above is None else f"{row.above:.4f}"
        in_noise = "" if row.in_noise is None else f"{row.in_noise:.1f}"
        found.append([*(value for _, value in row.point), *numbers, above, in_noise, row.verdict])
    return found


def as_text(results: Sequence[Result]) -> str:
    """The table for a console, and the sentence below it."""
    cells = table(results)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([*lines, "", sentence(results)])


def sentence(results: Sequence[Result]) -> str:
    """The meaning of the differences."""
    rows = rows_of(results)
    best = next((row for row in rows if row.losses), None)
    if best is None:
        return "All runs have diverged."
    noise, freedom = noise_of([row.losses for row in rows])
    name = ", ".join(f"{key} = {value}" for key, value in best.point) or "the recipe"
    name += best.verdict.removeprefix("best")
    if noise is None:
        return f"Lowest: {name}. The noise is unknown, because no point has two seeds: use --seeds 3 or more."
    even = sum(row.verdict.startswith("within") for row in rows)
    beside = f"{even} of the other {len(rows) - 1} points cannot be told from it" if len(rows) > 1 else "the only point"
    return (
        f"Lowest: {name}; {beside}. The noise of one run is {noise:.2g} (standard deviation over seeds, {freedom} "
        f"degrees of freedom); at most {LEVEL:.0%} of sweeps without a difference would call a point worse."
    )


def write_report(results: Sequence[Result], grid: Mapping[str, Sequence[str]], folder: Path, left: str) -> None:
    """Write report.html and sweep.png. left: a sentence about runs that are missing. Raises OSError."""
    runs = {result.name: read_rows(result.folder / "metrics.jsonl") for result in results}
    over_keys, curves = panels(results, grid), curve_panels(runs)
    sections = [
        Section("Points", text=" ".join(filter(None, (sentence(results), left))), table=table(results)),
        *([Section("Loss over the settings", panels=over_keys)] if over_keys else []),
        Section("Curves", panels=curves),
    ]
    page(folder / "report.html", f"sweep of {', '.join(grid) or 'seeds'}", sections)
    if shown := [*over_keys, *losses_of(curves)]:
        draw(shown, folder / "sweep.png")


def losses_of(curves: Sequence[Panel]) -> list[Panel]:
    """The panels of curve_panels that have losses."""
    return [panel for panel in curves if panel.title in ("training loss", "validation loss")]


def panels(results: Sequence[Result], grid: Mapping[str, Sequence[str]]) -> list[Panel]:
    """The loss over each key that has several values."""
    return [_over(key, values, results) for key, values in grid.items() if len(values) > 1]


def _over(key: str, values: Sequence[str], results: Sequence[Result]) -> Panel:
    """Mean loss over the values of a key, with a line for each setting of the others, and a dot for each run."""
    numbers = _numbers(values)
    place = dict(zip(values, numbers or range(len(values)), strict=True))
    lines: dict[str, Points] = {}
    rows = [row for row in rows_of(results) if row.losses]
    for name in dict.fromkeys(_others(result.point, key) for result in results):
        own = sorted((place[dict(row.point)[key]], row.loss) for row in rows if _others(row.point, key) == name)
        lines[name or results[0].kind] = [x for x, _ in own], [y for _, y in own]
    dots = [(place[dict(each.point)[key]], each.loss) for each in results if each.loss is not None]
    spaced = numbers is not None and min(numbers) > 0 and max(numbers) >= 4 * min(numbers)
    return Panel(
        f"loss over {key}",
        results[0].kind,
        lines,
        xlabel=key,
        log_x=spaced,
        dots=([x for x, _ in dots], [y for _, y in dots]),
        ticks=() if numbers else tuple(values),
    )


def _others(point: tuple[tuple[str, str], ...], key: str) -> str:
    return ", ".join(f"{other.rpartition('.')[2]} = {value}" for other, value in point if other != key)


def _numbers(values: Sequence[str]) -> list[float] | None:
    """The values as numbers; None if one is no number."""
    try:
        return [float(value) for value in values]
    except ValueError:
        return None
