"""Layouts as values: words and degrees are each other's inverse, and every layout that fits is found."""

import dataclasses
import math

import pytest

from components.config import ConfigError, JobConfig, load_config
from parallelize import layouts
from parallelize.layouts import Layout, layout_of, take_degree
from parallelize.mesh import Degrees
from tests.small import RECIPE, SMALL


def job(*words: str) -> JobConfig:
    return load_config(["--job.config_file", str(RECIPE), *SMALL, *words])


@pytest.mark.parametrize("ranks", [1, 2, 6, 16])
@pytest.mark.parametrize("experts", [False, True])
def test_every_layout_of_so_many_ranks_is_there_once(ranks: int, experts: bool) -> None:
    found = [*layouts.layouts(ranks, experts)]
    assert len({*found}) == len(found)
    assert all(each.degrees.world_size == ranks for each in found)
    whole = {dataclasses.replace(each.degrees, ep=1) for each in found}
    # Ways to spread each prime factor's power over five dimensions.
    powers = [next(p for p in range(9) if ranks % prime ** (p + 1)) for prime in (2, 3)]
    assert len(whole) == math.prod(math.comb(power + 4, 4) for power in powers)
    shared = {each.degrees.ep for each in found if each.degrees.dp_shard == ranks}
    assert shared == ({size for size in range(1, ranks + 1) if ranks % size == 0} if experts else {1})


def test_words_are_read_as_they_are_written() -> None:
    for each in layouts.layouts(12, experts=True):
        words, degrees = str(each).split(), dict[str, int]()
        while words:
            assert take_degree(words, degrees)
        assert layout_of(degrees) == each


def test_what_is_no_degree_is_left() -> None:
    for words in (["tp"], ["tp", "x"], ["hsdp", "2"], ["one"], ["resume", "5"], []):
        left = [*words]
        assert not take_degree(left, {})
        assert left == words
    degrees = dict[str, int]()
    words = ["hsdp", "2x3", "tp"]
    assert take_degree(words, degrees)
    assert (degrees, words) == ({"ddp": 2, "fsdp": 3}, ["tp"])


def test_a_job_keeps_its_global_batch() -> None:
    given = Layout(Degrees(dp_replicate=2, dp_shard=2, tp=2)).given_to(job())
    assert given.training.global_batch_size == job().training.global_batch_size == 36
    assert given.training.local_batch_size == 9
    assert (given.parallelism.data_parallel_shard_degree, given.parallelism.tensor_parallel_degree) == (2, 2)
    with pytest.raises(ConfigError, match="global_batch_size is unset"):
        Layout(Degrees()).given_to(JobConfig())


def test_a_layout_is_refused_as_before_launch() -> None:
    assert Layout(Degrees(tp=2)).refusal(job()) == ""
    assert "4 attention heads, which 3 ranks cannot share" in Layout(Degrees(tp=3)).refusal(job())


def test_the_command_lists_what_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--job.config_file", str(RECIPE), *SMALL]
    assert layouts.main(["2", *words]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:5] == ["tp 2", "cp 2", "fsdp 2", "ddp 2", "pp 2"]
    assert printed[5] == "0 refused"
    assert layouts.main(["3", *words]) == 0
    assert "   1 by parallelism.tensor_parallel_degree" in capsys.readouterr().out
    assert layouts.main(["2"]) == 2
    assert "global_batch_size is unset" in capsys.readouterr().err
