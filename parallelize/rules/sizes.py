"""Sizes that rules check, and words that they use."""

import difflib
from collections.abc import Iterable
from typing import Any

from components.config import JobConfig


def sizes_of(config: JobConfig) -> Any:
    """The model's configuration: n_heads, n_kv_heads, ffn_dim, vocab_size, n_layers."""
    from models import sizes

    return sizes(config.model)


def uneven(size: int, what: str, ranks: int) -> str:
    """Reason why ranks cannot share this number of heads or columns evenly; empty if they can."""
    divisors = ", ".join(str(degree) for degree in range(1, min(size, 64) + 1) if size % degree == 0)
    return (
        f"{size} {what}, which {ranks} ranks cannot share evenly; degrees that can: {divisors}" if size % ranks else ""
    )


def near_multiples(size: int, unit: int) -> str:
    below = size // unit * unit
    return " or ".join(str(multiple) for multiple in (below, below + unit) if multiple)


def not_among(given: str, known: Iterable[str]) -> str:
    """Why an unknown name is refused: the known names (the first 20 if there are many), and the nearest one."""
    names = list(known)
    near = difflib.get_close_matches(given, names, 1, 0.5)
    shown = [*names[:20], f"{len(names) - 20} more"] if len(names) > 21 else names
    return f"not one of {', '.join(shown)}" + (f"; did you mean {near[0]}?" if near else "")
