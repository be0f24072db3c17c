"""Enumerates the layouts of a job that rules accept, and ranks those that fit a device by their time.

Candidates are visited in the order of a bound, which no step of theirs can undercut. The search ends when the next
bound is longer than the plans that were found, so that its answer is the same on every machine.
"""

import copy
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from components.config import ConfigError, JobConfig, check_rules
from components.config.contradictions import CONTRADICTIONS
from components.config.rule import value_of
from parallelize.layouts import KEYS, Layout, fixed_batch, layouts
from parallelize.mesh import Degrees, resolve_degrees
from parallelize.plan.devices import Device
from parallelize.plan.memory import Known, Placement, worst
from parallelize.plan.time import BUBBLES, Times, step_times
from parallelize.rules import FIRST, check_layout, check_model
from parallelize.rules.pipeline import layers_misfit, stages_misfit, table_misfit

MODES = (("none", "2"), ("selective", "op"), ("selective", "2"), ("full", "2"))
"""activation_checkpoint.mode and selective_ac_option."""
CHECKPOINTING = ("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option")
LOCAL, _MICRO = "training.local_batch_size", "parallelism.pipeline_parallel_microbatch_size"
_SCHEDULE, _METHOD = "parallelism.pipeline_parallel_schedule", "parallelism.context_parallel_method"
_RESHARD, _REDUCE = "parallelism.fsdp_reshard_after_forward", "parallelism.fsdp_reduce_gradients"
CHOSEN: dict[str, tuple[Any, ...]] = {
    LOCAL: tuple(range(1, 9)),
    # GPipe and LoopedBFS take the same time as these, and more memory; DualPipeV takes about ZBVZeroBubble's.
    _SCHEDULE: tuple(each for each in BUBBLES if each != "DualPipeV"),
    _MICRO: (1, 2, 4),
    _METHOD: ("ring", "ulysses", "allgather_kv"),
    _RESHARD: ("default", "never"),
    _REDUCE: ("last", "each"),
}
"""Keys that the search chooses beside the degrees and checkpointing -> values that are tried."""
OFFLOADS = ("optimizer.state_offload", "training.enable_cpu_offload")
"""Tried only if nothing else fits."""
PLANNED = (*(f"parallelism.{key}" for key in KEYS.values()), *CHOSEN, *CHECKPOINTING, *OFFLOADS)
"""All keys of a plan."""
_PP, _CP = "parallelism.pipeline_parallel_degree", "parallelism.context_parallel_degree"
SHORT = 16384
"""Context parallel of shorter sequences is tried only if nothing else fits."""
_OF_STAGES = (table_misfit, stages_misfit, layers_misfit)
"""Rules for a pipeline whose stages are placed before all rules are asked."""
_CLOSE, _MARGIN = 0.97, 0.95
"""Shares of a candidate's bounds in seconds and GiB that its plan does not undercut (tests/test_plan.py)."""
_NEAR = 1.03
"""Among plans within 3 % of the fastest, the one with the fewest axes is the best."""


