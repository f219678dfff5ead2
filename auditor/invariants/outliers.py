"""NUM: no single element of a matrix outweighs all others together a million times over."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.related import Collected, Seen, of_row, seen_whole, why_unread
from auditor.model.catalog import Role, Tensor
from auditor.model.dtype import Kind
from auditor.model.finding import Judgement, LikelyCause, Severity, Violation
from auditor.model.run import StepEvidence

_ROLES = frozenset({Role.PARAMETER, Role.MASTER, Role.EMA, Role.FIRST_MOMENT, Role.SECOND_MOMENT})
FEWEST = 256
"""Elements that aren't zero, from which one alone says something."""
LARGE = 1024.0
"""What no element of a trained matrix or of its moments reaches: those are of the order of one, or smaller."""
SHARE = 1e-12
"""Of the sum of squares that all other elements have at most: each is then on average 10^6 · sqrt(n) times smaller than
the one. A flipped exponent bit multiplies by 2^64 or 2^128 in float32 and bfloat16."""


def no_element_outweighs_all(evidence: StepEvidence) -> Judgement:
    """No element is far beyond all others of its matrix."""
    found, whole = Collected(), seen_whole(evidence.catalog, evidence.observations)
    for number, tensor in enumerate(evidence.catalog.tensors):
        if tensor.role not in _ROLES or tensor.dtype.kind is not Kind.FLOAT or len(tensor.shape) < 2:
            continue
        seen = whole.get(number)
        if seen is None:
            if tensor.num_elements:
                found.unknown(why_unread(evidence), tensor.name)
        elif seen.num_not_finite:
            found.not_applicable["it holds numbers that are not finite"] += 1
        elif seen.num_nonzero < FEWEST:
            found.not_applicable[f"fewer than {FEWEST} of its elements aren't zero"] += 1
        elif _outweighs(seen):
            found.violations.append(_violation(evidence, number, tensor, seen))
        else:
            found.num_holds += 1
    return found.judgement()


def _outweighs(seen: Seen) -> bool:
    if not LARGE < seen.largest < np.inf:
        return False
    with np.errstate(over="ignore"):
        square = np.float64(seen.largest) ** 2
    # The sum is of float64: what is lost of it by rounding is less than the share.
    return bool(np.isfinite(square) and np.isfinite(seen.sum_squares) and square >= seen.sum_squares * (1 - SHARE))


def _violation(evidence: StepEvidence, number: int, tensor: Tensor, seen: Seen) -> Violation:
    value = seen.maximum if seen.maximum >= -seen.minimum else seen.minimum
    detail = f"one element is {value:.3g}, all others together have no more than {SHARE:g} of its square"
    locations = tuple(of_row(evidence, number, row, 1, detail) for row in _rows(evidence, number, value))
    message = f"{tensor.name} ({tensor.role.value}) holds one element that outweighs all others: {value:.3g}"
    return Violation(tensor.name, locations, message)


def _rows(evidence: StepEvidence, number: int, value: float) -> Iterator[int]:
    """The pieces that hold the element."""
    rows = evidence.catalog.rows_by_tensor[number]
    seen = evidence.observations.pieces[rows]
    yield from rows[(seen["maximum"] == value) | (seen["minimum"] == value)].tolist()


INVARIANTS = (
    Invariant(
        "NUM004", "element-outweighs-all", Severity.ERROR,
        statement=f"No matrix of {FEWEST} or more elements that aren't zero, and no moments of one, hold a single "
                  f"element beyond {LARGE:g} beside which all others together have less than {SHARE:g} of the sum of "
                  "squares.",
        rationale="Optimizers bound what one step adds, so training makes no such element: one that is 10^20 times as "
                  "large as all others was damaged. It is finite, so nothing else stumbles over it.",
        source="Measured: Orbax restores a second moment of 1e31 without a word; arXiv 2605.04213",
        example="embed (second_moment) holds one element that outweighs all others: 1.06e+31",
        misses="Flips of lower exponent bits and of the mantissa; flips that make an element smaller; two such "
               "elements; vectors, which may hold a mask.",
        hint="Take this tensor from another copy, or resume from the last good step.",
        needs=Needs.WEIGHTS, judge_step=no_element_outweighs_all, one_fault=True, goes_first=True, ranks_as="OPT",
        likely_causes=(LikelyCause("a bit flipped in memory or storage", "pytorch/torchtitan#4324"),),
    ),
)  # fmt: skip
