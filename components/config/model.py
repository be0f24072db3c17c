"""Tables of a job file about what is trained, as in tables.py: [model], and in it [lora] and [model.rope_scaling]."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge

from components.config.bounds import Beta, Name, NonNegative, PathName, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary frequencies stretched to sequences that are longer than those the model was trained for."""

    rope_type: Literal["", "none", "linear", "llama3", "yarn"] = ""
    """linear, llama3 or yarn (models/rotary.py), in place of the flavor's own; none for no stretching. By default the
    flavor's own, and the keys below are not taken."""
    factor: Annotated[float, Ge(1)] = 1.0
    """Longer by this factor."""
    original_max_position_embeddings: NonNegative = 0
    """Length that the model was trained for; 0 for the flavor's."""
    beta_fast: PositiveFloat = 32.0
    """yarn: frequencies with at least so many turns in the original length stay."""
    beta_slow: PositiveFloat = 1.0
    """yarn: frequencies with at most so many turns are divided by the whole factor."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters (arXiv:2106.09685): A (rank, in) and B (out, rank) are trained, and nothing else is."""

    rank: NonNegative = 0
    """Rank of each adapter; 0 for none."""
    alpha: PositiveFloat = 16.0
    """The adapter's product is multiplied by alpha / rank."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Matrices of the layers that have adapters, by their names here (wq) or in Hugging Face's files (q_proj)."""
    use_rslora: bool = False
    """alpha / sqrt(rank) instead (arXiv:2312.03732)."""
    dropout: Beta = 0.0
    """Probability with which an adapter takes a number of its input for 0 in training."""
    base: Literal["", "float32", "bfloat16", "nf4"] = ""
    """Precision of frozen weights; nf4 (arXiv:2305.14314) of matrices, beside bfloat16. Empty: training.dtype."""
    initial_load_path: PathName | None = None
    """Start from the adapters of this folder of PEFT's."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model is trained."""

    name: Name = "llama"
    """A name in models/__init__.py."""
    flavor: Name = "debug"
    """A named size of that model."""
    attention_kernel: Name = "auto"
    """A name of KERNELS in models/attention.py; auto takes the fastest."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """Rotary frequencies of longer sequences."""
    lora: Lora = field(default_factory=Lora)
    """Adapters; a job file may say [lora] for [model.lora]."""
    hf_assets_path: PathName = "assets/tokenizer"
    """Tokenizer: a tiktoken rank file or tokenizer.json, or the folder that holds one."""
    converters: list[Literal["quantize.linear.float8"]] = field(default_factory=list)
    """Conversions of the model, by the tables that configure them."""
