"""Ranks that torchrun, accelerate launch or srun start: which environment is a rank's, and the run of such ranks."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from components.commands import check, start
from components.config import ROOT, ConfigError, JobConfig
from components.launch import orphan
from components.launch.joining import first_host, rank_variables, tasks_by_node, watch_starter
from components.launch.locks import RUN_LOCK, is_held
from components.launch.settings import Settings, read_settings
from tests.limits import finish, wait_until
from tests.test_train import TINY_RUN, numbers

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
}
"""Task 4 of `srun --nodes=2 --ntasks=5`; names and forms as srun of Slurm 21 to 24 sets them."""


def test_a_rank_of_torchrun_and_a_task_of_srun_become_ranks() -> None:
    assert rank_variables(TORCHRUN) == {name: TORCHRUN[name] for name in list(TORCHRUN)[:6]}
    assert rank_variables(SRUN) == {
        "RANK": "4",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "5",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "20003",
    }
    assert rank_variables(SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "1"})["MASTER_ADDR"] == "a"
    settings = read_settings(JobConfig(), SRUN)
    assert (settings.world_size, settings.ranks, settings.nodes) == (5, 2, 3)
    equal = read_settings(JobConfig(), TORCHRUN | {"NGPU": "2", "NNODES": "2", "MAX_RESTARTS": "0"})
    assert equal == Settings(ranks=2, nodes=2, endpoint="node1:29500", shown=None, joined=4)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},  # Kubernetes: a node
        {name: value for name, value in SRUN.items() if "STEP" not in name},  # the shell of sbatch
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"},  # srun --pty bash
        SRUN | {"SLURM_STEP_NUM_TASKS": "2", "NNODES": "2", "RDZV_ENDPOINT": "a:1"},  # docs/launch/slurm.sbatch
        SRUN | {"NNODES": "5", "NGPU": "1", "RDZV_ENDPOINT": "a:1"},  # a launcher for each task
        SRUN | {"SLURM_STEP_NUM_TASKS": "2", "NNODES": "1"},  # a run on each node
    ],
)
def test_other_environments_start_ranks(environment: dict[str, str]) -> None:
    assert rank_variables(environment) == {}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (TORCHRUN | {"MASTER_ADDR": ""}, 'LOCAL_RANK = "1": a rank needs MASTER_ADDR too'),
        (TORCHRUN | {"RANK": "4"}, 'RANK = "4": expected an integer below WORLD_SIZE = 4'),
        (TORCHRUN | {"LOCAL_RANK": "x"}, 'LOCAL_RANK = "x": expected an integer below LOCAL_WORLD_SIZE = 2'),
        (TORCHRUN | {"NGPU": "8"}, 'NGPU = "8": torchrun has started 2 ranks on this node; unset NGPU'),
        (TORCHRUN | {"NNODES": "4"}, 'NNODES = "4": torchrun has started 4 ranks, 2 on this node'),
        (TORCHRUN | {"NODE_RANK": "0"}, 'NODE_RANK = "0": torchrun has numbered'),
        (TORCHRUN | {"MAX_RESTARTS": "3"}, 'MAX_RESTARTS = "3": only torchrun can start its ranks again'),
        (TORCHRUN | {"RDZV_ENDPOINT": "a:1"}, 'RDZV_ENDPOINT = "a:1": the ranks meet at MASTER_ADDR'),
        (TORCHRUN | {"LOG_RANK": "0"}, 'LOG_RANK = "0": torchrun shows'),
        (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "bf16"}, "use training.mixed_precision_param"),
        (TORCHRUN | {"ACCELERATE_USE_FSDP": "true"}, r"use the keys of \[parallelism\]"),
        (SRUN | {"NNODES": "2", "RDZV_ENDPOINT": "a:1"}, "use --ntasks-per-node=1, or unset NNODES"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "2"}, "one task a node starts the ranks of its node: set NNODES"),
        (SRUN | {"MAX_RESTARTS": "1"}, "only srun can start"),
        (SRUN | {"SLURM_NODEID": ""}, "a task of srun needs SLURM_NODEID too"),
        ({"LOCAL_RANK": "0"}, "a rank needs RANK and WORLD_SIZE and LOCAL_WORLD_SIZE"),
        ({"LOCAL_RANK": "0", "RANK": "0"}, "a rank needs WORLD_SIZE and LOCAL_WORLD_SIZE"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "use compile.enable"),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, "mpirun starts one launcher a node"),
        ({"RDZV_ENDPOINT": "a:1", "NGPU": "1"}, "NNODES is needed too"),
        ({"RDZV_ENDPOINT": "a:99999", "NNODES": "2"}, "expected host:port"),
    ],
)
def test_a_rank_that_contradicts_our_variables_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        read_settings(JobConfig(), environment)
    assert len(refused.value.messages) == 1


def test_a_rank_makes_no_dry_run_and_may_see_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"comm.mode = .*start it without torchrun"):
        start.check_job(["--comm.mode", "fake_backend"], TORCHRUN)
    for gpus in (1, 2, 8):
        monkeypatch.setattr(start, "gpus", lambda gpus=gpus: gpus)
        start.check_devices(JobConfig(), read_settings(JobConfig(), TORCHRUN), TORCHRUN)
    monkeypatch.setattr(start, "gpus", lambda: 2)
    eight = TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}
    with pytest.raises(ConfigError, match="this node has 2 GPUs"):
        start.check_devices(JobConfig(), read_settings(JobConfig(), eight), eight)


def test_a_rank_makes_no_proof_and_checks_no_port_of_its_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert start.main(["--prove"]) == 2
    assert "--prove starts ranks of its own: start it without torchrun" in capsys.readouterr().err
    job = SimpleNamespace(settings=read_settings(JobConfig(), TORCHRUN))
    assert check.port(cast("Any", job)).startswith("the launcher of these ranks has ")


def test_a_parent_outside_of_the_container_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 0)
    assert int(watch_starter(1.0)[orphan.LAUNCHER_PIPE]) > 2


def test_slurms_lists_are_read() -> None:
    assert tasks_by_node("2(x3),1") == [2, 2, 2, 1]
    assert [first_host(text) for text in ("a", "a,b", "gpu[07-09,12],login1", "r[1-2]n[03,5]-ib,x")] == [
        *("a", "a", "gpu07", "r1n03-ib")
    ]


# Runs

WORDS = [
    *("--job.config_file", "recipes/llama_debug.toml", *TINY_RUN, "--validation.no_enable"),
    *("--checkpoint.interval", "4", "--training.steps"),
]
HERE = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}

Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def begin() -> Iterator[Begin]:
    begun: list[subprocess.Popen[str]] = []

    def begin(*words: str | Path, **variables: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        begun.append(subprocess.Popen(words, cwd=ROOT, env={**kept, **HERE, **variables}, **options))  # type: ignore[call-overload]
        return begun[-1]

    yield begin
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return str(listener.getsockname()[1])


def torchrun(begin: Begin, *words: str) -> list[subprocess.Popen[str]]:
    options = ("--no-python", "--nproc-per-node", "2", "--master-port", free_port())
    return [begin(Path(sys.executable).parent / "torchrun", *options, "./run_train.sh", *words)]


def accelerate(begin: Begin, *words: str) -> list[subprocess.Popen[str]]:
    options = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no")
    more = ("--dynamo_backend", "no", "--main_process_port", free_port(), "--no_python")
    return [begin(Path(sys.executable).parent / "accelerate", "launch", *options, *more, "./run_train.sh", *words)]


def srun(begin: Begin, *words: str) -> list[subprocess.Popen[str]]:
    one = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    place = {"SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0", "MASTER_PORT": free_port()}
    return [
        begin("./run_train.sh", *words, **SRUN | one | place | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank})
        for rank in ("0", "1")
    ]


def ours(begin: Begin, *words: str) -> list[subprocess.Popen[str]]:
    return [begin("./run_train.sh", *words, NGPU="2")]


def manifest(folder: Path, step: int) -> list[dict]:
    """Names and hashes of a checkpoint's files: equal for equal bits of weights, moments and state."""
    return json.loads((folder / f"checkpoint/step-{step}/manifest.json").read_text())


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("launch", [torchrun, accelerate, srun])
def test_ranks_of_another_launcher_train_the_same_run(launch: Callable, begin: Begin, tmp_path: Path) -> None:
    for name, way in (("theirs", launch), ("ours", ours)):
        for process in way(begin, *WORDS, "4", "--job.dump_folder", str(tmp_path / name)):
            output = finish(process)[0]
            assert process.returncode == 0, output
            assert "waiting" not in output
    assert numbers(tmp_path / "theirs") == numbers(tmp_path / "ours")
    assert manifest(tmp_path / "theirs", 4) == manifest(tmp_path / "ours", 4)


