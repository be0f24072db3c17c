"""Ranks on one node and on two, with small scripts in the place of train.py: output, logs, exit codes."""

import contextlib
import os
import random
import re
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist

from components.config import JobConfig
from components.launch.ending import _report
from components.launch.exit_codes import ExitCode
from components.launch.settings import read_settings
from tests.launches import START, Start, launcher
from tests.processes import alive

begin = pytest.fixture(launcher)


# How ranks end


def test_ranks_get_the_variables_and_the_words_and_have_a_log_each(begin: Start) -> None:
    script = """
        import gc, os, socket, sys
        import torch.distributed as dist
        dist.init_process_group("gloo")
        try:
            socket.create_connection(("127.0.0.2", int(os.environ["MASTER_PORT"])), 1)
            print("the store listens on other addresses too")
        except ConnectionRefusedError:
            pass
        rank, size = dist.get_rank(), dist.get_world_size()
        print(f"rank {rank} of {size}", sys.argv[1:], "threads", os.environ["OMP_NUM_THREADS"])
        print(os.environ["PYTORCH_ALLOC_CONF"], os.environ["GOMP_SPINCOUNT"])
        print("garbage is collected", gc.isenabled(), "imports are not looked through", gc.get_freeze_count() > 1e4)
        print("progress 1\\rprogress 2")
        print("\\x1b[31mto stderr\\x1b[0m", file=sys.stderr)
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)
    """
    launched = begin(script, "--job.description", "two words", PYTORCH_ALLOC_CONF="", LOGLEVEL="")
    code, out, err = launched.end()
    threads = read_settings(JobConfig(), {"NGPU": "2"}).threads
    assert code == 0, err
    said = "rank {} of 2 ['--job.description', 'two words'] threads " + f"{threads}\n"
    # The console shows rank 0 as it is, the logs all without colours.
    memory = "expandable_segments:True 10000"
    garbage = "garbage is collected True imports are not looked through True"
    # Universal newlines read \r as \n.
    assert out == said.format(0) + f"{memory}\n{garbage}\nprogress 1\nprogress 2\n"
    assert err == "\x1b[31mto stderr\x1b[0m\n"
    for rank in (0, 1):
        assert sorted(launched.log(rank).splitlines()) == sorted(
            [said.format(rank).strip(), memory, garbage, "progress 1", "progress 2", "to stderr"]
        )


def test_log_rank_chooses_what_is_shown(begin: Start) -> None:
    script = """
        import os
        assert "PYTORCH_ALLOC_CONF" not in os.environ, "it would be stronger than what the user has set"
        assert int(os.environ["OMP_NUM_THREADS"]) * int(os.environ["GOMP_SPINCOUNT"]), "empty is as unset"
        print("hello\\nfrom " + os.environ["RANK"], end="")
    """
    given = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native", "OMP_NUM_THREADS": "", "GOMP_SPINCOUNT": ""}
    _, out, _ = begin(script, NGPU="3", LOG_RANK="0,2", **given).end()
    assert sorted(out.splitlines()) == ["[rank 0] from 0", "[rank 0] hello", "[rank 2] from 2", "[rank 2] hello"]


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        (77, 1, 77),  # rank 1 fails, then rank 0
        (1, 5, 1),
        (5, 3, 0),  # rank 1 only noticed that rank 0 was going
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(first: int, later: int, expected: int, begin: Start) -> None:
    script = f"""
        import os, sys, time
        if os.environ["RANK"] == "1":
            print("what went wrong")
            sys.exit({first})
        time.sleep(0.3)
        sys.exit({later})
    """
    code, out, err = begin(script, MAX_RESTARTS="1" if later == ExitCode.NONFINITE else "0").end()
    assert (code, out) == (expected or later, "")
    lines = err.splitlines()
    if expected:
        assert lines.pop(0) == "  what went wrong"  # not on the console otherwise
    rank = 1 if expected else 0
    pattern = rf"rank {rank} ended with exit code {code}; its log: outputs/logs/\S+/rank_{rank}.log"
    assert re.fullmatch(pattern, lines[0])
    assert len(lines) == 1, "no traceback, no banner, and no second try of what would go wrong again"


