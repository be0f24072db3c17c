"""The sweep of docs/sweeps.md: python -m tests.benchmarks.sweep

A very small llama_debug at three rates and two weight decays. Writes tests/benchmarks/sweep.jsonl, a line for each run,
from which assets/figures/make.py draws sweep.png.
"""

import json
import sys
from pathlib import Path
from typing import Any

from components.commands.sweep import Run, main, parse_grid, runs_of
from components.commands.sweep_report import Result
from components.config import ROOT
from components.observe.report import read_rows
from tests.small import RECIPE, TOKENIZER

ROWS = ROOT / "tests" / "benchmarks" / "sweep.jsonl"
GRID = ["optimizer.lr=1e-3,2e-3,4e-3", "optimizer.weight_decay=0,0.1"]
SEEDS = 1
FOLDER = ROOT / "outputs" / "sweeps" / "llama_debug"
STEPS = 150
SETTINGS = {
    "model.hf_assets_path": TOKENIZER,
    "model.sizes.dim": 32,
    "model.sizes.n_layers": 1,
    "model.sizes.n_heads": 2,
    "model.sizes.n_kv_heads": 1,
    "model.sizes.ffn_dim": 64,
    "model.sizes.vocab_size": 1024,
    "training.seq_len": 16,
    "training.steps": STEPS,
    "checkpoint.interval": 25,
    "metrics.log_freq": 1,
    "validation.freq": STEPS,
    "validation.steps": 1,
}


def read() -> tuple[list[Result], dict[str, list[dict[str, float]]]]:
    """The results of all runs, and name -> rows of metrics."""
    lines = [json.loads(line) for line in ROWS.read_text().splitlines()]
    rows = {line["name"]: line.pop("rows") for line in lines}
    return [Result(**line | {"point": tuple(map(tuple, line["point"])), "folder": Path()}) for line in lines], rows


def words(folder: Path, **settings: Any) -> list[str]:
    """The command line of the sweep, and settings beside SETTINGS."""
    given = [word for key, value in (SETTINGS | settings).items() for word in (f"--{key}", str(value))]
    return [str(RECIPE), *(word for each in GRID for word in ("--grid", each)), "--to", str(folder), "--", *given]


def runs(folder: Path) -> list[Run]:
    """The runs of the sweep."""
    argv = words(folder)
    return runs_of(RECIPE, parse_grid(GRID), SEEDS, folder, argv[argv.index("--") + 1 :])


def measure(folder: Path) -> int:
    """Run the sweep, or what is left of it, and write its rows."""
    if code := main(words(folder)):
        return code
    lines = []
    for run in runs(folder):
        result, kept = run.result(), ("step", "loss", "validation_loss")
        rows = [{key: row[key] for key in kept if key in row} for row in read_rows(run.folder / "metrics.jsonl")]
        rows = [row for row in rows if row["step"] % 5 == 0]
        own = {name: getattr(result, name) for name in ("name", "point", "seed", "loss", "kind")}
        lines.append(json.dumps(own | {"rows": rows}) + "\n")
    ROWS.write_text("".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(measure(FOLDER))
