"""Choice and order of the tests that the commands of tests/run.sh run: slow tests get a mark, files are sorted."""

import hashlib
import inspect
import os
import re
import subprocess
import time
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest

from components.config import ROOT
from tests.cpu import SLOW, read_costs
from tests.limits import limited_itself
from tests.planted import ONLY_PLANTS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--until", type=float, metavar="TIME", help="begin no test after this second of the epoch")
    parser.addoption("--turn", default="", metavar="WORD", help="files in an order that each word has its own of")
    parser.addoption("--plants", action="store_true", help="only see whether the faults of tests can still be planted")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test is slow by tests/costs.json. Changed files come first, then the files that take longest."""
    if config.option.plants:
        items[:] = [item for item in items if isinstance(item, pytest.Function) and plants_a_fault(item)]
        os.environ[ONLY_PLANTS] = "yes"
    costs, of_file = read_costs(), dict[Path, float]()
    for item in items:
        if costs.get(item.nodeid, 0) > SLOW and not item.get_closest_marker("quick"):
            item.add_marker("slow")
        of_file[item.path] = of_file.get(item.path, 0) + costs.get(item.nodeid, 0)
    turn: str = config.option.turn
    if turn:
        items.sort(key=lambda item: hashlib.sha256(f"{turn} {item.path.name}".encode()).digest())
    else:
        items.sort(key=lambda item: (not is_changed(item.path), -of_file[item.path], item.path))


def pytest_runtest_setup(item: pytest.Item) -> None:
    until: float | None = item.config.option.until
    if until and time.time() > until:
        pytest.skip(f"not run, the time was over: {item.path.name}")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: object) -> Generator[None, object, object]:
    with limited_itself(str(fixturedef)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with limited_itself(item.name):
        yield


def plants_a_fault(item: pytest.Function) -> bool:
    """Whether a test seems to run a layout with a fault: it has one as its parameter, or its code names one."""
    if "fault" in item.fixturenames:
        return True
    if "mutate=" not in item.path.read_text(encoding="utf-8"):
        return False
    return bool(re.search("mutate|plant|rewrite", inspect.getsource(item.function)))


@cache
def is_changed(test: Path) -> bool:
    """Whether this file of tests, or a module that it names, is another one than a commit ago."""
    text = test.read_text(encoding="utf-8")
    return any(test == ROOT / path or re.search(rf"\b{module_of(path)}\b", text) for path in changed_files())


@cache
def changed_files() -> list[Path]:
    """Python files that the last commit or the work tree changes; none where git has no commit before the last one."""
    git = ["git", "diff", "--name-only", "HEAD~1", "--", "*.py"]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    return [Path(name) for name in done.stdout.splitlines()]


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")
