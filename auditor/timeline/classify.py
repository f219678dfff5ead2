"""What kind of difference replicas show, judged over everything that was measured of one fault.

A drift begins as single ulps and grows, so the class belongs to the whole interval, never to its first step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from auditor.model.catalog import Role
from auditor.model.finding import Location, Severity
from auditor.model.observation import DifferenceClass

FEW_ELEMENTS = 4
"""Up to this many elements of a tensor are `few`. pytorch/pytorch#160169 (non-deterministic kernels): 15 of 131072."""
FEW_SHARE = 2**-10
"""… or up to this share of them."""
FEW_ULPS = 2
"""Differences of reordered sums are one or two units in the last place of the stored dtype."""
GROWS = 2.0
"""A difference that at least doubles over an interval grows; rounding noise of equal size does not."""
NOISE_LIMIT = 2.0**-6
"""Noise-seeded growth is a warning while it stays below this relative size: some ulps of bfloat16 (2^-8)."""

SEVERITIES = {
    DifferenceClass.SINGLE_BIT: Severity.ERROR, DifferenceClass.GROSS: Severity.ERROR,
    DifferenceClass.GROWING: Severity.ERROR, DifferenceClass.ISOLATED_ULPS: Severity.WARNING,
    DifferenceClass.NOISE_SEEDED_GROWTH: Severity.WARNING, DifferenceClass.EQUAL_AS_NUMBERS: Severity.NOTE,
    DifferenceClass.BUFFERS: Severity.WARNING,
}  # fmt: skip


def classify(locations: Sequence[Location]) -> DifferenceClass:
    """The class of one fault's differences over all its steps and roles."""
    if all(location.role is Role.BUFFER for location in locations):
        return DifferenceClass.BUFFERS
    measured = [location for location in locations if location.num_elements_differ]
    if not measured or len(measured) < len(locations):
        # Something was beyond the evidence budget: that it is small is not known.
        return DifferenceClass.GROWING if _grows(measured) else DifferenceClass.GROSS
    if all(location.num_equal_as_numbers == location.num_elements_differ for location in measured):
        return DifferenceClass.EQUAL_AS_NUMBERS
    if all(location.num_bits_differ == 1 for location in measured) and len({(x.tensor, x.role) for x in measured}) == 1:
        return DifferenceClass.SINGLE_BIT
    if not all(map(_is_noise, measured)):
        first = min(location.step for location in measured)
        seeded = all(_is_noise(location) for location in measured if location.step == first)
        small = all((location.relative_difference or 0.0) < NOISE_LIMIT for location in measured)
        if _grows(measured):
            return DifferenceClass.NOISE_SEEDED_GROWTH if seeded and small else DifferenceClass.GROWING
        return DifferenceClass.GROSS
    return DifferenceClass.NOISE_SEEDED_GROWTH if _grows(measured) else DifferenceClass.ISOLATED_ULPS


def _is_noise(location: Location) -> bool:
    """Last bits of few elements."""
    count, total = location.num_elements_differ or 0, location.num_elements_compared or 1
    few = count <= FEW_ELEMENTS or count <= FEW_SHARE * total
    finite = math.isfinite(location.max_abs_difference or 0.0)
    return few and finite and location.max_ulps is not None and 0 <= location.max_ulps <= FEW_ULPS


def _grows(measured: Sequence[Location]) -> bool:
    """Whether some replica's difference is at a later step at least twice what it was at its first."""
    first: dict[object, float] = {}
    for location in sorted(measured, key=lambda x: x.step):
        size = location.max_abs_difference or 0.0
        begun = first.setdefault((location.tensor, location.role, location.coordinate), size)
        # A value that is not finite is as far off as can be from the beginning.
        if math.isfinite(begun) and size >= GROWS * begun > 0:
            return True
    return False
