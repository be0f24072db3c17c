"""The layouts of the matrix, generated from its axes: all of them, and some that are drawn."""

import functools
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from components.config import ConfigError, load_config
from models import MODELS
from models.moe import MixtureConfig
from parallelize.mesh import resolve_degrees
from parallelize.rules import check_layout
from parallelize.schedules import SCHEDULES
from tests.small import CHATS, MIXTURE, PAIRS, RECIPE, small_for

Cell = tuple[tuple[str, str], ...]
"""(axis, value) for each axis, in the order of AXES."""

Words = tuple[str, ...]
_ADAPTERS = ("--lora.rank", "4", "--lora.alpha", "8")
_BFLOAT16 = ("--training.mixed_precision_param", "bfloat16")
OF_THE_RUN: dict[str, dict[str, Words]] = {
    "precision": {
        "float32": (),
        "bfloat16": _BFLOAT16,
        "bfloat16 weights": (*_BFLOAT16, "--training.dtype", "bfloat16"),
    },
    "optimizer": {name: ("--optimizer.name", name) for name in ("AdamW", "Muon")},
    "state_dtype": {dtype: ("--optimizer.state_dtype", dtype) for dtype in ("float32", "bfloat16", "int8")},
    "mup": {"off": (), "debug": ("--optimizer.mup_base", "debug")},
    "eps": {"1e-5": (), "1e-8": ("--optimizer.eps", "1e-8")},
    "length": {each: ("--training.seq_len", each) for each in ("32", "33", "7", "3", "2")},
    "validation_length": {"training's": (), **{each: ("--validation.seq_len", each) for each in ("40", "5")}},
    "document_mask": {"false": (), "true": ("--training.document_mask", "true")},
    "balance": {
        "none": (),
        "bias": ("--experts.bias_update_speed", "0.01"),
        "losses": ("--experts.sequence_loss_factor", "0.1", "--experts.z_loss_factor", "0.01"),
    },
    "lora": {
        "off": (),
        "all-linear": _ADAPTERS,
        "bfloat16": (*_ADAPTERS, "--lora.base", "bfloat16"),
        "nf4": (*_ADAPTERS, "--lora.base", "nf4"),
    },
    "targets": {"all": (), **{name: ("--lora.target_modules", f'["{name}"]') for name in ("wo", "w2")}},
    "lora_rank": {"4": (), **{each: ("--lora.rank", each) for each in ("1", "3")}},
    "dropout": {"0": (), "0.25": ("--lora.dropout", "0.25")},
    "data": {"text": (), "chats": CHATS, "mixture": MIXTURE, "pairs": PAIRS},
    "preference": {"dpo": (), **{each: ("--preference.loss", each) for each in ("ipo", "simpo", "orpo")}},
    "terms": {
        "none": (),
        "z": ("--training.z_loss_factor", "0.01"),
        "smoothing": ("--training.z_loss_factor", "0.01", "--training.label_smoothing", "0.2"),
    },
    "mtp": {each: ("--model.sizes.mtp_layers", each) if each != "0" else () for each in ("0", "1", "2")},
    "distill": {
        "off": (),
        "1": ("--distill.alpha", "0.5", "--distill.top", "4"),
        "2": ("--distill.alpha", "0.7", "--distill.top", "3", "--distill.temperature", "2"),
    },
    "spikes": {"trained": (), "skipped": ("--training.skip_spikes_sigma", "6", "--training.skip_spikes_window", "4")},
}
"""Axis -> setting -> words of the command line, for settings that decide the run: one process has them too."""
OF_THE_LAYOUT: dict[str, dict[str, Words]] = {
    "offload": {"false": (), "true": ("--training.enable_cpu_offload", "true")},
    "prefetch": {each: ("--parallelism.fsdp_prefetch_layers", each) for each in ("1", "2")},
    "early_stop": {each: ("--activation_checkpoint.early_stop", each) for each in ("false", "true")},
    "kernel": {each: ("--model.attention_kernel", each) for each in ("auto", "plain", "sdpa")},
    "deterministic": {each: ("--debug.deterministic", each) for each in ("false", "true")},
    "replicas": {"trusted": (), "compared": ("--debug.check_replicas_freq", "1")},
}
"""The same, for settings that one process does without."""
AXES: dict[str, Words] = {
    "dp": ("1", "ddp 2", "ddp 3", "ddp 4", "fsdp 2", "fsdp 3", "fsdp 4", "hsdp 2x2"),
    "reshard": ("default", "always", "never"),
    "tp": ("1", "2", "3", "4"),
    "sequence_parallel": ("true", "false"),
    "loss_parallel": ("true", "false"),
    "cp": ("1", "2", "3", "4"),
    "method": ("ring allgather", "ring alltoall", "allgather_kv", "ulysses"),
    "balancer": ("headtail", "none"),
    "document_mask": ("false", "true"),
    "pp": ("1", "2", "3", "4"),
    "schedule": tuple(SCHEDULES),
    "stages": ("fewest", "3 a rank", "5 a rank", "first empty"),
    "pipeline_first": ("false", "true"),
    "micro_batches": ("4", "8", "3", "6"),
    "splits": ("1", "2", "4"),
    "accumulation": ("1", "3", "2"),
    "reduce": ("last", "each"),
    "validation_batch": ("3", "training's"),
    "tied": ("false", "true"),
    "key_heads": ("4", "3", "2", "1"),
    "vocabulary": ("1032", "1027"),
    "model": ("llama", "qwen3", "qwen3_moe"),
    "ep": ("1", "2", "3", "4"),
    "router": ("softmax", "sigmoid"),
    "checkpointing": ("none", "full", "2", "op/budget"),
    "dynamics": ("false", "true"),
    "compile": ("false", "true"),
    "resume": ("none", "elsewhere"),
    **{axis: tuple(settings) for axis, settings in (OF_THE_RUN | OF_THE_LAYOUT).items()},
}
MAIN_AXES = (
    *("dp", "tp", "sequence_parallel", "loss_parallel", "cp", "method", "balancer", "document_mask", "pp", "schedule"),
    *("pipeline_first", "micro_batches", "splits"),
)
"""Axes that `--all` multiplies: each of these layouts has the next setting of each other axis."""
_MULTIPLIED = {axis: tuple(value for value in AXES[axis] if "3" not in value) for axis in ("dp", "tp", "cp", "pp")}
_MULTIPLIED["micro_batches"] = ("4", "8")
"""Settings of main axes that `--all` multiplies; others are drawn with `--random`."""
DRAWN = {
    *OF_THE_LAYOUT,
    *(
        "precision",
        "state_dtype",
        "eps",
        "validation_length",
        "targets",
        "lora_rank",
        "spikes",
        "stages",
        "resume",
        "data",
        "preference",
        "terms",
        "mtp",
        "distill",
        "mup",
    ),
}
"""Axes whose pairs with each other are in no cover: `--random` draws them."""
_WITH_EXPERTS = [name for name, (_, flavors) in MODELS.items() if isinstance(flavors["debug"], MixtureConfig)]
_UNNAMED_SHARED = [name for name in _WITH_EXPERTS if not any("shared" in each for each in MODELS[name][0].hf_names)]
FAMILIES = [name for name in MODELS if name not in AXES["model"]]
"""Families whose layouts are a product of their own: families()."""
NEEDS = {
    **dict.fromkeys(("sequence_parallel", "loss_parallel", "vocabulary"), "tp"),
    **dict.fromkeys(("method", "balancer"), "cp"),
    **dict.fromkeys(("schedule", "stages", "pipeline_first", "micro_batches", "splits"), "pp"),
    **dict.fromkeys(("targets", "lora_rank", "dropout"), "lora"),
    "early_stop": "checkpointing",
}
"""Axes that make no difference where another has its first setting."""
OF_EXPERTS = {"ep", "router", "balance"}
"""Axes that make no difference to models without experts."""
RARE = {"compile": 8, "precision": 4, "length": 3, "resume": 4, "kernel": 4, "stages": 2, "micro_batches": 2}
"""Axis -> N: one layout in N draws the axis, others keep its first setting. Such settings hide errors or take long."""
MOST_RANKS = 16
LABELS = (1, 7, 0, 30)
"""Labels kept of each sequence: ranks and micro-batches weigh differently."""
STEPS = 2
"""Of the optimizer, the second with moments of the first: more take more time and find nothing else."""
_SAVES = ("--checkpoint.enable", "true", "--checkpoint.last_save_in_hf", "true")
_GLOBAL_BATCH = 48
_MOST_COST = 25
"""Of a layout of a product, for each of its ranks: some settings in turn would take minutes together."""


