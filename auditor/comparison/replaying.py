"""One step of Adam from equal weights: what of two weights' difference does not follow from their own moments."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from auditor.comparison.holding import Holding
from auditor.comparison.lockstep import Stored, boxes
from auditor.comparison.matching import Pair
from auditor.comparison.rounding import Model, Threshold
from auditor.model.catalog import Role
from auditor.model.region import Box

ROUNDED = 2.0
"""Distances between numbers by which both sides' last additions may differ."""
ARITHMETIC = 1e-4
"""Of a step, for its own arithmetic in single precision, as in docs/motion-bound.md."""
FASTEST = 2.0
"""The rate that fits may be so many times the recorded one, where a schedule was stepped in between."""


@dataclass(frozen=True, slots=True)
class Left:
    """What a weight's own moments do not explain."""

    relative: float
    """Of the reference's weight."""
    threshold: Threshold


@dataclass(slots=True)
class _Sums:
    weight: float = 0.0
    apart: float = 0.0
    """Squared difference of the weights."""
    steps: float = 0.0
    """Squared difference of the steps m/√v."""
    both: float = 0.0
    moved: float = 0.0
    """Squared step m/√v of the reference."""


def left_over(reference: Holding, candidate: Holding, model: Model, pair: Pair) -> Left | None:
    """The part of a difference of weights that is no multiple of the difference of m/√v; None where that is not known.

    Both sides went one step from equal weights, so weights that the same optimizer moved differ by −rate·(u′ − u), and
    by the rounding of the last addition. The rate that fits best is taken, up to twice the recorded one. Where betas or
    epsilon are not recorded (optax), where small moments lead is not known.

    Raises:
        SourceLostError: something can't be read.
    """
    sides = [_stored(reference, pair, pair.reference), _stored(candidate, pair, pair.candidate)]
    if sides[0] is None or sides[1] is None or model.num_steps != 1 or None in (model.betas, model.epsilon):
        return None
    sums = _Sums()
    for box in boxes(sides[0][0].tensor.shape):
        with np.errstate(over="ignore", invalid="ignore"):
            _add(sums, sides[0], sides[1], box, model)
    return _left(sums, model, sides[0][0].tensor.dtype.epsilon)


_Sides = tuple[Stored, Stored, Stored]
"""A weight and its moments."""


def _add(sums: _Sums, left: _Sides, right: _Sides, box: Box, model: Model) -> None:
    (own, u), (theirs, other) = (
        (weight.values(box)[1], _update(first.values(box)[1], second.values(box)[1], model))
        for weight, first, second in (left, right)
    )
    apart, steps = _finite(theirs - own), _finite(other - u)
    sums.weight += float(np.sum(_finite(own) ** 2))
    sums.apart += float(np.sum(apart**2))
    sums.steps += float(np.sum(steps**2))
    sums.both += float(np.sum(apart * steps))
    sums.moved += float(np.sum(_finite(u) ** 2))


def _left(sums: _Sums, model: Model, own: float) -> Left | None:
    if not 0 < sums.weight < math.inf or not math.isfinite(sums.apart + sums.steps + abs(sums.both) + sums.moved):
        return None
    most = FASTEST * model.learning_rate if model.learning_rate else math.inf
    rate = min(max(0.0, -sums.both / sums.steps), most) if sums.steps else 0.0
    left = max(0.0, sums.apart + 2 * rate * sums.both + rate**2 * sums.steps)
    size = math.sqrt(sums.weight)
    allowed = ROUNDED * own + ARITHMETIC * rate * math.sqrt(sums.steps) / size
    how = (
        f"what its own moments leave over after one step from equal weights: {ROUNDED:g}·2^{math.log2(own):g}"
        f" + {ARITHMETIC:g} of the step"
    )
    moved = (rate or model.learning_rate or 0.0) * math.sqrt(sums.moved) / size
    return Left(math.sqrt(left) / size, Threshold(allowed, how, "derived", unrelated=moved))


def _stored(holding: Holding, pair: Pair, number: int | None) -> _Sides | None:
    first, second = (holding.numbers.get((role, pair.name)) for role in (Role.FIRST_MOMENT, Role.SECOND_MOMENT))
    if holding.source is None or number is None or first is None or second is None:
        return None
    found = tuple(Stored(holding.source, each) for each in (number, first, second))
    if len({stored.tensor.shape for stored in found}) > 1:
        return None
    return found[0], found[1], found[2]


def _update(m: NDArray[np.float64], v: NDArray[np.float64], model: Model) -> NDArray[np.float64]:
    assert model.betas is not None
    assert model.epsilon is not None
    first, second = (1 - math.pow(beta, max(1.0, model.counted)) for beta in model.betas)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (m / first) / (np.sqrt(v / second) + model.epsilon)


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
