"""A page of curves from runs: python -m components.metrics report FOLDER [FOLDER ...] [--output FILE]"""

import argparse
import sys

from components.config.bounds import path_argument
from components.launch.exit_codes import ExitCode
from components.observe.report import run_report


def main(argv: list[str]) -> int:
    """Write the page and print its path; returns 2 if a folder is not a run's dump folder."""
    parser = argparse.ArgumentParser(prog="python -m components.metrics", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="report")
    report = commands.add_parser("report", help="one HTML page with the curves of one run, or of several")
    report.add_argument("folders", nargs="+", type=path_argument, metavar="FOLDER", help="a run's dump folder")
    report.add_argument("--output", type=path_argument, help="the page (default: report.html in the first folder)")
    options = parser.parse_args(argv)
    path = options.output or options.folders[0] / "report.html"
    try:
        run_report(options.folders, path)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIG
    print(path)
    return ExitCode.DONE
