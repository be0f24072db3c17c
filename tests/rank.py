"""What a rank of tests/runs.py does. Alone here: the launcher imports less."""

import os

import tests.small  # noqa: F401 - its flavors
import train
from components.config import from_json
from components.launch.ending import run_to_exit
from tests.ranks import multiply_by_mkl


def run(argv: list[str]) -> None:
    """Train, and end the process. FAULT is run before: it may change the modules that it names."""
    multiply_by_mkl()  # the ranks that these runs are compared with do so: the same bits
    exec(os.environ["FAULT"], {"train": train, "rank": int(os.environ["RANK"])})
    run_to_exit(train.main, from_json(argv[0]))
