"""Types of bounded values, which keys.py describes in words. Every value within its bounds is safe to compute with."""

import argparse
import math
import os
import re
from collections.abc import Sequence
from fractions import Fraction as Fractional
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator

LARGEST = 2**31 - 1
"""Largest size or count: the product of two such numbers fits into 64 bits."""


class PathError(argparse.ArgumentTypeError, ValueError):
    """The reason why a path is refused, for argparse and for pydantic."""


def local_path(path: str) -> str:
    """Returns the path with ~ expanded; the path need not exist.

    Raises PathError if it is a URL, has a user or a variable that is not expanded, or is not accessible.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
        raise PathError("a URL; expected a path of this machine: mount the store, or copy its files")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise PathError("no home folder of this user is known; write ./~ for a folder whose name begins with ~")
    variable = re.search(r"\$(?:\{\w+\}|[A-Za-z_]\w*)[^/]*", expanded)
    try:
        if variable and not os.path.lexists(expanded[: variable.end()]):
            raise PathError("variables are not expanded here; write the value instead of $ and its name")
        os.stat(expanded)
    except (FileNotFoundError, NotADirectoryError):
        return expanded
    except OSError as error:
        raise PathError(error.strerror) from None
    return expanded


def path_argument(word: str) -> Path:
    """The type of a path on a command line, for argparse. Raises PathError."""
    return Path(local_path(word))


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest integers with the ratios of decimal numbers. Raises ValueError if their sum has over 31 bits."""
    exact = [Fractional(repr(float(weight))) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    found = [int(weight * common) for weight in exact]
    found = [weight // math.gcd(*found) for weight in found]
    if sum(found) > LARGEST:
        raise ValueError(f"the ratios of the weights {weights} need integers of more than 31 bits; use fewer digits")
    return tuple(found)


Positive = Annotated[int, Ge(1), Le(LARGEST)]
NonNegative = Annotated[int, Ge(0), Le(LARGEST)]
Sequences = Annotated[int, Ge(1), Le(2**24)]
Seconds = Annotated[int, Ge(1), Le(10**9)]
Seed = Annotated[int, Ge(0), Lt(2**64)]
Position = Annotated[int, Ge(1), Le(2**53)]
Weight = Annotated[float, Ge(0), Le(10**6)]
PositiveFloat = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Beta = Annotated[float, Ge(0), Lt(1)]
Name = Annotated[str, MinLen(1)]
PATH = AfterValidator(local_path)
PathName = Annotated[str, MinLen(1), PATH]
"""A path; relative to the current folder."""
INSIDE = "inside job.dump_folder"
FolderName = Annotated[str, MinLen(1), PATH, INSIDE]
"""A folder inside job.dump_folder; relative to it, so that the dump folder can be moved."""
