"""python -m tests.listed: what each command of tests/run.sh proves, and how many tests of each file are in it."""

import ast
import contextlib
import io
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.convergence.__main__ import SHORT
from tests.layouts import AXES, main_layouts
from tests.spread import cover, of_the_tests


class Collected:
    """A pytest plugin: the tests that there are."""

    def __init__(self) -> None:
        self.quick, self.slow = Counter[Path](), Counter[Path]()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            (self.slow if item.get_closest_marker("slow") else self.quick)[item.path] += 1


def main() -> int:
    found = Collected()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = pytest.main(["--collect-only"], plugins=[found])
    print(*([printed.getvalue()] if code else lines(found)), sep="\n")
    return int(code)


def lines(found: Collected) -> list[str]:
    spread = of_the_tests()
    quick, slow, settings = found.quick.total(), found.slow.total(), sum(map(len, AXES.values()))
    files = sorted(found.quick | found.slow)
    return [
        f"tests/run.sh          lint, format, types, {quick:,} tests and one convergence run",
        f"                      {len(cover(spread))} layouts of ranks have all {settings} settings of {len(AXES)} axes",
        f"tests/run.sh --full   {quick + slow:,} tests, with those that are slow, and {len(SHORT)} convergence runs",
        f"                      {len(spread)} layouts have each pair of settings",
        f"tests/run.sh --all    {len(main_layouts()):,} layouts more: every product of the axes",
        "",
        "quick   slow",
        *(f"{found.quick[file]:5}  {found.slow[file] or '':5}  {file.name}: {proves(file)}" for file in files),
    ]


def proves(file: Path) -> str:
    """The first sentence of a file of tests."""
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
