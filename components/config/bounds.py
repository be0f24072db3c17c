"""Types of values with bounds; keys.py has the words for them."""

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt, MinLen

Positive = Annotated[int, Ge(1)]
NonNegative = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Beta = Annotated[float, Ge(0), Lt(1)]
Name = Annotated[str, MinLen(1)]
