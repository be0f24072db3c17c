"""Processor time of a layer of experts, forward and backward, beside others: python -m tests.benchmarks.experts

One thread, best of five. Beside it: a dense feed-forward as wide as a token's experts together; the three grouped
products of the experts alone, and a loop over experts, on rows that are in order already; and torchtitan's layer, if
`python -m tests.benchmarks.peers.sides` has installed it.

    python -m tests.benchmarks.experts --degrees

measures a step of two ranks with expert degrees 1 and 2, in turns: of the debug model, and with more experts.

    python -m tests.benchmarks.experts --whole

measures a step of the debug model and of qwen3's, which is as wide as a token's experts together, in turns.

    python -m tests.benchmarks.experts --loads BALANCED OTHER

draws the loads of two runs with metrics.dynamics_freq, from their dump folders: assets/figures/experts.png.
"""

import argparse
import importlib
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.config import ROOT
from components.launch.memory import keep_freed_memory
from components.observe.report import points, read_rows
from components.state.init import initialize_weights
from models import MODELS
from models.layers import FeedForward
from models.moe import Experts, Mixture
from parallelize.precision import compute_in, set_product_precision
from tests.benchmarks.peers.__main__ import SMALL
from tests.benchmarks.peers.sides import FOLDER, NO_LAYOUT, measure

SIZES = {"D256 F192 E32 C4": (256, 192, 32, 4), "D512 F256 E64 C8": (512, 256, 64, 8)}
TOKENS = 1024


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--degrees", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--loads", type=Path, nargs=2, metavar="FOLDER")
    options = parser.parse_args(argv)
    if options.loads:
        draw(dict(zip(("experts.bias_update_speed = 1e-3", "no balancing"), options.loads, strict=True)))
        return
    if options.degrees:
        for experts in (16, 32, 64):
            name = f"{experts} experts, two ranks, degree"
            job: dict[str, Any] = {"experts": experts, "layout": {"fsdp": 2}, "warm": 2, "steps": 5}
            words = "--model.name qwen3_moe --parallelism.expert_parallel_degree"
            _compare({f"{name} {each}": job | {"words": f"{words} {each}".split()} for each in (1, 2)})
        return
    if options.whole:
        # Kernels for the numbers of rows are made in the first steps.
        words = "--model.flavor debug --model.name"
        job = {"warm": 10, "steps": 10}
        _compare({name: job | {"words": f"{words} {name}".split()} for name in ("qwen3", "qwen3_moe")})
        return
    torch.set_num_threads(1)
    keep_freed_memory()  # as train.py does
    set_product_precision("highest", torch.device("cpu"))
    for name, sizes in SIZES.items():
        found = _measured(*sizes)
        for what, milliseconds in found.items():
            print(f"{name}  {what:29}{milliseconds:8.1f} ms  {milliseconds / found['experts']:6.2f}", flush=True)


