"""Is it still the same training run? Loss and gradient norm at every step, against one rank and a golden curve.

python -m tests.convergence                                   llama_debug for 20 steps at several layouts
python -m tests.convergence --long                            llama_debug and qwen3_debug for 200 steps, at every axis
python -m tests.convergence recipes/mine.toml                 any recipe
python -m tests.convergence recipes/mine.toml "fsdp 2 tp 2" "cp 2"       the sides that are given
python -m tests.convergence recipes/mine.toml --reference main@ "one rank"        a revision against the working tree
python -m tests.convergence recipes/mine.toml -- --training.seq_len 128           a setting for all sides
python -m tests.convergence --refresh                         keep the curve as the golden one

A side is written in words: a layout (ddp 2, fsdp 2, hsdp 2x2, tp 2, cp 2, pp 2, one rank, or own for the recipe's),
then settings of its own (--compile.enable); before them REVISION@, another recipe, or resume 10, which stops after step
10 and goes on in new processes.
Exits with 0 for the same run, 1 for another one, 2 for a mistake. Everything is written to --output.
"""

import argparse
import os
import shlex
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from components.commands.start import gpus
from components.config import ROOT, ConfigError
from components.config.files import writable
from components.launch.exit_codes import ExitCode
from tests.convergence import golden
from tests.convergence.report import Comparison, as_text, write
from tests.convergence.sides import Curve, Side, check, parse, run
from tests.convergence.verdict import noise_floor

RECIPES = [ROOT / "recipes" / f"{name}.toml" for name in ("llama_debug", "qwen3_debug")]
DISTURBANCES = ("order 1", "order 2", "ulp 1", "ulp 2")
SHORT = ("pp 2", "ddp 2 tp 2", "cp 2 tp 2", "fsdp 2 resume 10")
_CP = "--parallelism.context_parallel_method"
_PP = "--parallelism.pipeline_parallel_schedule"
LONG = (
    *("ddp 2", "fsdp 4", "hsdp 2x2", "tp 4", "tp 2 --parallelism.sequence_parallel false"),
    *(f"cp 2 {_CP} ring", f"cp 2 {_CP} allgather_kv", f"cp 2 {_CP} ulysses"),
    *("pp 2", f"pp 2 {_PP} ZBVZeroBubble", f"pp 2 {_PP} Interleaved1F1B"),
    *("one rank --activation_checkpoint.mode full", "fsdp 2 --compile.enable"),
    *("fsdp 2 tp 2", "fsdp 2 cp 2", "cp 2 tp 2", "pp 2 fsdp 2", "pp 2 tp 2", "pp 2 cp 2"),
    *("fsdp 2 cp 2 tp 2", "pp 2 fsdp 2 tp 2", "resume 100 fsdp 2"),
)


