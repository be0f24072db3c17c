"""What activation checkpointing and compile do to a training step: bytes kept for backward, and time.

python -m tests.benchmarks.activation       prints them, and draws assets/figures/activation_checkpointing.png

The debug model on one process and one thread, 4 sequences of 256 tokens. Each mode runs three times, in turns.
"""

import time

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import train
from components.config import ROOT
from tests.harness import observe
from tests.test_memory import count_activations

MODEL = (
    *("--model.flavor", "debug", "--training.seq_len", "256", "--training.global_batch_size", "4"),
    *("--training.local_batch_size", "4"),
)
SELECTIVE = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option")
COMPILE = ("--compile.enable", "true")
FULL = ("--activation_checkpoint.mode", "full")
MODES = {
    "none": (),
    "per operation": (*SELECTIVE, "op"),
    "every second layer": (*SELECTIVE, "2"),
    "full": FULL,
    "compiled": COMPILE,
    "compiled, full": (*COMPILE, *FULL),
}


def measure(run: train.Run) -> tuple[float, float]:
    """MiB that forward leaves (not counted where it is compiled), and seconds of the fastest of five steps."""
    batches, seconds = train.local_batches(run), []
    for _ in range(5):
        started = time.perf_counter()
        train.train_step(run, batches, train.divisor(run))
        seconds.append(time.perf_counter() - started)
    return 0.0 if run.config.compile.enable else count_activations(run) / 2**20, min(seconds)


def main() -> None:
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for _ in range(3):
        for mode, settings in MODES.items():
            found[mode].append(observe(*MODEL, *settings, steps=2, at_end=measure).extra)
    kept = {mode: results[0][0] for mode, results in found.items()}
    seconds = {mode: min(each for _, each in results) for mode, results in found.items()}
    for mode in MODES:
        counted = f"{kept[mode]:6.1f}" if kept[mode] else "     ?"
        print(f"{mode:20} {counted} MiB kept, {seconds[mode] / seconds['none']:.2f} x time", flush=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8), facecolor="white", sharey=True)
    for axes, values, words, form in (
        (left, kept, "MiB that forward keeps for backward", "{:.0f}"),
        (right, {mode: value / seconds["none"] for mode, value in seconds.items()}, "time of a step", "{:.2f} x"),
    ):
        bars = axes.barh(list(MODES), list(values.values()), color="#2f6fb5", height=0.62)
        axes.bar_label(bars, [form.format(value) if value else "" for value in values.values()], padding=3, fontsize=8)
        axes.set_title(words, loc="left", fontsize=10)
        axes.set(xticks=[], xlim=(0, 1.18 * max(values.values())))
        axes.tick_params(length=0, labelsize=9)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    left.invert_yaxis()
    figure.tight_layout()
    figure.savefig(ROOT / "assets" / "figures" / "activation_checkpointing.png", dpi=120)


if __name__ == "__main__":
    main()
