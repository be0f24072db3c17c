"""States that wait on the host: the same run, no race between streams, and no memory that is asked for in a step."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from components.commands.dry_run import Meter
from components.config import load_config
from components.optim import visits
from components.optim.optimizer import build_optimizer, staged_bytes
from components.optim.visits import Visits
from tests.harness import observe, rewrite
from tests.test_optimizer import small_model
from tests.test_rounding import differing, give_equal_gradients, states

OFFLOAD, STATE, WEIGHTS = "--optimizer.state_offload", "--optimizer.state_dtype", "--training.dtype"
KINDS: dict[str, tuple[str, ...]] = {
    "AdamW": (),
    "foreach": ("--optimizer.implementation", "foreach"),
    "8-bit moments": (STATE, "int8"),
    "bfloat16 weights and moments": (WEIGHTS, "bfloat16", STATE, "bfloat16"),
    "Muon": ("--optimizer.name", "Muon"),
    "Muon, 8-bit momentum": ("--optimizer.name", "Muon", STATE, "int8"),
}
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "fsdp 2": (2, ("--parallelism.data_parallel_shard_degree", "2", "--training.local_batch_size", "18")),
    "tp 2": (2, ("--parallelism.tensor_parallel_degree", "2")),
    "pp 2 x fsdp 2": (
        4,
        (
            *("--parallelism.pipeline_parallel_degree", "2", "--parallelism.data_parallel_shard_degree", "2"),
            *("--training.local_batch_size", "18"),
        ),
    ),
    "ep 2": (
        2,
        (
            *("--model.name", "qwen3_moe", "--parallelism.expert_parallel_degree", "2"),
            *("--training.local_batch_size", "18"),
        ),
    ),
}
SMALL_BUCKETS = 64 * 64


def use_small_buckets() -> None:
    """Several buckets, and matrices in several pieces."""
    visits.BUCKET = SMALL_BUCKETS


def numbers(run: train.Run) -> tuple[dict[str, Tensor], int]:
    return states(run), staged_bytes(run.optimizer)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *itertools.product(KINDS, ("one", "fsdp 2", "tp 2")),
        *itertools.product(("8-bit moments", "Muon"), ("pp 2 x fsdp 2", "ep 2")),
    ],
)
def test_a_run_has_the_same_bits(kind: str, layout: str) -> None:
    ranks, words = LAYOUTS[layout]
    words = (*KINDS[kind], *words)
    on_device = observe(*words, ranks=ranks, at_end=numbers)
    on_host = observe(*words, OFFLOAD, "true", ranks=ranks, mutate=use_small_buckets, at_end=numbers)
    assert on_host.losses == on_device.losses
    assert not differing(on_host.weights, on_device.weights)
    assert not differing(on_host.extra[0], on_device.extra[0])
    assert on_host.extra[1] > on_device.extra[1] == 0


def plant(*fault: str) -> None:
    use_small_buckets()
    rewrite("components.optim.visits", *fault)


@pytest.mark.parametrize(
    "fault",
    [
        ("Visits._return", "home.copy_(here, non_blocking=True)", "pass"),
        ("_cut", "last=end == rows", "last=True"),
    ],
    ids=["nothing goes back", "each piece counts a step"],
)
def test_a_planted_fault_changes_the_run(fault: tuple[str, str, str]) -> None:
    found = observe(OFFLOAD, "true", mutate=partial(plant, *fault))
    assert differing(found.weights, observe().weights)


@pytest.mark.parametrize("kind", ["AdamW", "8-bit moments", "Muon"])
def test_a_run_goes_on_at_another_layout_with_the_key_changed(kind: str, tmp_path: Path) -> None:
    """Three steps of one process, with states on the host in the first and the last."""
    words = (*KINDS[kind], "--checkpoint.enable", "true")
    for layout, offload in (("fsdp 2", "true"), ("tp 2", "false"), ("one", "true")):
        ranks, more = LAYOUTS[layout]
        given = (*words, *more, OFFLOAD, offload)
        last = observe(*given, ranks=ranks, steps=1, folder=str(tmp_path), mutate=give_equal_gradients, at_end=states)
    whole = observe(*KINDS[kind], steps=3, mutate=give_equal_gradients, at_end=states)
    assert not differing(last.weights, whole.weights)
    assert not differing(last.extra, whole.extra)


def built(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    words = [*KINDS[kind], OFFLOAD, "true"]
    model = small_model()
    return model, build_optimizer([model], load_config(words).optimizer)


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()


class Order(TorchDispatchMode):
    """Notes two accesses of the same bytes, one of them a write, that no event orders: on a GPU either may be first.

    Streams are those of torch.cpu, which do nothing, given a vector clock each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self._numbers = itertools.count()
        self._accesses: dict[int, list[tuple[int, int, bool, int, int, str]]] = defaultdict(list)
        """Storage -> (first byte, end, whether written, stream, its time, operation)."""
        self._alive: list[Any] = []
        """An address is that of one storage."""
        order = self

        class Stream:
            def __init__(self) -> None:
                self.number, self.clock = next(order._numbers), Counter[int]()

            def wait_stream(self, other: "Stream") -> None:
                self.clock |= other.clock

        class Event:
            def __init__(self) -> None:
                self.clock = Counter[int]()

            def record(self) -> None:
                self.clock = order.current.clock.copy()

            def wait(self) -> None:
                order.current.clock |= self.clock

        self.Stream, self.Event, self.current = Stream, Event, Stream()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.current.clock[self.current.number] += 1
        for argument, value in zip(function._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in () if function.is_view else tree_leaves(value):
                self._access(tensor, written, str(function))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._accesses:
                self._access(tensor, True, str(function))
        return result

    def _access(self, tensor: Any, written: bool, what: str) -> None:
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return
        self._alive.append(tensor)
        first = int(tensor.storage_offset()) * tensor.element_size()
        end, clock, number = first + int(tensor.nbytes), self.current.clock, self.current.number
        earlier = self._accesses[tensor.untyped_storage()._cdata]
        for start, stop, wrote, other, time, name in earlier:
            if start < end and first < stop and (wrote or written) and clock[other] < time:
                self.races.append(f"{what} on stream {number} beside {name} on stream {other}")
        earlier.append((first, end, written, number, clock[number], what))


def races(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of three steps, and of whoever has waited for the device then and reads all states."""
    order = Order()
    for name in ("Stream", "Event", "stream"):
        monkeypatch.setattr(torch.cpu, name, getattr(order, name))
    monkeypatch.setattr(torch.cpu, "current_stream", lambda: order.current)
    monkeypatch.setattr(visits, "BUCKET", 512)
    model, optimizer = built(kind)
    with order:
        steps(model, optimizer, 3)
        for state in optimizer.state.values():
            for value in state.values():
                value.clone()
    assert len(vars(optimizer)["visits"]._buckets) > 3
    return order.races


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_streams_use_the_same_bytes_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert races(kind, monkeypatch) == []


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("_prepare", "self._arriving.wait_stream(streams.current_stream())"),
        ("__iter__", "bucket.buffer.arrived.wait()"),
        ("__iter__", "bucket.buffer.updated.record()"),
        ("__iter__", "bucket.buffer.left.wait()"),
        ("_bring", "bucket.buffer.left.wait()"),
        ("_bring", "bucket.buffer.arrived.record()"),
        ("_return", "bucket.buffer.updated.wait()"),
        ("_return", "bucket.buffer.left.record()"),
    ],
)
def test_a_missing_wait_is_found(function: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Visits, function, getattr(Visits, function))  # put back at the end
    rewrite("components.optim.visits", f"Visits.{function}", line, "pass")
    assert races("AdamW", monkeypatch)


def test_a_step_asks_for_no_memory_to_move_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "BUCKET", 512)
    model, optimizer = built("8-bit moments")
    steps(model, optimizer, 1)
    visited = vars(optimizer)["visits"]
    with Meter(None, [[*optimizer.state.values()], [bucket.buffer.bytes for bucket in visited._buckets]]) as meter:
        before = meter.peak
        for _ in visited:
            pass
    assert meter.peak == before > 0


def test_buffers_are_three_of_the_largest_bucket() -> None:
    model, optimizer = built("AdamW")
    assert staged_bytes(optimizer) == 0
    steps(model, optimizer, 1)
    moments = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.ndim)
    assert moments <= staged_bytes(optimizer) < moments + 2 * 256 * len(optimizer.state), "one bucket, one buffer"
