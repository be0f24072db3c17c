"""20 steps with experts, at many layouts: python -m tests.benchmarks.routing

Of each layout the worst relative error of a step's loss, with the routing of one process replayed and with the layout's
own, and the tokens that were sent elsewhere: of 24 sequences of 32 tokens, in two layers, in 20 steps.
"""

from itertools import chain

from components.commands.figures import Observation
from tests.harness import observe

STEPS = 20
RUN = (
    *("--model.name", "qwen3_moe", "--model.flavor", "many_heads", "--experts.bias_update_speed", "1e-3"),
    *("--training.global_batch_size", "24", "--training.local_batch_size", "24"),
)
KEYS = {
    "dp": "data_parallel_shard_degree",
    "replicas": "data_parallel_replicate_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
}
LAYOUTS: list[dict[str, int]] = [
    {"dp": 2},
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 2},
    {"dp": 4, "ep": 4},
    {"replicas": 2, "dp": 2, "ep": 2},
    {"tp": 2},
    {"tp": 2, "ep": 2},
    {"tp": 4, "ep": 4},
    {"dp": 2, "tp": 2, "ep": 4},
    {"cp": 2, "ep": 2},
    {"cp": 2, "tp": 2, "ep": 4},
    {"pp": 2},
    {"pp": 2, "dp": 2, "ep": 2},
]


def main() -> None:
    one = observe(*RUN, steps=STEPS)
    print(f"smallest gap of scores in one process: {one.routing.smallest_gap():.1e}")
    for layout in LAYOUTS:
        ranks, batch_ranks = 1, layout.get("dp", 1) * layout.get("replicas", 1)
        for name, degree in layout.items():
            ranks *= degree if name != "ep" else 1
        words = list(chain.from_iterable((f"--parallelism.{KEYS[name]}", str(size)) for name, size in layout.items()))
        words += ["--training.local_batch_size", str(24 // batch_ranks)]
        words += ["--parallelism.pipeline_parallel_microbatch_size", str(6 // batch_ranks)]
        if "dp" not in layout:
            words += ["--parallelism.data_parallel_shard_degree", "1"]
        replayed = observe(*RUN, *words, ranks=ranks, steps=STEPS, routing=one.routing)
        free = observe(*RUN, *words, ranks=ranks, steps=STEPS)
        shown = " ".join(f"{name} {degree}" for name, degree in layout.items())
        errors = f"replayed {_worst(replayed, one):.1e}, own {_worst(free, one):.1e}"
        print(f"{shown:24} {errors}, {replayed.routing.flips} flips", flush=True)


def _worst(observed: Observation, one: Observation) -> float:
    return max(abs(loss / right - 1) for loss, right in zip(observed.losses, one.losses, strict=True))


if __name__ == "__main__":
    main()
