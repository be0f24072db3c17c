"""Whether two curves are the same run: their difference at every step, in units of what rounding alone does."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tests.convergence.sides import SERIES, Curve

BAND = 10.0
"""Times the noise floor that a curve may be away. docs/convergence.md has what unchanged code and faults measure."""
_ULP = 2.0**-23
"""Of a float32 near 1: a curve cannot be told from another any finer."""

Floor = Mapping[str, Sequence[float]]
"""For each of SERIES, the relative difference by step that rounding alone makes."""


def differences(curve: Curve, other: Curve) -> dict[str, list[float]]:
    """|curve / other - 1| by step, for each of SERIES; infinite where only one has a number."""
    return {name: _relative(getattr(curve, name), getattr(other, name)) for name in SERIES}


def _relative(values: Sequence[float], references: Sequence[float]) -> list[float]:
    steps = max(len(values), len(references))
    padded = [[*numbers, *[math.nan] * (steps - len(numbers))] for numbers in (values, references)]
    return [_apart(value, reference) for value, reference in zip(*padded, strict=True)]


def _apart(value: float, reference: float) -> float:
    if value == reference or (math.isnan(value) and math.isnan(reference)):
        return 0.0
    apart = abs(value / reference - 1) if reference else math.inf
    return math.inf if math.isnan(apart) else apart


def noise_floor(reference: Curve, disturbed: Sequence[Curve]) -> dict[str, list[float]]:
    """The largest difference of any disturbed run from the undisturbed one, up to each step.

    It never falls: what rounding has once moved stays moved, if only by a later step. At least one unit of float32.
    """
    floor: dict[str, list[float]] = {name: [_ULP] * len(reference.loss) for name in SERIES}
    for curve in disturbed:
        for name, apart in differences(curve, reference).items():
            highest = accumulate(apart, max)
            floor[name] = [max(pair) for pair in zip(floor[name], highest, strict=True)]
    return floor


@dataclass(frozen=True)
class Distance:
    """How far one number of a curve is from the reference's; in units of the noise floor."""

    by_step: tuple[float, ...]

    @property
    def worst(self) -> float:
        return max(self.by_step)

    @property
    def worst_step(self) -> int:
        """Counted from 1."""
        return 1 + self.by_step.index(self.worst)

    @property
    def leaves_band(self) -> int | None:
        """The first step where it is outside; None if it never is."""
        return next((step for step, times in enumerate(self.by_step, 1) if times > BAND), None)


def distances(curve: Curve, reference: Curve, floor: Floor) -> dict[str, Distance]:
    """Loss and gradient norm at every step, in units of the floor."""
    found = {}
    for name, apart in differences(curve, reference).items():
        limits = [*floor[name], *[floor[name][-1]] * (len(apart) - len(floor[name]))]
        found[name] = Distance(tuple(value / limit for value, limit in zip(apart, limits, strict=True)))
    return found


def first_outside(found: Mapping[str, Distance]) -> int | None:
    """The first step at which any number is outside the band; None for the same run."""
    steps = [distance.leaves_band for distance in found.values() if distance.leaves_band]
    return min(steps, default=None)


def same(curve: Curve, reference: Curve, floor: Floor) -> bool:
    return first_outside(distances(curve, reference, floor)) is None


def who_moved(curve: Curve, reference: Curve, witnesses: Sequence[Curve], floor: Floor) -> str:
    """Of two curves that differ, the one that the witnesses contradict: a golden curve, other layouts."""
    for_reference = sum(same(witness, reference, floor) for witness in witnesses)
    for_curve = sum(same(witness, curve, floor) for witness in witnesses)
    if for_reference == for_curve:
        return "both, or either" if witnesses else "either: there is no golden curve to say which"
    return curve.text if for_reference > for_curve else reference.text
