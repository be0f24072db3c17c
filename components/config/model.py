"""Tables of a job file that describe the model: [model], [model.lora] (also written [lora]), [model.rope_scaling]."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge

from components.config.bounds import Beta, Name, NonNegative, PathName, Positive, PositiveFloat, Size


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Changed rotary frequencies for sequences longer than those of the original training."""

    rope_type: Literal["", "none", "linear", "llama3", "yarn"] = ""
    """linear, llama3 or yarn (models/rotary.py) replaces the flavor's scaling; none disables scaling. Default: the
    flavor's scaling, which ignores the keys below."""
    factor: Annotated[float, Ge(1)] = 1.0
    """New sequence length divided by the original one."""
    original_max_position_embeddings: NonNegative = 0
    """Sequence length of the original training; 0 takes the flavor's."""
    beta_fast: PositiveFloat = 32.0
    """yarn: frequencies with at least this many rotations in the original length are unchanged."""
    beta_slow: PositiveFloat = 1.0
    """yarn: frequencies with at most this many rotations in the original length are divided by the whole factor."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters (arXiv:2106.09685). Only their matrices A (rank, in) and B (out, rank) are trained."""

    rank: NonNegative = 0
    """Rank of each adapter; 0 for none."""
    alpha: PositiveFloat = 16.0
    """The output of an adapter is multiplied by alpha / rank."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Matrices of the layers that get adapters, by module name (wq) or by name in Hugging Face's files (q_proj)."""
    use_rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (arXiv:2312.03732)."""
    dropout: Beta = 0.0
    """Probability of zeroing an element of an adapter's input in training."""
    base: Literal["", "float32", "bfloat16", "nf4"] = ""
    """Precision of frozen weights. nf4 (arXiv:2305.14314): matrices of the layers in NF4, other weights in bfloat16.
    Empty: training.dtype."""
    initial_load_path: PathName | None = None
    """Folder in PEFT's format from which the adapters start."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model is trained."""

    name: Name = "llama"
    """A model family: a module of models/ (docs/models.md). Left out if flavor is a folder."""
    flavor: Name = "debug"
    """A named size, or a Hugging Face folder, written with a slash ("./SmolLM2-135M"). A folder sets the name and all
    sizes, and, if they are unset, hf_assets_path and (with initial_load_in_hf) checkpoint.initial_load_path. On the
    command line a folder replaces the job file's name and hf_assets_path."""
    sizes: dict[str, Size] = field(default_factory=dict)
    """Changes of the flavor or folder: fields of the family's configuration (models/config.py). vocab_size =
    "tokenizer": the rows that the tokenizer needs, rounded up to vocab_multiple."""
    vocab_multiple: Positive = 64
    """Rows of sizes.vocab_size = "tokenizer" are rounded up to a multiple of this number."""
    attention_kernel: Name = "auto"
    """A name of KERNELS in models/attention.py; auto chooses the fastest."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """Rotary frequencies for longer sequences."""
    lora: Lora = field(default_factory=Lora)
    """Adapters; a job file may write [lora] instead of [model.lora]."""
    hf_assets_path: PathName = "assets/tokenizer"
    """Tokenizer: a tiktoken rank file or tokenizer.json, or the folder that holds one."""
    converters: list[Literal["quantize.linear.float8"]] = field(default_factory=list)
    """Conversions of the model, each named after the table that configures it."""