def main(argv: list[str]) -> int:
    """Run the comparison that argv asks for; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.convergence",
        usage="%(prog)s [RECIPE] [SIDE ...] [options] [-- --table.key value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="RECIPE or SIDE", help="a recipe first, then the sides to compare")
    parser.add_argument("--reference", default="one rank", metavar="SIDE", help="what all are compared with")
    parser.add_argument("--steps", type=int, help="steps of each run (default 20, with --long 200)")
    parser.add_argument(
        "--long", action="store_true", help="200 steps, more layouts; without a recipe llama_debug and qwen3_debug"
    )
    parser.add_argument("--refresh", action="store_true", help="write the golden curve; shows the old one beside it")
    parser.add_argument("--output", type=Path, help="folder of the report (default: outputs/convergence/RECIPE-STEPS)")
    split = argv.index("--") if "--" in argv else len(argv)
    options, settings = parser.parse_intermixed_args(argv[:split]), argv[split + 1 :]
    if options.steps is not None and options.steps < 1:
        parser.error("--steps: expected 1 or more")
    words, recipes = options.words, [RECIPES[0]]
    if words and words[0].endswith(".toml"):
        recipes = [Path(words.pop(0))]
    elif not words:
        recipes = RECIPES if options.long else recipes
        # Short sequences: on two cores most of the time would go into them, and no axis would see more.
        settings = settings or ["--training.seq_len", "64"]
    steps = options.steps or (200 if options.long else 20)
    defaults = LONG if options.long else SHORT
    codes = []
    try:
        for recipe in recipes:
            folder = (options.output or ROOT / "outputs" / "convergence") / f"{recipe.stem}-{steps}"
            if not writable(folder):
                raise ConfigError(f"{folder} cannot be written; use --output FOLDER")
            sides = [parse(text, recipe) for text in [options.reference, *(words or defaults)]]
            if not words:
                sides = [sides[0], *that_fit(sides[1:], steps, tuple(settings))]
            for side in sides:
                check(side, steps, tuple(settings))
            comparison = compare(sides[0], sides[1:], steps, tuple(settings), folder, fresh=options.refresh)
            command = shlex.join(["python", "-m", "tests.convergence", *argv])
            write(comparison, folder, command)
            print(f"\n{as_text(comparison.table())}\n")
            print(*comparison.sentences(), folder / "report.html", sep="\n", flush=True)
            if options.refresh:
                path = golden.path_of(recipe, steps)
                curve, floor = comparison.reference, comparison.floor
                golden.write(path, sides[0], steps, tuple(settings), curve, floor, command)
                print(f"{path}: written; the page shows the old curve and the new one", flush=True)
            codes.append(0 if comparison.same or options.refresh else 1)
    except ConfigError as error:
        print(*error.messages, sep="\n", file=sys.stderr)
        return ExitCode.CONFIG
    except RuntimeError as error:
        print(f"nothing to compare with: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return max(codes)


def that_fit(sides: list[Side], steps: int, settings: tuple[str, ...]) -> list[Side]:
    """Those of the usual layouts that this recipe can have; says why the others are left out."""
    fitting = []
    for side in sides:
        try:
            check(side, steps, settings)
            fitting.append(side)
        except ConfigError as error:
            print(f"left out: {error}", flush=True)
    return fitting


def compare(
    reference: Side, sides: list[Side], steps: int, settings: tuple[str, ...], folder: Path, fresh: bool = False
) -> Comparison:
    """Run the reference and every side.

    The noise floor is that of the golden curve where there is one of this run and device; else, and with fresh, it is
    measured: the reference runs four more times with its rounding disturbed.

    Raises:
        RuntimeError: the reference did not end well.
    """
    kept = golden.read(golden.path_of(reference.recipe, steps), settings)
    changes = golden.changes(kept.run, golden.what_decides(reference, steps, settings)) if kept else []
    progress = Progress(reference, sides)
    curve = run(reference, steps, settings, folder / "runs" / "reference")
    progress.show(reference, "")
    if kept and not changes and not fresh and kept.curve.about["device"] == curve.about["device"]:
        noise, floor = [], kept.floor
    else:
        noise = disturbed(reference, steps, settings, folder, progress)
        floor = noise_floor(curve, noise)
    curves, failures = [], {}
    for number, side in enumerate(sides):
        try:
            curves.append(run(side, steps, settings, folder / "runs" / f"side_{number}"))
        except RuntimeError as error:
            failures[side.text] = str(error)
        progress.show(side, "")
    return Comparison(
        f"{reference.recipe.stem}, {steps} steps",
        curve,
        noise,
        floor,
        curves,
        failures,
        kept.curve if kept else None,
        changes,
    )


def disturbed(
    reference: Side, steps: int, settings: tuple[str, ...], folder: Path, progress: "Progress"
) -> list[Curve]:
    """The reference's curves with its rounding disturbed in four ways."""

    def disturb(disturbance: str) -> Curve:
        done = run(reference, steps, settings, folder / "runs" / disturbance.replace(" ", "_"), disturbance)
        done.text = disturbance
        progress.show(reference, disturbance)
        return done

    progress.all += len(DISTURBANCES) * (1 + reference.ranks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(1 if gpus() else max(1, cores // reference.ranks)) as pool:
        return list(pool.map(disturb, DISTURBANCES))


class Progress:
    """A line for each run that has ended, and how long the rest will take."""

    def __init__(self, reference: Side, sides: list[Side]) -> None:
        self.started, self.done = time.perf_counter(), 0
        self.all = sum(1 + side.ranks for side in [reference, *sides])

    def show(self, side: Side, disturbance: str) -> None:
        self.done += 1 + side.ranks
        seconds = time.perf_counter() - self.started
        rest = seconds / self.done * (self.all - self.done)
        what = f"{side.text}, disturbed: {disturbance}" if disturbance else side.text
        print(f"{seconds:5.0f} s  eta {rest:4.0f} s  {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
