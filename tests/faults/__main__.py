"""What was promised for faults and bad input, and what is seen.

python -m tests.faults                         every row's tests, in one run of pytest; writes docs/reliability.md
python -m tests.faults 12 13                   these rows only
python -m tests.faults --campaign              the campaigns that have no result at this revision: hours
python -m tests.faults --campaign mutations    this one; --amount 300: so much of it (its function says what)
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from components.config import ROOT
from components.config.files import replace
from tests.cpu import adopt_orphans, tree_seconds
from tests.faults.page import PAGE, RESULTS, page, read_results
from tests.faults.rows import FOLDER, Row, read_rows

Campaign = Callable[..., list[str]]
"""Takes an amount, or its default; returns lines for the page. Keeps its progress itself, to go on where it was cut."""


class Reports:
    """A pytest plugin: the outcome and the seconds of each test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        worst = max(self.outcomes.get(report.nodeid, ""), report.outcome, key=["", "passed", "skipped", "failed"].index)
        self.outcomes[report.nodeid] = worst
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def of(self, row: Row) -> dict[str, Any]:
        """What was seen of a row: held if every case of every test passed; and its seconds."""
        nodes_of = {test: [n for n in self.outcomes if n == test or n.startswith(f"{test}[")] for test in row.tests}
        nodes = {node for found in nodes_of.values() for node in found}
        held = all(nodes_of.values()) and {self.outcomes[node] for node in nodes} == {"passed"}
        seconds = sum(self.seconds[node] for node in nodes)
        return {"seen": "held" if held else "broken", "seconds": round(seconds, 1)}


def run_rows(rows: list[Row]) -> tuple[dict[str, Any], float]:
    """What was seen of each row that has tests, and the processor time of all of it in seconds."""
    reports = Reports()
    adopt_orphans()
    pytest.main([*sorted({test for row in rows for test in row.tests})], plugins=[reports])
    return {str(row.number): reports.of(row) for row in rows if row.tests}, tree_seconds(os.getpid())


def campaigns() -> dict[str, Campaign]:
    """Name -> function: `campaign` of a part's module has the module's name, `campaign_x` is called x."""
    found: dict[str, Campaign] = {}
    for path in sorted(FOLDER.glob("[a-z]*.py")):
        module = importlib.import_module(f"tests.faults.{path.stem}")
        for name, value in vars(module).items():
            if name.partition("_")[0] == "campaign" and callable(value):
                found[name.removeprefix("campaign_") if "_" in name else path.stem] = value
    return found


def revision() -> str:
    """The commit, with + if the tree differs in more than what this command writes."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    written = [f":!{path.relative_to(ROOT)}" for path in (PAGE, RESULTS)]
    return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "--", ".", *written))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", type=int, metavar="ROW", help="numbers of rows; all if left out")
    parser.add_argument("--campaign", nargs="*", metavar="NAME", help="run campaigns instead")
    parser.add_argument("--amount", type=float, help="how much of a campaign: minutes or a count, as its function says")
    arguments = parser.parse_args(argv)
    if arguments.campaign is None:
        return show_rows(arguments.rows)
    known = campaigns()
    if unknown := set(arguments.campaign) - known.keys():
        parser.error(f"no campaign {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    results, amount = read_results()["campaigns"], [] if arguments.amount is None else [arguments.amount]
    done = {name for name, result in results.items() if result["revision"] == revision()}
    for name in arguments.campaign or sorted(known.keys() - done):
        keep_campaign(name, known[name], amount)
    return 0


def show_rows(numbers: list[int]) -> int:
    """Run the tests of these rows (all if there are none), print and keep what is seen; 1 if a row is broken."""
    chosen = [row for row in read_rows() if not numbers or row.number in numbers]
    seen, processor_seconds = run_rows(chosen)
    for row in chosen:
        found = seen.get(str(row.number), {"seen": "no test", "seconds": 0.0})
        print(f"{row.number:3}  {found['seen']:8}{found['seconds']:7.1f} s  {row.fault}: {row.expected}")
    print(f"{processor_seconds:.0f} s of processor time")
    results = read_results()
    results["rows"] |= {number: row | mark() for number, row in seen.items()}
    if not numbers:
        results["processor_seconds"] = round(processor_seconds)
    save(results)
    return int(any(row["seen"] == "broken" for row in seen.values()))


def keep_campaign(name: str, campaign: Campaign, amount: list[float]) -> None:
    """Run a campaign, print and keep its lines."""
    started = time.monotonic()
    lines = campaign(*amount)
    about = (campaign.__doc__ or name).splitlines()[0]
    results = read_results()
    results["campaigns"][name] = {"about": about, "lines": lines, "seconds": round(time.monotonic() - started)} | mark()
    save(results)
    print(f"{name}: {about}", *lines, sep="\n  ")


def mark() -> dict[str, str]:
    """When a result was seen, and of which code."""
    return {"date": time.strftime("%Y-%m-%d"), "revision": revision()}


def save(results: dict[str, Any]) -> None:
    """Keep the results, and write the page anew."""
    replace(RESULTS, json.dumps(results, indent=1, sort_keys=True) + "\n")
    replace(PAGE, page(read_rows(), results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
