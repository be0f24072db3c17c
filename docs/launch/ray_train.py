"""Ray Train starts the ranks of a run, and starts them again after a loss. All nodes have this repository at one path.

    python docs/launch/ray_train.py --workers 16 --gpu --max-failures 10 \
        --job.config_file recipes/llama8b.toml --training.global_batch_size 16

--workers N          ranks, on any nodes of the Ray cluster
--workers MIN:MAX    as many ranks as the cluster has room for; fewer after a loss, more after a gain
--gpu                a GPU for each rank; default: a CPU
--max-failures N     how often Ray starts all ranks again, from the last checkpoint (0)
--resize-seconds N   with MIN:MAX: time between two looks for room for more ranks (60)

All other words are those of ./run_train.sh, which each worker of Ray runs as one rank. The exit code is that of
./run_train.sh. A signal to this process reaches the ranks: they save and stop. Made for Ray 2.60.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchTrainer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from components.commands.start import with_recipe  # noqa: E402
from components.config import ConfigError, load_config  # noqa: E402
from components.launch.exit_codes import ExitCode  # noqa: E402
from components.launch.locks import RUN_LOCK, is_held  # noqa: E402
from components.launch.settings import with_variables  # noqa: E402
from components.launch.signals import STOP_SIGNALS  # noqa: E402

PASSED_ON = ("SHUTDOWN_TIMEOUT_SECONDS", "OMP_NUM_THREADS", "PYTHON")
"""Variables of this process that ranks get too. `ray job submit --runtime-env-json` sets others."""


class Control:
    """An actor: the signals to the ranks, and the exit codes of the newest start's ranks."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.codes: dict[int, int] = {}

    def send(self, number: int) -> None:
        self.signals.append(number)

    def sent(self) -> list[int]:
        return self.signals

    def begin(self) -> None:
        self.codes = {}

    def end(self, rank: int, code: int) -> None:
        self.codes[rank] = code

    def ended(self) -> dict[int, int]:
        return self.codes


def work(given: dict[str, Any]) -> int:
    """Runs one rank in a process of its own, because signals need its main thread; returns the rank's exit code.

    Raises RuntimeError if Ray shall start all ranks again. When Ray ends a worker, it kills the worker's rank too.
    """
    context, control = ray.train.get_context(), given["control"]
    rank = context.get_world_rank()
    if rank == 0:
        ray.get(control.begin.remote())
    wait_for_lock(given["folder"], given["seconds"])
    host, port = broadcast_from_rank_zero(free_address() if rank == 0 else None)
    theirs = ("NODE_RANK", "ACCELERATE_TORCH_DEVICE")
    environment = {
        **{name: value for name, value in os.environ.items() if name not in theirs},
        "RANK": str(rank),
        "LOCAL_RANK": str(context.get_local_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
    process = subprocess.Popen([ROOT / "run_train.sh", *given["argv"]], cwd=given["cwd"], env=environment)
    passed = 0
    while process.poll() is None:
        for number in ray.get(control.sent.remote())[passed:]:
            process.send_signal(number)
            passed += 1
        time.sleep(0.5)
    code = process.returncode if process.returncode >= 0 else ExitCode.LOST_RANK
    ray.get(control.end.remote(rank, code))
    if code in (ExitCode.DONE, ExitCode.CONFIG, ExitCode.NONFINITE) or code > 128:
        return code
    raise RuntimeError(f"rank {rank} ended with exit code {code}")


def wait_for_lock(folder: Path, seconds: float) -> None:
    """Waits until rank 0 of the last start has ended; at most the time that it has for saving."""
    end = time.monotonic() + seconds
    while is_held(folder / RUN_LOCK) and time.monotonic() < end:
        time.sleep(0.5)


def free_address() -> tuple[str, int]:
    """This node's address, and a free port of it, where the ranks meet."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return ray.util.get_node_ip_address(), listener.getsockname()[1]


def workers(text: str) -> int | tuple[int, int]:
    least, _, most = text.partition(":")
    return (int(least), int(most)) if most else int(least)


def main(argv: list[str]) -> int:
    """Runs the job on a Ray cluster; returns the exit code of ./run_train.sh."""
    parser = argparse.ArgumentParser(usage=__doc__, add_help=False)
    parser.add_argument("--workers", type=workers, required=True)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--max-failures", type=int, default=0)
    parser.add_argument("--resize-seconds", type=float, default=60)
    options, words = parser.parse_known_args(argv)
    try:
        words = with_variables(words, os.environ)
        config = load_config(with_recipe(words))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIG
    folder = Path(config.job.dump_folder).absolute()
    variables = {name: os.environ[name] for name in PASSED_ON if os.environ.get(name)}
    ray.init(runtime_env={"env_vars": variables})
    here = {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
    control = ray.remote(num_cpus=0, label_selector=here)(Control).remote()
    seconds = float(os.environ.get("SHUTDOWN_TIMEOUT_SECONDS") or 300)
    given = {"argv": words, "cwd": os.getcwd(), "folder": folder, "seconds": seconds, "control": control}
    trainer = TorchTrainer(
        work,
        train_loop_config=given,
        scaling_config=ray.train.ScalingConfig(
            num_workers=options.workers,
            use_gpu=options.gpu,
            elastic_resize_monitor_interval_s=options.resize_seconds,
        ),
        run_config=ray.train.RunConfig(
            name=re.sub(r"\W", "_", time.strftime("%Y-%m-%d %H:%M:%S")),
            storage_path=str(folder / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=options.max_failures),
        ),
    )
    return run(trainer, control)


def run(trainer: TorchTrainer, control: Any) -> int:
    """Fits in a thread, because the main thread passes signals on; returns the exit code."""
    found: list[int] = []
    received: list[int] = []

    def fit() -> None:
        try:
            found.append(trainer.fit().return_value)
        except ray.train.TrainingFailedError as error:
            codes = ray.get(control.ended.remote()).values()
            own = [code for code in codes if code not in (ExitCode.DONE, ExitCode.LOST_RANK)]
            found.append(own[0] if own else ExitCode.LOST_RANK)
            print(error, file=sys.stderr)

    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))
    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        while received:
            ray.get(control.send.remote(received.pop(0)))
    return found[0] if found else ExitCode.ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