def with_settings(job: JobConfig, settings: dict[str, Any]) -> JobConfig:
    """The job with values of keys of its tables, as of "training.local_batch_size"."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    return replace(job, **{table: replace(getattr(job, table), **own) for table, own in tables.items()})


@dataclass(frozen=True)
class Plan:
    """A layout with its memory on the worst rank, and the time of a step."""

    place: Placement
    gib: dict[str, float]
    """GiB as in memory.memory."""
    times: Times
    device: Device

    @property
    def job(self) -> JobConfig:
        return self.place.job

    @property
    def degrees(self) -> Degrees:
        return self.place.degrees

    @property
    def settings(self) -> dict[str, Any]:
        """Key of the job file -> value."""
        return {key: value_of(self.job, key) for key in PLANNED} | Layout(self.degrees).settings

    @property
    def fits(self) -> bool:
        return self.gib["total"] + self.device.reserved_gib <= self.device.memory_gib

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second on a device."""
        training = self.job.training
        return fixed_batch(self.job) * training.seq_len / self.times.total / self.degrees.world_size

    @property
    def axes(self) -> int:
        """Degrees above 1."""
        return sum(size > 1 for size in astuple(self.degrees))

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the peak, with attention over causal pairs."""
        peak = self.device.tflops[self.job.training.mixed_precision_param] * 1e12
        flops = self.place.known.model.flops_per_token(self.job.training.seq_len)[1]
        return self.tokens_per_second * flops / peak

    def as_json(self) -> dict[str, Any]:
        """The plan as --json prints it."""
        return {
            "layout": self.settings,
            "memory_gib": self.gib,
            "step_seconds": self.times.total,
            "tokens_per_second_per_device": self.tokens_per_second,
            "mfu": self.mfu,
            "bound_by": self.times.bound_by,
        }


class Planner:
    """Plans of one job on one kind of device."""

    def __init__(self, job: JobConfig, ranks: int, device: Device, pinned: frozenset[str] = frozenset()) -> None:
        """pinned: keys whose values in the job are kept. Raises ConfigError for a job that has no plan."""
        check_model(job)
        check_rules(FIRST[:1], job, Degrees())
        if job.activation_checkpoint.mode == "memory_budget":
            raise ConfigError("activation_checkpoint.mode = memory_budget: no plan knows what it keeps; use another")
        if (dtype := job.training.mixed_precision_param) not in device.tflops:
            raise ConfigError(f"training.mixed_precision_param = {dtype}: tflops and achieved of the device lack it")
        device = replace(device, ranks_per_node=min(device.ranks_per_node, ranks))
        self.job, self.ranks, self.device, self.pinned = job, ranks, device, pinned
        self.known = Known(job, device.kernels)
        self.timed: list[Plan] = []
        """All plans that were computed."""
        fixed_batch(job)

    def pinning(self, degrees: dict[str, Any]) -> "Planner":
        """A planner of the same model in which these keys of the layout have these values, and no others are tried."""
        other = copy.copy(self)
        other.job, other.pinned, other.timed = with_settings(self.job, degrees), self.pinned | degrees.keys(), []
        return other

    @property
    def tried(self) -> int:
        return len(self.timed)

    def plan(self, job: JobConfig, degrees: Degrees) -> Plan:
        """The plan of one layout, which need not fit. Rules are not checked."""
        place = Placement(self.known, job, degrees)
        self.timed.append(Plan(place, worst(place), step_times(place, self.device), self.device))
        return self.timed[-1]

    def search(self, count: int) -> tuple[list[Plan], list[Plan]]:
        """The best plans that rules accept, of different degrees; if none fits, the one nearest to fitting."""
        nearest: list[Plan] = []
        rings = self.job.training.seq_len >= SHORT or _CP in self.pinned
        free = () if self.device.kernels == "cpu" else (key for key in OFFLOADS if key not in self.pinned)
        offloads = [{key: True} for key in free]  # the memory of a CPU is the host's
        tried: list[tuple[bool, list[dict[str, bool]]]] = [(rings, [{}]), (True, [{}]), (True, offloads)]
        for cp, offload in tried[rings : None if offloads else 2]:
            degrees = [each for each in self.degrees() if cp or each.cp == 1]
            if best := self._visited(self.bounds(degrees, offload, self._fastest_modes()), count):
                near = [plan for plan in best if plan.times.total <= _NEAR * best[0].times.total]
                first = min(near, key=lambda plan: (plan.axes, plan.times.total))
                return [first, *(plan for plan in best if plan is not first)][:count], []
            bounds = sorted(self.bounds(degrees, offload), key=lambda each: worst(each.place)["total"])
            accepted = (plan for each in bounds if (plan := self._accepted(each)))
            nearest += itertools.islice(accepted, 8)
        return [], sorted(nearest, key=lambda plan: plan.gib["total"])[:1]

    def _visited(self, bounds: list[Plan], count: int) -> list[Plan]:
        """The fastest plan of each of the degrees that fit, fastest first; at least the best `count` of all."""
        best: dict[Degrees, Plan] = {}
        room = self.device.memory_gib - self.device.reserved_gib
        order, numbers = list[tuple[float, int, Plan]](), itertools.count()
        while bounds or order:
            for each in bounds:
                heapq.heappush(order, (each.times.total, next(numbers), each))
            total, _, each = heapq.heappop(order)
            bound, known, bounds = _CLOSE * total, best.get(each.degrees), []
            times = sorted(plan.times.total for plan in best.values())
            if len(times) >= count and bound > max(times[count - 1], _NEAR * times[0]):
                break
            if known and bound > known.times.total:
                continue
            bounds = self._slower(each)
            if _MARGIN * worst(each.place)["total"] > room:
                continue
            plan = self._accepted(each)
            if plan and plan.fits and (not known or plan.times.total < known.times.total):
                best[each.degrees] = plan
        return sorted(best.values(), key=lambda plan: plan.times.total)

    def _slower(self, bound: Plan) -> list[Plan]:
        """The same choice with the modes of checkpointing that are slower than the fastest one."""
        if bound.job.activation_checkpoint.mode != "none":
            return []
        settings = (dict(zip(CHECKPOINTING, mode, strict=True)) for mode in self._modes()[1:])
        return [self._bound(with_settings(bound.job, each), bound.degrees) for each in settings]

    def _accepted(self, bound: Plan) -> Plan | None:
        return None if refusal(bound.job, bound.degrees) else self.plan(bound.job, bound.degrees)

    def _values(self, key: str, values: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        return (value_of(self.job, key),) if key in self.pinned else CHOSEN[key] if values is None else values

    def reason(self) -> str:
        """Why rules refuse the plainest layout that has the pinned degrees, or why no layout has them."""
        for each in sorted(self._pinned_layouts(), key=lambda each: -each.degrees.dp_shard):
            share = max(1, fixed_batch(self.job) // each.degrees.batch_ranks)
            job = with_settings(self.job, each.settings | ({} if LOCAL in self.pinned else {LOCAL: share}))
            if said := refusal(job, each.degrees):
                return f"{each}: {said}"
        free = {"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": -1}
        job = with_settings(self.job, {key: value for key, value in free.items() if key not in self.pinned})
        try:
            return refusal(job, resolve_degrees(job, self.ranks)) or "no batch or schedule suits it"
        except ConfigError as error:
            return str(error)

    def _pinned_layouts(self) -> Iterator[Layout]:
        """All layouts of these ranks that have the pinned degrees."""
        pins = {key: value for key in self._pinned_degrees if (value := value_of(self.job, key)) != -1}
        for each in layouts(self.ranks, bool(self.known.experts)):
            if all(each.settings[key] == value for key, value in pins.items()):
                yield each

    @property
    def _pinned_degrees(self) -> list[str]:
        return [key for key in self.pinned if key.endswith("_degree")]

    def degrees(self) -> Iterator[Degrees]:
        """Degrees that are worth a look; tensor and context parallel stay inside a node unless a key is pinned."""
        config, batch, node = self.known.config, fixed_batch(self.job), self.device.ranks_per_node
        pins, stages = self._pinned_degrees, max(1, config.n_layers // 2)
        for each in self._pinned_layouts():
            degrees, span = each.degrees, each.degrees.tp * each.degrees.cp
            kv_heads, shards = config.n_kv_heads, span * degrees.dp_shard
            if all(
                (
                    node % span == 0 or any("tensor" in key or "context" in key for key in pins),
                    degrees.cp == 1 or self.job.training.seq_len // degrees.cp >= 1024 or pins,
                    batch % degrees.batch_ranks == 0 and (degrees.pp <= stages or _PP in pins),
                    config.n_heads % degrees.tp == 0 == max(kv_heads, degrees.tp) % min(kv_heads, degrees.tp),
                    # Replicas of one device, or of 1, 4, 16 or 64 nodes.
                    1 in (degrees.dp_replicate, shards) or shards in (node, 4 * node, 16 * node, 64 * node) or pins,
                    not self.known.experts or config.n_experts % degrees.ep == 0,
                )
            ):
                yield degrees

    def bounds(
        self,
        all_degrees: Iterable[Degrees],
        offloads: Sequence[dict[str, bool]],
        modes: list[tuple[str, str]] | None = None,
    ) -> list[Plan]:
        """All choices at these degrees, with about the least time and memory that they need: nothing is measured.

        modes: of checkpointing, by default all.
        """
        found = []
        for degrees, offload in itertools.product(all_degrees, offloads):
            job = with_settings(self.job, Layout(degrees).settings | offload)
            for settings in self._choices(degrees, modes or self._modes()):
                own = with_settings(job, settings)
                if degrees.pp == 1 or not any(misfit(own, degrees) for misfit in _OF_STAGES):
                    found.append(self._bound(own, degrees))
        return found

    def _bound(self, job: JobConfig, degrees: Degrees) -> Plan:
        place = Placement(self.known, job, degrees, at_least=True)
        return Plan(place, {}, step_times(place, self.device), self.device)

    def _choices(self, degrees: Degrees, modes: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
        """Keys that are chosen -> values, at these degrees."""
        share, piped = fixed_batch(self.job) // degrees.batch_ranks, degrees.pp > 1
        sharded = degrees.dp_shard * degrees.cp > 1 and not piped
        default = {LOCAL: (share,), _SCHEDULE: ("1F1B",), _MICRO: (1,), _METHOD: ("ring",)}
        default |= {_RESHARD: ("default",), _REDUCE: ("last",)}
        matters = {LOCAL: not piped, _SCHEDULE: piped, _MICRO: piped, _METHOD: degrees.cp > 1}
        matters |= {_RESHARD: sharded, _REDUCE: sharded}
        tried = [self._values(key, None if matters[key] else default[key]) for key in CHOSEN]
        for values in itertools.product(*tried, modes):
            settings = dict(zip(CHOSEN, values[:-1], strict=True))
            if (piped and settings[LOCAL] % settings[_MICRO]) or share % settings[LOCAL]:
                continue
            if settings[_REDUCE] == "each" and settings[LOCAL] == share and _REDUCE not in self.pinned:
                continue  # there is one accumulation step
            yield settings | dict(zip(CHECKPOINTING, values[-1], strict=True))

    def _fastest_modes(self) -> list[tuple[str, str]]:
        """No checkpointing, which no other mode undercuts, if it is among the modes; else all of them."""
        modes = self._modes()
        return modes[:1] if modes[0][0] == "none" else modes

    def _modes(self) -> list[tuple[str, str]]:
        mode, option = (value_of(self.job, key) if key in self.pinned else None for key in CHECKPOINTING)
        modes = [(name, option) for name in ("none", "selective", "full")] if option else MODES
        return [each for each in modes if mode in (None, each[0])]


def refusal(job: JobConfig, degrees: Degrees) -> str:
    """Why rules refuse a job at these degrees; empty if they do not."""
    try:
        check_rules(CONTRADICTIONS, job)
        check_layout(job, degrees)
    except ConfigError as error:
        return str(error)
    return ""
