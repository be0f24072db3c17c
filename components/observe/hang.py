"""Finds the rank that others wait for in vain, and says in which mesh dimension and operation, and since when.

torch's flight recorder notes each collective as it is enqueued, with its group, and whether it is done. When a
collective times out on some rank, an alarm in the store wakes a thread on every living rank. Each living rank reports
through the store what its main thread waits for, and writes the stacks of its threads to its log. The missing rank is
the one that does not report, or that waits for no collective.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist

from components.launch.exit_codes import ExitCode
from components.launch.locks import end_process
from parallelize.mesh import Mesh

_REPORT_SECONDS = 1.0
"""Time for all ranks that live to report."""
_FOREVER = timedelta(days=1000)


@dataclass
class Wait:
    """A collective that is not done."""

    dimension: str
    ranks: list[int]
    operation: str
    since: float
    """Seconds since 1970."""


@dataclass
class Report:
    """One rank's view of a hang."""

    waits: list[Wait]
    """Collectives that its main thread may be waiting for, oldest first."""
    failed: bool
    """Its collective has timed out."""
    place: str
    """Where its main thread is."""


class HangWatch:
    """A context in which a collective's timeout ends every rank, with a sentence and LOST_RANK. It slows no step."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        used: dict[str, Any] = {
            name: group for name, group in mesh.groups().items() if group.size() > 1 and name != "dp_shard"
        }
        named = {"all ranks": dist.group.WORLD} | used
        self.groups = {group.group_name: (name, dist.get_process_group_ranks(group)) for name, group in named.items()}
        self.stage: Any = used.get("pp")
        self.main = threading.get_ident()
        self.snapshots: list[list[Wait]] = []
        """Collectives at the last two looks, because one look may fall between a failure and this context's end."""
        self.in_pipeline_since: float | None = None
        self.ended = threading.Event()
        self.prefix = f"hang/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/"

    def __enter__(self) -> Self:
        if self.world_size > 1:
            # Two connections, because the main thread and _answer may each be inside a call that waits.
            store: Any = dist.distributed_c10d._get_default_store()
            self.store, self.own = store.clone(), store.clone()
            for work in (self._answer, self._look):
                threading.Thread(target=work, name="hang", daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, stack: TracebackType | None) -> None:
        self.ended.set()
        watched = isinstance(error, RuntimeError) and self.world_size > 1
        if watched and (said := self.explain("timed out" in str(error).lower())):
            traceback.print_exception(error)
            _end(said)

    @property
    def timeout(self) -> float:
        """Seconds, as last set on the group of all ranks."""
        group: Any = dist.group.WORLD
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    def explain(self, timed_out: bool) -> str:
        """One sentence, the same on every rank, if a collective has timed out on some rank; else empty."""
        with contextlib.suppress(dist.DistError):
            if not timed_out and not self.own.check([f"{self.prefix}alarm"]):
                return ""
            self._report(self.own)
            if timed_out and self.own.add(f"{self.prefix}raised", 1) == 1:
                self.own.set(f"{self.prefix}alarm", "")
                self.own.set(f"{self.prefix}sentence", self._collect())
            self.own.wait([f"{self.prefix}sentence"], timedelta(seconds=3 * _REPORT_SECONDS))
            return self.own.get(f"{self.prefix}sentence").decode()
        return ""

    def _collect(self) -> str:
        keys = {rank: f"{self.prefix}{rank}" for rank in range(self.world_size)}
        for _ in range(5):  # mostly one rank is missing, and the others report at once
            time.sleep(_REPORT_SECONDS / 5)
            if sum(self.own.check([key]) for key in keys.values()) >= self.world_size - 1:
                break
        time.sleep(_REPORT_SECONDS / 5)
        there = {rank: json.loads(self.own.get(key)) for rank, key in keys.items() if self.own.check([key])}
        reports = {
            rank: Report([Wait(**wait) for wait in report.pop("waits")], **report) for rank, report in there.items()
        }
        return sentence(reports, self.world_size)

    def _answer(self) -> None:
        """Wait for an alarm, however long; then report, and write all stacks to the log."""
        with contextlib.suppress(dist.DistError):
            self.store.wait([f"{self.prefix}alarm"], _FOREVER)
            if not self.ended.is_set():  # else the main thread reports
                self._report(self.store)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)

    def _look(self) -> None:
        """Note pending collectives at intervals, because the flight recorder lists a failed collective as done.

        Waits between pipeline stages have no timeout in gloo and no entry in the flight recorder. If the main thread
        uses no processor time there for the length of the timeout, this thread ends its rank.
        """
        clock = getattr(time, "pthread_getcpuclockid", None)  # macOS has neither this clock nor this watch
        used = looked = now = 0.0
        while not self.ended.wait(min(self.timeout / 6, 1)):
            if time.monotonic() - looked < min(self.timeout / 6, 10):  # the timeout is short after the first step
                continue
            looked = time.monotonic()
            self.snapshots = [*self.snapshots[-1:], self._recorded()]
            used_before, used = used, time.clock_gettime(clock(self.main)) if clock else time.monotonic()
            # If a stage is only slow, its peers go on with each micro-batch, and use more than a millisecond.
            waiting = used - used_before < 1e-3 and self._in_pipeline()
            before, now = now, time.time()
            if not waiting or self.in_pipeline_since is None:
                self.in_pipeline_since = before if waiting else None
            elif now - self.in_pipeline_since > self.timeout:
                _end(self.explain(timed_out=True))

    def _in_pipeline(self) -> bool:
        """Whether the main thread is inside a call of torch.distributed that a pipeline schedule has made."""
        frame, names = sys._current_frames().get(self.main), []
        while frame:
            names.append(frame.f_code.co_filename)
            frame = frame.f_back
        return "/torch/distributed/" in names[0] and any("/distributed/pipelining/" in name for name in names)

    def _recorded(self) -> list[Wait]:
        """Collectives that are not done."""
        recorder: Any = torch._C._distributed_c10d  # torch's stub lacks the function
        record = json.loads(recorder._dump_fr_trace_json(includeCollectives=True, onlyActive=False))
        waits = []
        for entry in record.get("entries", []):
            if not entry["retired"]:
                name, ranks = self.groups.get(entry["process_group"][0], ("another group", []))
                operation = entry["profiling_name"].partition(":")[2]
                waits.append(Wait(name, ranks, operation, entry["time_created_ns"] / 1e9))
        return waits

    def _report(self, store: Any) -> None:
        waits, failed = self._recorded(), self.ended.is_set()
        if failed:  # the flight recorder lists the main thread's collective as done
            old = time.time() - 0.8 * self.timeout
            late = [wait for waits_then in self.snapshots for wait in waits_then if wait.since < old]
            waits = sorted([*late, *waits], key=lambda wait: wait.since)
        if self.in_pipeline_since is not None and self.stage:
            ranks = dist.get_process_group_ranks(self.stage)
            waits.append(Wait("pp", ranks, "send or receive", self.in_pipeline_since))
        frame, place = sys._current_frames().get(self.main), ""
        while frame and not place:
            if "site-packages" not in frame.f_code.co_filename and "/lib/python" not in frame.f_code.co_filename:
                place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        store.set(f"{self.prefix}{self.rank}", json.dumps(asdict(Report(waits, failed, place))))


