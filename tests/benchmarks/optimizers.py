"""What optimizers and their precisions cost, and what they save.

python -m tests.benchmarks.optimizers             processor time of a step over AdamW's, in turns
python -m tests.benchmarks.optimizers --tokens    Muon's over AdamW's at several tokens a step, beside its products
python -m tests.benchmarks.optimizers --losses    validation loss of llama_debug after its 300 steps
python -m tests.benchmarks.optimizers --bytes     bytes of a matrix's parameter; draws assets/figures/optimizers.png

Time: one process, one thread, 36M parameters (width 512, 8 layers, a vocabulary of 8,192), 4 sequences of 256 tokens,
or more; the best of three turns.
Losses: one thread each, bfloat16 products; lines are added to .cache/tests/optimizer_losses.jsonl, and not run again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import train
from components.config import ROOT, Optimizer, load_config
from components.optim.optimizer import row_bytes
from models.llama import FLAVORS, Llama
from parallelize.groups import init_distributed
from tests.benchmarks.peers import ours
from tests.benchmarks.peers.__main__ import LARGER, TIMED
from tests.benchmarks.peers.sides import NO_LAYOUT, measure

TURNS = 3
NAME, STATE, WEIGHTS = "--optimizer.name", "--optimizer.state_dtype", "--training.dtype"
KINDS: dict[str, tuple[str, ...]] = {
    "AdamW": (),
    "bfloat16 moments": (STATE, "bfloat16"),
    "8-bit moments": (STATE, "int8"),
    "bfloat16 weights": (WEIGHTS, "bfloat16"),
    "bfloat16 weights and moments": (WEIGHTS, "bfloat16", STATE, "bfloat16"),
    "bfloat16 weights, 8-bit moments": (WEIGHTS, "bfloat16", STATE, "int8"),
    "Muon": (NAME, "Muon"),
    "Muon, bfloat16 weights, 8-bit momentum": (NAME, "Muon", WEIGHTS, "bfloat16", STATE, "int8"),
}
TOKENS = (1024, 4096)
RATES = ("1e-3", "2e-3", "4e-3")
SEEDS = ("0", "1", "2")
LOSSES = ROOT / ".cache" / "tests" / "optimizer_losses.jsonl"
FIGURE = ROOT / "assets" / "figures" / "optimizers.png"


def times() -> None:
    for dtype in ("bfloat16", "float32"):
        job = NO_LAYOUT | LARGER | TIMED | {"dtype": dtype}
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(TURNS):
            for kind, found in seconds.items():
                found.append(measure("here", job | {"words": [*KINDS[kind]]})["processor"])
        for kind, found in seconds.items():
            ratio = min(found) / min(seconds["AdamW"])
            print(f"{dtype:8} {kind:40} {min(found) * 1e3:5.0f} ms, {ratio:.2f} of AdamW's", flush=True)


def times_of_muon(dtypes: tuple[str, ...] = ("bfloat16", "float32")) -> None:
    """Steps of both in turns. The floor is AdamW's step and the products of the iterations alone."""
    torch.set_num_threads(1)
    init_distributed(60)
    FLAVORS["peers"] = ours.sizes(LARGER)
    for dtype in dtypes:
        products = min(seconds_of_products(getattr(torch, dtype)) for _ in range(TURNS))
        for tokens in TOKENS:
            job = NO_LAYOUT | LARGER | {"dtype": dtype, "batch": tokens // LARGER["seq"]}
            given = [ours.words(job | {"words": [*KINDS[kind]]}) for kind in ("AdamW", "Muon")]
            runs = [train.build(load_config(each), torch.device("cpu")) for each in given]
            turns = [[seconds_of_step(run) for run in runs] for _ in range(1 + TURNS)]
            adam, muon = (min(found) for found in zip(*turns[1:], strict=True))
            said = f"AdamW {adam * 1e3:.0f} ms, Muon {muon * 1e3:.0f} ms, products {products * 1e3:.0f} ms"
            ratios = f"{muon / adam:.2f} of AdamW's, floor {(adam + products) / adam:.2f}"
            print(f"{dtype:8} {tokens:6,} tokens: {said}: {ratios}", flush=True)


def seconds_of_step(run: train.Run) -> float:
    """Processor time."""
    batches, valid = train.local_batches(run), train.divisor(run)
    begun = time.process_time()
    train.train_step(run, batches, valid)
    return time.process_time() - begun


def seconds_of_products(dtype: torch.dtype) -> float:
    """Processor time of the iterations' products alone, of all matrices of the layers."""
    with torch.device("meta"):
        model = Llama(ours.sizes(LARGER))
    matrices = [each.shape for name, each in model.named_parameters() if model.kind(name).role == "matrix"]
    spent = 0.0
    for shape, count in Counter(tuple(sorted(shape)) for shape in matrices).items():
        x = torch.randn(shape, dtype=dtype)
        gram = x @ x.mT
        begun = time.process_time()
        for _ in range(count * Optimizer.newton_schulz_steps):
            x @ x.mT, gram @ gram, gram @ x
        spent += time.process_time() - begun
    return spent


def losses() -> None:
    """AdamW and Muon at three rates, AdamW with three seeds, every kind at the recipe's rate."""
    wanted = {(kind, rate, SEEDS[0]) for kind in ("AdamW", "Muon") for rate in RATES}
    wanted |= {(kind, RATES[1], SEEDS[0]) for kind in KINDS} | {("AdamW", RATES[1], seed) for seed in SEEDS}
    LOSSES.parent.mkdir(parents=True, exist_ok=True)
    lines = LOSSES.read_text().splitlines() if LOSSES.exists() else []
    found = {tuple(run): loss for run, loss in map(json.loads, lines)}

    def one(run: tuple[str, str, str]) -> None:
        found[run] = validation_loss(*run)
        with open(LOSSES, "a", encoding="utf-8") as file:
            print(json.dumps([run, found[run]]), file=file)
        print(*run, f"{found[run]:.4f}", f"({len(wanted - found.keys())} left)", flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        order = [*KINDS]
        list(pool.map(one, sorted(wanted - found.keys(), key=lambda run: (run[2], order.index(run[0]), run[1]))))
    for kind, rate, seed in sorted(found):
        print(f"{kind:40} lr {rate} seed {seed} {found[kind, rate, seed]:.4f}")


def validation_loss(kind: str, rate: str, seed: str) -> float:
    """Of llama_debug at its last step."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--job.config_file", "recipes/llama_debug.toml", "--job.dump_folder", folder]
        words += ["--checkpoint.enable", "false", "--training.mixed_precision_param", "bfloat16"]
        words += ["--optimizer.lr", rate, "--debug.seed", seed, *KINDS[kind]]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, env=environment, check=True, capture_output=True)
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        return [row["validation_loss"] for row in rows if "validation_loss" in row][-1]


def bytes_of_kinds() -> None:
    """Of a parameter in a matrix whose rows have blocks of 256."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 3.2), facecolor="white")
    for place, (kind, words) in enumerate(KINDS.items()):
        config = load_config([*words])
        dtype = getattr(torch, config.training.dtype)
        state = row_bytes("matrix", 2, 4096, dtype, config.optimizer) / 4096
        left = 0.0
        parts = {"weight": dtype.itemsize, "gradient": dtype.itemsize, "optimizer": state}
        for (part, size), colour in zip(parts.items(), ("#2f6fb5", "#e08a1e", "#3f9a5b"), strict=True):
            axes.barh(place, size, left=left, color=colour, label=part if place == 0 else None)
            left += size
        axes.text(left + 0.1, place, f"{left:.2f}".rstrip("0").rstrip("."), va="center")
        print(f"{kind:40} {left:.3f} bytes, {state:.3f} of them the optimizer's")
    axes.set_yticks(range(len(KINDS)), [*KINDS])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("bytes a parameter of a matrix (one batch a step)")
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=110)
    print(f"drawn: {FIGURE.relative_to(ROOT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--losses", action="store_true")
    choice.add_argument("--bytes", action="store_true")
    choice.add_argument("--tokens", action="store_true")
    options = parser.parse_args()
    asked = {losses: options.losses, bytes_of_kinds: options.bytes, times_of_muon: options.tokens}
    next((measured for measured, wanted in asked.items() if wanted), times)()


if __name__ == "__main__":
    main()
