"""The best learning rate and the size of activations over width, with and without muP (optimizer.mup_base).

python -m tests.benchmarks.mup           measure what tests/benchmarks/mup.jsonl lacks, then draw both figures
python -m tests.benchmarks.mup --seeds 3 the same, with more seeds: losses are their mean
python -m tests.benchmarks.mup --draw    only draw assets/figures/mup_rates.png and mup_activations.png

The shape of Llama's debug flavor (heads of 32, half as many key heads, feed-forwards of three times the width), with
two layers and a vocabulary of 1,024, on the bundled text; 100 steps of 8 sequences of 32 tokens, after 10 of warm-up
with a linear decay to 0; one process, one thread. The base is the debug flavor, whose width is 256. A loss is the mean
over the last ten steps. The coordinate check has 16 sequences a step.
"""

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import train
from components.config import ROOT, load_config
from components.observe.report import Panel, draw
from tests.ranks import group_of_one
from tests.small import RECIPE, TOKENIZER

WIDTHS, BASE = (64, 128, 256, 512), 256
START = 4e-3
"""The first rate of the first width. Rates are multiples of it by powers of two."""
KINDS: dict[str, tuple[str, bool]] = {
    "AdamW": ("AdamW", False),
    "AdamW, muP": ("AdamW", True),
    "Muon": ("Muon", False),
    "Muon, muP": ("Muon", True),
}
"""Name -> optimizer, and whether rates and starting values follow the width."""
STEPS, LAST = 100, 10
ROWS = ROOT / "tests" / "benchmarks" / "mup.jsonl"
FIGURES = ROOT / "assets" / "figures"
CHECKED = (64, 128, 256, 512, 1024)
"""Widths of the coordinate check. Muon has widths up to 256 alone: its iterations take minutes on a CPU."""
CHECKED_STEPS, CHECKED_RATE = 5, 8e-3
WATCHED = {
    "embeddings": "tok_embeddings",
    "queries": "layers.1.attention.wq",
    "attention": "layers.1.attention",
    "feed-forward": "layers.1.feed_forward",
    "logits": "output",
}
"""Name of a line -> module whose output is measured."""


