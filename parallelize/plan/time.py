"""The time of a step: products at the device's rate for their size, the rest at the memory's, messages over links.

Overlap is an assumption per dimension:

- FSDP's messages hide behind the layer that computes meanwhile, except those of the first and the last weights; in a
  pipeline they hide behind nothing
- an all-reduce over replicas hides behind backward of the last micro-batch
- a ring's messages hide behind attention
- messages of tensor parallel (unless asynchronous), of experts, of the other context methods and between stages are
  exposed
- what moves to the host and back hides behind a layer (activations), or behind nothing (states)
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache

from parallelize.float8 import FLOAT8
from parallelize.mesh import Degrees
from parallelize.plan.devices import Device
from parallelize.plan.memory import Group, Placement, Stage, Sums, Weight
from parallelize.schedules import splits_backward
from parallelize.tables import Box, simulate

PASSES, KERNELS = {False: 9.0, True: 2.0}, {False: 120, True: 30}
"""Compiled or not -> how often forward and backward of a layer move the bytes that it keeps, and in how many kernels.

PASSES and LOGITS are by rows of one H100 (docs/gpu.md).
"""
LOGITS, CONVERTED = 32, 3
"""Bytes moved for a logit in forward and backward, and to convert a number to float8."""


BUBBLES = {
    "1F1B": 1.0,
    "Interleaved1F1B": 1 / 2,
    "DualPipeV": 1 / 3,
    "InterleavedZeroBubble": 1 / 6,
    "ZBVZeroBubble": 1 / 6,
}
"""Schedule -> idle time over (pp - 1), in forwards and backwards of a micro-batch (arXiv:2401.10241), for bounds."""


def spans_of(degrees: Degrees, pipeline_first: bool) -> dict[str, int]:
    """Dimension -> how many neighbouring ranks hold a whole group. tp is innermost, then cp, dp_shard."""
    cp, fsdp, world = degrees.tp * degrees.cp, degrees.tp * degrees.cp * degrees.dp_shard, degrees.world_size
    ddp, pp = (world, fsdp * degrees.pp) if pipeline_first else (world // degrees.pp, world)
    return {"tp": degrees.tp, "cp": cp, "ep": degrees.ep, "fsdp": fsdp, "dp_replicate": ddp, "pp": pp}


PARTS = {
    "products": "FLOPs of matrices and attention, at the rate for their sizes",
    "memory": "bytes of norms, activations, conversions and the update, at the memory's bandwidth; kernels' fixed cost",
    "tp": "two all-gathers and two reduce-scatters a layer, twice (arXiv:2205.05198), with nothing beside them",
    "cp": "keys and values, or Ulysses' exchange (arXiv:2310.01889, 2309.14509); a ring hides behind attention",
    "ep": "two exchanges a layer, twice (arXiv:2006.16668)",
    "fsdp": "gathers and reduce-scatters (arXiv:2304.11277), less the layer that computes meanwhile",
    "dp_replicate": "an all-reduce of gradients, less the last backward",
    "pipeline": "idle time of the schedule's table of actions, and messages between stages",
    "offload": "bytes to the host and back",
}
"""Part of a step -> its formula."""


@dataclass
class Times(Sums):
    """Seconds of a micro-batch in a stage, or of a step, by PARTS."""

    products: float = 0
    memory: float = 0
    tp: float = 0
    cp: float = 0
    ep: float = 0
    fsdp: float = 0
    dp_replicate: float = 0
    pipeline: float = 0
    offload: float = 0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def sent(self) -> float:
        """Share of messages that nothing hides, and of waiting for other ranks."""
        return 1 - (self.products + self.memory) / self.total if self.total else 0

    @property
    def bound_by(self) -> str:
        """The largest part."""
        return max(vars(self), key=lambda name: getattr(self, name))


Both = tuple[Times, Times]
"""Forward and backward of a micro-batch in a stage."""


def _product(place: Placement, weight: Weight, device: Device, float8: bool) -> tuple[float, float, float]:
    """Seconds of one product of a weight with a micro-batch, products in backward, and bytes moved to convert it."""
    degrees, shape, filtered = place.degrees, weight.shape, place.job.quantize.linear.float8.filter_fqns
    share = degrees.ep / degrees.tp if weight.is_expert else 1 / degrees.tp if ".router." in weight.name else 1
    columns = shape[-1] * (64 / 34 if weight.packed else 1)
    rows = place.sequences * place.tokens * weight.kind.multiplied * share
    eight = float8 and len(shape) == 2 and not any(part in weight.name for part in filtered)
    dtype = "float8" if eight else place.dtype
    groups = shape[0] if len(shape) == 3 else 1
    seconds = device.product(rows, columns, shape[-2], dtype, 1 if eight else place.compute, groups)
    converted = 2 * CONVERTED * (rows * columns + columns * shape[-2] + rows * shape[-2]) if eight else 0
    return seconds, 1 + weight.kind.trained, converted


def stage_times(stage: Stage, device: Device, reduces: bool) -> Both:
    """Times of a micro-batch, which may reduce the gradients."""
    place, known = stage.place, stage.known
    degrees, spans, gathers = place.degrees, _spans(place), place.gathers
    forward, backward = Times(), Times()
    shards = degrees.dp_shard * degrees.cp
    for (kind, again), count in Counter(stage.kinds).items():
        first, second = _layer(place, kind, again, device)
        group = stage.group(f"layers.{kind}")
        if shards > 1 and gathers:
            sent = device.gather(group.gathered, shards, spans["fsdp"])
            first += Times(fsdp=device.exposed(sent, first.products + first.memory))
            sent = sent * (gathers - 1) + reduces * device.gather(group.unsharded, shards, spans["fsdp"])
            second += Times(fsdp=device.exposed(sent, second.products + second.memory))
        forward, backward = forward.add(first, count), backward.add(second, count)
    if stage.has_head:
        for weight in known.weights(degrees.tp, degrees.ep)["tok_embeddings" if stage.ties else "output"]:
            if len(weight.shape) == 2:
                once, times, _ = _product(place, weight, device, False)
                once *= 1 + stage.ahead
                tokens = place.sequences * place.tokens * (1 + stage.ahead)
                logits = LOGITS * tokens * weight.shape[0] / device.bandwidth
                forward += Times(once, logits / 3)
                backward += Times(times * once, logits * 2 / 3)
    return forward, backward


def _layer(place: Placement, kind: int, again: float, device: Device) -> Both:
    """Forward and backward of a layer, without FSDP's messages. again: share of the products that is recomputed."""
    known = place.known.times.setdefault(id(device), (device, {}))[1]  # a key's device is alive
    key = kind, again, *place.computes, *_spans(place).values()
    if key not in known:
        known[key] = _computed(place, kind, again, device)
    return known[key]