def _compare(jobs: dict[str, dict[str, Any]]) -> None:
    """Processor time of a step, float32, the best of three turns; and how often it fits into that of the first job."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(3):
        for name, job in jobs.items():
            seconds[name].append(measure("here", NO_LAYOUT | SMALL | {"dtype": "float32"} | job)["processor"])
    first = min(next(iter(seconds.values())))
    for name, found in seconds.items():
        print(f"{name:40}{min(found) * 1e3:8.0f} ms  {first / min(found):6.2f}", flush=True)


def _measured(dim: int, width: int, experts: int, chosen: int) -> dict[str, float]:
    debug = MODELS["qwen3_moe"][1]["debug"]
    config = replace(debug, dim=dim, expert_dim=width, n_experts=experts, top_k=chosen)
    mixture, half, dense = Mixture(config), Mixture(config), FeedForward(dim, width * chosen)
    for module in (mixture, half, dense):
        initialize_weights(module, lambda name: 0.02, seed=0)
    compute_in(half, torch.bfloat16)
    x = torch.randn(1, TOKENS, dim, requires_grad=True)
    rows = torch.randn(TOKENS * chosen, dim, requires_grad=True)
    mixture(x, None)
    counts, own = mixture.counts_E, mixture.experts
    assert counts is not None
    return {
        "experts": _milliseconds(mixture, x, None),
        "experts, bfloat16": _milliseconds(half, x.bfloat16(), None),
        "dense, as wide": _milliseconds(dense, x),
        "a loop": _milliseconds(_Loop(own), rows, counts),
        "grouped products alone": _milliseconds(own, rows, counts),
        **_of_torchtitan(x, width, experts, chosen),
    }


def _of_torchtitan(x: Tensor, width: int, experts: int, chosen: int) -> dict[str, float]:
    """Its layer with its loop over experts, and with its grouped products, which convert to bfloat16."""
    if not (FOLDER / "torchtitan").exists():
        return {}
    sys.path.append(str(FOLDER / "torchtitan"))
    # A module of Triton kernels, which pad rows for GPUs: nothing here needs them.
    kernels: Any = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None
    sys.modules[kernels.__name__] = kernels
    titan: Any = importlib.import_module("torchtitan.models.moe.moe")
    titan.indices_padding_wrapper = lambda run_experts: run_experts
    # It counts integers, as a CPU cannot.
    vars(torch)["histc"] = lambda chosen, bins, min, max: torch.bincount(chosen.flatten(), minlength=bins)
    shared = {"num_experts": experts, "num_shared_experts": 0, "top_k": chosen, "score_func": "softmax"}
    found = {}
    torch.set_float32_matmul_precision("highest")  # as it does
    for name, grouped in (("torchtitan, a loop", False), ("torchtitan, grouped, bfloat16", True)):
        layer = titan.MoE(titan.MoEArgs(**shared, use_grouped_mm=grouped), x.shape[2], width)
        with torch.no_grad():
            layer.init_weights(0.02, torch.device("cpu"))
        found[name] = _milliseconds(layer, x)
    set_product_precision("highest", torch.device("cpu"))
    return found


def draw(runs: dict[str, Path]) -> None:
    """The busiest expert of each layer over the steps, and the loads of all experts in the last step sampled."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(9, 5.4), facecolor="white", width_ratios=(1, 1.15))
    for (name, folder), (curve, loads) in zip(runs.items(), panels, strict=True):
        rows = [row for row in read_rows(folder / "metrics.jsonl") if "dynamics" in row]
        last = rows[-1]["dynamics"]
        for layer in last["expert_load_max"]:
            curve.plot(*points(rows, "dynamics", "expert_load_max", layer), label=layer.replace("layers.", "layer "))
        curve.axhline(1, color="#8c959f", linewidth=0.8)
        curve.set(title=name, ylim=(0, 4.2), ylabel="busiest expert / mean", xlabel="step")
        table: dict[str, list[float]] = {}
        for expert, load in last["expert_load"].items():
            table.setdefault(expert.rpartition(".")[0], []).append(load)
        shown = loads.imshow(list(table.values()), vmin=0, vmax=4, cmap="viridis", aspect="auto")
        loads.set(
            title=f"step {rows[-1]['step']}",
            xlabel="expert",
            ylabel="layer",
            yticks=range(len(table)),
            xticks=range(0, len(next(iter(table.values()))), 5),
        )
        figure.colorbar(shown, ax=loads, label="load / mean")
        curve.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(frameon=False, ncols=2)
    figure.tight_layout()
    figure.savefig(ROOT / "assets" / "figures" / "experts.png", dpi=110)
    plt.close(figure)


class _Loop(nn.Module):
    """Over experts, a product for each."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        w1, w2, w3 = self.experts.w1, self.experts.w2, self.experts.w3
        parts = rows.split(counts.tolist())
        return torch.cat([(F.silu(x @ w1[e].T) * (x @ w3[e].T)) @ w2[e].T for e, x in enumerate(parts)])


def _milliseconds(layer: nn.Module, *inputs: Any) -> float:
    best = float("inf")
    for _ in range(5):
        layer.zero_grad()
        started = time.process_time()
        layer(*inputs).sum().backward()
        best = min(best, time.process_time() - started)
    return best * 1e3


if __name__ == "__main__":
    main(sys.argv[1:])
