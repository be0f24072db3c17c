"""The memory of a rank at the highest point of a step, by formulas over measured layers.

The dry run (components/commands/dry_run.py) is the oracle. FSDP's buffers are those of torch's
distributed/fsdp/_fully_shard: forward frees an all-gather's buffer when the next weights have arrived, and backward
frees a reduce-scatter's buffer when the next layer's gradients are there.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, Self

from components.config import JobConfig
from models import meta_model
from models.loss import CHUNK
from models.nf4 import is_packed
from models.objective import objective_of
from models.parameters import Kind
from parallelize.mesh import Degrees, global_batch_size
from parallelize.mtp import mtp_modules
from parallelize.padding import padded_length
from parallelize.plan.layer import Layer, Part, laid_out, measure
from parallelize.schedules import modules_of_stages, splits_backward, stages_of_rank, table_of
from parallelize.sharding import block_of, local_part
from parallelize.tables import Step, order_of_parts
from parallelize.timeline import actions
from parallelize.wrapping import wrapping_of

GIB = 2**30
LINES = {
    "weights": "shards of its stages, in training.dtype (arXiv:1910.02054); averages.ema_decay adds 4 bytes each",
    "gradients": "shards in training.dtype, as the update reads them",
    "optimizer": "moments of the shards, in optimizer.state_dtype",
    "activations": "kept from forward to backward, of the micro-batches that the schedule keeps (arXiv:2205.05198)",
    "other": "gathered weights, gradients before reduction, a chunk of logits, one layer's buffers, inputs",
}
"""Line of a rank's memory -> its formula."""


class Weight(NamedTuple):
    """A parameter, as expert and tensor parallel leave it on a rank."""

    name: str
    shape: tuple[int, ...]
    columns: int
    """Columns of the whole parameter."""
    bytes: int
    """Bytes of an element."""
    packed: bool
    kind: Kind

    @property
    def is_expert(self) -> bool:
        return ".experts." in self.name


class Sums:
    """A dataclass of numbers that add up name by name."""

    def __add__(self, other: Self) -> Self:
        return self.add(other, 1)

    def add(self, other: Self, count: float) -> Self:
        """With another one, `count` times."""
        mine, theirs = vars(self).values(), vars(other).values()
        return type(self)(*[one + count * two for one, two in zip(mine, theirs, strict=True)])


@dataclass
class Group(Sums):
    """Weights that FSDP gathers together, in bytes on one rank."""

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    gathered: float = 0
    """Gathered, in the precision of forward and backward."""
    copied: float = 0
    """Copies in the precision of forward and backward, if FSDP does not gather."""
    unsharded: float = 0
    """Gradients of the gathered weights in float32, as they are accumulated and reduced."""


