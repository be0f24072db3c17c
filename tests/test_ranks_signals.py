"""Signals to ranks: they save and stop, at once when asked twice, whoever receives the signal; nothing is left."""

import signal
import time

import pytest

from components.launch.exit_codes import ExitCode
from components.launch.ranks import _FAILURE_GRACE_SECONDS
from components.launch.signals import SAME_STOP_SECONDS
from tests.launches import START, Start, launcher
from tests.limits import wait_until
from tests.processes import alive

begin = pytest.fixture(launcher)


SAVES = """
    import os, signal, sys, time
    rank = int(os.environ["RANK"])
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: asked.append(number))
    worker = os.fork()
    if worker == 0:  # as a loader worker: no handlers of its own
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(600)
    open(f"worker_{rank}", "w").write(str(worker))
    print("ready", flush=True)
    while not asked:
        time.sleep(0.01)
    time.sleep(0.2 + SAVING * rank)
    worker_lives = os.waitpid(worker, os.WNOHANG) == (0, 0)
    open(f"saved_{rank}", "w").write(f"{asked} {worker_lives}")
    os.kill(worker, signal.SIGKILL)
    os._exit(128 + asked[0])
"""


@pytest.mark.parametrize(
    ("number", "saving"),
    # Rank 1 saves for longer than a failed rank's peers are given: the first one to stop is no failure.
    [(signal.SIGTERM, _FAILURE_GRACE_SECONDS + 0.5), (signal.SIGINT, 0.5), (signal.SIGUSR1, 0.5)],
)
def test_ranks_save_and_stop_on_a_signal(number: signal.Signals, saving: float, begin: Start) -> None:
    launched = begin(SAVES.replace("SAVING", str(saving)), LOG_RANK="all")
    launched.wait_for("ready")
    launched.wait_for("ready")
    launched.process.send_signal(number)
    launched.process.send_signal(number)  # as a scheduler may, or a terminal and a wrapper both
    code, _, err = launched.end()
    assert code == 128 + number
    assert f"{number.name}: the ranks save and stop" in err
    assert "exit code" not in err
    for rank in (0, 1):
        saved = (launched.folder / f"saved_{rank}").read_text()
        assert saved == f"[{int(number)}] True", "one signal, and the loader worker lived until the rank had saved"


def test_a_second_ctrl_c_stops_at_once_and_does_not_say_saved(begin: Start) -> None:
    launched = begin(SAVES.replace("SAVING", "600"), LOG_RANK="all")
    launched.wait_for("ready")
    launched.wait_for("ready")
    launched.process.send_signal(signal.SIGINT)
    time.sleep(SAME_STOP_SECONDS + 0.2)
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.end()  # long before the ranks have saved: they would for ten minutes
    assert code == ExitCode.UNSAVED
    assert "stopped at once, without saving" in err
    assert not (launched.folder / "saved_1").exists()
    assert not [rank for rank in (0, 1) if alive(int((launched.folder / f"worker_{rank}").read_text()))]


def test_grace_that_is_too_short_is_said(begin: Start) -> None:
    launched = begin(SAVES.replace("SAVING", "600"), LOG_RANK="all", SHUTDOWN_TIMEOUT_SECONDS="1")
    launched.wait_for("ready")
    launched.wait_for("ready")
    launched.process.send_signal(signal.SIGTERM)
    code, _, err = launched.end()
    assert code == ExitCode.UNSAVED
    assert "rank 1 did not stop within 1 seconds and was killed" in err


def test_a_signal_before_ranks_have_handlers_stops_them_too(begin: Start) -> None:
    launched = begin("import time; print('ready', flush=True); time.sleep(600)")
    launched.wait_for("ready")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 143


def test_a_signal_that_another_thread_receives_stops_them_too(begin: Start) -> None:
    """The kernel may choose any thread: here the main one does not take it, and ranks inherit that."""
    script = """
        import signal, time
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        print("ready", flush=True)
        time.sleep(600)
    """
    launched = begin(script, start=OTHER_THREAD + START)
    launched.wait_for("ready")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 143


def test_a_signal_that_comes_while_ranks_are_started_reaches_each_once(begin: Start) -> None:
    script = """
        import os, signal, time
        asked = []
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
        open("ready_" + os.environ["RANK"], "w").close()
        while not asked:
            time.sleep(0.01)
        time.sleep(2)  # a second signal would come in this time
        print(asked)
        os._exit(143)
    """
    launched = begin(script, start=SIGNAL_BETWEEN + START)
    assert launched.end()[0] == 143
    assert [launched.log(rank).splitlines()[-1] for rank in (0, 1)] == ["[15]", "[15]"]


SIGNAL_BETWEEN = """
import os, signal, time
from components.launch import ranks

def start(number, *more):
    if number == 1:
        while not os.path.exists("ready_0"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
    rank = RankProcess(number, *more)
    while not os.path.exists(f"ready_{number}"):
        time.sleep(0.01)
    return rank

RankProcess, ranks.RankProcess = ranks.RankProcess, start
"""


OTHER_THREAD = """
import signal, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
"""


def test_nobody_reading_the_console_does_not_stop_a_run(begin: Start) -> None:
    script = """
        import time
        print("ready", flush=True)
        for _ in range(20):
            print("line", flush=True)
            time.sleep(0.02)
        print("done", flush=True)
    """
    launched = begin(script)
    launched.wait_for("ready")
    assert launched.process.stdout
    launched.process.stdout.close()
    wait_until(lambda: launched.process.poll() is not None)
    assert launched.process.returncode == 0
    assert launched.log(0).splitlines()[-1] == "done"
