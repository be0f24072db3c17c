"""docs/launch/ray_train.py on two Ray nodes of this machine: the same run, lost workers, fewer nodes, a signal.

Needs Ray, which no requirement names: `pip install ray==2.60.0` into an environment that has all others.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.config import ROOT
from tests.limits import Limit, finish, wait_until
from tests.test_joining import HERE, WORDS, begin, manifest, ours  # noqa: F401 - begin is a fixture
from tests.test_train import numbers

pytest.importorskip("ray", reason="Ray is not installed")

Begun = subprocess.Popen[str]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    made.add_node(**options)
    yield made
    made.shutdown()


def submit(cluster: Any, folder: Path, *words: str) -> Begun:
    command: list[str | Path] = [
        sys.executable,
        ROOT / "docs/launch/ray_train.py",
        *words,
        "--job.dump_folder",
        str(folder / "dump"),
    ]
    environment = {**os.environ, **HERE, "RAY_ADDRESS": cluster.address, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    log = (folder / "log").open("w")  # nobody reads a pipe while the test waits
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)


def rank_process(folder: Path, rank: int) -> Any:
    """The process of a rank, by the folder among its words."""
    import psutil

    for process in psutil.process_iter():
        try:
            if str(folder / "dump") in " ".join(process.cmdline()) and process.environ().get("RANK") == str(rank):
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"no rank {rank}")


def wait_for(step: int, folder: Path, process: Begun) -> None:
    dump = folder / "dump"

    def reached() -> bool:
        return (dump / "metrics.jsonl").exists() and any(number >= step for number, _, _ in numbers(dump))

    limit = Limit(f"step {step}", idle=300)
    while not reached():
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        limit.check()
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.torchrun
def test_a_run_whose_worker_is_killed_is_the_unbroken_run(cluster: Any, begin: Any, tmp_path: Path) -> None:  # noqa: F811
    process = submit(cluster, tmp_path, "--workers", "2", "--max-failures", "1", *WORDS, "40")
    wait_for(5, tmp_path, process)
    rank_process(tmp_path, 1).parent().kill()
    assert process.wait() == 0, (tmp_path / "log").read_text()[-3000:]
    output = (tmp_path / "log").read_text()
    assert re.search("continuing after step (4|8|12)", output), "from the last checkpoint"
    (own,) = ours(begin, *WORDS, "40", "--job.dump_folder", str(tmp_path / "ours"))
    finish(own)
    assert numbers(tmp_path / "dump") == numbers(tmp_path / "ours")
    assert manifest(tmp_path / "dump", 40) == manifest(tmp_path / "ours", 40)


@pytest.mark.slow
@pytest.mark.torchrun
def test_a_lost_node_leaves_one_rank_and_a_signal_saves(cluster: Any, tmp_path: Path) -> None:
    words = ("--workers", "1:2", "--max-failures", "2", "--resize-seconds", "3600")
    process = submit(cluster, tmp_path, *words, *WORDS, "4000", "--lr_scheduler.total_steps", "4000")
    wait_for(5, tmp_path, process)
    both = rank_process(tmp_path, 0), rank_process(tmp_path, 1)
    second = next(each for each in cluster.worker_nodes)
    cluster.remove_node(second, allow_graceful=False)
    wait_until(lambda: not any(each.is_running() for each in both), process)
    lost_at = numbers(tmp_path / "dump")[-1][0]
    wait_for(lost_at + 3, tmp_path, process)
    assert rank_process(tmp_path, 0).environ()["WORLD_SIZE"] == "1"
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143, (tmp_path / "log").read_text()[-3000:]
    saved = numbers(tmp_path / "dump")[-1][0]
    assert manifest(tmp_path / "dump", saved)
    assert [step for step, _, _ in numbers(tmp_path / "dump")] == list(range(1, saved + 1))
