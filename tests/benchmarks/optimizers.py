"""Processor time of a step with each optimizer, over AdamW's, in turns: python -m tests.benchmarks.optimizers

One process with one thread, 36M parameters (width 512, 8 layers, a vocabulary of 8,192), 4 sequences of 256 tokens.
"""

from components.optimizer import OPTIMIZERS
from tests.benchmarks.peers.__main__ import LARGER, TIMED
from tests.benchmarks.peers.sides import NO_LAYOUT, measure

TURNS = 3


def main() -> None:
    for dtype in ("bfloat16", "float32"):
        job = NO_LAYOUT | LARGER | TIMED | {"dtype": dtype}
        seconds: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
        for _ in range(TURNS):
            for name, times in seconds.items():
                times.append(measure("here", job | {"words": ["--optimizer.name", name]})["processor"])
        for name, times in seconds.items():
            ratio = min(times) / min(seconds["AdamW"])
            print(f"{dtype:8} {name:6} {min(times) * 1e3:5.0f} ms, {ratio:.2f} of AdamW's", flush=True)


if __name__ == "__main__":
    main()