def _end(said: str) -> NoReturn:
    """Ends this process at once, because the end of main, which draws loss.png, would keep the other ranks waiting."""
    sys.stdout.flush()
    print(said, file=sys.stderr, flush=True)
    end_process(ExitCode.LOST_RANK)


def sentence(reports: dict[int, Report], world_size: int) -> str:
    """Says which ranks are missing, which wait for them, in which collective, since when. reports: of living ranks."""
    silent = [rank for rank in range(world_size) if rank not in reports]
    missing = silent or [rank for rank, report in reports.items() if not report.waits and not report.failed]
    seen = [(wait, rank) for rank, report in reports.items() for wait in report.waits]
    on_missing = [each for each in seen if set(each[0].ranks) & set(missing)]
    waiting = ""
    if first := min(on_missing or seen, key=lambda each: each[0].since, default=None):
        wait = first[0]
        missing = sorted(set(missing) & set(wait.ranks)) or missing
        peers = {rank for found, rank in seen if (found.dimension, found.ranks) == (wait.dimension, wait.ranks)}
        waiting = f"; {_ranks(peers)} waiting in {_describe(wait)}"
    if not missing:
        return f"a collective timed out, although all ranks answer and wait: they disagree on what is next{waiting}"
    state = "not answering" if silent else f"waiting for no other rank, at {reports[missing[0]].place}"
    return f"{_ranks(missing)} {state}{waiting}. The stacks of the ranks that answer are in their logs"


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed))}"


def _describe(wait: Wait) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(wait.since))
    return (
        f"{wait.operation} of {wait.dimension} (ranks {', '.join(map(str, wait.ranks))}) since {since}, "
        f"{time.time() - wait.since:.0f} s ago"
    )
