"""The work of a rank. The process that ranks are forked from imports this module, and so all that train.py needs."""

import sys

import setproctitle

import train
from components.launch.ending import run_to_exit


def run(argv: list[str]) -> None:
    """Train, and end the process. It is listed by `ps` as one that runs train.py."""
    setproctitle.setproctitle(" ".join([sys.executable, train.__file__, *argv]))
    run_to_exit(train.main, argv)