class Known:
    """Facts about a job's model, computed once and used by all layouts."""

    def __init__(self, job: JobConfig, kernels: str) -> None:
        """kernels: "cuda" or "cpu", as in layer.measure."""
        self.kernels, self._job = kernels, job
        self.model = meta_model(job.model, job.training.dtype)
        self.config = self.model.config
        self.objective = objective_of(*job.objective_and_terms)
        self.experts = getattr(self.config, "n_experts", 0)
        kinds: dict[Any, int] = {}
        numbers = (*range(self.config.n_layers), *self.config.mtp_numbers)
        self.kind_of = [kinds.setdefault(self._kind(number), number) for number in numbers]
        """Layer -> the first layer of its kind."""
        self._sample: Any = copy.deepcopy(self.model)
        for number in {*numbers} - {*self.kind_of}:
            del self._sample.layers[str(number)]
        self.weights, self.group, self.kinds = cache(self._weights), cache(self._group), cache(self._kinds)
        self.layer, self.layer_at_least = cache(self._layer), cache(self._layer_at_least)
        self.times: dict[int, Any] = {}
        """Times of layers, for time.py."""

    def _kind(self, number: int) -> Any:
        config, layer = self.config, self.model.layers[str(number)]
        shapes = tuple((name, weight.shape) for name, weight in layer.named_parameters())
        return shapes, config.has_window(number), config.has_rope(number)

    def _weights(self, tp: int, ep: int) -> dict[str, list[Weight]]:
        """Module (tok_embeddings, layers.N for the first layer of each kind, norm, output) -> its parameters."""
        found: dict[str, list[Weight]] = {}
        if ep > 1:  # which divides the experts, the first dimension
            for module, weights in self.weights(tp, 1).items():
                divided = (each.shape[0] // ep if each.is_expert else each.shape[0] for each in weights)
                pairs = zip(weights, divided, strict=True)
                found[module] = [each._replace(shape=(first, *each.shape[1:])) for each, first in pairs]
            return found
        whole = dict(self._sample.named_parameters())
        with laid_out(self._job, self._sample, Part(tp)) as stage:
            for name, weight in stage.named_parameters():
                module = ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])
                shape, given = tuple(local_part(weight)[1].shape), whole[name]
                sizes = shape, given.shape[-1], given.element_size(), is_packed(given)
                found.setdefault(module, []).append(Weight(name, *sizes, self.model.kind(name)))
        return found

    def _layer(self, kind: int, part: Part, tokens: int, checkpointing: str = "none", splits: bool = False) -> Layer:
        """The layer as layer.measure has it. Between few and most ranks of experts, linear in 1 / ep."""
        most = self.experts or 1
        least = next((ep for ep in range(2, most) if most % ep == 0), most)
        if least < part.ep < most:
            few, many = (self.layer(kind, replace(part, ep=ep), tokens, checkpointing, splits) for ep in (least, most))
            share = (1 / part.ep - 1 / most) / (1 / least - 1 / most)
            return Layer(*(last + share * (first - last) for first, last in zip(few, many, strict=True)))  # type: ignore[arg-type]
        even = -(-tokens // (part.tp * part.ep)) * part.tp * part.ep
        found = measure(self._job, self._sample, kind, part, even, self.kernels, checkpointing, splits)
        return found if even == tokens else found.times(tokens / even)

    def _layer_at_least(self, kind: int, part: Part, tokens: int, *how: Any) -> Layer:
        """The least that a rank keeps: its even share of a layer that is not split."""
        length = self._job.training.seq_len
        found = self.layer(kind, Part(ep=part.ep), length, *how).times(tokens / part.tp / length)
        return found._replace(gradients=found.gradients / part.tp)

    def _kinds(self, mode: str, option: str) -> list[tuple[int, float]]:
        """Layer -> the first of its kind, and the share of forward that backward repeats (about 0.5 per operation)."""
        every = int(option) if mode == "selective" and option != "op" else 1
        share = 0.5 if mode == "selective" and option == "op" else float(mode != "none")
        return [(kind, share * (number % every == 0)) for number, kind in enumerate(self.kind_of)]

    def _group(self, modules: tuple[str, ...], tp: int, ep: int, shards: int, of_experts: int) -> Group:
        """The weights of some modules on the rank that has the largest shards."""
        weights = [each for module in modules for each in self.weights(tp, ep).get(module, [])]
        return sum((_group_of(self._job, of_experts if each.is_expert else shards, each) for each in weights), Group())


def _group_of(job: JobConfig, shards: int, weight: Weight) -> Group:
    """Bytes of one parameter: its largest shard, and its gathered copy."""
    count, router = math.prod(weight.shape), ".router." in weight.name
    dims = weight.shape[:-1] if weight.packed else weight.shape
    even = weight.is_expert and any(size % shards == 0 for size in dims)
    first = weight.shape[0] if weight.shape else 1
    own = count if router else count // shards if even else count // max(1, first) * -(-first // shards)
    compute = 4 if job.training.mixed_precision_param == "float32" else 2
    trained = weight.kind.trained
    return Group(
        weights=own * (weight.bytes + 4 * trained * bool(job.averages.ema_decay)),
        gradients=own * weight.bytes * trained,
        optimizer=own * _state_bytes(job, weight) * trained,
        gathered=0 if router else count * (1 if weight.packed else compute),
        copied=0 if router or weight.packed or weight.bytes == compute else count * compute,
        unsharded=0 if router else 4 * count * trained,
    )


def _state_bytes(job: JobConfig, weight: Weight) -> float:
    """Bytes of optimizer state for an element (components/optim): Muon has one moment for matrices, Adam has two."""
    optimizer = job.optimizer
    block = block_of(weight.columns)
    moment: float = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / block}[optimizer.state_dtype]
    if len(weight.shape) == 1 or (optimizer.state_dtype == "int8" and block == 1):
        moment = 4
    one = optimizer.name == "Muon" and weight.kind.role in ("matrix", "expert", "adapter")
    return moment if one else 2 * moment


