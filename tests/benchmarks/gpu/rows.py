"""What the GPU kit checks and measures, as data, in the order in which it does so."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from components.optim import visits
from models.llama import FLAVORS
from tests.benchmarks.peers.clock import Job
from tests.benchmarks.peers.sides import NO_LAYOUT


@dataclass(frozen=True)
class FastPath:
    """A way through the code whose loss and gradients are compared with those of float32 on the CPU."""

    name: str
    words: tuple[str, ...]
    bars: tuple[float, float]
    """Relative errors of the loss, and of the worst parameter's gradient."""
    run: tuple[str, ...] = ()
    """Settings that decide the run: the CPU has them too."""


SIZES = (
    *("--model.flavor", "wide", "--training.seq_len", "512"),
    *("--training.global_batch_size", "4", "--training.local_batch_size", "4"),
)
"""Of all paths: heads of 64, and sequences of several blocks of attention."""
_FLOAT32, _BFLOAT16, _FLOAT8 = (1e-5, 1e-4), (2e-3, 5e-2), (1e-2, 0.3)
DOCUMENTS = ("--training.document_mask", "true")
_EXPERTS = ("--model.name", "qwen3_moe", "--model.flavor", "debug")
_SINKS = ("--model.name", "gpt_oss", "--model.flavor", "debug")
_WINDOWS = ("--model.name", "gemma3", "--model.flavor", "debug")
_LATENT = ("--model.name", "deepseek_v3", "--model.flavor", "debug")
_ADAPTERS = ("--lora.rank", "16", "--lora.base", "bfloat16")
_PACKED = ("--lora.rank", "16", "--lora.base", "nf4")
_DROPOUT = ("--lora.dropout", "0.1")
_COMPILE = ("--compile.enable", "true")
_BUDGET = ("--activation_checkpoint.mode", "memory_budget", "--activation_checkpoint.memory_budget", "0.3")
_SELECTIVE = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option")


def _mixed(*words: str) -> tuple[str, ...]:
    return ("--training.mixed_precision_param", "bfloat16", *words)


def _float8(recipe: str, *words: str) -> tuple[str, ...]:
    convert = ("--model.converters", '["quantize.linear.float8"]', "--quantize.linear.float8.recipe_name", recipe)
    return _mixed(*convert, *words)


PATHS = [
    FastPath("float32", ("--training.mixed_precision_param", "float32"), _FLOAT32),
    FastPath("float32, documents", ("--training.mixed_precision_param", "float32"), _FLOAT32, DOCUMENTS),
    FastPath("bfloat16", _mixed(), _BFLOAT16),
    FastPath("bfloat16, plain attention", _mixed("--model.attention_kernel", "plain"), _BFLOAT16),
    FastPath("bfloat16, documents", _mixed(), _BFLOAT16, DOCUMENTS),
    FastPath("bfloat16, compiled", _mixed(*_COMPILE), _BFLOAT16),
    FastPath("bfloat16, compiled, documents", _mixed(*_COMPILE), _BFLOAT16, DOCUMENTS),
    FastPath("bfloat16, full checkpointing", _mixed("--activation_checkpoint.mode", "full"), _BFLOAT16),
    FastPath("bfloat16, checkpointing of every second layer", _mixed(*_SELECTIVE, "2"), _BFLOAT16),
    FastPath("bfloat16, checkpointing per operation", _mixed(*_SELECTIVE, "op"), _BFLOAT16),
    FastPath("bfloat16, compiled, full", _mixed(*_COMPILE, "--activation_checkpoint.mode", "full"), _BFLOAT16),
    FastPath("bfloat16, compiled, memory budget 0.3", _mixed(*_COMPILE, *_BUDGET), _BFLOAT16),
    FastPath("bfloat16, weights on the host", _mixed("--training.enable_cpu_offload", "true"), _BFLOAT16),
    FastPath(
        "bfloat16, weights on the host, 8-bit moments",
        _mixed("--training.enable_cpu_offload", "true", "--optimizer.state_dtype", "int8"),
        _BFLOAT16,
    ),
    FastPath("bfloat16, deterministic", _mixed("--debug.deterministic", "true"), _BFLOAT16),
    FastPath("float32, experts", ("--training.mixed_precision_param", "float32"), _FLOAT32, _EXPERTS),
    # A token whose scores are close may go to another expert than in float32.
    FastPath("bfloat16, experts", _mixed(), (2e-3, 0.5), _EXPERTS),
    FastPath("bfloat16, experts, compiled", _mixed(*_COMPILE), (2e-3, 0.5), _EXPERTS),
    FastPath("float32, sinks and windows", ("--training.mixed_precision_param", "float32"), _FLOAT32, _SINKS),
    FastPath("bfloat16, sinks and windows", _mixed(), (2e-3, 0.5), _SINKS),
    FastPath("bfloat16, windows", _mixed(), _BFLOAT16, _WINDOWS),
    FastPath("float32, latent attention", ("--training.mixed_precision_param", "float32"), _FLOAT32, _LATENT),
    FastPath("float32, adapters, nf4", ("--training.mixed_precision_param", "float32"), _FLOAT32, _PACKED),
    FastPath("bfloat16, adapters", _mixed(), _BFLOAT16, _ADAPTERS),
    FastPath("bfloat16, adapters, dropout, compiled", _mixed(*_COMPILE), _BFLOAT16, (*_ADAPTERS, *_DROPOUT)),
    FastPath("bfloat16, adapters, nf4, compiled", _mixed(*_COMPILE), _BFLOAT16, _PACKED),
    FastPath("float8, rowwise with bfloat16 weight gradients", _float8("rowwise_with_gw_hp"), _FLOAT8),
    FastPath("float8, rowwise", _float8("rowwise"), _FLOAT8),
    FastPath("float8, tensorwise", _float8("tensorwise"), _FLOAT8),
    FastPath("float8, compiled", _float8("rowwise_with_gw_hp", *_COMPILE), _FLOAT8),
]


