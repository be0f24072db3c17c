"""The commands of tests/run.sh: which tests each runs, in which order, and what they say at their end."""

import json
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from components.config import ROOT
from tests import conftest, cpu, listed
from tests.processes import ended, start


class Item:
    """A test, as far as it is looked at."""

    def __init__(self, name: str, *marks: str) -> None:
        self.nodeid, self.marks = f"tests/{name}", [*marks]
        self.path = ROOT / "tests" / name.partition("::")[0]

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


COSTS = {"tests/test_mesh.py::a": 9.0, "tests/test_loss.py::a": 1.0, "tests/test_loss.py::b": 99.0}


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (conftest, cpu):
        monkeypatch.setattr(module, "read_costs", lambda: COSTS)
    monkeypatch.setattr(conftest, "changed_files", lambda: [Path("parallelize/mesh.py")])
    conftest.is_changed.cache_clear()


def collected(*items: Item, turn: str = "") -> list[Item]:
    options: Any = types.SimpleNamespace(option=types.SimpleNamespace(turn=turn, plants=False))
    chosen: Any = [*items]
    conftest.pytest_collection_modifyitems(options, chosen)
    return chosen


def test_a_test_is_slow_by_what_it_took() -> None:
    mesh, loss, other = Item("test_mesh.py::a"), Item("test_loss.py::a"), Item("test_loss.py::new")
    collected(mesh, loss, other, marked := Item("test_loss.py::b", "quick"))
    assert [each.marks for each in (mesh, loss, other, marked)] == [["slow"], [], [], ["quick"]]


def test_files_of_changed_modules_are_first_and_then_those_that_take_longest() -> None:
    names = ["test_docs.py::a", "test_loss.py::a", "test_docs.py::b", "test_loss.py::b", "test_mesh.py::x"]
    found = [each.nodeid.removeprefix("tests/") for each in collected(*map(Item, names))]
    assert found == ["test_mesh.py::x", "test_loss.py::a", "test_loss.py::b", "test_docs.py::a", "test_docs.py::b"]


def test_each_turn_has_an_order_of_its_own_and_files_stay_whole() -> None:
    names = [f"test_{name}.py::{test}" for name in ("docs", "loss", "mesh", "init", "moe") for test in "ab"]
    orders = [[each.path.name for each in collected(*map(Item, names), turn=turn)] for turn in "123"]
    assert len({tuple(order) for order in orders}) == 3
    for order in orders:
        assert order[::2] == order[1::2]
        assert len({*order}) == 5


def test_nothing_begins_when_the_time_is_over() -> None:
    item: Any = Item("test_mesh.py::a")
    for until in (None, time.time() + 60):
        item.config = types.SimpleNamespace(option=types.SimpleNamespace(until=until))
        conftest.pytest_runtest_setup(item)
    item.config.option.until = time.time() - 1
    with pytest.raises(pytest.skip.Exception, match=r"not run, the time was over: test_mesh.py"):
        conftest.pytest_runtest_setup(item)


@pytest.mark.parametrize(
    ("name", "seconds", "markexpr", "named"),
    [
        ("tests/test_loss.py::b", 100.0, "not slow", False),
        ("tests/test_loss.py::new", 10.0, "not slow", False),
        ("tests/test_loss.py::new", 30.0, "not slow", True),
        ("tests/test_loss.py::new", 30.0, "", False),
    ],
)
def test_the_quick_command_names_a_new_test_that_is_slow(name: str, seconds: float, markexpr: str, named: bool) -> None:
    config: Any = types.SimpleNamespace(option=types.SimpleNamespace(markexpr=markexpr))
    config.stash = {cpu._SPENT: {name: seconds, "start and collection": 99.0}}
    assert cpu._too_slow(config) == [name] * named


def test_costs_of_tests_that_did_not_run_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "COSTS", tmp_path / "costs.json")
    spent = {"start and collection": 99.0, "tests/test_mesh.py::a": 0.0, "tests/test_mesh.py::b": 2.22}
    for chosen, left in (["tests"], {"tests/test_loss.py::a": 1.0, "tests/test_loss.py::b": 99.0}), ([], {}):
        option = types.SimpleNamespace(write_costs=True, markexpr="", keyword="", file_or_dir=chosen)
        config = types.SimpleNamespace(option=option, stash={cpu._SPENT: spent})
        session: Any = types.SimpleNamespace(config=config)
        cpu.pytest_sessionfinish(session)
        assert json.loads(cpu.COSTS.read_text(encoding="utf-8")) == left | {"tests/test_mesh.py::b": 2.2}


def test_the_time_of_what_a_command_leaves_running_counts() -> None:
    left = "import time\nwhile time.process_time() < 1.5: pass\nprint(flush=True)\ntime.sleep(600)"
    begins = f"subprocess.Popen([sys.executable, '-c', {left!r}], stdout=subprocess.PIPE)"
    script = f"import subprocess, sys; {begins}.stdout.readline()"
    process = start("-m", "tests.cpu", sys.executable, "-c", script)
    with ended(process):
        assert process.stdout
        assert float(process.stdout.readline().partition(" s of processor time")[0]) >= 1


def test_the_list_says_what_each_command_proves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed, "main_layouts", lambda: [None] * 1234)  # those that there are take seconds
    found = listed.Collected()
    found.quick[ROOT / "tests/test_mesh.py"], found.slow[ROOT / "tests/test_mesh.py"] = 3, 1000
    first, layouts, full, _, whole, *_, last = listed.lines(found)
    assert "types, 3 tests and one convergence run" in first
    assert re.search(r"\b6\d layouts of ranks have all \d+ settings", layouts)
    assert "1,003 tests" in full
    assert "1,234 layouts more" in whole
    assert re.fullmatch(r" +3 +1000  test_mesh\.py: \w.+", last)


@pytest.mark.parametrize("script", ["tests/run.sh", ".ci/run"])
def test_the_scripts_are_bash(script: str) -> None:
    assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0
