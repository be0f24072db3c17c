"""The matrix of layouts: each is the run of one process, or is refused by a rule.

python -m tests.matrix                      a spread: every pair of settings, in a few layouts
python -m tests.matrix --all                every product of the axes; writes docs/composition.md
python -m tests.matrix --all --resume       those of them that this code has not been run with
python -m tests.matrix --random 30 --seed 7 layouts drawn from all, until rules accept 30
"""

import argparse
import functools
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import train
from components.commands.figures import BARS, Observation, figures, worst
from components.commands.routing import Routing
from components.config import ROOT, to_dict
from components.state.adapters import export_run
from tests import composition
from tests.harness import observe
from tests.layouts import AXES, MESH, MOST_RANKS, STEPS, Layout, any_layout, layout, main_layouts
from tests.limits import TimeLimit
from tests.spread import spread


@dataclass(frozen=True)
class Result:
    """What became of a layout."""

    layout: Layout
    refusal: str
    error: str
    figures: dict[str, float]
    seconds: float
    flips: int = 0
    """Tokens sent to other experts than in one process, whose routing was then replayed."""

    @property
    def broken(self) -> dict[str, float]:
        bars = bars_of(self.layout)
        over = {name: value for name, value in self.figures.items() if not value <= bars[name]}
        if over and self.layout["precision"] != "float32":
            noise = rounding(self.layout)
            over = {name: value for name, value in over.items() if not value <= 3 * noise[name]}
        return over

    @property
    def verdict(self) -> str:
        if self.refusal:
            return "refused"
        return "error" if self.error else "broken" if self.broken else "proven"


def bars_of(each: Layout) -> dict[str, float]:
    """How far a layout may be from one process.

    A sum in bfloat16 has three digits, of which the last depends on how work is split: so a figure may also be three
    times the rounding of one process, since the layout has a rounding of its own. With an eps of 1e-8 AdamW makes a
    gradient near zero, and its error, as large as others. A rounded moment may be the next number. Then the second
    step's numbers, which dynamics are, differ too.
    """
    if each["precision"] != "float32":
        loss, products = ("loss", "validation loss"), ("gradient", "gradient norm", "weights", "loss by source")
        bars = BARS | dict.fromkeys(loss, 1e-3) | dict.fromkeys(products, 1e-2)
        return bars if each["eps"] == "1e-5" else bars | {"weights": 3e-2}
    if each["eps"] != "1e-5" or each["state_dtype"] != "float32":
        return BARS | {"weights": 1e-3, "validation loss": 1e-4, "loss by source": 1e-4, "dynamics": 0.1}
    return BARS


def rounding(each: Layout) -> dict[str, float]:
    """How far one process in bfloat16 is from one in float32 with the same routing; 0 for what has to be equal."""
    rounded = one_process(each)
    exact = layout(**dict(each.cell) | {"precision": "float32"}).run()
    routing = replace(rounded.routing, within=0.5) if rounded.routing.known else None
    found = figures(rounded, observe(*exact, steps=STEPS, valid_labels=each.labels, routing=routing))
    return {name: value if BARS[name] else 0.0 for name, value in found.items()}


def one_process(each: Layout) -> Observation:
    """The run of one process, which layouts of the same run share."""
    return _one_process(each.run(), each.labels)


@functools.cache
def _one_process(run: tuple[str, ...], labels: tuple[int, ...]) -> Observation:
    return observe(*run, steps=STEPS, valid_labels=labels)


def measure(layouts: Iterable[Layout]) -> Iterator[Result]:
    """Run every layout that no rule refuses.

    Layouts of one mesh come one after another: they share DTensor's caches of that mesh.
    """
    accepted: list[Layout] = []
    for each in layouts:
        if refusal := each.refusal():
            yield Result(each, refusal, "", {}, 0.0)
        else:
            accepted.append(each)
    accepted.sort(key=lambda each: (each.ranks, *(each[axis] for axis in MESH)))
    for each in accepted:
        try:
            result = _compare(each, None)
            routing = replace(one_process(each).routing, within=1e-3 if bars_of(each) is BARS else 0.5)
            yield _compare(each, routing) if result.broken and routing.known else result
        except (RuntimeError, TimeLimit) as error:
            yield Result(each, "", str(error), {}, 0.0)