def test_a_killed_rank_ends_all_and_is_named(begin: Start) -> None:
    script = """
        import os, signal, subprocess, sys, time
        child = subprocess.Popen(["sleep", "600"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), child.pid, "ready", flush=True)
        if os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    """
    launched = begin(script, NGPU="3", LOG_RANK="all")
    for _ in range(3):
        launched.wait_for("ready")
    pids = [[int(pid) for pid in launched.log(rank).split()[:2]] for rank in range(3)]
    os.kill(pids[1][0], signal.SIGKILL)
    start = time.perf_counter()
    code, _, err = launched.end()
    assert time.perf_counter() - start < 60, "a rank that waits for others past its timeout has seconds"
    assert code == ExitCode.LOST_RANK
    assert "rank 1 was killed by SIGKILL; its log: " in err
    assert "ranks 0, 2 did not end after that: killed" in err
    assert not [pid for both in pids for pid in both if alive(pid)], "processes are left, or a rank's children"


def test_a_rank_that_aborts_leaves_in_its_log_where_it_was(begin: Start) -> None:
    script = """
        import os, sys
        from components.launch.ending import run_to_exit

        def train(argv):
            os.abort()

        run_to_exit(train, [])
    """
    launched = begin(script, NGPU="1")
    _, _, err = launched.end()
    assert "rank 0 was killed by SIGABRT" in err
    assert re.search(r"Fatal Python error: Aborted(.|\n)* in train\n", launched.log(0))


@pytest.mark.parametrize("when", ["before", "while"])
def test_the_death_of_a_loader_worker_does_not_end_the_report_of_an_error(when: str, begin: Start) -> None:
    """torch raises from the handler of SIGCHLD, and the error itself may have come before the signal."""
    script = f"""
        import os, signal, sys
        from components.launch import ending

        def died(number, frame):
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

        class Error(Exception):
            def __str__(self):
                os.kill(os.getpid(), signal.SIGCHLD)
                return "DataLoader worker"

        def train(argv):
            signal.signal(signal.SIGCHLD, died)
            raise Error

        set_handler = signal.signal
        def set_later(*words):
            if "{when}" == "before" and words[1] is signal.SIG_DFL and signal.getsignal(words[0]) is died:
                signal.signal = set_handler
                os.kill(os.getpid(), words[0])
            return set_handler(*words)

        signal.signal = set_later
        ending.run_to_exit(train, [])
    """
    code, _, err = begin(script, NGPU="1").end()
    assert code == ExitCode.LOST_WORKER, err
    assert "rank 0: a DataLoader worker is gone" in err


def test_lost_ranks_are_started_again_when_asked(begin: Start) -> None:
    script = """
        import os, signal, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
    """
    launched = begin(script, MAX_RESTARTS="1")
    code, out, err = launched.end()
    assert code == 0, err
    assert "rank 1 was killed by SIGKILL" in err
    assert "starting all ranks again" in err
    assert out.splitlines()[-1] == "attempt 1"


def test_the_last_line_of_a_lost_rank_is_quoted_however_late_it_is_logged(begin: Start) -> None:
    script = """
        import os
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            print("waited for a neighbour")
            os._exit(LOST_RANK)
    """
    script = script.replace("LOST_RANK", str(int(ExitCode.LOST_RANK)))
    code, _, err = begin(script, start=LATE_LOGS + START, MAX_RESTARTS="1").end()
    assert code == 0, err
    assert "  waited for a neighbour\n" in err


@pytest.mark.parametrize(
    ("own", "code"), [(ExitCode.LOST_WORKER, ExitCode.LOST_WORKER), (ExitCode.ERROR, ExitCode.ERROR)]
)
def test_the_rank_that_failed_by_itself_is_named_though_its_neighbour_ends_first(
    own: ExitCode, code: ExitCode, begin: Start
) -> None:
    script = f"""
        import os, time
        if os.environ["RANK"] == "0":
            print("another rank is gone", flush=True)
            os._exit({int(ExitCode.LOST_RANK)})
        time.sleep(0.5)
        print("why", flush=True)
        os._exit({int(own)})
    """
    ended, _, err = begin(script).end()
    assert ended == code
    assert f"  why\nrank 1 ended with exit code {int(own)}" in err