class Placement:
    """The stages of a job on each rank of its pipeline, or one stage. Equal stages are one object."""

    def __init__(self, known: Known, job: JobConfig, degrees: Degrees, at_least: bool = False) -> None:
        """at_least: layers are not measured at this layout; ranks keep their even share of a whole layer."""
        self.known, self.job, self.degrees, self.at_least = known, job, degrees, at_least
        self.layer = known.layer_at_least if at_least else known.layer
        parallelism, piped = job.parallelism, degrees.pp > 1
        self.wrapping = wrapping_of(job, degrees, bool(known.experts))
        stays = self.wrapping.reshard == "never"
        self.gathers = 0 if piped or not self.wrapping.wrapped else 1 if stays else 2
        """All-gathers of a layer in a micro-batch; those of a pipeline happen once a step."""
        self.sequences = parallelism.pipeline_parallel_microbatch_size if piped else job.training.local_batch_size
        """Sequences of a micro-batch."""
        self.micro_batches = job.training.local_batch_size // self.sequences
        """Forward passes of a stage in one turn."""
        self.turns = max(1, global_batch_size(job, degrees) // (job.training.local_batch_size * degrees.batch_ranks))
        """Accumulation steps of an optimizer step."""
        length = padded_length(job.training.seq_len, degrees, parallelism) // degrees.cp
        self.tokens = length // parallelism.pipeline_parallel_sequence_splits
        self.part = Part(
            degrees.tp, degrees.cp, degrees.ep, parallelism.context_parallel_method if degrees.cp > 1 else "ring"
        )
        self.dtype = job.training.mixed_precision_param
        self.compute = 4 if self.dtype == "float32" else 2
        """Bytes of an element in forward and backward."""
        self.compiled = job.compile.enable and "model" in job.compile.components
        self.shards = degrees.tp, degrees.ep, degrees.dp_shard * degrees.cp, degrees.efsdp
        """Numbers of ranks over which weights are split."""
        self.computes = (
            *(at_least, self.part, self.sequences, self.tokens, self.dtype, self.compiled, *job.model.converters),
            *(parallelism.enable_async_tensor_parallel, job.activation_checkpoint.offload),
        )
        """All that a layer's time depends on, beside the spans of its groups."""
        split = degrees.tp if parallelism.sequence_parallel else 1
        width = known.config.dim * self.compute * self.sequences
        self.hidden, self.whole_hidden = -(-self.tokens // split) * width, self.tokens * width
        """Bytes of a micro-batch's hidden state, split along the sequence and whole."""
        names = ["tok_embeddings", *(f"layers.{number}" for number in range(known.config.n_layers)), "norm", "output"]
        modules = modules_of_stages(parallelism, known.config.n_layers) if piped else [names]
        modules = [*modules[:-1], [*modules[-1], *mtp_modules(known.config)]]
        stage_of = cache(partial(Stage, self))
        self.of_rank: list[dict[int, Stage]] = []
        """For each rank of the pipeline: number -> stage."""
        for rank in range(degrees.pp):
            mine = stages_of_rank(parallelism, rank, len(modules)) if piped else [0]
            self.of_rank.append({number: stage_of(*self._key(modules[number])) for number in mine})

    def _key(self, modules: list[str]) -> tuple[tuple[tuple[int, float], ...], bool, bool]:
        numbers = [int(name[7:]) for name in modules if name.startswith("layers.")]
        checkpoint = self.job.activation_checkpoint
        layers = self.known.kinds(checkpoint.mode, checkpoint.selective_ac_option)
        kinds = tuple([layers[number] for number in numbers])
        return kinds, "tok_embeddings" in modules, "output" in modules

    @property
    def orders(self) -> list[list[Step]]:
        """Steps of each rank for up to 2 micro-batches a rank, because later ones repeat the earlier ones."""
        if self.degrees.pp == 1:
            return [[(("F", 0, 0),), (("B", 0, 0),)]]
        schedule, count = self.job.parallelism.pipeline_parallel_schedule, self.micro_batches
        if schedule not in ("GPipe", "LoopedBFS"):
            count = min(count, 2 * self.degrees.pp)
        table = table_of(self.job.parallelism, count)
        return table or _orders(schedule, self.degrees.pp, count, len(self.of_rank[0]))


@cache
def _orders(schedule: str, pp: int, count: int, stages_a_rank: int) -> list[list[Step]]:
    return order_of_parts(pp, count, 1) if schedule == "1F1B" else actions(schedule, pp, count, stages_a_rank)


class Stage:
    """A stage on one rank. Bytes are those of a micro-batch."""

    def __init__(
        self, place: Placement, kinds: tuple[tuple[int, float], ...], has_embedding: bool, has_head: bool
    ) -> None:
        """kinds: of each layer, the first layer of its kind, and the share that backward recomputes."""
        self.place, self.kinds, self.has_embedding, self.has_head = place, kinds, has_embedding, has_head
        self.known, self.wrapping = place.known, place.wrapping
        self.splits = splits_backward(place.job.parallelism) and not has_embedding
        """Gradients of inputs and of weights are computed apart. The first stage leaves all of its backward to W."""
        self.ties = self.known.config.tie_embeddings and has_head
        self.ahead = self.known.config.mtp_layers if has_head else 0
        """Layers of multi-token prediction, whose tokens the head sees beside the model's own."""
        of_kind = {kind: self.group(f"layers.{kind}") for kind, _ in set(kinds)}
        self.groups = [of_kind[kind] for kind, _ in kinds]
        self.ends = self.group("norm", "tok_embeddings" if self.ties else "output") if has_head else Group()
        """Norm and head, and a table that is tied to the head."""
        holds_table = has_embedding or self.ahead > 0
        self.embedding = self.group("tok_embeddings") if holds_table and not self.ties else Group()
        self.all = self.ends + self.embedding
        for kind, count in Counter(kind for kind, _ in kinds).items():
            self.all = self.all.add(of_kind[kind], count)

    def group(self, *modules: str) -> Group:
        return self.known.group(modules, *self.place.shards)

    @cached_property
    def layers(self) -> list[Layer]:
        """Each layer with its input among what is kept, in bytes of all sequences."""
        costs = {key: self._layer(*key) for key in {*self.kinds}}
        return [costs[key] for key in self.kinds]

    def _layer(self, kind: int, again: float) -> Layer:
        place, per_op = self.place, again == 0.5
        checkpointing = "op" if per_op else "full" if again and self.splits else "none"
        found = place.layer(kind, place.part, place.tokens, checkpointing, self.splits).times(place.sequences)
        kept, backward = found.kept + found.input * bool(found.keeps_input or per_op), found.backward
        if place.hidden < place.whole_hidden:
            backward += place.whole_hidden  # the gathered gradient
        if again == 1:
            backward += 0 if self.splits else found.kept
            kept = 0 if place.job.activation_checkpoint.offload else found.input
        elif place.compiled and not per_op and self.known.kernels == "cuda":  # the dry run does not compile
            kept -= self._fused_away(kind)
        return found._replace(kept=kept, forward=found.input + found.forward, backward=backward)

    def _fused_away(self, kind: int) -> float:
        """Kept by an eager layer alone: one hidden state, and the activation's result (measured, docs/gpu.md)."""
        place, name = self.place, f"layers.{kind}"
        weights = self.known.weights(place.degrees.tp, place.degrees.ep)[name]
        columns = sum(each.shape[0] for each in weights if each.name == f"{name}.feed_forward.w1.weight")
        return place.hidden + place.sequences * place.tokens * columns * place.compute

    @cached_property
    def highest(self) -> Callable[[str, bool, bool], float]:
        """_highest, computed once for each of its arguments."""
        return cache(self._highest)

    @cached_property
    def kept(self) -> float:
        """Kept from forward to backward, with the loss's gradients and a stage's input and output."""
        passed = (not self.has_embedding) + (not self.has_head) if self.place.degrees.pp > 1 else 0
        passed += self.ahead * self.has_embedding  # one tensor with the first layer's input
        return sum(layer.kept for layer in self._parts) + self.place.hidden * passed

    @cached_property
    def _parts(self) -> list[Layer]:
        """Layers, then norm and head as if they were one."""
        if not self.has_head:
            return self.layers
        place, hidden = self.place, self.place.hidden * (1 + self.ahead)
        whole_hidden = place.whole_hidden * (1 + self.ahead)
        tied = self.known.model.kind("tok_embeddings.weight" if self.ties else "output.weight")
        rows = -(-self.known.config.vocab_size // place.degrees.tp) * self.known.config.dim * tied.trained
        # The last norm's input, and the loss's gradients of hidden states and of the head's rows in float32.
        norm = place.hidden * (1 if self.known.kernels == "cuda" else 8 / place.compute)
        working, kept = rows * (4 + place.compute) + whole_hidden, norm + whole_hidden + 4 * rows
        forward = kept + self._loss()
        head = Layer(kept=kept, forward=forward, backward=working + hidden, between=hidden, weights=working)
        return [*self.layers, head]

    def _loss(self) -> float:
        """Buffers of a chunk of logits (models/loss.py), and the hidden states of the head."""
        place, (least, size) = self.place, CHUNK["cuda"]
        columns = -(-self.known.config.vocab_size // place.degrees.tp)
        tokens = place.sequences * place.tokens * (1 + self.ahead)
        chunk = min(tokens, max(least, size // (4 * columns)))
        # Logits; the last chunk's gradient; float32 probabilities, and float32 logits unless a kernel fuses them.
        fused = place.compute == 4 or (self.known.kernels == "cuda" and place.degrees.tp == 1)
        each = place.compute * (2 if chunk < tokens else 1) + (4 if fused else 8)
        if temperature := self.known.objective.temperature:  # all other tokens' probabilities, and at the temperature
            each += 4 if temperature == 1 else 8
        hidden = place.hidden * (1 + 2 * self.ahead)  # with multi-token prediction first apart, then in one tensor
        return chunk * columns * each + hidden + place.whole_hidden * (1 + self.ahead) * (place.degrees.tp > 1)

    def _highest(self, kind: str, accumulated: bool, reduces: bool) -> float:
        """Highest point of an action (F, B, I or W) above what is held before it.

        accumulated: gradients of an earlier micro-batch exist. reduces: the gradients are reduced, or kept as they are.
        """
        if kind == "F":
            return self._forward()
        if not self.splits or kind == "B":
            return self._backward(accumulated, reduces)
        added = peak = 0.0
        if kind == "I":
            for layer in reversed(self._parts):
                peak, added = max(peak, added + layer.backward), added + layer.between
            return peak
        for group, layer in zip([*self.groups, self.ends], self._parts, strict=False):
            peak = max(peak, added + layer.weights + layer.gradients)
            added += layer.left + self._gradients(group) * (not accumulated)
        return max(peak, added)

    def _forward(self) -> float:
        frees = self.wrapping.wrapped and self.wrapping.reshard != "never"
        copies = self.wrapping.converts and not self.wrapping.wrapped
        table = self.ends.gathered if frees and self.ties else 0  # FSDP's root, which keeps it to the end of backward
        alive = peak = self.place.hidden * ((not self.has_embedding) + self.ahead) + table
        for layer, group in zip(self._parts, [*self.groups, self.ends], strict=False):
            buffers = group.gathered * (2 if frees else 1 if self.wrapping.wrapped else 0)
            if group is self.ends and table:
                buffers = self.groups[-1].gathered
            peak = max(peak, alive + group.copied * copies + buffers + layer.forward)
            alive += layer.kept + group.copied * (copies and self.place.job.activation_checkpoint.mode != "full")
        return peak

    def _backward(self, accumulated: bool, reduces: bool) -> float:
        wrapped, keeps_copies = self.wrapping.wrapped, self.place.job.activation_checkpoint.mode != "full"
        frees = wrapped and self.wrapping.reshard != "never"
        groups = [self.ends if self.ties else self.embedding, *self.groups, Group() if self.ties else self.ends]
        items = [*zip(groups, [Layer(), *self._parts], strict=False)]
        table = self.ends.gathered if frees and self.ties else 0.0
        peak = released = made = before = 0.0
        for number in reversed(range(len(items))):
            group, layer = items[number]
            root = self.ties and not number
            ahead = items[number - 1][0].gathered if number > self.ties and frees else 0
            gathered = group.gathered * (frees and not root)
            held = made - released + table + gathered
            peak = max(peak, held + before + ahead + layer.backward + layer.gradients)
            released += layer.kept
            held, new = made - released, self._gradients(group)
            if wrapped and self.ties and number == len(items) - 1:
                table += self._gradients(self.ends)  # the head's part of the gradient
            if not wrapped:
                peak = max(peak, held + new * (2 - accumulated))
                released += group.copied * (self.wrapping.converts and keeps_copies)
                made += new * (not accumulated)
            elif reduces:  # the root is freed before its own reduction, which has both gradients
                now = 0 if accumulated else new
                own = held + now + group.unsharded + self.place.hidden + ahead
                peak = max(peak, own + table * (not root))
                made += group.gradients - group.unsharded * accumulated
                before = group.unsharded
            else:
                added = group.unsharded * (not accumulated)
                peak = max(peak, table + held + layer.kept + gathered + ahead + new + added)
                made += added
        return peak

    def _gradients(self, group: Group) -> float:
        """A micro-batch's gradients, before they are added up."""
        return group.unsharded / 4 * self.place.compute if self.wrapping.wrapped else group.gradients

    @property
    def between(self) -> float:
        """Kept from the gradients of inputs to those of weights, beside self.kept."""
        if not self.splits:  # W has the whole backward, for which the output's gradient waits
            return self.place.hidden
        return sum(each.between for each in self._parts) + self.place.hidden  # the input's gradient

    @property
    def pending(self) -> float:
        """Gradients of weights that wait for the next backward, which adds them to those in float32."""
        return self._gradients(self.all) if self.splits and self.wrapping.wrapped and self.place.compute < 4 else 0


Held = tuple[tuple[int, int, int, int], ...]
"""For each stage of a rank: micro-batches between F and B or W, those between I and W, and whether there are gradients,
and gradients that wait for the next backward."""


class Moment(NamedTuple):
    """An action of a schedule, and what a rank holds when it begins."""

    kind: str
    stage: int
    accumulated: bool
    """Gradients of an earlier micro-batch exist."""
    held: Held


@cache
def _moments(
    order: tuple[Step, ...], stages: tuple[int, ...], split: frozenset[int], waits: bool, sums: bool, later: bool
) -> list[Moment]:
    """Different moments of an order, without those whose action happens again while at least as much is held.

    split: stages that compute gradients of inputs and of weights apart. waits: their gradients of weights wait for the
    next backward. sums: micro-batches add up to one sum. later: gradients of an earlier turn exist.
    """
    alive, between, graded, waiting = (dict.fromkeys(stages, number) for number in (0, 0, int(later), 0))
    found: dict[tuple[str, int, bool], set[Held]] = {}
    for kind, stage, _ in (action for step in order for action in step):
        apart = stage in split
        if kind in "BI" and waiting[stage]:
            graded[stage], waiting[stage] = 1, 0
        exists = bool((waiting if apart and waits else graded)[stage]) and (sums or (apart and kind in "IW"))
        if kind != "I" or apart:
            held = tuple((alive[each], between[each], graded[each], waiting[each]) for each in stages)
            found.setdefault((kind, stage, exists), set()).add(held)
        alive[stage] += {"F": 1, "I": 0}.get(kind, -1)
        between[stage] += {"I": 1, "W": -1}.get(kind, 0)
        if kind == "W" and apart and waits:
            waiting[stage] = 1
        elif kind in "BW":
            graded[stage] = 1
    return [
        Moment(*key, held)
        for key, every in found.items()
        for held in every
        if not any(held != other and _is_at_most(held, other) for other in every)
    ]


def _is_at_most(one: Held, other: Held) -> bool:
    return all(first <= second for pair in zip(one, other, strict=True) for first, second in zip(*pair, strict=True))


def _walk(place: Placement, rank: int) -> Iterator[tuple[float, float]]:
    """Yields (bytes in all, activations kept among them) at the highest point of actions, weights left out."""
    stages, wrapped, piped = place.of_rank[rank], place.wrapping.wrapped, place.degrees.pp > 1
    reduces_last = place.job.parallelism.fsdp_reduce_gradients == "last"
    base = 0.0
    if wrapped and place.wrapping.reshard == "never":
        base = sum(stage.all.gathered for stage in stages.values())
    whole = wrapped and (piped or reduces_last)
    sizes = [
        (stage.kept, stage.between, stage.all.unsharded if whole else stage.all.gradients, stage.pending)
        for stage in stages.values()
    ]
    split = frozenset(number for number, stage in stages.items() if stage.splits)
    waits, later = any(stage.pending for stage in stages.values()), place.turns > 1 and not piped  # a step's last turn
    given = (*stages,), split, waits, reduces_last or not wrapped, later
    for kind, number, accumulated, held in _moments(tuple(place.orders[rank]), *given):
        alive = total = 0.0
        for counts, (kept, between, gradients, pending) in zip(held, sizes, strict=True):
            alive += counts[0] * kept + counts[1] * between
            total += counts[2] * gradients + counts[3] * pending
        stage = stages[number]
        total += base + alive + stage.highest(kind, accumulated, not piped)
        yield total, alive + stage.kept * (kind == "F")
    if piped and wrapped:
        groups = [group for stage in stages.values() for group in (*stage.groups, stage.ends, stage.embedding)]
        reduced = max(group.unsharded for group in groups)
        yield base + sum(stage.all.unsharded for stage in stages.values()) + reduced, 0.0


def memory(place: Placement, rank: int) -> dict[str, float]:
    """GiB on a rank of the pipeline at the highest point of a step: LINES, and their sum "total".

    "gradients" are those that the update reads; "other" are gathered weights, gradients before their reduction,
    logits and the buffers of one layer.
    """
    job, held = place.job, sum((stage.all for stage in place.of_rank[rank].values()), Group())
    peak, kept = max(_walk(place, rank))
    peak = max(peak, held.gradients)
    objective, dropout = place.known.objective, bool(job.model.lora.dropout)
    columns = 3 + job.training.masks_documents + len(objective.columns) + dropout  # in int64
    columns += job.distill.top * bool(objective.temperature)  # an int32 and a float32 each
    inputs = job.training.local_batch_size * place.tokens * (8 * columns + 4 * place.known.config.rotary_dim)
    optimizer, host = held.optimizer, job.training.enable_cpu_offload
    if job.optimizer.state_offload:  # three buckets of 2^23 elements (components/optim/visits.py)
        optimizer = min(optimizer, 3 * 2**23 * 8)
    lines = {
        "weights": 0.0 if host else held.weights,
        "gradients": 0.0 if host else held.gradients,
        "optimizer": 0.0 if host else optimizer,
        "activations": min(kept, peak - held.gradients),
    }
    lines["other"] = max(0.0, peak - held.gradients - lines["activations"]) + inputs
    lines |= {"total": sum(lines.values())}
    return {name: size / GIB for name, size in lines.items()}


def worst(place: Placement) -> dict[str, float]:
    """Memory of the rank of the pipeline that needs most."""
    return max((memory(place, rank) for rank in range(place.degrees.pp)), key=lambda lines: lines["total"])
