"""Sizes that rules check, and words that they use."""

import difflib
from collections.abc import Iterable
from typing import Any

from components.config import JobConfig


def sizes_of(config: JobConfig) -> Any:
    """The model's configuration: n_heads, n_kv_heads, ffn_dim, vocab_size, n_layers."""
    from models import sizes

    return sizes(config.model)


def near_multiples(size: int, unit: int) -> str:
    below = size // unit * unit
    return " or ".join(str(multiple) for multiple in (below, below + unit) if multiple)


def not_among(given: str, known: Iterable[str]) -> str:
    """The names that would do, and the nearest."""
    near = difflib.get_close_matches(given, known, 1, 0.5)
    return f"not one of {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else "")
