"""Processes that are the ranks of a world, for tests: forked from a server that has torch and train.py imported.

They do one case after another, so that a layout costs a second and not six.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from components.launch.ending import leave
from parallelize import precision
from parallelize.groups import init_distributed
from tests.limits import MOST_IDLE, Limit, TimeLimit

PRELOADED = ["pytest", "tests.harness", "torch._inductor.compile_fx"]
"""What the fork server imports: ranks that get a function of a test import its file, and that imports pytest; the first
compile of a rank would import the compiler.
"""
Work = Callable[[Any, torch.device], Any]
COMPUTING = 300.0
"""Seconds of processor time of a case, for each of its ranks."""
FOLLOWING = 20.0
"""Seconds without work that ranks have to end after the first of them: what they wait for does not come."""


class Ranks:
    """Processes of one world, that do one case after another: work(case, device) is called in each."""

    def __init__(self, count: int, work: Work, environment: dict[str, str]) -> None:
        # Here, and not on rank 0: a port that is free now may not be when rank 0 asks for it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory()
        self.count, self.cases, self.alive = count, 0, True
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        pipes = [context.Pipe() for _ in range(count)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(
                target=_rank,
                args=(rank, count, work, environment, self._folder.name, self._store.port, theirs),
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def run(self, case: Any) -> Any:
        """Result of the work on rank 0; a RuntimeError if any rank fails, which ends all ranks; or a TimeLimit."""
        self.cases += 1
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has ended: the answer is missing too
                pipe.send(case)
        limit = Limit(f"a case of {self.count} ranks", COMPUTING * self.count)
        waiting, ended = [*self._pipes], False
        try:
            while waiting:
                limit.check()
                ready = multiprocessing.connection.wait(waiting, 1)
                for pipe in [pipe for pipe in waiting if pipe in ready]:
                    waiting.remove(pipe)
                    if not _answers(pipe):
                        ended, limit.idle = True, FOLLOWING
        except TimeLimit as reached:
            if not ended:
                self.end()
                return reached
        if not ended:
            return torch.load(Path(self._folder.name) / "result", map_location="cpu", weights_only=False)
        for process in self._processes:
            process.join(5)
        codes = [process.exitcode for process in self._processes]
        errors = "\n".join(path.read_text() for path in sorted(Path(self._folder.name).glob("error_*")))
        self.end()
        return RuntimeError(f"ranks ended with {codes}\n{errors}")

    def end(self) -> None:
        """End all processes, without a word of theirs."""
        self.alive = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


_kept: dict[int, Ranks] = {}
"""Ranks that wait for another case, by their number: torch's caches of a layout's operations are filled once."""
_MOST_KEPT, _MOST_CASES = 16, 256
"""Ranks that are kept, in all; and cases of one world, by its ranks: each case leaves its groups' threads."""


def _end_kept() -> None:
    for ranks in _kept.values():
        ranks.end()


# Before multiprocessing waits for them, which it does in its own processes too.
multiprocessing.util.Finalize(None, _end_kept, exitpriority=0)


def kept_ranks(count: int, work: Work) -> Ranks:
    """Ranks that are as new: no case of theirs has planted a fault, set the environment or failed."""
    ranks = _kept.pop(count, None)
    if ranks and (not ranks.alive or ranks.cases >= max(4, _MOST_CASES // count)):
        ranks.end()
        ranks = None
    for other in [*_kept]:
        if count + sum(_kept) > _MOST_KEPT:
            _kept.pop(other).end()
    _kept[count] = ranks or Ranks(count, work, {})
    return _kept[count]


def _answers(pipe: Connection) -> bool:
    try:
        return pipe.recv() is None
    except (EOFError, OSError):
        return False


def _rank(
    rank: int, count: int, work: Work, environment: dict[str, str], folder: str, port: int, pipe: Connection
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= environment
    multiply_by_mkl()
    gc.disable()  # as train.train does
    faulthandler.enable()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        device = init_distributed(int(10 * MOST_IDLE), share_gpus=True)  # Ranks notice a hang long before
        while True:
            case = pipe.recv()
            result = work(case, device)
            if rank == 0:
                torch.save(result, Path(folder) / "result")
            gc.collect(1)  # all of the case is young: what was imported meanwhile is not looked at
            pipe.send(None)
    except BaseException as error:
        (Path(folder) / f"error_{rank:02}").write_text(f"rank {rank}: {type(error).__name__}: {error}\n")
    leave(1)


def multiply_by_mkl() -> None:
    """Before a run is built. oneDNN makes a kernel for each new shape: for small models longer than the products."""
    vars(precision)["_products_are_exact"] = lambda: False


def _end_with_parent() -> None:
    """A rank whose test was killed would wait for its peers, and train on."""
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.connection.wait([parent.sentinel]):
        os._exit(1)


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """This process is the one rank of a world."""
    init_distributed(60)
    try:
        yield
    finally:
        dist.destroy_process_group()
