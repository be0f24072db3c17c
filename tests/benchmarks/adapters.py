"""What a rank keeps when a base is frozen, in each precision: dry runs of recipes/llama8b_lora.toml.

python -m tests.benchmarks.adapters     prints the table of docs/finetune.md, draws assets/figures/finetune.png
"""

import os
import re
import subprocess
import sys

from components.config import ROOT

FIGURE = ROOT / "assets" / "figures" / "finetune.png"
BASE = "--lora.base"
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "8B, all trained, float32": (1, ("--lora.rank", "0")),
    "8B, adapters, float32": (1, (BASE, "float32")),
    "8B, adapters, bfloat16": (1, (BASE, "bfloat16")),
    "8B, adapters, nf4": (1, (BASE, "nf4")),
    "70B, adapters, bfloat16, each of 8": (8, (BASE, "bfloat16", "--model.flavor", "70B")),
    "70B, adapters, nf4, each of 2": (2, (BASE, "nf4", "--model.flavor", "70B")),
}
"""Name -> ranks, which shard the model, and settings."""


def measured(ranks: int, words: tuple[str, ...]) -> dict[str, float]:
    """GiB of the first rank, by the dry run's names."""
    recipe = ("--job.config_file", str(ROOT / "recipes" / "llama8b_lora.toml"), "--comm.mode", "fake_backend")
    layout = ("--parallelism.data_parallel_shard_degree", "-1", "--training.global_batch_size", str(2 * ranks))
    done = subprocess.run(
        [str(ROOT / "run_train.sh"), *recipe, *layout, *words],
        env=os.environ | {"NGPU": str(ranks)},
        capture_output=True,
        text=True,
    )
    found = {name.strip(): float(size) for name, size in re.findall(r"^  (\S.*?) +([\d.]+) GiB$", done.stdout, re.M)}
    if "weights" not in found:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return {name: size for name, size in found.items() if not name.startswith(("fsdp", "in all"))}


def draw(rows: dict[str, dict[str, float]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.45 * len(rows) + 1.2), layout="constrained")
    names = [*rows][::-1]
    left = [0.0] * len(names)
    for kind in rows[names[0]]:
        sizes = [rows[name][kind] for name in names]
        axes.barh(names, sizes, left=left, label=kind)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for height, total in enumerate(left):
        axes.text(total, height, f" {total:.1f}", va="center")
    for card in (24, 80):
        axes.axvline(card, color="black", linewidth=1, linestyle=":")
    axes.margins(x=0.08)
    axes.set_xlabel("GiB of a rank at the highest point; dotted: cards of 24 and 80")
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(FIGURE, dpi=110)


def main() -> int:
    rows = {}
    print("| | weights | gradients | optimizer | the rest | GiB in all |\n|---|---|---|---|---|---|")
    for name, (ranks, words) in RUNS.items():
        rows[name] = measured(ranks, words)
        sizes = " | ".join(f"{size:.1f}" for size in (*rows[name].values(), sum(rows[name].values())))
        print(f"| {name} | {sizes} |", flush=True)
    draw(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
