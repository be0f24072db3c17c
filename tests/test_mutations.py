"""Mutated recipes, command lines and JSON files: a small share of `python -m tests.faults --campaign mutations`."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.config import ConfigError
from tests.faults import mutations
from tests.faults.mutations import Mutations, mutate_bytes, mutate_lines, mutate_value
from tests.limits import TimeLimit, limited
from tests.ranks import group_of_one

# Numbers whose first reading was a traceback, each for another reason.
FOUND = [136, 156, 268, 4928, 5276, 5568, 5912, 6124, 6596]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mutations]:
    with group_of_one():  # readers of checkpoints ask all ranks
        yield Mutations(tmp_path_factory.mktemp("mutations"))


def test_what_is_mutated_is_taken_or_is_one_sentence(made: Mutations) -> None:
    assert [found for number in [*FOUND, *range(20_000, 20_400)] if (found := made.fault(number))] == []


def test_a_number_is_always_the_same_mutation(made: Mutations) -> None:
    assert made.argv(7) == made.argv(7)
    first, second = (mutate_bytes(random.Random(5), b"steps = 100\n" * 20) for _ in range(2))
    assert first == second != b"steps = 100\n" * 20
    assert mutate_lines(random.Random(1), "[a]\nb = 1") != "[a]\nb = 1"
    assert mutate_value(random.Random(1), {"a": 1}) != {"a": 1}


def compute_for_ever() -> None:
    with limited("a loop", 0.1):
        while True:
            json.loads("1")


def test_a_traceback_a_long_message_and_a_hang_are_faults(made: Mutations, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(error: Exception) -> str | None:
        def fail(argv: list[str]) -> None:
            raise error

        monkeypatch.setattr(mutations, "check", fail)
        return made.fault(1)

    assert check(KeyError("x")) == "1: KeyError: 'x'"
    assert "not one line" in str(check(ConfigError("a\nb")))
    assert check(ConfigError("a")) is None
    started = time.process_time()
    with pytest.raises(TimeLimit, match="limit of time: a loop took more than"):
        compute_for_ever()
    assert time.process_time() - started < 5


def test_a_file_is_as_it_was_after_its_mutation(made: Mutations) -> None:
    for number in range(0, 80, 4):
        made.fault(number)
    assert all(Path(path).read_bytes() == content for path, content, _ in made.files)
