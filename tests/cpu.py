"""Processor time of all processes that a command starts, also of those that it does not wait for.

python -m tests.cpu COMMAND ...        the command's total, in seconds of processor time, at its end
pytest -p tests.cpu ...                the 40 most expensive tests and a table by test file, ranks and commands included

With -n too. `time` misses ranks: their parent is the fork server, which outlives pytest.
"""

import ctypes
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")


def tree_seconds(root: int) -> float:
    """Processor time of a process and its descendants, with what they have waited for. Linux only."""
    children, ticks = defaultdict(list), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        process = int(path.parent.name)
        children[int(fields[1])].append(process)
        ticks[process] = sum(map(int, fields[11:15]))
    waiting, total = [root], 0
    while waiting:
        process = waiting.pop()
        total += ticks.get(process, 0)
        waiting += children[process]
    return total / _TICKS


def children_seconds() -> float:
    """Processor time of the processes that this one has waited for."""
    spent = os.times()
    return spent.children_user + spent.children_system


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process: none is lost."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


_BY_TEST = pytest.StashKey[dict[str, float]]()


def pytest_configure(config: pytest.Config) -> None:
    adopt_orphans()
    config.stash[_BY_TEST] = {"(start and collection)": 0.0}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    by_test = item.config.stash[_BY_TEST]
    before = tree_seconds(os.getpid())
    if len(by_test) == 1:
        by_test["(start and collection)"] = before
    try:
        return (yield)
    finally:
        by_test[f"{item.path.name}::{item.name}"] = tree_seconds(os.getpid()) - before


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["seconds"] = session.config.stash[_BY_TEST]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """With pytest-xdist the tests are run, and measured, by its workers."""
    by_test = node.config.stash[_BY_TEST]
    for name, seconds in getattr(node, "workeroutput", {}).get("seconds", {}).items():
        by_test[name] = by_test.get(name, 0.0) + seconds


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    by_test, by_file = config.stash[_BY_TEST], defaultdict[str, float](float)
    for name, seconds in by_test.items():
        by_file[name.partition("::")[0]] += seconds
    terminalreporter.section("processor time of all processes, in seconds")
    for table in (dict(_most_expensive(by_test)[:40]), by_file):
        for name, seconds in _most_expensive(table):
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")
        terminalreporter.write_line("")
    terminalreporter.write_line(f"{sum(by_test.values()):8.1f}  all")


def _most_expensive(table: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(table.items(), key=lambda each: -each[1])


def main(command: list[str]) -> int:
    """Run a command and wait for all that it has started; print its processor time. Returns its exit code."""
    adopt_orphans()
    started = time.perf_counter()
    code = subprocess.run(command, check=False).returncode
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    print(f"{children_seconds():.1f} s of processor time, {time.perf_counter() - started:.1f} s: {' '.join(command)}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
