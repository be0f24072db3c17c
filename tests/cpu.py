"""Processor time of all processes that a command starts, also of those that it does not wait for.

python -m tests.cpu COMMAND ...        the command's total, in seconds of processor time, at its end
pytest -p tests.cpu ...                the most expensive tests, ranks and commands included; with -n too
pytest -p tests.cpu --write-costs      and, for the tests that ran, tests/costs.json, which says what is slow

`time` misses ranks: their parent is the fork server, which outlives pytest.
"""

import ctypes
import json
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
    for process in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
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


COSTS = Path(__file__).with_name("costs.json")
"""Processor time, in seconds, of each test that takes a second or more. A test above SLOW is slow."""
SLOW = 1.3
TOO_SLOW = 20.0
"""The quick command names a test that takes more and is not in COSTS: many times SLOW, since machines differ."""
_SPENT = pytest.StashKey[dict[str, float]]()
_LOOKED = pytest.StashKey[tuple[float, float]]()
"""Time and processor time when the tree was last looked at."""


def read_costs() -> dict[str, float]:
    return json.loads(COSTS.read_text(encoding="utf-8"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-costs", action="store_true", help="write what the tests took into tests/costs.json")


def pytest_configure(config: pytest.Config) -> None:
    adopt_orphans()
    config.stash[_SPENT] = {}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """To look takes milliseconds: so only where half a second is over, all of which counts as the last test's."""
    stash, spent = item.config.stash, item.config.stash[_SPENT]
    if "start and collection" not in spent:
        spent["start and collection"] = tree_seconds(os.getpid())
        stash[_LOOKED] = time.monotonic(), spent["start and collection"]
    spent[item.nodeid] = 0.0
    try:
        return (yield)
    finally:
        looked_at, before = stash[_LOOKED]
        if time.monotonic() - looked_at > 0.5:
            stash[_LOOKED] = time.monotonic(), tree_seconds(os.getpid())
            spent[item.nodeid] = stash[_LOOKED][1] - before


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """With pytest-xdist the tests are run, and measured, by its workers."""
    spent = node.config.stash[_SPENT]
    for name, seconds in getattr(node, "workeroutput", {}).get("spent", {}).items():
        spent[name] = spent.get(name, 0.0) + seconds


def pytest_sessionfinish(session: pytest.Session) -> None:
    config, spent = session.config, session.config.stash[_SPENT]
    if hasattr(config, "workeroutput"):
        config.workeroutput["spent"] = spent
        return
    if config.option.write_costs:
        chosen = config.option.markexpr or config.option.keyword or config.option.file_or_dir
        before = read_costs() if chosen else {}
        costs = before | {name: round(seconds, 1) for name, seconds in spent.items() if "::" in name}
        tests = {name: seconds for name, seconds in sorted(costs.items()) if seconds >= 1}
        COSTS.write_text(json.dumps(tests, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


def _too_slow(config: pytest.Config) -> list[str]:
    """Tests of the quick command that should be in COSTS."""
    if config.option.markexpr != "not slow":
        return []
    slow = {name for name, seconds in config.stash[_SPENT].items() if "::" in name and seconds > TOO_SLOW}
    return sorted(slow - read_costs().keys())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    spent = config.stash[_SPENT]
    terminalreporter.section("processor time of all processes, in seconds")
    for name, seconds in sorted(spent.items(), key=lambda each: -each[1])[:10]:
        terminalreporter.write_line(f"{seconds:8.1f}  {name}")
    terminalreporter.write_line(f"{sum(spent.values()):8.1f}  all")
    for name in _too_slow(config):
        terminalreporter.write_line(f"{name} is too slow for the quick command: add its seconds to tests/costs.json")


def main(command: list[str]) -> int:
    """Run a command; print the processor time of all its processes. Returns its exit code."""
    adopt_orphans()
    started = time.perf_counter()
    code = subprocess.run(command, check=False).returncode
    seconds = tree_seconds(os.getpid()) - time.process_time()
    print(f"{seconds:.0f} s of processor time, {time.perf_counter() - started:.0f} s: {' '.join(command)}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