def _computed(place: Placement, kind: int, again: float, device: Device) -> Both:
    job, degrees, known, spans = place.job, place.degrees, place.known, _spans(place)
    float8 = FLOAT8 in job.model.converters and "float8" in device.tflops
    products, later, converted = 0.0, 0.0, 0.0
    for weight in known.weights(degrees.tp, degrees.ep)[f"layers.{kind}"]:
        if weight.kind.multiplied and len(weight.shape) > 1:
            once, times, moved = _product(place, weight, device, float8)
            products, later, converted = products + once, later + times * once, converted + moved
    config, tokens = known.config, place.sequences * place.tokens
    keys = config.keys_seen(kind, job.training.seq_len)[1]
    pairs = 2 * config.n_heads / degrees.tp * (config.head_dim + config.value_dim) * keys * tokens
    attention = pairs / (device.tflops[place.dtype] * 1e12 * device.attention)
    kept = place.layer(kind, place.part, place.tokens, "none", False).kept * place.sequences
    rest = (kept * PASSES[place.compiled] + converted) / device.bandwidth
    rest += KERNELS[place.compiled] * device.kernel_us * 1e-6
    method, width = job.parallelism.context_parallel_method, config.n_kv_heads / degrees.tp * config.head_dim
    tp = cp = ep = offload = 0.0
    if degrees.tp > 1:  # two gathers and two reduce-scatters, and as many in backward
        tp = 4 * device.gather(place.whole_hidden, degrees.tp, spans["tp"]) + device.dtensor_us * 1e-6
        tp = max(0.0, tp - products / 2) if job.parallelism.enable_async_tensor_parallel else tp
    if degrees.cp > 1:
        sent = 2 * tokens * degrees.cp * width * place.compute
        if method == "ulysses":
            sent = 2 * place.whole_hidden / degrees.tp + sent / degrees.cp
            cp = device.exchange(sent, degrees.cp, spans["cp"])
        else:
            cp = device.gather(sent, degrees.cp, spans["cp"])
    if degrees.ep > 1:
        ep = 2 * device.exchange(place.hidden * getattr(config, "top_k", 1), degrees.ep, spans["ep"])
    if job.activation_checkpoint.offload and again:
        offload = device.exposed(place.hidden / (device.host_gb_s * 1e9), products)
    cp_forward, cp_backward = cp, 2 * cp if method != "ulysses" else cp
    if method == "ring":
        cp_forward, cp_backward = device.exposed(cp, attention), device.exposed(2 * cp, 2.5 * attention)
    whole = again == 1
    first = Times(products + attention, rest / 3, tp, cp_forward, ep, offload=offload)
    second = Times(later + 2.5 * attention, rest * 2 / 3, tp, cp_backward, ep, offload=offload)
    repeated = Times(products * again + attention * whole, rest / 3, tp * whole, cp_forward * whole, ep * whole)
    return first, second.add(repeated, bool(again))


