"""How differences go on over the saved steps: grown from rounding, or there at once. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from auditor.comparison.matching import COMPARED
from auditor.comparison.outcome import Amount, Compared, Course, Growing, Standing, StepComparison
from auditor.model.catalog import Role

JUMPS = 30.0
"""Larger than the step before by this factor, beyond what steps between two saves can make of rounding: a jump."""

HALF = 0.5
"""Of a difference, as a length."""


def growing(steps: Sequence[StepComparison]) -> tuple[Growing, ...]:
    """Of every role that differs somewhere, how its difference goes on. A single step has no course."""
    if len(steps) < 2:
        return ()
    return tuple(found for role in COMPARED if (found := _of_role(role, steps)) is not None)


def _of_role(role: Role, steps: Sequence[StepComparison]) -> Growing | None:
    rows = {step.step: [row for row in step.rows if row.pair.role is role and row.amount] for step in steps}
    points = [(step, size_of(own)) for step, own in rows.items()]
    if not any(size for _, size in points):
        return None
    bad = [step for step, own in rows.items() if any(row.standing is Standing.BEYOND for row in own)]
    if not bad:
        _, most = max(rows.items(), key=lambda step: size_of(step[1]))
        within = [row for row in most if row.standing is not Standing.UNDETERMINED]
        # What is undetermined is no rounding: where it is most of what differs, rounding does not explain the course.
        course = Course.AGREES if _apart(within) > HALF * _apart(most) else Course.OPEN
        return Growing(role, course, tuple(points))
    first = [step for step, _ in points].index(bad[0])
    before, now = points[first - 1][1] if first else 0.0, points[first][1]
    if not before or now > JUMPS * before:
        later = [size for _, size in points[first:]]
        steady = len(later) > 2 and max(later) < 2 * min(later) and not before
        return Growing(role, Course.STEADY if steady else Course.JUMP, tuple(points), bad[0])
    return Growing(role, Course.NOISE, tuple(points))


def size_of(rows: Sequence[Compared]) -> float:
    """Relative Frobenius norm of the difference of several tensors taken as one."""
    length = math.hypot(*(amount.length for amount in _finite(rows)))
    return _apart(rows) / length if length else 0.0


def _apart(rows: Sequence[Compared]) -> float:
    return math.hypot(*(amount.relative * amount.length for amount in _finite(rows)))


def _finite(rows: Sequence[Compared]) -> list[Amount]:
    return [row.amount for row in rows if row.amount is not None and math.isfinite(row.amount.relative)]
