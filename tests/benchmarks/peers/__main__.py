"""A training step here and in torchtitan, litgpt and transformers' Trainer: the same sizes, tokens and precision.

python -m tests.benchmarks.peers                       every row of the table; writes docs/performance.md
python -m tests.benchmarks.peers --only "fsdp 2"       rows whose name has these words; writes nothing
python -m tests.benchmarks.peers --turns 5

Every side runs in turns with the others, on one thread a rank. Processor time of a step, averaged over ranks, repeats
within a few per cent on a shared machine; wall time does not, and is shown beside it. The best of all turns counts.
Other projects are installed into .cache/peers, beside this environment's own torch.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from components.config import ROOT
from components.observe.metrics import git_revision
from tests.benchmarks.peers.sides import NO_LAYOUT, install, measure

PAGE, RESULTS = ROOT / "docs" / "performance.md", Path(__file__).parent / "results.json"
PICTURE = ROOT / "assets" / "figures" / "performance.png"
Results = dict[str, dict[str, list[dict[str, float]]]]
"""Row -> side -> the times of each turn."""
SMALL = {"dim": 256, "layers": 4, "heads": 8, "kv_heads": 4, "ffn": 768, "vocab": 4096, "seq": 256, "batch": 4}
LARGER = SMALL | {"dim": 512, "layers": 8, "ffn": 1536, "vocab": 8192}
TIMED = {"warm": 3, "steps": 10}
BOTH = ("here", "torchtitan")


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    job: dict[str, Any]
    sides: tuple[str, ...]
    bar: float
    """The least ratio asked of the second side's time to ours."""


def _row(name: str, dtype: str, bar: float, sizes: dict[str, Any] = SMALL, **more: Any) -> Row:
    sides = more.pop("sides", BOTH)
    return Row(f"{name}, {dtype}", NO_LAYOUT | sizes | TIMED | {"dtype": dtype} | more, sides, bar)


KERNELS = (*BOTH, "kernels")
ALONE = (*BOTH, "bare loop", "matrix products", "kernels")
ROWS = [
    _row("one process", "bfloat16", 1.6, sides=ALONE),
    _row("one process", "float32", 1.15, sides=ALONE),
    _row("one process, compiled", "bfloat16", 1.4, compile=True, sides=KERNELS),
    _row("one process, compiled", "float32", 1.1, compile=True, sides=KERNELS),
    *(
        _row(f"{axis} 2", dtype, bar, layout={axis: 2}, sides=sides)
        for axis, sides in (("ddp", KERNELS), ("fsdp", KERNELS), ("tp", BOTH), ("pp", KERNELS))
        for dtype, bar in (("bfloat16", 1.5), ("float32", 1.15))
    ),
    _row("36M parameters", "bfloat16", 1.3, LARGER, sides=ALONE),
    _row("one process, litgpt", "bfloat16", 1.3, sides=("here", "litgpt")),
    _row("one process, transformers' Trainer", "bfloat16", 1.3, sides=("here", "Trainer")),
    _row("36M parameters, LoRA by PEFT and Trainer", "bfloat16", 1.3, LARGER, lora=16, sides=("here", "Trainer")),
]


def best(times: list[dict[str, float]], clock: str) -> float:
    return min(each[clock] for each in times)


def table(results: Results) -> str:
    """Markdown of the measured rows."""
    lines = [
        "| a step | here, ms | the other, ms | ratio | wall, ratio | asked (ms) | beside it, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in ROWS if row.name in results):
        sides = results[row.name]
        ours, other = (sides[side] for side in row.sides[:2])
        ratio, wall = (best(other, clock) / best(ours, clock) for clock in ("processor", "wall"))
        beside = ", ".join(f"{side} {best(sides[side], 'processor') * 1e3:.0f}" for side in row.sides[2:])
        lines.append(
            f"| {row.name} | {best(ours, 'processor') * 1e3:.0f} | {row.sides[1]} {best(other, 'processor') * 1e3:.0f} "
            f"| {ratio:.2f} | {wall:.2f} | {row.bar} ({best(other, 'processor') / row.bar * 1e3:.0f}) | {beside} |"
        )
    return "\n".join(lines)


def write(results: Results) -> None:
    """The page, its picture, and every time."""
    RESULTS.write_text(json.dumps({"revision": git_revision()["revision"], "rows": results}, indent=1) + "\n")
    head, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- peers -->\n")
    _, _, tail = rest.partition("<!-- end -->")
    PAGE.write_text(f"{head}<!-- peers -->\n{table(results)}\n<!-- end -->{tail}", encoding="utf-8")
    draw(results)


def draw(results: Results) -> None:
    """How often a step here fits into the other side's, row by row."""
    import matplotlib.pyplot as plt

    rows = [row for row in ROWS if row.name in results][::-1]
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(rows) + 0.8), layout="constrained")
    for height, row in enumerate(rows):
        ours, other = (results[row.name][side] for side in row.sides[:2])
        ratio = best(other, "processor") / best(ours, "processor")
        axes.barh(height, ratio, color="tab:blue" if "bfloat16" in row.name else "tab:gray")
        axes.text(max(ratio, row.bar), height, f" {ratio:.2f}", va="center")
        axes.plot([row.bar, row.bar], [height - 0.4, height + 0.4], color="black")
    axes.axvline(1, color="tab:red", linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{row.name} ({row.sides[1]})" for row in rows])
    axes.set(xlim=(0, 2.6), xlabel="the other side's step over ours; black: asked for")
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        print("this CPU has no instructions for bfloat16: those rows take hours; --only float32 leaves them out")
    install()
    results: Results = {}
    chosen = [row for row in ROWS if options.only in row.name]
    for row in chosen:
        times: dict[str, list[dict[str, float]]] = {side: [] for side in row.sides}
        for _ in range(options.turns):
            for side in row.sides:
                times[side].append(measure(side, row.job))
        results[row.name] = times
        print(table({row.name: times}).splitlines()[-1], flush=True)
    if not options.only:
        write(results)


if __name__ == "__main__":
    main()
