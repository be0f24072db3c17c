"""`--prove` of every recipe: verdict, ranks, seconds and worst gradient; the bar is two minutes on two cores.

python -m tests.benchmarks.prove             all recipes: a line for each in tests/benchmarks/prove.jsonl
python -m tests.benchmarks.prove glm olmo    recipes whose names have one of these words: their lines anew
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from components.config import ROOT
from tests.cpu import adopt_orphans, tree_seconds

RECORD = Path(__file__).with_suffix(".jsonl")
_VERDICTS = {0: "the same run", 2: "refused"}


def prove(recipe: Path) -> dict[str, Any]:
    """The figures of a recipe's proof, by the command that a user starts."""
    command = [sys.executable, "-m", "components.commands.start", "--prove", "--job.config_file", str(recipe)]
    before, started = tree_seconds(os.getpid()), time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    layout = re.search(r"^layout +(.*), (\d+) ranks", done.stdout, re.M)
    gradient = re.search(r"^ +gradient +(\S+)", done.stdout, re.M)
    verdict = _VERDICTS.get(done.returncode, "another run")
    if verdict != "the same run":
        print(done.stdout + done.stderr)
    return {
        "recipe": recipe.stem,
        "layout": layout[1] if layout else "",
        "ranks": int(layout[2]) if layout else 0,
        "seconds": round(seconds, 1),
        "processor_seconds": round(tree_seconds(os.getpid()) - before, 1),
        "gradient": float(gradient[1]) if gradient else None,
        "verdict": verdict,
    }


def main(words: list[str]) -> int:
    """Prove the recipes; returns 1 unless each is the same run."""
    adopt_orphans()
    every = sorted((ROOT / "recipes").glob("*.toml"))
    recipes = [path for path in every if not words or any(word in path.stem for word in words)]
    rows, started = list[dict[str, Any]](), time.perf_counter()
    for number, recipe in enumerate(recipes, 1):
        row = prove(recipe)
        rows.append(row)
        left = (time.perf_counter() - started) / number * (len(recipes) - number)
        print(
            f"{number:3}/{len(recipes)}  eta {left / 60:2.0f}m  {row['verdict']:12} {row['ranks']:2} ranks "
            f"{row['seconds']:5.1f} s  {row['processor_seconds']:5.1f} s of processors  gradient {row['gradient']}  "
            f"{row['recipe']}",
            flush=True,
        )
    before = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()] if RECORD.exists() else []
    record = {row["recipe"]: row for row in [*before, *rows]}
    lines = [json.dumps(record[path.stem]) + "\n" for path in every if path.stem in record]
    RECORD.write_text("".join(lines), encoding="utf-8")
    slowest = max(rows, key=lambda row: row["seconds"])
    same = sum(row["verdict"] == "the same run" for row in rows)
    print(f"{same} of {len(rows)} the same run; slowest {slowest['seconds']} s ({slowest['recipe']})")
    return int(same < len(rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