def words(width: int, rate: float, kind: str, steps: int = STEPS, *more: str) -> list[str]:
    """The command line of a run."""
    optimizer, scaled = KINDS[kind]
    sizes = {"dim": width, "n_layers": 2, "n_heads": width // 32, "n_kv_heads": width // 64, "ffn_dim": 3 * width}
    given: dict[str, Any] = {f"model.sizes.{name}": value for name, value in (sizes | {"vocab_size": 1024}).items()}
    given |= {"model.hf_assets_path": TOKENIZER, "validation.enable": "false", "checkpoint.enable": "false"}
    given |= {"training.seq_len": 32, "training.local_batch_size": 8, "training.global_batch_size": 8}
    given |= {"training.steps": steps, "lr_scheduler.warmup_steps": steps // 10, "lr_scheduler.min_lr_factor": 0.0}
    given |= {"optimizer.name": optimizer, "optimizer.lr": rate} | ({"optimizer.mup_base": "debug"} if scaled else {})
    settings = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    return ["--job.config_file", str(RECIPE), *settings, *more]


def losses(argv: Sequence[str], steps: int = STEPS) -> Iterator[float]:
    """Yields the loss of each step, until it is not finite."""
    run = train.build(load_config([*argv]), torch.device("cpu"))
    batches = train.local_batches(run)
    for _ in range(steps):
        loss = train.train_step(run, batches, train.divisor(run))[0].item()
        if not math.isfinite(loss):
            return
        yield loss


def final_loss(width: int, rate: float, kind: str, steps: int = STEPS, *more: str) -> float:
    """Mean loss of the last steps; infinite for a run that has diverged."""
    found = list(losses(words(width, rate, kind, steps, *more), steps))
    return sum(found[-LAST:]) / LAST if len(found) == steps else math.inf


def activations(width: int, kind: str, steps: int = CHECKED_STEPS) -> dict[str, float]:
    """Name -> root mean square of the change of an output after some steps, on the first batch."""
    more = "--training.local_batch_size", "16", "--training.global_batch_size", "16"
    run = train.build(load_config(words(width, CHECKED_RATE, kind, STEPS, *more)), torch.device("cpu"))
    batches, (model,) = train.local_batches(run), run.stages
    tokens = next(train.local_batches(run))["tokens"]
    outputs: dict[str, Tensor] = {}
    for name, module in WATCHED.items():
        model.get_submodule(module).register_forward_hook(
            lambda _, __, output, name=name: outputs.update({name: output.detach().clone()})
        )

    def look() -> dict[str, Tensor]:
        with torch.no_grad():
            model(tokens)
        return dict(outputs)

    before = look()
    for _ in range(steps):
        train.train_step(run, batches, train.divisor(run))
    return {name: (after - before[name]).square().mean().sqrt().item() for name, after in look().items()}


def read(path: Path = ROWS) -> list[dict[str, Any]]:
    """The rows that were measured."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(seeds: int) -> None:
    """Add the rows that the file lacks: first the coordinate check, then losses around the best rate of each width."""
    with ROWS.open("a") as file, group_of_one():

        def add(row: dict[str, Any]) -> None:
            print(row, flush=True)
            file.write(json.dumps(row) + "\n")
            file.flush()

        for kinds, widest in ((("AdamW", "AdamW, muP"), 1024), (("Muon", "Muon, muP"), 256)):
            done = {(row["width"], row["kind"]) for row in read() if row["rate"] is None}
            for width, kind in itertools.product([each for each in CHECKED if each <= widest], kinds):
                if (width, kind) not in done:
                    add({"width": width, "kind": kind, "rate": None, "change": activations(width, kind)})
            start = dict.fromkeys(kinds, START)
            for width, kind in itertools.product([each for each in WIDTHS if each <= widest], kinds):
                beyond = 1 if width > 128 else 2
                while (rate := next_rate(losses_of(read(), width, kind, seeds), start[kind], beyond)) is not None:
                    for seed in range(seeds):
                        # At the base's width both kinds are the same run.
                        known = read() if width == BASE else [row for row in read() if row["kind"] == kind]
                        same = [row for row in known if row["kind"] in kinds and _key(row) == (width, rate, seed)]
                        if not any(row["kind"] == kind for row in same):
                            loss = same[0]["loss"] if same else final_loss(width, rate, kind, STEPS, SEED, str(seed))
                            kept = loss if loss is not None and math.isfinite(loss) else None
                            add({"width": width, "kind": kind, "rate": rate, "seed": seed, "loss": kept})
                found = losses_of(read(), width, kind, seeds)
                start[kind] = min(found, key=lambda rate: found[rate])


SEED = "--debug.seed"


def _key(row: Mapping[str, Any]) -> tuple[int, float | None, int]:
    return row["width"], row["rate"], row.get("seed", 0)


def losses_of(rows: Sequence[Mapping[str, Any]], width: int, kind: str, seeds: int = 1) -> dict[float, float]:
    """Rate -> mean loss over seeds, for rates with this number of seeds; infinite if a run diverged."""
    own: dict[float, list[float]] = {}
    for row in rows:
        if (row["width"], row["kind"]) == (width, kind) and row["rate"] is not None:
            own.setdefault(row["rate"], []).append(math.inf if row["loss"] is None else row["loss"])
    return {rate: sum(losses) / len(losses) for rate, losses in own.items() if len(losses) >= seeds}


def next_rate(by_rate: Mapping[float, float], start: float, beyond: int) -> float | None:
    """The next rate to try; None if the best rate has `beyond` lower and `beyond` higher ones beside it."""
    if not by_rate:
        return start
    best = min(by_rate, key=lambda rate: by_rate[rate])
    around = (best * 2**power for power in range(-beyond, beyond + 1))
    return next((rate for rate in around if rate not in by_rate), None)


def best_rate(by_rate: Mapping[float, float]) -> float:
    """The rate with the least loss: the lowest point of a parabola through the best three, over log(rate)."""
    rates = sorted(by_rate)
    best = min(range(len(rates)), key=lambda number: by_rate[rates[number]])
    if not 0 < best < len(rates) - 1:
        return rates[best]
    (x0, x1, x2), (y0, y1, y2) = zip(*((math.log(each), by_rate[each]) for each in rates[best - 1 : best + 2]))
    if not math.isfinite(y0 + y2):
        return rates[best]
    left, right = (x1 - x0) * (y1 - y2), (x1 - x2) * (y1 - y0)
    return math.exp(x1 - ((x1 - x0) * left - (x1 - x2) * right) / (2 * (left - right)))


def moves(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Kind -> width -> best rate."""
    found = {kind: {width: losses_of(rows, width, kind) for width in WIDTHS} for kind in KINDS}
    best = {kind: {width: best_rate(own) for width, own in by.items() if own} for kind, by in found.items()}
    return {kind: by_width for kind, by_width in best.items() if by_width}


def figures() -> None:
    """Draw both figures, and print how far the best rate moves."""
    rows = read()
    best = moves(rows)
    panels, checks = [], []
    for kind, by_width in best.items():
        spread = max(by_width.values()) / min(by_width.values())
        print(f"{kind}: {', '.join(f'{width}: {rate:.1e}' for width, rate in by_width.items())}; moves {spread:.1f} x")
        lines = {}
        for width in by_width:
            kept = [(rate, loss) for rate, loss in sorted(losses_of(rows, width, kind).items()) if loss < 6]
            lines[f"width {width}"] = [rate for rate, _ in kept], [loss for _, loss in kept]
        title = f"{kind}: best rate moves {spread:.1f} x"
        panels.append(Panel(title, "loss", lines, xlabel="learning rate", log_x=True))
    for kind in best:
        own_rows = {row["width"]: row["change"] for row in rows if row["kind"] == kind and row["rate"] is None}
        widths = sorted(own_rows)
        lines = {name: (widths, [own_rows[width][name] for width in widths]) for name in WATCHED}
        checks.append(
            Panel(f"{kind}: after {CHECKED_STEPS} steps", "change", lines, log=True, xlabel="width", log_x=True)
        )
    draw(panels, FIGURES / "mup_rates.png")
    draw(checks, FIGURES / "mup_activations.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each width and rate (default 1)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.draw:
        measure(options.seeds)
    figures()


if __name__ == "__main__":
    main()
