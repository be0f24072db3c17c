"""python -m components.metrics report: a page of curves (components/commands/report.py)."""

import sys

from components.commands.report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
