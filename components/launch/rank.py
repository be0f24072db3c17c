"""The main function of a rank. The fork server imports this module, and with it all modules that train.py needs."""

import sys

import setproctitle

import train
from components.launch.ending import run_to_exit


def run(argv: list[str]) -> None:
    """Trains and ends the process. `ps` lists the process as one that runs train.py."""
    setproctitle.setproctitle(" ".join([sys.executable, train.__file__, *argv]))
    run_to_exit(train.main, argv)
