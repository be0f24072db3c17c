"""A rank that is slow by itself is named; those that wait for it are not."""

import functools
import math
import time

import pytest
import torch.distributed as dist

import train
from components.observe.stragglers import OwnTime, Stragglers
from parallelize.groups import gather
from tests.harness import observe, rewrite
from tests.test_guards import LAYOUTS

SLOW = ("train", "divisor", "return max", "dist.get_rank() == 1 and __import__('time').sleep(2); return max")


def watch(run: train.Run) -> list[tuple[float, float]]:
    """By rank: seconds of a step, and the rank's own."""
    stragglers, batches = Stragglers(run.mesh), train.local_batches(run)
    with stragglers.watched(logged=False) as own:
        train.train_step(run, batches, train.divisor(run))
    assert (stragglers.compare(own), own.seconds) == ([], 0), "nothing is looked at in a step that is not logged"
    started = time.perf_counter()
    with stragglers.watched(logged=True) as own:
        train.train_step(run, batches, train.divisor(run))
    return gather((time.perf_counter() - started, own.seconds))


@pytest.mark.parametrize("layout", ["ddp 2", "tp 2"])
def test_waiting_for_a_slow_rank_is_not_own_time(layout: str) -> None:
    """Rank 1 sleeps for two seconds."""
    slow = functools.partial(rewrite, *SLOW)
    (whole, waiting), (_, sleeping) = observe(*LAYOUTS[layout], ranks=2, steps=0, mutate=slow, at_end=watch).extra
    assert sleeping >= 2
    assert waiting < whole - 1


def say(run: train.Run) -> list[list[str]]:
    """What is said after steps in which rank 1 is slow, but for the fourth, and in the last by a little."""
    stragglers, own = Stragglers(run.mesh), OwnTime(enabled=True)
    said = []
    for seconds in (0.5, 0.5, 0.5, 0.2, 0.5, 0.5, 0.5, 0.5, 0.25):
        own.seconds = seconds if dist.get_rank() == 1 else 0.2
        said.append(stragglers.compare(own))
    return said


def test_a_rank_is_named_after_three_logged_steps_and_compared_with_its_own_stage() -> None:
    said = observe(*LAYOUTS["ddp 2"], ranks=2, steps=0, at_end=say).extra
    line = "rank 1 is slow: 0.50 s of its own in a step, others 0.20 s (median), in the last 3 logged steps"
    assert said == [[], [], [line], [], [], [], [line], [], []]
    stages = observe(*LAYOUTS["pp 2"], ranks=2, steps=0, at_end=say).extra
    assert stages == [[]] * 9, "stages of a pipeline have different work"


def test_sleeping_and_computing_are_own_time() -> None:
    with OwnTime(enabled=True) as own:
        time.sleep(0.1)
        deadline = time.perf_counter() + 0.1
        while time.perf_counter() < deadline:
            math.sqrt(2)
    assert own.seconds > 0.19
