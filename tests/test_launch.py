"""The launcher, with small scripts in the place of train.py: ranks, logs, signals, exit codes; and the environment."""

import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components import start
from components.config import ROOT, ConfigError, JobConfig, load_config
from components.launch import environment
from components.launch import settings as settings_module
from components.launch.exit_codes import ExitCode
from components.launch.ranks import _FAILURE_GRACE_SECONDS
from components.launch.settings import Settings, read_settings

START = """
import os, sys
from components import start
config, settings = start.check(sys.argv[2:], os.environ)
sys.exit(start.start(config, settings, [sys.executable, *sys.argv[1:]]))
"""

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
        time.sleep(60)
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


@dataclasses.dataclass
class Launched:
    """A launcher that runs, in its folder."""

    process: subprocess.Popen[str]
    folder: Path

    def wait_for(self, line: str) -> None:
        assert self.process.stdout
        while (read := self.process.stdout.readline()) != "":
            if line in read:
                return
        pytest.fail(f"ended before it printed {line}: {self.end()}")

    def end(self, timeout: float = 30) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def log(self, rank: int) -> str:
        (path,) = self.folder.glob(f"outputs/logs/*/rank_{rank}.log")
        return path.read_text()


Start = Callable[..., Launched]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Start]:
    """Start a script on ranks; whatever is left of it is killed at the end."""
    folder = tmp_path / "with spaces"
    folder.mkdir()
    begun: list[Launched] = []

    def begin(script: str, *words: str, start: str = START, **variables: str) -> Launched:
        (folder / "my script.py").write_text(textwrap.dedent(script))
        kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        settings = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "NGPU": "2"}
        process = subprocess.Popen(
            [sys.executable, "-c", start, "my script.py", *words],
            cwd=folder,
            env={**kept, **settings, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun.append(Launched(process, folder))
        return begun[-1]

    yield begin
    for launched in begun:
        launched.process.send_signal(signal.SIGQUIT)  # the launcher kills its ranks
        launched.process.wait(10)


def alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return state not in ("", "Z")


# How ranks end


def test_ranks_get_the_variables_and_the_words_and_have_a_log_each(begin: Start) -> None:
    script = """
        import os, sys
        import torch.distributed as dist
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        print(f"rank {rank} of {size}", sys.argv[1:], "threads", os.environ["OMP_NUM_THREADS"])
        print("progress 1\\rprogress 2")
        print("\\x1b[31mto stderr\\x1b[0m", file=sys.stderr)
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)
    """
    launched = begin(script, "--job.description", "two words")
    code, out, err = launched.end()
    threads = settings(NGPU="2").threads
    assert code == 0, err
    said = "rank {} of 2 ['--job.description', 'two words'] threads " + f"{threads}\n"
    # The console shows rank 0 as it is, the logs all without colours.
    assert out == said.format(0) + "progress 1\rprogress 2\n".replace("\r", "\n"), "universal newlines read \\r as \\n"
    assert err == "\x1b[31mto stderr\x1b[0m\n"
    for rank in (0, 1):
        assert sorted(launched.log(rank).splitlines()) == sorted(
            [said.format(rank).strip(), "progress 1", "progress 2", "to stderr"]
        )


def test_log_rank_chooses_what_is_shown(begin: Start) -> None:
    script = 'import os; print("hello\\nfrom " + os.environ["RANK"], end="")'
    _, out, _ = begin(script, NGPU="3", LOG_RANK="0,2").end()
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
        child = subprocess.Popen(["sleep", "60"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), child.pid, "ready", flush=True)
        if os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    """
    launched = begin(script, NGPU="3", LOG_RANK="all")
    for _ in range(3):
        launched.wait_for("ready")
    pids = [[int(pid) for pid in launched.log(rank).split()[:2]] for rank in range(3)]
    os.kill(pids[1][0], signal.SIGKILL)
    start = time.perf_counter()
    code, _, err = launched.end()
    assert time.perf_counter() - start < 5, "a rank that waits for others past its timeout has 5 seconds"
    assert code == ExitCode.LOST_RANK
    assert "rank 1 was killed by SIGKILL; its log: " in err
    assert "ranks 0, 2 did not end after that: killed" in err
    assert not [pid for both in pids for pid in both if alive(pid)], "processes are left, or a rank's children"


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


# Signals


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


def test_a_second_ctrl_c_stops_at_once(begin: Start) -> None:
    launched = begin(SAVES.replace("SAVING", "60"), LOG_RANK="all")
    launched.wait_for("ready")
    launched.wait_for("ready")
    launched.process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    start = time.perf_counter()
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.end()
    assert time.perf_counter() - start < 3
    assert code == 130
    assert "stopped at once, without saving" in err
    assert not (launched.folder / "saved_1").exists()
    assert not [rank for rank in (0, 1) if alive(int((launched.folder / f"worker_{rank}").read_text()))]


def test_grace_that_is_too_short_is_said(begin: Start) -> None:
    launched = begin(SAVES.replace("SAVING", "60"), LOG_RANK="all", SHUTDOWN_TIMEOUT_SECONDS="1")
    launched.wait_for("ready")
    launched.wait_for("ready")
    launched.process.send_signal(signal.SIGTERM)
    code, _, err = launched.end()
    assert code == ExitCode.LOST_RANK
    assert "rank 1 did not stop within 1 seconds and was killed" in err


def test_a_signal_before_ranks_have_handlers_stops_them_too(begin: Start) -> None:
    launched = begin("import time; print('ready', flush=True); time.sleep(60)")
    launched.wait_for("ready")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end(10)[0] == 143


def test_a_signal_that_another_thread_receives_stops_them_too(begin: Start) -> None:
    """The kernel may choose any thread: here the main one does not take it, and ranks inherit that."""
    script = """
        import signal, time
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        print("ready", flush=True)
        time.sleep(60)
    """
    launched = begin(script, start=OTHER_THREAD + START)
    launched.wait_for("ready")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end(20)[0] == 143


OTHER_THREAD = """
import signal, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
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
    assert launched.process.wait(30) == 0
    assert launched.log(0).splitlines()[-1] == "done"


# What is checked before


def settings(config: JobConfig | None = None, **environment: str) -> Settings:
    return read_settings(config or JobConfig(), environment)


def test_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (settings_module, start):
        monkeypatch.setattr(module, "gpus", lambda: 0)
    assert settings().ranks == 2
    assert settings(load_config(["--parallelism.data_parallel_replicate_degree", "4"])).ranks == 4
    assert settings(NGPU="3").ranks == 3
    four = load_config(["--parallelism.data_parallel_shard_degree", "4"])
    assert settings(four, NNODES="2", RDZV_ENDPOINT="a:1").ranks == 2
    for module in (settings_module, start):
        monkeypatch.setattr(module, "gpus", lambda: 8)
    assert settings().ranks == 8
    assert settings(NGPU="1").ranks == 1
    with pytest.raises(ConfigError, match='NGPU = "16": this node has 8 GPUs'):
        start.check([], {"NGPU": "16"})


def test_wrong_variables_are_all_named() -> None:
    wrong = {
        "NGPU": "two",
        "NNODES": "0",
        "NODE_RANK": "1",
        "RDZV_ENDPOINT": "host",
        "MAX_RESTARTS": "-1",
        "SHUTDOWN_TIMEOUT_SECONDS": "soon",
    }
    with pytest.raises(ConfigError) as caught:
        read_settings(JobConfig(), wrong)
    for name, value in wrong.items():
        assert [line for line in caught.value.messages if line.startswith(f'environment: {name} = "{value}": ')]
    with pytest.raises(ConfigError, match=r'LOG_RANK = "2": expected all, or ranks from 0 to 1'):
        settings(NGPU="2", LOG_RANK="2")
    with pytest.raises(ConfigError, match="RDZV_ENDPOINT is needed too"):
        settings(NGPU="2", NNODES="2")
    with pytest.raises(ConfigError, match='MAX_RESTARTS = "1": with several nodes expected 0'):
        settings(NGPU="2", NNODES="2", RDZV_ENDPOINT="a:1", MAX_RESTARTS="1")
    assert settings(NGPU="2", MAX_RESTARTS="1").restarts == 1


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    assert [settings(NGPU=ranks).threads for ranks in ("1", "2", "5", "24")] == [12, 6, 2, 1]


def test_the_dump_folder_must_be_one_that_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is not a folder"):
        start.check(["--job.dump_folder", str(tmp_path / "file/outputs")], {"NGPU": "1"})
    start.check(["--job.dump_folder", str(tmp_path / "a/b")], {"NGPU": "1"})
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "checking makes nothing"


def test_without_a_job_file_the_debug_recipe_is_run() -> None:
    recipe = ["--job.config_file", str(start.DEFAULT_RECIPE)]
    assert start.with_recipe(["--training.steps", "3"]) == [*recipe, "--training.steps", "3"]
    for words in (["--job.config_file", "a.toml"], ["--job.config-file=a.toml"]):
        assert start.with_recipe(words) == words


# Two nodes on one machine


@pytest.mark.parametrize("numbered", [True, False], ids=["NODE_RANK", "unnumbered"])
def test_two_nodes(numbered: bool, begin: Start) -> None:
    script = """
        import os, sys
        print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE")))
        sys.exit(143 if os.environ["RANK"] == "1" else 0)
    """
    endpoint = f"localhost:{free_port()}"
    nodes = []
    for node in ("1", "0"):
        number = {"NODE_RANK": node} if numbered else {}
        variables = {"NGPU": "1", "NNODES": "2", "RDZV_ENDPOINT": endpoint, "LOG_RANK": "all", "NODE": node}
        nodes.append(begin(script, **variables, **number))
    ends = [node.end(60) for node in nodes]
    assert sorted(code for code, _, _ in ends) == [0, 143], ends
    first, second = sorted(out.strip().partition("] ")[2].split() for _, out, _ in ends)
    assert (first[:2], second[:2]) == (["0", "2"], ["1", "2"])
    assert first[2:4] == second[2:4], "both go to one master"
    if numbered:
        assert (first[4], second[4]) == ("0", "1")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def test_a_port_in_use_is_named(begin: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        endpoint = f"localhost:{taken.getsockname()[1]}"
        launched = begin("print('never')", NGPU="1", NNODES="2", RDZV_ENDPOINT=endpoint, NODE_RANK="0")
        code, _, err = launched.end(60)
    assert code == ExitCode.ERROR
    assert f"could not meet at RDZV_ENDPOINT={endpoint}" in err
    assert "Traceback" not in err


# run_train.sh and the environment


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what run_train.sh needs, with a launcher that only tells how it was called."""
    repository = tmp_path / "my repository"
    (repository / "components/launch").mkdir(parents=True)
    (repository / "tests").mkdir()
    for name in ("run_train.sh", "pyproject.toml", "components/launch/environment.py"):
        shutil.copy(ROOT / name, repository / name)
    (repository / "components/start.py").write_text(
        "import os, sys\nprint(sys.executable, os.environ['PYTHONPATH'], os.getcwd(), sys.argv[1:], sep='\\n')\n"
    )
    return repository


def run(script: Path, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "PYTHONPATH")}
    return subprocess.run(
        [script, *words], cwd=cwd, env={**environment, **variables}, capture_output=True, text=True, timeout=60
    )


def bare_python(folder: Path) -> Path:
    """A Python without packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin/python"


def test_run_train_uses_a_python_that_has_all(copy: Path, tmp_path: Path) -> None:
    done = run(copy / "run_train.sh", "--a.b", "two words", cwd=tmp_path, PYTHON=sys.executable, PYTHONPATH="/mine")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    python, path, cwd, words = done.stdout.splitlines()
    assert (python, path, cwd) == (sys.executable, f"{copy}:/mine", str(tmp_path))
    assert words == "['--a.b', 'two words']"


def test_run_train_refuses_a_python_that_lacks_something(copy: Path, tmp_path: Path) -> None:
    python = bare_python(tmp_path / "bare")
    done = run(copy / "run_train.sh", cwd=tmp_path, PYTHON=str(python))
    assert done.returncode == 2
    assert f"PYTHON={python} lacks what pyproject.toml asks for: torch>=2.11 torchdata" in done.stderr
    done = run(copy / "run_train.sh", cwd=tmp_path, PYTHON="/bin/false")
    assert done.returncode == 2
    assert "is not a Python 3.11 or newer" in done.stderr
    assert not (copy / ".venv").exists()


def test_run_train_finds_an_activated_environment(copy: Path, tmp_path: Path) -> None:
    done = run(copy / "run_train.sh", cwd=tmp_path, PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    assert done.stdout.splitlines()[0] in (sys.executable, str(Path(sys.executable).with_name("python3")))
    assert not (copy / ".venv").exists()


FAKE_PIP = """
import os, sys, time
from pathlib import Path
log = Path(os.environ["PIP_LOG_FILE"])
log.write_text((log.read_text() if log.exists() else "") + " ".join(sys.argv[1:]) + "\\n")
time.sleep(float(os.environ.get("PIP_TAKES", "0")))
if os.environ.get("PIP_DIES"):
    os.kill(os.getppid(), 9)
    os._exit(1)
for word in sys.argv[2:]:
    name, _, version = word.replace("==", ">=").partition(">=")
    folder = Path(sys.prefix) / f"lib/python3.{sys.version_info[1]}/site-packages/{name}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Name: {name}\\nVersion: {version}\\n")
"""


@pytest.fixture
def making(copy: Path, tmp_path: Path) -> dict[str, str]:
    """Variables with which run_train.sh makes .venv in the copy, by a pip that only pretends."""
    base = tmp_path / "base"
    bare_python(base)
    modules = tmp_path / "modules"
    (modules / "pip").mkdir(parents=True)
    (modules / "pip/__init__.py").touch()
    (modules / "pip/__main__.py").write_text(FAKE_PIP)
    # run_train.sh keeps PYTHONPATH, so these go before the real modules.
    path = f"{base}/bin:/usr/bin:/bin"
    return {"PATH": path, "PYTHONPATH": str(modules), "PIP_LOG_FILE": str(tmp_path / "pip.log")}


def test_run_train_makes_an_environment_once_and_takes_no_half_made_one(
    copy: Path, making: dict[str, str], tmp_path: Path
) -> None:
    killed = run(copy / "run_train.sh", cwd=tmp_path, PIP_DIES="1", **making)
    assert killed.returncode != 0
    # Whatever was written, metadata of the packages included, is not trusted.
    check = [str(copy / ".venv/bin/python"), str(copy / "components/launch/environment.py"), "--check"]
    subprocess.run([check[0], "-m", "pip", "install", *environment.requirements([])], env=making, check=True)
    assert subprocess.run(check, capture_output=True, text=True).stdout == "an installation that was cut short\n"
    leftover = copy / ".venv/half-written"
    leftover.touch()
    Path(making["PIP_LOG_FILE"]).unlink()

    first = run(copy / "run_train.sh", cwd=tmp_path, **making)
    assert first.returncode == 0, first.stderr
    assert not leftover.exists()
    assert first.stdout.splitlines()[0] == str(copy / ".venv/bin/python")
    assert first.stderr.count("\n") == 1
    assert first.stderr.startswith(f"making {copy}/.venv")
    (call,) = Path(making["PIP_LOG_FILE"]).read_text().splitlines()
    assert call.startswith("install torch==2.13.0 torchdata>=0.11 ")
    assert "torch>=" not in call
    assert "pytest" not in call

    second = run(copy / "run_train.sh", cwd=tmp_path, **making)
    assert (second.returncode, second.stderr, second.stdout) == (0, "", first.stdout)


def test_two_first_runs_at_once_install_once(copy: Path, making: dict[str, str], tmp_path: Path) -> None:
    runs = [
        subprocess.Popen(
            [copy / "run_train.sh"],
            env={**os.environ, **making, "PIP_TAKES": "1", "PYTHON": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in runs]
    assert [process.returncode for process in runs] == [0, 0], outputs
    assert sorted(bool("waiting" in err) for _, err in outputs) == [False, True]
    assert len(Path(making["PIP_LOG_FILE"]).read_text().splitlines()) == 1


def test_checking_the_environment_is_quick_and_compares_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.perf_counter()
    code = subprocess.run(
        [sys.executable, ROOT / "components/launch/environment.py", "--check", "--group", "test"]
    ).returncode
    assert code == 0
    assert time.perf_counter() - start < 0.5  # 0.09 s on an idle machine
    installed = {"torch": "2.10.1", "tyro": "1.0.17", "numpy": "1.26"}
    monkeypatch.setattr(environment.metadata, "version", lambda name: installed.get(name, "999"))
    assert environment.missing([]) == ["torch>=2.11"]
    installed["torch"] = "2.11.0a0+git123"
    assert environment.missing([]) == []
    assert environment.missing(["pinned"]) == ["torch==2.13.0"]
    installed["torch"] = "2.13.0+cpu"
    assert environment.missing(["pinned"]) == []
