"""What is measured of elements while they lie in a buffer: the contract of the kernels, and which of them is taken.

The numpy kernels (``digest``, ``statistics``) are the reference; the compiled ones give the same digests, counts and
extrema. Sums of squares, and sketches, may differ in their last digits, because their order of summation does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from auditor.model.dtype import DType
from auditor.model.joint import Joint
from auditor.model.observation import OBSERVED
from auditor.model.pairing import Pairing, PairKind
from auditor.observe.decode import can_round

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Runs:
    """Stretches of elements that lie without gaps both in a buffer and in the C order of their tensor.

    Columns of one length. Complex elements count as two halves everywhere: in ``length`` and in ``start``.
    """

    at: NDArray[np.int64]
    """First byte in the buffer; of any alignment."""
    length: NDArray[np.int64]
    """Elements."""
    start: NDArray[np.int64]
    """C-order index in the whole tensor of the first element."""
    row: NDArray[np.int64]
    """The row of the totals to which the run adds."""


TALLY = np.dtype([("num_compared", "i8"), ("num_beyond", "i8"), ("num_one_ulp", "i8"), ("largest", "f8"),
                  ("first", "i8")])  # fmt: skip
"""Running totals of one pair of replicas; columns as in :class:`~auditor.model.pairing.PairResult`. ``first`` begins at
-1; parts may be met in any order, the smallest index counts."""


SEAM = np.dtype([("num_compared", "i8"), ("num_beyond", "i8"), ("largest", "f8"), ("first", "i8"), ("last", "i8")])
"""Running totals of one joint in one piece; columns as in :class:`~auditor.model.joint.JointResult`."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: where its runs lie; their length and start are those of all sides."""

    buffer: Bytes
    dtype: DType
    at: NDArray[np.int64]
    """First byte in the buffer of every run; of any alignment."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the elements of streams belong in their tensor, which is the same for all of them. Carriers."""

    count: int
    """Elements of a stream."""
    start: int
    """C-order index of the first."""
    length: int
    """Elements of a row; the last may have fewer."""
    step: int
    """From the first element of a row to that of the next, in the tensor's C order."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Elements that lie without gaps in a local file."""

    descriptor: int
    """Of the open file."""
    offset: int
    """Its byte where the first element begins."""
    dtype: DType
    row: int
    """The row of the totals to which they add; -1 where they are only compared."""
    buffer: Bytes
    """Room for what is read at once."""

    @property
    def width(self) -> int:
        """Bytes of one carrier."""
        return np.dtype(self.dtype.carrier).itemsize


class Kernels(Protocol):
    """The measures over elements in buffers."""

    name: str
    sweeps: bool
    """Whether they read files by themselves: :meth:`sweep`."""

    def measure(self, buffer: Bytes, dtype: DType, runs: Runs, totals: NDArray[np.void]) -> None:
        """Add digests, counts, extrema and sums of the ``runs`` to their rows of ``totals``.

        ``totals``: rows of :data:`~auditor.model.observation.OBSERVED`, whose ``minimum`` and ``maximum`` begin at +inf
        and -inf.
        """

    def compare(
        self, pairing: Pairing, left: Side, right: Side, length: NDArray[np.int64], start: NDArray[np.int64],
        tally: NDArray[np.void],
    ) -> None:  # fmt: skip
        """Add what ``pairing`` asks of these runs to ``tally`` (one row of :data:`TALLY`, shape ``(1,)``)."""

    def sweep(
        self, streams: Sequence[Stream], pairs: Sequence[tuple[Pairing, int, int, NDArray[np.void]]], rows: Rows,
        totals: NDArray[np.void], joints: Sequence[tuple[Joint, Sequence[int], NDArray[np.void]]] = (),
    ) -> int:  # fmt: skip
        """Read all streams in lock-step, measure them, compare the pairs, and look at the joints.

        ``pairs``: what is compared, number of the left stream and of the right one, and the tally. ``joints``: likewise
        with the seam, whose streams are as the joint names its tensors. Returns how many
        carriers are done; the others were neither measured nor compared, because a file can't be read there, a
        joint may be beyond there, or these kernels don't read.
        """

    def join(
        self, joint: Joint, sides: Sequence[Side], length: NDArray[np.int64], start: NDArray[np.int64],
        seam: NDArray[np.void],
    ) -> None:  # fmt: skip
        """Add what ``joint`` asks of these runs, its tensors in order, to ``seam`` (one row of :data:`SEAM`)."""

    def sketch(self, buffer: Bytes, dtype: DType, runs: Runs, sketches: NDArray[np.float64]) -> None:
        """Add the values of the ``runs`` to the rows of ``sketches``, shape (any, 64), that their ``row`` names."""


def empty_seams(count: int) -> NDArray[np.void]:
    """Rows of :data:`SEAM` to which nothing was added yet."""
    rows = np.zeros(count, SEAM)
    rows["first"] = rows["last"] = -1
    return rows


def comparable(kind: PairKind, left: DType, right: DType) -> bool:
    """Whether ``compare`` takes tensors of these dtypes; it raises ValueError otherwise."""
    if kind is PairKind.EQUAL:
        return left.carrier == right.carrier and not left.packed
    if kind is PairKind.CAST:
        return can_round(right, left)
    return left.bits >= 8 and right.bits >= 8


def empty_rows(count: int) -> NDArray[np.void]:
    """Rows of :data:`~auditor.model.observation.OBSERVED` to which nothing was added yet."""
    rows = np.zeros(count, OBSERVED)
    rows["minimum"], rows["maximum"] = np.inf, -np.inf
    return rows


def empty_tallies(count: int) -> NDArray[np.void]:
    """Rows of :data:`TALLY` to which nothing was added yet."""
    rows = np.zeros(count, TALLY)
    rows["first"] = -1
    return rows
