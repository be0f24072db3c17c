"""Campaigns of the store: what takes too long for the test command.

kills: a whole process tree is killed at random while two ranks save every step. Each start has to load bits that some
step had, and of no step before the last one published. Progress is in .cache/tests, so a campaign that was cut goes on
where it stood: python -m tests.faults.storage 200

reads: every read of a resume fails, with each error, on each rank.
"""

import errno
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from components.config import ROOT
from components.config.files import read_json_if_whole, replace
from components.state.checkpoint import Checkpointer
from components.state.folder import steps_in
from tests.checkpoints import checkpointer, fork_ranks, run, saved
from tests.ranks import PRELOADED
from tests.test_checkpoint_reads import ERRNOS, sweep

FOLDER = ROOT / ".cache" / "tests" / "kills"
_SIZES = (300, 200, 100)  # a save takes some milliseconds, so that most kills hit one


def campaign_kills(amount: int = 200) -> list[str]:
    """Kill the tree this many times in all; lines of what was seen."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    seen = {"kills": 0, "in a save": 0, "bad loads": 0, "early starts": 0, "steps": 0} | read_json_if_whole(_PROGRESS)
    while seen["kills"] < amount:
        mode = ("disabled", "async")[seen["kills"] % 2]
        for name, count in _kill_once(mode).items():
            seen[name] = count if name == "steps" else seen[name] + count
        replace(_PROGRESS, json.dumps(seen))
    return [
        f"whole process tree killed {seen['kills']} times, synchronous and asynchronous saves in turn, "
        f"{seen['in a save']} times in a save, over {seen['steps']:,} steps: "
        f"{seen['bad loads']} bad loads, {seen['early starts']} starts from before the last published step"
    ]


_PROGRESS = FOLDER / "progress.json"


def _kill_once(mode: str) -> dict[str, int]:
    """Start a tree of two ranks, kill it, and count."""
    published = _published()
    for name in ("began", "bad"):
        (FOLDER / name).unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "tests.checkpoints"])
    tree = context.Process(target=_tree, args=(mode,))
    tree.start()
    assert tree.pid is not None
    end = time.monotonic() + 300
    while random.random() > 0.002 and not (FOLDER / "began").exists() and tree.is_alive() and time.monotonic() < end:
        time.sleep(0.005)  # about one kill in ten hits a tree that is still loading
    time.sleep(random.uniform(0, 1))
    with suppress(ProcessLookupError):
        os.killpg(tree.pid, signal.SIGKILL)
    tree.kill()
    tree.join()
    in_a_save = any(path.name.startswith(".") for path in (FOLDER / "checkpoint").glob(".*"))
    began = int((FOLDER / "began").read_text()) if (FOLDER / "began").exists() else published
    shutil.rmtree(FOLDER / "tmp", ignore_errors=True)
    counts = {"kills": 1, "in a save": int(in_a_save), "steps": _published()}
    return counts | {"bad loads": int((FOLDER / "bad").exists()), "early starts": int(began < published)}


def campaign_reads(times: int = 1) -> list[str]:
    """Fail every read of a resume with every error, on each of two ranks, for good and once."""
    reads, wrong = 0, []
    for number, victim, lasting in itertools.product(ERRNOS * times, (0, 1), (True, False)):
        with tempfile.TemporaryDirectory() as folder:
            for outcome in run(sweep, saved(Path(folder), 10, 20, world=2), victim, lasting, (number,), world=2):
                assert not outcome.error, outcome.error
                wrong += outcome.value[1]
            reads += outcome.value[0]
    errors = ", ".join(errno.errorcode[number] for number in ERRNOS)
    return [
        f"{reads} reads of a resume failed ({errors}): {len(wrong)} renames, silent starts or unnamed files",
        *wrong,
    ]


def _published() -> int:
    return max((step for step, _ in steps_in(FOLDER / "checkpoint")), default=0)


def _tree(mode: str) -> None:
    os.setsid()
    (FOLDER / "tmp").mkdir(exist_ok=True)
    tempfile.tempdir = str(FOLDER / "tmp")
    for outcome in fork_ranks(2, _train, mode):  # it ends only by an error
        (FOLDER / "bad").write_text(f"{outcome.error}\n{outcome.printed}")


def _train(mode: str) -> None:
    saver = checkpointer(FOLDER / "checkpoint", 0, _SIZES, async_mode=mode, keep_latest_k=2)
    state = saver.load()
    step = state["step"] if state else 0
    if state:
        loaded = {name: tensor.clone() for name, tensor in saver._tensors(with_optimizer=True).items()}
        _fill(saver, step)
        assert all(tensor.equal(loaded[name]) for name, tensor in saver._tensors(with_optimizer=True).items()), "bits"
    dist.barrier()
    if dist.get_rank() == 0:
        replace(FOLDER / "began", str(step))
    while True:
        step += 1
        _fill(saver, step)
        saver.save(step, {"sequences": step})
        saver.poll()


def _fill(saver: Checkpointer, step: int) -> None:
    """Every number that is saved depends on the step."""
    generator = torch.Generator().manual_seed(step)
    for tensor in saver._tensors(with_optimizer=True).values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator))


if __name__ == "__main__":
    print(*campaign_kills(int(sys.argv[1])), sep="\n")
