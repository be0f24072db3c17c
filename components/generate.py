"""python -m components.generate FOLDER PROMPT: text from a model (components/commands/generate.py)."""

import sys

from components.commands.generate import main
from components.launch.ending import run_to_exit

if __name__ == "__main__":
    run_to_exit(main, sys.argv[1:])
