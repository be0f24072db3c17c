"""Tokens a second of the loader on a warm cache (wanted: a million a process), and of tokenizing on one core.

python -m tests.benchmarks.loader
"""

import tempfile
import time
from itertools import islice
from pathlib import Path

from components.config import ROOT
from components.data import DataSpec, PackedSequences, prepare
from components.data.loader import GlobalOrder, build_loader

SEQ_LEN, BATCH, BATCHES, COPIES = 256, 4, 5000, 4


def main() -> None:
    text = "".join(file.read_text() for file in sorted((ROOT / "assets" / "kjv").glob("*.txt")))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(COPIES):
            (Path(folder) / f"{number}.txt").write_text(text)
        # Prints its own tokens a second, with the start of the process in it.
        cache = prepare(DataSpec(folder, "text", False, "assets/tokenizer", Path(folder) / ".cache"), workers=1)
        for part, sequences in (
            ("all", PackedSequences(cache, SEQ_LEN)),
            ("train", PackedSequences(cache, SEQ_LEN, "train", 0.05)),
        ):
            batches = build_loader(GlobalOrder(sequences, 0, BATCH, BATCH))
            next(batches)
            started = time.perf_counter()
            tokens = sum(batch["tokens"].numel() for batch in islice(batches, BATCHES))
            print(f"loader, {part}: {tokens / (time.perf_counter() - started):,.0f} tokens/s")


if __name__ == "__main__":
    main()
