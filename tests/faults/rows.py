"""The table of faults, read from rows*.toml."""

import ast
import functools
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from components.config import ROOT

FOLDER = Path(__file__).parent
NUMBERS = range(1, 55)


@dataclass
class Row:
    """A fault, what must happen, and the tests that fail where it does not."""

    number: int
    fault: str = ""
    expected: str = ""
    tests: list[str] = field(default_factory=list)
    """As pytest names them: tests/test_x.py::test_y, or one of its cases with [case]."""


def read_rows(folder: Path = FOLDER) -> list[Row]:
    """Every row by number. rows.toml has the words; a number in another file adds tests to its row.

    Raises ValueError for a number that one file has twice, and for a number that is not in the table.
    """
    rows: dict[int, Row] = {}
    for path in sorted(folder.glob("rows*.toml"), key=lambda path: (path.name != "rows.toml", path.name)):
        given = [Row(**row) for row in tomllib.loads(path.read_text(encoding="utf-8"))["row"]]
        numbers = [row.number for row in given]
        if wrong := {number for number in numbers if numbers.count(number) > 1 or number not in NUMBERS}:
            raise ValueError(f"{path.name}: rows {sorted(wrong)}: twice, or not in the table")
        for row in given:
            known = rows.setdefault(row.number, Row(row.number, row.fault, row.expected))
            known.tests += [test for test in row.tests if test not in known.tests]
    return [rows[number] for number in sorted(rows)]


def exists(test: str) -> bool:
    """Whether the file has a test function of this name."""
    path, _, name = test.partition("::")
    return name.partition("[")[0] in _functions(ROOT / path)


@functools.cache
def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
