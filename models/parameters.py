"""The kind of each parameter: its role, and whether it is trained. A family's table has kinds by parameter name.

Names are the same at every layout. Modules and tensors are not, because tensor parallel, float8 and FSDP replace them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from torch import nn

Role = Literal["embedding", "matrix", "bias", "norm", "head", "router", "expert", "adapter"]


class Uniform(NamedTuple):
    """The uniform distribution from -bound to bound."""

    bound: float


class Constant(NamedTuple):
    """The same value for all elements."""

    value: float


@dataclass(frozen=True)
class Kind:
    """Properties of a parameter."""

    role: Role
    multiplied: float = 1
    """Share of the elements that multiply a token; each of these costs 2 FLOPs per token in forward."""
    into_residual: bool = False
    """The matrix product is added to the residual stream."""
    trained: bool = True
    """The parameter has a gradient and optimizer state."""
    zero: bool = False
    """The parameter is 0 at step 0."""


EMBEDDING = Kind("embedding", multiplied=0)
TIED_EMBEDDING = Kind("embedding")  # also the head's matrix
MATRIX = Kind("matrix")
OUTPUT_MATRIX = Kind("matrix", into_residual=True)
BIAS = Kind("bias", multiplied=0, zero=True)
NORM = Kind("norm", multiplied=0)
HEAD = Kind("head")
ADAPTERS = {"lora_A": Kind("adapter"), "lora_B": Kind("adapter", zero=True)}
"""Suffix of a parameter's name -> kind, in models with adapters (models/lora.py)."""

KINDS: dict[str, Kind] = {
    "tok_embeddings": EMBEDDING,
    "layers.*.attention.w[qkv]": MATRIX,
    "layers.*.attention.wo": OUTPUT_MATRIX,
    "layers.*.attention.w[qkvo].bias": BIAS,
    "layers.*.attention.sinks": BIAS,
    "layers.*.attention.[qk]_norm": NORM,
    "layers.*.attention_norm": NORM,
    "layers.*.attention_post_norm": NORM,
    "layers.*.feed_forward.w[13]": MATRIX,
    "layers.*.feed_forward.w2": OUTPUT_MATRIX,
    "layers.*.feed_forward.w[123].bias": BIAS,
    "layers.*.ffn_norm": NORM,
    "layers.*.ffn_post_norm": NORM,
    "layers.*.mtp.*norm": NORM,
    "layers.*.mtp.eh_proj": MATRIX,
    "norm": NORM,
    "output": HEAD,
}
"""Pattern -> kind, for a transformer. A pattern covers a parameter or all of a module; the longest pattern applies."""


def adapter_kind(name: str) -> Kind | None:
    """The kind of an adapter's matrix (wq.lora_A, or w1_lora_A of experts); None for any other parameter."""
    return next((kind for ending, kind in ADAPTERS.items() if name.endswith(ending)), None)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's matrix."""
    return adapter_kind(name) is not None


def tied_names(model: Any) -> list[tuple[str, str]]:
    """(another name, first name) of each parameter that has several."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return [(name, first[parameter]) for name, parameter in named if name != first[parameter]]


def find_kind(name: str, kinds: Mapping[str, Kind], frozen: Iterable[str]) -> Kind:
    """A parameter's kind, untrained if a pattern of `frozen` covers its name. Raises ValueError for an unknown name."""
    covering = [pattern for pattern in kinds if covers(pattern, name)]
    if not covering:
        raise ValueError(f"the model's kinds have no pattern for {name}; add one")
    longest = max(covering, key=lambda pattern: pattern.count("."))
    kind = kinds[longest]
    return replace(kind, trained=kind.trained and not any(covers(pattern, name) for pattern in frozen))


def check_frozen(frozen: Iterable[str], names: Iterable[str]) -> None:
    """Raises ValueError if a pattern of `frozen` covers none of the names."""
    names = list(names)
    if unknown := [pattern for pattern in frozen if not any(covers(pattern, name) for name in names)]:
        raise ValueError(f"frozen = {unknown}: no parameter has such a name; use patterns of the model's parameters")


def set_trained(model: nn.Module) -> None:
    """Set requires_grad of each parameter by its kind. Call again after parameters were replaced."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(model.kind(name).trained)  # type: ignore[operator]


def covers(pattern: str, name: str) -> bool:
    """Whether a pattern covers a name. A * stands for one part between dots.

    A pattern with fewer parts than the name is a module, and covers all of its parameters.
    """
    patterns, parts = pattern.split("."), name.split(".")
    return len(patterns) <= len(parts) and all(map(fnmatchcase, parts, patterns))
