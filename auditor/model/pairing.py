"""Two tensors that are compared element by element: a low-precision weight and its master, a moment and the other."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PairKind(enum.Enum):
    """What is measured of a pair."""

    CAST = "cast"
    """Whether ``left`` is ``right`` rounded to the dtype of ``left``, to nearest, ties to even."""
    BOUND = "bound"
    """|left| against limit * sqrt(right + floor)."""
    EQUAL = "equal"
    """Whether both have the same bits."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """A request: compare two tensors of one Catalog, which have one shape."""

    kind: PairKind
    left: int
    """Number of the weight, or of the first moment."""
    right: int
    """Number of the master, or of the second moment."""
    limit: float = 0.0
    floor: float = 0.0


@dataclass(frozen=True, slots=True)
class PairResult:
    """What was measured of one replica of ``left`` against one of ``right``."""

    left_replica: int
    right_replica: int
    num_compared: int = 0
    """Elements of both that were read."""
    num_beyond: int = 0
    """CAST, EQUAL: elements that are not equal. BOUND: elements beyond the limit; a NaN is none (NUM speaks of it)."""
    num_one_ulp: int = 0
    """CAST: of those, elements that are the neighbour of the rounded master."""
    largest: float = 0.0
    """CAST: largest distance in representable values. BOUND: largest |left| / sqrt(right + floor)."""
    first: int = -1
    """C-order index in the tensor of the first element beyond; -1 where there is none."""
    complete: bool = True
    """Whether all elements of ``left``'s replica were compared."""
