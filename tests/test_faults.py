"""The table of faults is whole, and every test that it names is there."""

from pathlib import Path

import pytest

from tests.faults.__main__ import Reports, campaigns, main
from tests.faults.page import page
from tests.faults.rows import NUMBERS, Row, exists, read_rows


def test_every_row_is_there_and_so_are_its_tests() -> None:
    rows = read_rows()
    assert [row.number for row in rows] == list(NUMBERS)
    assert all(row.fault and row.expected for row in rows)
    assert [row.number for row in rows if not row.tests] == []
    assert [test for row in rows for test in row.tests if not exists(test)] == []


def test_a_test_that_is_not_there_is_noticed() -> None:
    here = "tests/test_faults.py::test_a_test_that_is_not_there_is_noticed"
    assert exists(here)
    assert exists(f"{here}[a case]")
    assert not exists(f"{here}_or_not")
    assert not exists("tests/test_nothing.py::test_x")


def test_parts_add_tests_to_a_row_but_no_row_twice(tmp_path: Path) -> None:
    (tmp_path / "rows.toml").write_text('[[row]]\nnumber = 1\nfault = "f"\nexpected = "e"\ntests = ["a"]\n')
    part = tmp_path / "rows_part.toml"
    part.write_text('[[row]]\nnumber = 1\nfault = "other words"\ntests = ["a", "b"]\n')
    assert read_rows(tmp_path) == [Row(1, "f", "e", ["a", "b"])]
    for wrong in ("[[row]]\nnumber = 3\n[[row]]\nnumber = 3\n", "[[row]]\nnumber = 55\n"):
        part.write_text(wrong)
        with pytest.raises(ValueError, match=r"rows_part\.toml"):
            read_rows(tmp_path)


def reports(**outcomes: str) -> Reports:
    found = Reports()
    found.outcomes = {f"tests/t.py::{node}": outcome for node, outcome in outcomes.items()}
    found.seconds = dict.fromkeys(found.outcomes, 1.0)
    return found


@pytest.mark.parametrize(
    ("outcomes", "seen"),
    [
        ({"one[a]": "passed", "one[b]": "passed", "two": "passed"}, "held"),
        ({"one[a]": "passed", "one[b]": "failed", "two": "passed"}, "broken"),
        ({"one": "passed", "two": "skipped"}, "broken"),
        ({"one": "passed"}, "broken"),
        ({"one": "passed", "two_more": "passed"}, "broken"),
    ],
)
def test_a_row_held_only_if_every_case_of_every_test_passed(outcomes: dict[str, str], seen: str) -> None:
    row = Row(1, tests=["tests/t.py::one", "tests/t.py::two"])
    assert reports(**outcomes).of(row)["seen"] == seen


def test_the_page_says_what_was_seen_and_when() -> None:
    mark = {"date": "2026-11-22", "revision": "abc1234"}
    rows = [Row(1, "a fault", "refused", ["t"]), Row(2, "another", "told", ["t"]), Row(3, "a third", "told")]
    results = {
        "rows": {"1": {"seen": "held", "seconds": 1.25} | mark, "2": {"seen": "broken", "seconds": 2.0} | mark},
        "campaigns": {"kills": {"about": "Kills.", "lines": ["200 of 200"], "seconds": 7} | mark},
    }
    text = page(rows, results)
    assert "Seen on 2026-11-22 at revision abc1234: 1 of 3 rows held." in text
    assert "| 1 | a fault | refused | held | 1.2 |" in text
    assert "| 2 | another | told | broken | 2.0 |" in text
    assert "| 3 | a third | told | no test yet |  |" in text
    assert "**kills**, 2026-11-22, revision abc1234, 7 s: Kills.\n\n- 200 of 200" in text


def test_a_campaign_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--campaign", "nothing"])
    assert f"no campaign nothing: there are {', '.join(campaigns())}" in capsys.readouterr().err
