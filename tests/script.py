"""What a rank does that runs a script in the place of train.py. Alone here, so that such a rank imports little."""

import runpy
import sys


def run(words: list[str]) -> None:
    """A script and its words, as Python runs it."""
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
