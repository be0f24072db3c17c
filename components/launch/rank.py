"""The main function of a rank. The fork server imports this module, and with it all modules that train.py needs."""

import sys

import setproctitle

import train
from components.config import from_json
from components.config.read import COMMAND_LINE
from components.config.rule import value_of
from components.launch.ending import run_to_exit


def run(argv: list[str]) -> None:
    """Trains and ends the process; argv: the job as JSON, which the launcher has resolved and checked.

    `ps` lists the process as one that runs train.py with the words of the command line.
    """
    (job,) = argv
    config = from_json(job)
    given = [f"--{key} {value_of(config, key)}" for key, origin in config.origins.items() if origin == COMMAND_LINE]
    setproctitle.setproctitle(" ".join([sys.executable, train.__file__, *given]))
    run_to_exit(train.main, config)