def test_a_rank_that_has_ended_while_others_start_keeps_its_exit_code(begin: Start) -> None:
    code, _, err = begin("", start=LATE_CODES + START, NGPU="3").end()
    assert (code, err) == (0, "")


LATE_CODES = """
import threading, time
from multiprocessing import forkserver

def read(pipe):
    time.sleep(1 if "_wait" in threading.current_thread().name else 0.3)
    return at_once(pipe)

at_once, forkserver.read_signed = forkserver.read_signed, read
"""

LATE_LOGS = """
import time
from components.launch import process

def copy(*words):
    time.sleep(0.5)
    at_once(*words)

at_once, process._copy = process._copy, copy
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_ranks_whose_fork_server_died_are_lost(restarts: int, begin: Start) -> None:
    script = """
        import os, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            print(os.getpid(), os.getppid(), "ready", flush=True)
            time.sleep(600)
    """
    launched = begin(script, NGPU="1", MAX_RESTARTS=str(restarts))
    launched.wait_for("ready")
    rank, server = (int(pid) for pid in launched.log(0).split()[:2])
    os.kill(server, signal.SIGKILL)
    code, _, err = launched.end()
    assert code == (0 if restarts else ExitCode.LOST_RANK), err
    assert "rank 0 was killed by SIGKILL; its log: " in err
    assert not alive(rank)


# Two nodes on one machine


@pytest.mark.parametrize("numbered", [True, False], ids=["NODE_RANK", "unnumbered"])
def test_two_nodes_that_lose_a_rank_meet_again(numbered: bool, begin: Start) -> None:
    """Rank 1 is killed when all have met, and rank 0 may wait for it: its own launcher has not lost anything."""
    script = """
        import os, signal, sys, time
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(total)
        assert total == 3
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE")))
        sys.stdout.flush()
        os._exit(143 if os.environ["RANK"] == "1" else 0)
    """
    endpoint = f"localhost:{free_port()}"
    nodes = []
    for node in ("1", "0"):
        number = {"NODE_RANK": node} if numbered else {}
        variables = {
            "NGPU": "1",
            "NNODES": "2",
            "RDZV_ENDPOINT": endpoint,
            "LOG_RANK": "all",
            "NODE": node,
            "MAX_RESTARTS": "1",
        }
        nodes.append(begin(script, **variables, **number))
    ends = [node.end() for node in nodes]
    assert sorted(code for code, _, _ in ends) == [0, 143], ends
    first, second = sorted(out.strip().partition("] ")[2].split() for _, out, _ in ends)
    assert (first[:2], second[:2]) == (["0", "2"], ["1", "2"])
    assert first[2:4] == second[2:4], "both go to one master"
    if numbered:
        assert (first[4], second[4]) == ("0", "1")


def free_port() -> int:
    """A port that nobody listens on. Connections of other tests cannot take it: theirs begin at 32768."""
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", random.randrange(20_000, 32_000)))
            return free.getsockname()[1]


def test_a_port_in_use_is_named(begin: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        endpoint = f"localhost:{taken.getsockname()[1]}"
        launched = begin("print('never')", NGPU="1", NNODES="2", RDZV_ENDPOINT=endpoint, NODE_RANK="0")
        code, _, err = launched.end()
    assert code == ExitCode.ERROR
    assert f"could not meet at RDZV_ENDPOINT={endpoint}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), ExitCode.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: out of memory"), ExitCode.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), ExitCode.OUT_OF_MEMORY),
        (dist.DistBackendError("NCCL error: Cuda failure 2 'out of memory'"), ExitCode.OUT_OF_MEMORY),
        (dist.DistBackendError("NCCL error: remote process exited"), ExitCode.LOST_RANK),
        (RuntimeError("DataLoader worker is killed, or out of memory"), ExitCode.LOST_WORKER),
        (RuntimeError("the process that tokenizes is gone: killed, or out of memory"), ExitCode.ERROR),
    ],
)
def test_full_memory_is_told_from_a_lost_rank(error: Exception, code: ExitCode) -> None:
    assert _report(error) == code
