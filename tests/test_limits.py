"""Limits of time end processes that hang or never end, and no slow ones."""

import functools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import limits, ranks
from tests.limits import Limit, TimeLimit, finish, limited, limited_itself, run, wait_until
from tests.processes import ended, start


def check_for(seconds: float, limit: Limit) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        limit.check()
        time.sleep(0.05)


def test_what_sleeps_hangs_and_what_computes_does_not() -> None:
    with ended(start("-c", "import time; time.sleep(600)")), pytest.raises(TimeLimit, match="limit of time: it hangs"):
        check_for(60, Limit("it", idle=2))
    with ended(start("-c", "while True: pass")) as _:
        check_for(5, Limit("it", idle=2))
        with pytest.raises(TimeLimit, match="limit of time: it took more than 1 s of processor time"):
            check_for(60, Limit("it", 1))


def test_a_command_at_its_limit_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "Limit", functools.partial(Limit, idle=2))
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], text=True)
    with pytest.raises(TimeLimit, match="sleep"):
        finish(process)
    assert process.wait() == -signal.SIGKILL
    done = run([sys.executable, "-c", "import sys; print('out'); sys.exit('err')"])
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 1)
    with pytest.raises(TimeLimit):
        wait_until(lambda: False)


def test_a_process_that_ends_before_what_is_waited_for_is_told() -> None:
    with pytest.raises(pytest.fail.Exception, match="exit code 3 before"):
        wait_until(lambda: False, start("-c", "import sys; sys.exit(3)"))


def compute_for_ever(limit: Callable[[str, float], AbstractContextManager[None]]) -> None:
    with limit("a loop", 0.1):
        while True:
            pass


def test_what_this_process_does_not_end_is_ended() -> None:
    left, _ = signal.getitimer(signal.ITIMER_PROF)
    assert left > 1, "each test has a limit, in conftest.py"
    for limit in (limited, limited_itself):
        with pytest.raises(TimeLimit, match="a loop took more than"):
            compute_for_ever(limit)
    before = signal.getsignal(signal.SIGALRM)
    with limited("nothing", 0.1):
        pass
    assert signal.getsignal(signal.SIGALRM) == before


def meet(absent: int, device: torch.device) -> int:
    """A rank stays away, where one is named."""
    if dist.get_rank() == absent:
        time.sleep(600)
    dist.barrier()
    return absent


def test_ranks_that_wait_for_each_other_are_a_limit_of_time_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "Limit", functools.partial(Limit, idle=3))
    world: Any = ranks.Ranks(2, meet, {})
    assert world.run(-1) == -1
    found = world.run(1)
    assert isinstance(found, TimeLimit)
    assert str(found).startswith("limit of time: a case of 2 ranks hangs")