def _compare(each: Layout, routing: Routing | None) -> Result:
    """The layout beside one process. routing: of one process, for a layout with experts that has sent tokens elsewhere.

    A layout that resumes takes its first step, and another layout the rest from its checkpoint, with an export.
    """
    reference = one_process(each)
    options: dict[str, Any] = {"valid_labels": each.labels, "routing": routing}
    if not each.resumes:
        observed = observe(*each.overrides(), ranks=each.ranks, steps=STEPS, **options)
        found = figures(observed, reference)
    else:
        with tempfile.TemporaryDirectory() as folder:
            first = observe(*each.overrides(), ranks=each.ranks, steps=1, folder=folder, **options)
            words, ranks = each.elsewhere()
            export = functools.partial(_exported_from, folder=Path(folder))
            rest = observe(*words, ranks=ranks, steps=STEPS - 1, folder=folder, at_end=export, **options)
        observed = first.then(rest)
        found = figures(observed, reference)
        exported = _exported(each.run(), each.labels)
        biases = [name for name in exported if name.endswith("bias")]  # which are zero at first
        found["weights"] = max(found["weights"], worst(rest.extra, exported, biases))
    flips = observed.routing.flips if routing else 0
    return Result(each, "", "", found, observed.seconds, flips)


@functools.cache
def _exported(run: tuple[str, ...], labels: tuple[int, ...]) -> dict[str, Tensor]:
    """Tensors of the export of one process."""
    with tempfile.TemporaryDirectory() as folder:
        export = functools.partial(_exported_from, folder=Path(folder))
        return observe(*run, steps=STEPS, valid_labels=labels, folder=folder, at_end=export).extra


def _exported_from(run: train.Run, folder: Path) -> dict[str, Tensor]:
    """Called by all ranks at the end of a run; what it returns is rank 0's."""
    export_run(to_dict(run.config), folder / f"step-{run.step}", folder / "export", torch.float32)
    return {name: tensor for path in folder.glob("export/*.safetensors") for name, tensor in load_file(path).items()}


def main(argv: list[str]) -> int:
    """Print each layout with its worst gradient error and seconds; 1 if any was neither proven nor refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every layout; then write docs/composition.md")
    parser.add_argument("--product-ranks", type=int, default=8, metavar="N", help="multiply out to N ranks with --all")
    parser.add_argument("--random", type=int, default=0, metavar="N")
    parser.add_argument("--set", action="append", default=[], metavar="AXIS=VALUE", help="layouts with this setting")
    parser.add_argument("--most-ranks", type=int, default=MOST_RANKS, metavar="N", help="layouts of up to N ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="a line for each layout is added to this file")
    parser.add_argument("--resume", action="store_true", help="leave out what this code has proven there")
    options = parser.parse_args(argv)
    draw = random.Random(options.seed)
    fixed = dict(word.split("=", 1) for word in options.set)
    if options.random:
        drawn = (each for _ in itertools.count() if (each := any_layout(draw, **fixed)).ranks <= options.most_ranks)
        chosen = list[Layout]()
        while sum(not each.refusal() for each in chosen) < options.random:
            chosen.append(next(drawn))
    else:
        chosen = main_layouts(options.product_ranks) if options.all else spread(options.seed)
    chosen = [each for each in chosen if each.ranks <= options.most_ranks and fixed.items() <= {*each.cell}]
    path: Path = options.results or (composition.RECORD if options.all else RESULTS)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = composition.read(path)
    if options.resume:
        rows = [row for row in rows if row["verdict"] == "proven"]
        done = {tuple(row["layout"].items()) for row in rows}
        chosen = [each for each in chosen if each.cell not in done]
    path.write_text("".join(composition.line(row) for row in rows), encoding="utf-8")
    counts: dict[str, int] = {}
    started = time.perf_counter()
    with open(path, "a", encoding="utf-8") as file:
        for number, result in enumerate(measure(chosen), 1):
            counts[result.verdict] = counts.get(result.verdict, 0) + 1
            worst = f"{result.figures['gradient']:.1e}" if result.figures else ""
            shown = f"{result.verdict:8} {worst:8} {result.seconds:5.1f} s  {result.layout}"
            if result.flips:
                shown += f" · {result.flips} flips, replayed"
            if result.verdict in ("broken", "error"):
                shown += f"\n    {result.error or result.broken}"
            rest = (time.perf_counter() - started) / number * (len(chosen) - number)
            print(f"{number:5}/{len(chosen)} eta {rest / 60:3.0f}m  {shown}", flush=True)
            cell, ranks = dict(result.layout.cell), result.layout.ranks
            record: dict[str, Any] = {"layout": cell, "ranks": ranks, "code": composition.code()}
            record |= {"verdict": result.verdict, "figures": result.figures, "refusal": result.refusal}
            record["flips"] = result.flips
            file.write(composition.line(record | {"seconds": round(result.seconds, 2)}))
            file.flush()
    print(f"{counts} in {time.perf_counter() - started:.0f} s")
    if options.all and not fixed:
        rows = composition.read(path)
        run = {tuple(row["layout"].items()) for row in rows}
        left = sum(each.cell not in run for each in main_layouts(options.product_ranks))
        composition.write(rows, AXES, BARS, left)
        print(f"written: {composition.PAGE.relative_to(ROOT)}")
    return int(bool(counts.get("broken") or counts.get("error")))


RESULTS = ROOT / ".cache" / "tests" / "matrix.jsonl"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
