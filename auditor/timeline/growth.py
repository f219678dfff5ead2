"""By which law a fault grows: what its sizes over the saved steps look like. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from auditor.model.finding import Growth

MIN_POINTS = 3
"""Two points fit a line and an exponential alike."""
STEADY = 2.0
"""Sizes within this factor are constant: noise of equal size does not double (see ``classify.GROWS``)."""
FITS = 0.5
"""Root mean square of ln(size / fit) up to which a law is stated; beyond it (a factor of 1.6) growth is irregular."""


def law_of(points: Sequence[tuple[int, float]]) -> Growth | None:
    """The law of (step, size) points of one interval; None where they are too few, or not all sizes are numbers.

    Both a straight line and an exponential are fitted by least squares, of relative errors; the one with the smaller
    logarithmic residual is stated. A fit to few points on one stretch of steps says how it grew there, not how it will
    go on.

    >>> law_of([(10, 1.0), (20, 2.0), (30, 4.0), (40, 8.0)]).law, law_of([(1, 3.0), (2, 3.1), (3, 2.9)]).law
    ('exponential', 'constant')
    """
    if len(points) < MIN_POINTS or not all(0 < size < math.inf for _, size in points):
        return None
    sizes = [size for _, size in points]
    if max(sizes) < STEADY * min(sizes):
        return Growth("constant", 0.0)
    steps = [float(step) for step, _ in points]
    offset, rate = _line(steps, [math.log(size) for size in sizes])
    base, slope = _line(steps, sizes, [(min(sizes) / size) ** 2 for size in sizes])
    exponential = _spread([math.log(size) - offset - rate * step for step, size in zip(steps, sizes, strict=True)])
    fitted = [base + slope * step for step in steps]
    linear = (
        _spread([math.log(size / fit) for size, fit in zip(sizes, fitted, strict=True)])
        if min(fitted) > 0
        else math.inf
    )
    if min(linear, exponential) > FITS or max(rate, slope) <= 0:
        return Growth("irregular", 0.0)
    return Growth("linear", slope) if linear <= exponential else Growth("exponential", math.log(2) / rate)


def _line(x: Sequence[float], y: Sequence[float], weights: Sequence[float] | None = None) -> tuple[float, float]:
    """Offset and slope of the least squares line."""
    largest = max(weights, default=1.0) if weights else 1.0
    w = [weight / largest for weight in weights] if weights else [1.0] * len(x)
    total = sum(w)
    middle, height = (sum(a * b for a, b in zip(w, values, strict=True)) / total for values in (x, y))
    across = sum(c * (a - middle) ** 2 for a, c in zip(x, w, strict=True))
    slope = sum(c * (a - middle) * (b - height) for a, b, c in zip(x, y, w, strict=True)) / across if across else 0.0
    return height - slope * middle, slope


def _spread(residuals: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in residuals) / len(residuals))