def use_small_buckets() -> None:
    """Of states that are offloaded: dozens, in place of one of the whole model."""
    visits.BUCKET = 1 << 14


@dataclass(frozen=True)
class SameBits:
    """Settings beside which a run of three steps keeps every bit of its weights, on the device alone."""

    name: str
    run: tuple[str, ...]
    words: tuple[str, ...]
    mutate: Callable[[], None]


STATES = ("--optimizer.state_offload", "true")
SAME_BITS = [
    SameBits(f"states on the host, {name}", _mixed(*run), STATES, use_small_buckets)
    for name, run in {
        "AdamW": (),
        "8-bit moments": ("--optimizer.state_dtype", "int8"),
        "bfloat16 weights": ("--training.dtype", "bfloat16", "--optimizer.state_dtype", "bfloat16"),
        "Muon": ("--optimizer.name", "Muon"),
    }.items()
]


@dataclass(frozen=True)
class Step:
    """A line of the table of speeds."""

    flavor: str
    seq: int
    batch: int
    compile: bool = False
    checkpointing: str = "none"
    float8: bool = False
    words: tuple[str, ...] = ()
    """More settings of ours, which other sides lack."""

    @property
    def name(self) -> str:
        parts = [self.flavor, f"{self.batch} × {self.seq}", "compiled" if self.compile else "eager"]
        parts += [f"checkpointing {self.checkpointing}"] * (self.checkpointing != "none")
        return ", ".join(parts + ["float8"] * self.float8 + ([WORDS[self.words]] if self.words else []))

    @property
    def sides(self) -> tuple[str, ...]:
        """The bare loop has neither checkpointing nor float8."""
        if self.words:
            return ("here",)
        bare = self.checkpointing == "none" and not self.float8
        return ("here", *(("bare loop",) if bare else ()), "torchtitan")

    def job(self, device: str) -> Job:
        sizes = FLAVORS[self.flavor]
        return NO_LAYOUT | {
            "flavor": self.flavor,
            "dim": sizes.dim,
            "layers": sizes.n_layers,
            "heads": sizes.n_heads,
            "kv_heads": sizes.n_kv_heads,
            "ffn": sizes.ffn_dim,
            "vocab": sizes.vocab_size,
            "seq": self.seq,
            "batch": self.batch,
            "dtype": "bfloat16",
            "compile": self.compile,
            "checkpointing": self.checkpointing,
            "float8": self.float8,
            "words": self.words,
            "device": device,
            "warm": 3,
            "steps": 10,
        }


def _steps(flavor: str, seq: int, batch: int) -> list[Step]:
    sizes: dict[str, Any] = {"flavor": flavor, "seq": seq, "batch": batch}
    return [
        Step(**sizes),
        Step(**sizes, compile=True),
        Step(**sizes, compile=True, float8=True),
        Step(**sizes, compile=True, checkpointing="full"),
        Step(**sizes, compile=True, checkpointing="memory budget 0.5"),
        Step(**sizes, checkpointing="full"),
        Step(**sizes, checkpointing="op"),
    ]


OFFLOAD = ("--training.enable_cpu_offload", "true")
LORA = ("--lora.rank", "16", "--lora.base", "bfloat16")
WORDS = {OFFLOAD: "weights on the host", STATES: "states on the host", LORA: "LoRA"}
"""Names of the settings that only this project's side has."""
STEPS = [
    *(Step("8B", 4096, batch, compile, words=LORA) for batch in (1, 2) for compile in (True, False)),
    *_steps("1B", 4096, 4),
    *_steps("3B", 4096, 2),
    # With AdamW in float32 weights and moments of 8B take 120 GiB: they are on the host.
    *(Step("8B", seq, 1, compile, "full", words=OFFLOAD) for seq in (4096, 8192) for compile in (False, True)),
    *(Step("8B", 4096, 1, compile, "full", words=STATES) for compile in (False, True)),
    *_steps("8B", 4096, 1),
    *_steps("1B", 8192, 2),
    *_steps("3B", 8192, 1),
    *_steps("8B", 8192, 1),
]
TINY = [
    Step("debug", 128, 2),
    Step("debug", 128, 2, checkpointing="full"),
    Step("debug", 128, 2, words=STATES),
]
"""For a machine without a GPU: they show that the kit runs."""
