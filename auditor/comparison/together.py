"""What single tensors can't show and all together do: one factor in every gradient, a precision in between. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from auditor.comparison.lockstep import Distance
from auditor.comparison.matching import Pair
from auditor.comparison.outcome import OPEN, Compared, Standing
from auditor.comparison.rounding import Threshold
from auditor.model.catalog import Role
from auditor.model.dtype import DType
from auditor.model.finding import LikelyCause

FEWEST = 8
"""Tensors from which a common factor is told."""
DEVIATIONS = 8.0
"""How many times the spread over tensors a common factor must be away from one."""
LEFT = 0.1
"""Of a usual tensor, what its factor may leave over where it is a multiple."""
SHARE = 0.25
"""And how much of the threshold of a usual tensor."""
TO_DEVIATION = 1.4826
"""From the median of distances from the median to a standard deviation."""
FOLLOWS = "as far as a bias of its size went, of which nothing is determined"
LED = 4.0
"""Distances between numbers a step, root mean square, by which one optimizer's arithmetic may lead weights apart."""
NOT_LED = "its moments are equal in every bit, so no step led it elsewhere"
_SOURCE = "NVIDIA/Megatron-LM#673; NVIDIA/Megatron-LM#906"


@dataclass(frozen=True, slots=True)
class CommonFactor:
    """All gradients of the candidate are this multiple of the reference's."""

    factor: float
    spread: float
    num_tensors: int


def common_factor(measured: Sequence[tuple[Compared, Distance]]) -> CommonFactor | None:
    """The factor that the first moments of most tensors share, where it is not one.

    Rounding is as often up as down, so the factor that fits a tensor best is one within a small part of its round-off,
    and other tensors' factors are others. A factor that all have, far from one by their own spread, is no rounding.
    """
    own = [
        (row, apart) for row, apart in measured
        if row.pair.role is Role.FIRST_MOMENT and row.threshold is not None and math.isfinite(apart.factor)
    ]  # fmt: skip
    if len(own) < FEWEST:
        return None
    factors = [apart.factor for _, apart in own]
    middle = median(factors)
    spread = TO_DEVIATION * median(abs(factor - middle) for factor in factors)
    usual = median(row.threshold.relative for row, _ in own if row.threshold is not None)
    if median(apart.beside_factor for _, apart in own) < LEFT:
        # What has nothing else in common with the reference is no multiple of it; where all are one, however large
        # rounding may be of each, that all of it is a factor is none.
        usual = min(usual, 1.0)
    away = abs(middle - 1)
    count = sum(_shares(factor, middle) for factor in factors)
    return CommonFactor(middle, spread, count) if away > max(DEVIATIONS * spread, SHARE * usual) else None


def with_factor(
    rows: Sequence[Compared], found: CommonFactor | None, measures: Mapping[int, Distance]
) -> list[Compared]:  # fmt: skip
    """The rows, with first moments beyond rounding that share a factor; by row, ``measures`` of those that differ.

    What is as near to the reference as rounding lets it be stands as it is: where the gradients of some layers are
    twice what they were, those of the others aren't.
    """
    if found is None:
        return list(rows)
    detail = f"like the others, {found.factor:.6g} times the reference (spread over tensors {found.spread:.1g})"
    return [
        replace(row, standing=Standing.BEYOND, detail=_joined(row, detail))
        if at in measures and row.pair.role is Role.FIRST_MOMENT and row.threshold is not None
        and row.standing in OPEN and _shares(measures[at].factor, found.factor)
        else row
        for at, row in enumerate(rows)
    ]  # fmt: skip


def _joined(row: Compared, detail: str) -> str:
    # That rounding may be as large is beside the point where all share one factor.
    return detail if row.standing is Standing.UNDETERMINED or not row.detail else f"{row.detail}; {detail}"


def _shares(own: float, common: float) -> bool:
    """Whether a tensor's factor is rather the common one than one."""
    return abs(own - common) < abs(own - 1)


def following(rows: Sequence[Compared]) -> list[Compared]:
    """The rows, with averages of activations undetermined that moved no more than an undetermined bias before them.

    What a bias adds, normalisation takes out again: its gradient is rounding, and its own wandering goes into the mean.
    """
    limits: dict[int, float] = {}
    for row in rows:
        if row.amount and row.pair.role is Role.PARAMETER and row.standing is Standing.UNDETERMINED:
            count = row.amount.num_elements
            limits[count] = max(limits.get(count, 0.0), row.amount.relative * row.amount.length)
    return [
        replace(row, standing=Standing.UNDETERMINED, detail=FOLLOWS)
        if row.pair.role is Role.BUFFER and row.standing in (Standing.BEYOND, Standing.SUSPICIOUS) and row.amount
        and 0 < row.amount.relative * row.amount.length <= limits.get(row.amount.num_elements, 0.0)
        else row
        for row in rows
    ]  # fmt: skip


def not_led(rows: Sequence[Compared], narrower: Callable[[Pair], DType], num_steps: float) -> list[Compared]:
    """The rows, with weights beyond rounding whose own moments are equal while they are not: what moved them is equal.

    Two implementations of one optimizer round a step otherwise, by no more than a few distances between numbers.
    """
    same: dict[str, set[Role]] = {}
    for row in rows:
        if row.standing is Standing.EQUAL and row.pair.role in (Role.FIRST_MOMENT, Role.SECOND_MOMENT):
            same.setdefault(row.pair.name, set()).add(row.pair.role)
    return [
        _beside_moments(row, narrower(row.pair).epsilon, num_steps)
        if row.amount and row.standing in OPEN and row.pair.role in (Role.PARAMETER, Role.MASTER)
        and len(same.get(row.pair.name, ())) > 1 else row for row in rows
    ]  # fmt: skip


def _beside_moments(row: Compared, epsilon: float, num_steps: float) -> Compared:
    assert row.amount is not None
    times = LED * max(1.0, num_steps)
    how = f"of a weight with equal moments, {times:g}·{epsilon:.3g}"
    threshold = Threshold(times * epsilon, how, "derived", suspicious=1.0, unrelated=row.amount.spread)
    if not epsilon or threshold.vague or row.amount.relative <= threshold.relative:
        return row
    return replace(row, standing=Standing.BEYOND, threshold=threshold, detail=NOT_LED)


def factor_cause(found: CommonFactor, degrees: str) -> LikelyCause:
    """What a common factor comes from."""
    named = f" ({degrees})" if degrees else ""
    return LikelyCause(
        f"gradients of {found.num_tensors} tensors are {found.factor:.6g} times the reference's{named}: the loss (mean "
        "over tokens, padding, ranks), its scale, or clipping", _SOURCE,
    )  # fmt: skip