@dataclass(frozen=True)
class Layout:
    """A cell with every axis that it makes a difference to; equal layouts are one."""

    cell: Cell

    def __getitem__(self, axis: str) -> str:
        return dict(self.cell)[axis]

    def __str__(self) -> str:
        shown = {
            "dp": "{}",
            "tp": "tp {}",
            "cp": "cp {}",
            "ep": "ep {}",
            "pp": "pp {}",
            "sequence_parallel": "sp {}",
            "loss_parallel": "lp {}",
        }
        default = {axis: values[0] for axis, values in AXES.items()}
        parts = [shown.get(axis, f"{axis} {{}}").format(value) for axis, value in self.cell if value != default[axis]]
        return " · ".join(parts) or "one rank"

    @property
    def ranks(self) -> int:
        replicas, shards = self._data_parallel()
        return replicas * shards * int(self["tp"]) * int(self["cp"]) * int(self["pp"])

    def _data_parallel(self) -> tuple[int, int]:
        kind, _, sizes = self["dp"].partition(" ")
        if kind == "hsdp":
            replicas, _, shards = sizes.partition("x")
            return int(replicas), int(shards)
        return {"1": (1, 1), "ddp": (int(sizes or 1), 1), "fsdp": (1, int(sizes or 1))}[kind]

    @property
    def shared_by(self) -> int:
        """Ranks that may share experts."""
        return self._data_parallel()[1] * int(self["tp"]) * int(self["cp"])

    @property
    def labels(self) -> tuple[int, ...]:
        """Labels kept of each sequence; rows of chats have their own."""
        return LABELS if self["data"] == "text" else ()

    @property
    def passes(self) -> int:
        """Forward passes of a rank's stages in a step."""
        micro_batches = int(self["micro_batches"]) * int(self["splits"]) if self["pp"] != "1" else 1
        return int(self["accumulation"]) * micro_batches

    @property
    def cost(self) -> float:
        """Processor time of all its ranks, as a multiple of a pass: within a third of what was measured, mostly.

        A pass takes its time in Python: by the number of operations, whatever their size. Where gradients of weights
        are computed apart, a checkpointed layer is computed again for each of its weights.
        """
        apart = self["pp"] != "1" and SCHEDULES[self["schedule"]].splits_backward and self["checkpointing"] != "none"
        factors = {3: self["tp"] != "1", 1.8: self["cp"] != "1", 2: self["model"] in _WITH_EXPERTS, 3.7: apart}
        own = self.ranks * (8 + self.passes * math.prod(factor for factor, counts in factors.items() if counts))
        return own + 60 * self.resumes  # another layout, two exports

    @property
    def layers(self) -> int:
        """A pipeline's model has a layer more than there are stages, or two less: stages are never alike."""
        return 2 if self["pp"] == "1" else self.stages + 1 if self.stages <= 5 else self.stages - 2

    @property
    def stages(self) -> int:
        a_rank = SCHEDULES[self["schedule"]].stages_a_rank[0]
        return int(self["pp"]) * (int(self["stages"][0]) if self["stages"].endswith("a rank") else a_rank)

    def run(self) -> Words:
        """Settings that decide the run: one process has them too."""
        flavor = f"matrix{self.layers}"
        flavor += f"_{self['key_heads']}_key_heads" * (self["key_heads"] != "4")
        flavor += "_odd_vocabulary" * (self["vocabulary"] == "1027")
        flavor += "_sigmoid" * (self["router"] == "sigmoid") + "_wide" * (self["lora"] == "nf4")
        flavor += "_tied" * (self["tied"] == "true")
        return (
            *("--model.name", self["model"], "--model.flavor", flavor),
            *("--training.global_batch_size", str(_GLOBAL_BATCH), "--training.local_batch_size", str(_GLOBAL_BATCH)),
            *("--validation.enable", "true", "--validation.held_out_fraction", "0.006"),  # some sequences
            *("--metrics.dynamics_freq", str(STEPS)),
            *itertools.chain.from_iterable(settings[self[axis]] for axis, settings in OF_THE_RUN.items()),
        )

    def overrides(self) -> Words:
        """Settings of a job file."""
        return (*self.run(), *self._laid_out(), *(_SAVES if self.resumes else ()))

    def _laid_out(self) -> Words:
        replicas, shards = self._data_parallel()
        method, _, rotate = self["method"].partition(" ")
        local = _GLOBAL_BATCH // (replicas * shards) // int(self["accumulation"])
        given = {
            "data_parallel_replicate_degree": replicas,
            "data_parallel_shard_degree": shards,
            "fsdp_reshard_after_forward": self["reshard"],
            "fsdp_reduce_gradients": self["reduce"],
            "tensor_parallel_degree": self["tp"],
            "sequence_parallel": self["sequence_parallel"],
            "loss_parallel": self["loss_parallel"],
            "context_parallel_degree": self["cp"],
            "expert_parallel_degree": self["ep"],
            "context_parallel_method": method,
            "context_parallel_load_balancer": self["balancer"],
            **({"context_parallel_rotate_method": rotate} if rotate else {}),
            "pipeline_parallel_degree": self["pp"],
            "pipeline_parallel_schedule": self["schedule"],
            "pipeline_parallel_microbatch_size": max(1, local // int(self["micro_batches"])),
            "pipeline_parallel_sequence_splits": self["splits"],
            "pipeline_first": self["pipeline_first"],
            **self._stages(),
        }
        of_its_own = self["validation_batch"] != "training's"
        return (
            *(f"--activation_checkpoint.{word}" for word in self._checkpointing()),
            *("--compile.enable", self["compile"]),
            *("--compile.backend", "aot_eager"),  # inductor takes four times as long
            *itertools.chain.from_iterable((f"--parallelism.{key}", str(value)) for key, value in given.items()),
            *itertools.chain.from_iterable(settings[self[axis]] for axis, settings in OF_THE_LAYOUT.items()),
            *("--training.local_batch_size", str(local)),
            *(("--validation.local_batch_size", self["validation_batch"]) if of_its_own else ()),
            *(("--metrics.dynamics_freq", "0") if self["dynamics"] == "false" else ()),
        )

    @property
    def resumes(self) -> bool:
        return self["resume"] != "none"

    def _stages(self) -> dict[str, int]:
        """Keys of [parallelism]; a stage without layers is a rank without layers where a rank has one stage."""
        if self["stages"] == "first empty":
            first = math.ceil(self.layers / (self.stages - 1))
            ends = {"first": first, "last": 0}
            return {f"pipeline_parallel_{end}_stage_less_layers": count for end, count in ends.items()}
        if self["stages"] == "fewest":
            return {}
        return {"pipeline_parallel_layers_per_stage": math.ceil((self.layers + 2) / self.stages)}

    def elsewhere(self) -> tuple[Words, int]:
        """Words and ranks of another layout of the same run, where the run goes on after its first step."""
        draw, kept = random.Random(str(self)), {axis: self[axis] for axis in ("model", *OF_THE_RUN)}
        while True:
            pipeline = draw.choice([{"pp": "1"}, {axis: self[axis] for axis in ("pp", "schedule", "stages")}])
            other = any_layout(draw, small=True, **kept | pipeline | {"compile": "false"})
            words = (*self.run(), *other._laid_out(), *_SAVES)
            if not refusal(words, other.ranks):
                return words, other.ranks

    def _checkpointing(self) -> tuple[str, ...]:
        """Per operation is refused where layers are compiled, which keep to a memory budget instead."""
        choice = self["checkpointing"]
        if choice == "op/budget" and self["compile"] == "true":
            return ("mode=memory_budget", "memory_budget=0.3")
        return (
            (f"mode={choice}",)
            if choice in ("none", "full")
            else ("mode=selective", f"selective_ac_option={choice.partition('/')[0]}")
        )

    @functools.cache  # noqa: B019 - a layout is a value
    def refusal(self) -> str:
        """Why it is refused before launch; empty if it is not."""
        return refusal(self.overrides(), self.ranks)


def refusal(words: Words, ranks: int) -> str:
    try:
        config = load_config(["--job.config_file", str(RECIPE), *small_for(words), *words])
        check_layout(config, resolve_degrees(config, ranks))
    except ConfigError as error:
        return str(error)
    return ""


def layout(**given: str) -> Layout:
    """A layout where settings that make no difference have their first value."""
    values = {axis: given.get(axis, choices[0]) for axis, choices in AXES.items()}
    idle = [axis for axis, other in NEEDS.items() if values[other] == AXES[other][0]]
    if values["accumulation"] == "1" or values["pp"] != "1":
        idle.append("reduce")  # refused in a pipeline
    if values["cp"] != "1" or values["schedule"] != "1F1B":
        idle.append("splits")  # refused
    a_rank = SCHEDULES[values["schedule"]].stages_a_rank
    if values["stages"].endswith("a rank") and a_rank[1] < 3:
        idle.append("stages")  # refused
    if values["model"] not in _WITH_EXPERTS:
        idle += OF_EXPERTS
    elif (values["lora"] != "off", values["balance"]) == (True, "bias"):
        idle.append("balance")  # refused
    if values["model"] in _UNNAMED_SHARED and values["router"] == "sigmoid":
        idle += ("targets", "resume")  # its shared expert has no name in Hugging Face's files
    if values["model"] in _WITH_EXPERTS and ("targets" in idle or values["targets"] != "wo"):
        idle.append("dropout")  # refused
    if values["data"] != "text":
        idle.append("document_mask")  # chats are masked in any case
        if values["validation_length"] == "5":
            idle.append("validation_length")  # no chat is so short
    if values["lora"] != "off" or (values["router"] == "sigmoid" and "router" not in idle):
        idle.append("mup")  # refused; most debug flavors have no shared expert
    if values["mtp"] != "0":
        idle.append("distill")  # refused
    elif values["distill"] != "off" and values["terms"] == "smoothing":
        idle.append("terms")  # refused
    if values["length"] not in ("32", "33"):
        idle.append("data")
    if "data" in idle or values["data"] != "pairs":
        idle.append("preference")
    else:
        idle += ("terms", "splits", "mtp", "distill")  # refused
    if values["precision"] != "float32":
        idle.append("dynamics")  # numbers of single tensors, most of them errors of rounding
    found = Layout(tuple((axis, AXES[axis][0] if axis in idle else value) for axis, value in values.items()))
    return found if found.shared_by % int(found["ep"]) == 0 else layout(**given | {"ep": "1"})  # refused


DEGREES = ("dp", "tp", "cp", "pp", "schedule")
MESH = ("pp", "pipeline_first", "tp", "cp", "dp")


def main_layouts(product_ranks: int = 8) -> list[Layout]:
    """The product of the main axes without pipelines, of so many ranks at the most; and of all degrees and schedules.

    The other axes have their settings in turn.
    """
    main = _product(MAIN_AXES, pp=("1",))
    return [
        *(each for each in main if each.ranks <= product_ranks),
        *(each for each in _product(DEGREES, pp=("1",)) if each.ranks > product_ranks),
        *_product(DEGREES, pp=_MULTIPLIED["pp"][1:]),
        *(each for each in _of_experts() if each.ranks <= product_ranks),
        *families(),
    ]


def _of_experts() -> list[Layout]:
    """Layouts of models with experts: of all degrees, both routers, and schedules where there is one."""
    model = tuple(name for name in _WITH_EXPERTS if name not in FAMILIES)
    found = [
        *_product([*DEGREES[:3], "ep", "router"], pp=("1",), model=model),
        *_product(["dp", "ep", "schedule"], pp=("2",), tp=("1",), cp=("1",), model=model),
    ]
    return [each for each in found if each["model"] in _WITH_EXPERTS]


def families(names: Sequence[str] = FAMILIES) -> list[Layout]:
    """Layouts of other families: of two ranks or none in each dimension, all context parallel methods and schedules."""
    found = [layout(**dict(each.cell) | {"model": name}) for name in names for each in _like(name in _WITH_EXPERTS)]
    return list(dict.fromkeys(found))


@functools.cache
def _like(with_experts: bool) -> list[Layout]:
    """The layouts of one family with or without experts; no rule refuses most of them."""
    one = (next(name for name in FAMILIES if (name in _WITH_EXPERTS) == with_experts),)
    products = (
        _product(["dp", "tp", "cp", "method"], True, pp=("1",), model=one, **_TWO),
        _product(["dp", "schedule"], True, pp=("2",), model=one, **_TWO | {"tp": ("1",), "cp": ("1",)}),
        _product(["tp", "pp", "cp"], True, dp=("1",), model=one),
    )
    return [each for each in itertools.chain.from_iterable(products) if each.ranks <= 8]


_TWO: dict[str, tuple[str, ...]] = {"dp": ("1", "ddp 2", "fsdp 2")} | dict.fromkeys(("tp", "cp"), ("1", "2"))


def _product(axes: Sequence[str], accepted: bool = False, **narrowed: tuple[str, ...]) -> list[Layout]:
    """Layouts of every combination of these axes, up to MOST_RANKS ranks; the others have their settings in turn.

    None takes much longer than the rest: settings are drawn again where they would; with `accepted`, also where a rule
    refuses the layout.
    """
    axes = list(dict.fromkeys([*axes, *narrowed]))
    values = itertools.product(*(narrowed.get(axis, _MULTIPLIED.get(axis, AXES[axis])) for axis in axes))
    found = dict.fromkeys(layout(**dict(zip(axes, each, strict=True))) for each in values)
    turns = random.Random(0)
    others = [axis for axis in AXES if axis not in axes and axis not in narrowed]
    chosen = [_in_time(each, others, turns, accepted) for each in found if each.ranks <= MOST_RANKS]
    return list(dict.fromkeys(chosen))


def _in_time(each: Layout, others: Sequence[str], turns: random.Random, accepted: bool) -> Layout:
    """The layout with the other axes' settings drawn, of ten draws the first that takes no longer than most layouts.

    accepted: of these the first that no rule refuses, if there is one.
    """
    drawn = [layout(**dict(each.cell) | {axis: _draw(turns, axis) for axis in others}) for _ in range(10)]
    quickest = min(drawn, key=lambda chosen: chosen.cost)
    in_time = [chosen for chosen in drawn if chosen.cost <= _MOST_COST * chosen.ranks] or [quickest]
    return next((chosen for chosen in in_time if accepted and not chosen.refusal()), in_time[0])


def _draw(draw: random.Random, axis: str) -> str:
    return draw.choice(AXES[axis]) if draw.randrange(RARE.get(axis, 1)) == 0 else AXES[axis][0]


def any_layout(draw: random.Random, small: bool = False, **fixed: str) -> Layout:
    """A layout of the product of all axes, but for those fixed; small: most degrees are 1."""
    values = {axis: _draw(draw, axis) for axis in AXES}
    if not small and draw.randrange(3) == 0:
        values["model"] = draw.choice(FAMILIES)
    # Other combinations of these are refused.
    values["key_heads"] = draw.choice(
        ("3", "1") if values["tp"] == "3" else ("4", "2", "1", *["3"] * (values["tp"] == "1"))
    )
    if values["dp"].endswith("3"):
        values["accumulation"] = draw.choice(("1", "2"))
    for axis in DEGREES:
        if small and draw.random() < 0.7:
            values[axis] = AXES[axis][0]
    for axis in NEEDS.keys() & fixed.keys():
        values[NEEDS[axis]] = draw.choice(AXES[NEEDS[axis]][1:])
    if OF_EXPERTS & fixed.keys():
        values["model"] = draw.choice(_WITH_EXPERTS)
    if fixed.get("dropout", "0") != "0":
        values |= {"lora": draw.choice(AXES["lora"][1:]), "model": draw.choice(AXES["model"][:2])}
    if fixed.get("ep", "1") != "1" and {values[axis] for axis in ("dp", "tp", "cp")} == {"1"}:
        values |= draw.choice([{"dp": f"fsdp {fixed['ep']}"}, {"tp": fixed["ep"]}, {"cp": fixed["ep"]}])
    found = layout(**values | fixed)
    return found if found.ranks <= MOST_RANKS else any_layout(draw, small, **fixed)