def step_times(place: Placement, device: Device) -> Times:
    """A step of the rank that works longest, with the idle time of its pipeline."""
    job, degrees, spans = place.job, place.degrees, _spans(place)
    shards, longest = degrees.dp_shard * degrees.cp, [*place.of_rank[0].values()]
    if degrees.pp == 1:
        (stage,) = longest
        mean = stage_times(stage, device, bool(place.gathers) and job.parallelism.fsdp_reduce_gradients == "each")
        last = stage_times(stage, device, bool(place.gathers))
        total = Times().add(sum(mean, Times()), place.turns - 1) + sum(last, Times())
        hidden_by = mean[1].products
    else:
        boxes, mean_of = timeline(place, device)
        of_stage = {id(both): sum(part.total for part in both) for both in mean_of.values()}
        seconds = {number: of_stage[id(both)] for number, both in mean_of.items()}
        rank = max(range(degrees.pp), key=lambda each: sum(seconds[number] for number in place.of_rank[each]))
        work = sum((part for number in place.of_rank[rank] for part in mean_of[number]), Times())
        if boxes:
            idle = max(box.end for box in boxes) - (1 + max(box.micro_batch for box in boxes)) * work.total
        else:
            idle = _least_idle(place, mean_of, work.total, device)
        count = place.micro_batches * job.parallelism.pipeline_parallel_sequence_splits
        turn = Times().add(work, count) + Times(pipeline=max(0.0, idle))
        total, longest = Times().add(turn, place.turns), [*place.of_rank[rank].values()]
        hidden_by = mean_of[0][1].products
    held = sum((stage.all for stage in longest), Group())
    update, fsdp, replicas = (3 * held.weights + 3 * held.gradients + 2 * held.optimizer) / device.bandwidth, 0.0, 0.0
    if shards > 1:  # the first weights and the last gradients, or all of a pipeline, with nothing beside them
        group = held if degrees.pp > 1 else longest[0].embedding
        ends = group.gathered, group.unsharded
        fsdp = sum(device.gather(size, shards, spans["fsdp"]) for size in ends)
    if degrees.dp_replicate > 1:
        summed = held.gradients * (1 if job.training.dtype == "float32" else 2)  # in float32
        sent = 2 * device.gather(summed, degrees.dp_replicate, spans["dp_replicate"])
        replicas = device.exposed(sent, hidden_by)
    host = job.training.enable_cpu_offload
    moved = held.optimizer * job.optimizer.state_offload + (held.weights + held.gradients + held.optimizer) * host
    return total + Times(memory=update, fsdp=fsdp, dp_replicate=replicas, offload=moved / (device.host_gb_s * 1e9))


def _least_idle(place: Placement, mean: dict[int, Both], work: float, device: Device) -> float:
    """About the least idle time of a turn: the schedule's formula, or all micro-batches pass through the last stage.

    work: seconds of a micro-batch in all stages of the rank that works longest.
    """
    parallelism, pp = place.job.parallelism, place.degrees.pp
    count, last = place.micro_batches * parallelism.pipeline_parallel_sequence_splits, max(mean)
    share = share_of_action("I" if splits_backward(parallelism) else "B", 1)[1]
    of_stage = {id(both): both for both in mean.values()}
    seconds = {key: forward.total + share * backward.total for key, (forward, backward) in of_stage.items()}
    path = sum(seconds[id(both)] for both in mean.values()) + (count - 1) * seconds[id(mean[last])]
    path += 2 * last * device.send(place.hidden, _spans(place)["pp"])
    formula = 0.8 * (pp - 1) * BUBBLES.get(parallelism.pipeline_parallel_schedule, 0) * work
    return max(formula, path - count * work)


def _spans(place: Placement) -> dict[str, int]:
    return spans_of(place.degrees, place.job.parallelism.pipeline_first)


def share_of_action(kind: str, stage: int) -> tuple[float, float]:
    """Shares of a stage's forward and backward in an action of a schedule.

    The first stage has no gradient of inputs, and torch leaves all of its backward to W.
    """
    if stage == 0 and kind in "IW":
        return 0, float(kind == "W")
    return {"F": (1, 0), "B": (0, 1)}.get(kind, (0, 0.5))


def action_times(kind: str, number: int, mean: Both) -> Times:
    """Times of an action of a stage."""
    forward, backward = share_of_action(kind, number)
    return Times().add(mean[0], forward).add(mean[1], backward)


def timeline(place: Placement, device: Device) -> tuple[list[Box], dict[int, Both]]:
    """Actions of the first micro-batches of a turn, by the schedule's own table, and each stage's times."""
    different = {stage for own in place.of_rank for stage in own.values()}
    of_stage = {stage: stage_times(stage, device, bool(place.gathers)) for stage in different}
    mean = {number: of_stage[stage] for own in place.of_rank for number, stage in own.items()}
    if place.at_least:
        return [], mean

    @cache
    def seconds(kind: str, number: int) -> float:
        return action_times(kind, number, mean[number]).total

    return simulate(place.orders, seconds, device.send(place.hidden, _spans(place)["pp"])), mean
