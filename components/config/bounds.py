"""Types of bounded values, which keys.py describes in words. Every value within its bounds is safe to compute with."""

import os
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator

LARGEST = 2**31 - 1
"""Largest size or count: the product of two such numbers fits into 64 bits."""


def usable_path(path: str) -> str:
    """Returns the path, which need not exist. Raises ValueError if it cannot name a file or is not accessible."""
    try:
        os.stat(os.path.expanduser(path))
    except (FileNotFoundError, NotADirectoryError):
        return path
    except OSError as error:
        raise ValueError(error.strerror) from None
    return path


Positive = Annotated[int, Ge(1), Le(LARGEST)]
NonNegative = Annotated[int, Ge(0), Le(LARGEST)]
Sequences = Annotated[int, Ge(1), Le(2**24)]
Seconds = Annotated[int, Ge(1), Le(10**9)]
Seed = Annotated[int, Ge(0), Lt(2**64)]
PositiveFloat = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Beta = Annotated[float, Ge(0), Lt(1)]
Name = Annotated[str, MinLen(1)]
PathName = Annotated[str, MinLen(1), AfterValidator(usable_path)]
