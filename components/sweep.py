"""python -m components.sweep RECIPE --grid KEY=A,B: a recipe over a grid of settings (components/commands/sweep.py)."""

import sys

from components.commands.sweep import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
