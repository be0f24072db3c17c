"""Processor time of a step with each method of context parallel, in turns: python -m tests.benchmarks.context

Two ranks of one thread each share sequences of 2,048 tokens, with and without a document mask; 5.2M parameters.
The time is a rank's, and its ratio to one process with as many tokens as a rank has.
"""

from tests.benchmarks.peers.__main__ import SMALL
from tests.benchmarks.peers.sides import NO_LAYOUT, measure

METHODS = {
    "one process": (),
    "ring, allgather": ("ring", "allgather"),
    "ring, alltoall": ("ring", "alltoall"),
    "allgather_kv": ("allgather_kv",),
    "ulysses": ("ulysses",),
}
TURNS = 2


def main() -> None:
    for documents in (False, True):
        for dtype in ("float32", "bfloat16"):
            seconds: dict[str, list[float]] = {method: [] for method in METHODS}
            for _ in range(TURNS):
                for method, found in seconds.items():
                    found.append(_seconds(method, dtype, documents))
            alone = min(seconds["one process"])
            for method, found in seconds.items():
                what = f"{dtype:8} {'documents' if documents else 'causal':9} {method:15}"
                print(f"{what} {min(found) * 1e3:5.0f} ms, {min(found) / alone:.2f}", flush=True)


def _seconds(method: str, dtype: str, documents: bool) -> float:
    keys = ("--parallelism.context_parallel_method", "--parallelism.context_parallel_rotate_method")
    words = [word for pair in zip(keys, METHODS[method]) for word in pair]
    words += ["--training.document_mask", str(documents).lower()]
    ranks = 1 if method == "one process" else 2
    # One process computes a sequence alone; two ranks compute two.
    job = NO_LAYOUT | SMALL | {"seq": 2048, "batch": ranks, "warm": 2, "steps": 5, "dtype": dtype}
    return measure("here", job | {"layout": {"cp": ranks}, "words": words})["processor"]


if __name__ == "__main__":
    main()
