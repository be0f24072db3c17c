"""What each parameter of a model is, and whether it is trained: a family's table, looked up by the parameter's name.

Names are the same at every layout. Modules and tensors are not: tensor parallel, float8 and FSDP replace them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from torch import nn

Role = Literal["embedding", "matrix", "bias", "norm", "head", "router", "expert", "adapter"]


class Uniform(NamedTuple):
    """Numbers from -bound to bound, all as likely."""

    bound: float


@dataclass(frozen=True)
class Kind:
    """What a parameter is."""

    role: Role
    multiplied: float = 1
    """The share of the parameter that a token is multiplied by: 2 FLOPs an element in forward."""
    into_residual: bool = False
    """The product is added to the residual stream."""
    trained: bool = True
    """The parameter has a gradient and a state of the optimizer."""
    zero: bool = False
    """The parameter is 0 at step 0."""


EMBEDDING = Kind("embedding", multiplied=0)
TIED_EMBEDDING = Kind("embedding")  # it is also the head's table
MATRIX = Kind("matrix")
OUTPUT_MATRIX = Kind("matrix", into_residual=True)
BIAS = Kind("bias", multiplied=0, zero=True)
NORM = Kind("norm", multiplied=0)
HEAD = Kind("head")
ADAPTERS = {"lora_A": Kind("adapter"), "lora_B": Kind("adapter", zero=True)}
"""Ending of a parameter's name -> kind, of models with adapters (models/lora.py)."""

KINDS: dict[str, Kind] = {
    "tok_embeddings": EMBEDDING,
    "layers.*.attention.w[qkv]": MATRIX,
    "layers.*.attention.wo": OUTPUT_MATRIX,
    "layers.*.attention.w[qkvo].bias": BIAS,
    "layers.*.attention.sinks": BIAS,
    "layers.*.attention.[qk]_norm": NORM,
    "layers.*.attention_norm": NORM,
    "layers.*.feed_forward.w[13]": MATRIX,
    "layers.*.feed_forward.w2": OUTPUT_MATRIX,
    "layers.*.ffn_norm": NORM,
    "norm": NORM,
    "output": HEAD,
}
"""Pattern -> kind, of a transformer. A pattern names a parameter or a module around it; the longest pattern counts."""


def adapter_kind(name: str) -> Kind | None:
    """The kind of a matrix of an adapter, or None for any other parameter: wq.lora_A, and w1_lora_A of experts."""
    return next((kind for ending, kind in ADAPTERS.items() if name.endswith(ending)), None)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is a matrix of an adapter."""
    return adapter_kind(name) is not None


def find_kind(name: str, kinds: Mapping[str, Kind], frozen: Iterable[str]) -> Kind:
    """A parameter's kind, not trained if a pattern in frozen covers its name. Raises ValueError for an unknown name."""
    covering = [pattern for pattern in kinds if covers(pattern, name)]
    if not covering:
        raise ValueError(f"the model's kinds have no pattern for {name}")
    longest = max(covering, key=lambda pattern: pattern.count("."))
    kind = kinds[longest]
    return replace(kind, trained=kind.trained and not any(covers(pattern, name) for pattern in frozen))


def check_frozen(frozen: Iterable[str], names: Iterable[str]) -> None:
    """Raises ValueError for patterns that cover none of the names."""
    names = list(names)
    if unknown := [pattern for pattern in frozen if not any(covers(pattern, name) for name in names)]:
        raise ValueError(f"frozen names parameters that are not there: {', '.join(unknown)}")


def set_trained(model: nn.Module) -> None:
    """Tell autograd which parameters are trained; called again after modules were given new parameters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(model.kind(name).trained)  # type: ignore[operator]


def covers(pattern: str, name: str) -> bool:
    """Part by part, so that * stands for one; a pattern with fewer parts names a module, and covers what is in it."""
    patterns, parts = pattern.split("."), name.split(".")
    return len(patterns) <= len(parts) and all(map(fnmatchcase, parts, patterns))