@pytest.mark.slow
@pytest.mark.torchrun
def test_ranks_of_srun_save_at_a_signal_and_those_of_torchrun_at_its_end(begin: Begin, tmp_path: Path) -> None:
    """Three turns of one run: a signal to rank 1, the death of torchrun, and a turn of the own launcher."""

    def reaches(step: int) -> bool:
        return (tmp_path / "metrics.jsonl").exists() and any(number >= step for number, _, _ in numbers(tmp_path))

    words = [*WORDS, "40", "--job.dump_folder", str(tmp_path)]
    ranks = srun(begin, *words)
    wait_until(lambda: reaches(2), ranks[0])
    ranks[1].send_signal(signal.SIGUSR1)
    outputs = [finish(rank)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [138, 138], outputs
    first = numbers(tmp_path)[-1][0]
    assert manifest(tmp_path, first)

    (process,) = torchrun(begin, *words)
    wait_until(lambda: reaches(first + 2), process)
    process.kill()
    wait_until(lambda: not is_held(tmp_path / RUN_LOCK))
    second = numbers(tmp_path)[-1][0]
    assert first + 2 <= second < 40
    assert manifest(tmp_path, second), "the ranks have saved after their launcher's end"

    (process,) = ours(begin, *WORDS, str(second + 1), "--job.dump_folder", str(tmp_path))
    output = finish(process)[0]
    assert f"continuing after step {second}" in output
    assert process.returncode == 0


HANGS = """
import os, time
from components.launch.ending import run_to_exit
from components.launch.joining import watch_starter
from components.launch.signals import StopSignal
from parallelize.groups import init_distributed
os.environ |= watch_starter(0.5)
stop = StopSignal()
init_distributed(60)
with stop.saving():
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_joined_rank_that_does_not_save_in_time_ends_itself(begin: Begin) -> None:
    process = begin(sys.executable, "-c", HANGS, PYTHONPATH=str(ROOT))
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert process.returncode == 6
