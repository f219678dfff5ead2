"""How far two tensors are apart, read from both sides in lock-step however each is stored. Nothing is written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.comparison.holding import Source
from auditor.model.catalog import Tensor, c_strides
from auditor.model.dtype import DType, Kind
from auditor.model.region import Box
from auditor.observe.decode import can_round, rounded, to_float64
from auditor.storage.strided import slabs
from auditor.view.assemble import SourceLostError, read_box

SLAB_ELEMENTS = 1 << 20
"""Of each side at once: 8 MB as doubles, some 80 MB with all that is worked out of them."""
WIDEST = 8
"""Bits of an exponent whose squares, and their sums, are doubles."""
MAX_DIMS = 64
"""That numpy's arrays have."""
FEWEST = 8
"""Elements by whose spread it is told what unrelated ones would show."""
MAX_BINS = 1 << 14
"""A dim that is longer is looked at in so many stretches."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One replica of one tensor of one side."""

    source: Source
    number: int
    replica: int = 0

    @property
    def tensor(self) -> Tensor:
        """What is read."""
        return self.source.catalog.tensors[self.number]

    def values(self, box: Box) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """Value bits and numbers of one box.

        Raises:
            SourceLostError: something of it can't be read, or has more dims than numpy can work with.
        """
        if self.tensor.dtype.kind is Kind.COMPLEX and len(box.shape) == MAX_DIMS:
            raise SourceLostError(f"{self.tensor.name}: complex numbers along {MAX_DIMS} dims can't be taken apart")
        read = read_box(self.source.store, self.source.catalog, self.number, self.replica, box)
        dtype = self.tensor.dtype
        bits = np.ascontiguousarray(read).view(dtype.carrier)
        # Complex elements are two numbers, along a last dim of their own.
        bits = bits.reshape((*box.shape, 2) if dtype.kind is Kind.COMPLEX else box.shape)
        return bits, to_float64(bits, dtype)


@dataclass(slots=True)
class Profile:
    """Sums over all other dims, one for each stretch of a dim."""

    apart: NDArray[np.float64]
    """Of the squared difference."""
    product: NDArray[np.float64]
    """Of reference times candidate."""
    square: NDArray[np.float64]
    """Of the squared reference."""


@dataclass(slots=True)
class Distance:
    """How two tensors of one shape differ. Squares are of elements that are finite on both sides."""

    num_elements: int = 0
    num_differ: int = 0
    """Elements with other bits; where dtypes differ, with other numbers."""
    num_not_rounded: int = 0
    """Of dtypes that differ: elements that are not the wider side's number rounded to the narrower dtype."""
    num_odd: int = 0
    """Elements that are finite on one side alone."""
    apart: float = 0.0
    """Sum of the squared difference."""
    num_far: int = 0
    """Elements that are farther apart than one distance between numbers of the narrower dtype."""
    num_larger: int = 0
    """Elements that are farther from zero in the candidate."""
    reference: float = 0.0
    candidate: float = 0.0
    product: float = 0.0
    sums: tuple[float, float] = (0.0, 0.0)
    """Of the reference's and of the candidate's elements; of complex ones, of both parts."""
    num_summed: int = 0
    exponent: int = 0
    """All sums are of elements divided by 2 to this power (squares: to its double); ``largest`` is not."""
    rolled: float = 0.0
    """Sum of squared differences of the reference and itself, moved by one along the first dim."""
    largest: float = 0.0
    first: tuple[int, ...] = ()
    """Index of the first element that differs."""
    profiles: list[Profile] = field(default_factory=list)
    """One a dim."""

    @property
    def relative(self) -> float:
        """Frobenius norm of the difference over that of the reference; infinite where the reference is zero alone."""
        if self.num_odd:
            return math.inf
        if self.apart == 0:
            return 0.0
        return math.sqrt(self.apart / self.reference) if self.reference > 0 else math.inf

    @property
    def length(self) -> float:
        """Frobenius norm of the reference."""
        with np.errstate(over="ignore"):
            return float(np.ldexp(math.sqrt(self.reference), self.exponent))

    @property
    def spread(self) -> float:
        """How far elements lie from their own mean, relative to the reference's length; of the wider side.

        Elements that have nothing to do with each other, of the same mean and spread, differ by √2 times that. Of fewer
        than eight nothing is known but their size: one.
        """
        if self.num_elements < FEWEST:
            return 1.0
        count = max(1, self.num_summed)
        squares = (self.reference, self.candidate)
        found = [square - total**2 / count for square, total in zip(squares, self.sums, strict=True)]
        return math.sqrt(max(0.0, *found) / self.reference) if self.reference > 0 else 0.0

    @property
    def factor(self) -> float:
        """The candidate as a multiple of the reference that fits best; NaN where the reference is zero."""
        return self.product / self.reference if self.reference > 0 else math.nan

    @property
    def beside_factor(self) -> float:
        """What the best multiple leaves over, relative to the candidate."""
        if not (self.reference > 0 and self.candidate > 0):
            return math.inf
        left = max(0.0, self.candidate - self.product**2 / self.reference)
        return math.sqrt(left / self.candidate)


def boxes(shape: Sequence[int], limit: int = SLAB_ELEMENTS) -> Iterator[Box]:
    """A tensor cut into boxes of at most ``limit`` elements, in C order."""
    for slab in slabs(shape, c_strides(shape), limit):
        yield Box(slab.start, tuple(a + n for a, n in zip(slab.start, slab.shape, strict=True)))


def measure(reference: Stored, candidate: Stored, shape: tuple[int, ...] | None = None) -> Distance:
    """How far two replicas of one shape are apart; ``shape``: only of their first so many elements along each dim.

    Raises:
        SourceLostError: a side can't be read whole.
    """
    shape = reference.tensor.shape if shape is None else shape
    found = Distance(profiles=[_empty(extent) for extent in shape], exponent=_exponent((reference, candidate), shape))
    last: NDArray[np.float64] | None = None
    for box in boxes(shape):
        own, theirs = reference.values(box), candidate.values(box)
        _count(found, box, own[0], theirs[0], reference.tensor.dtype, candidate.tensor.dtype, own[1], theirs[1])
        with np.errstate(invalid="ignore", over="ignore"):
            a, b = (np.ldexp(x, -found.exponent) for x in _finite(found, own[1], theirs[1]))
            _add(found, box, shape, a, b)
            last = _roll(found, a, last, whole=box.shape[1:] == tuple(shape[1:]))
    with np.errstate(over="ignore"):
        found.largest = float(np.ldexp(found.largest, found.exponent))
    return found


def _exponent(sides: Sequence[Stored], shape: Sequence[int]) -> int:
    """By which power of two elements are divided, so that their squares are doubles; none for 8 bits of exponent."""
    if all(side.tensor.dtype.exponent_bits <= WIDEST for side in sides):
        return 0
    largest = 0.0
    for side in sides:
        for box in boxes(shape):
            values = side.values(box)[1]
            largest = max(largest, float(np.abs(values).max(initial=0.0, where=np.isfinite(values))))
    return math.frexp(largest)[1]


def _empty(extent: int) -> Profile:
    bins = min(extent, MAX_BINS)
    return Profile(np.zeros(bins), np.zeros(bins), np.zeros(bins))


def _count(
    found: Distance, box: Box, own: NDArray[Any], theirs: NDArray[Any], left: DType, right: DType,
    a: NDArray[np.float64], b: NDArray[np.float64],
) -> None:  # fmt: skip
    found.num_elements += box.num_elements
    with np.errstate(invalid="ignore", over="ignore"):
        found.num_far += int(np.count_nonzero(np.abs(a - b) > _one_apart(a, b, left, right)))
        found.num_larger += int(np.count_nonzero(np.abs(b) > np.abs(a)))
    if left == right:
        differ = own != theirs
    else:
        differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
        found.num_not_rounded += _not_rounded(own, theirs, left, right, int(np.count_nonzero(differ)))
    count = int(np.count_nonzero(differ))
    if count and not found.num_differ:
        index = np.unravel_index(int(np.argmax(differ.reshape(-1))), differ.shape)
        place = index[: len(box.start)]
        found.first = tuple(int(i) + start for i, start in zip(place, box.start, strict=False))
    found.num_differ += count


def _one_apart(a: NDArray[np.float64], b: NDArray[np.float64], left: DType, right: DType) -> NDArray[np.float64]:
    """The distance between neighbouring numbers of the narrower dtype, where the elements lie."""
    narrow = min(left, right, key=lambda dtype: dtype.mantissa_bits)
    least = math.ldexp(1.0, 1 - narrow.bias - narrow.mantissa_bits) if narrow.epsilon else 0.0
    size: NDArray[np.float64] = np.maximum(np.abs(a), np.abs(b))
    return size * narrow.epsilon + least


def _not_rounded(own: NDArray[Any], theirs: NDArray[Any], left: DType, right: DType, num_differ: int) -> int:
    wide, narrow, source, target = (own, theirs, left, right) if left.bits >= right.bits else (theirs, own, right, left)
    if not can_round(source, target):
        return num_differ
    return int(np.count_nonzero(rounded(wide, source, target) != narrow))


def _finite(
    found: Distance, a: NDArray[np.float64], b: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    good = np.isfinite(a) & np.isfinite(b)
    if good.all():
        return a, b
    odd = ~good & ~((a == b) | (np.isnan(a) & np.isnan(b)))
    found.num_odd += int(np.count_nonzero(odd))
    return np.where(good, a, 0.0), np.where(good, b, 0.0)


def _add(found: Distance, box: Box, shape: Sequence[int], a: NDArray[np.float64], b: NDArray[np.float64]) -> None:
    apart, product, square = (a - b) ** 2, a * b, a * a
    found.apart += float(apart.sum())
    found.product += float(product.sum())
    found.reference += float(square.sum())
    found.candidate += float(np.sum(b * b))
    found.num_summed += a.size
    found.sums = found.sums[0] + float(a.sum()), found.sums[1] + float(b.sum())
    found.largest = max(found.largest, float(np.sqrt(apart.max(initial=0.0))))
    for dim, profile in enumerate(found.profiles):
        others = tuple(other for other in range(apart.ndim) if other != dim)
        bins = len(profile.apart)
        places = np.arange(box.start[dim], box.stop[dim]) * bins // shape[dim]
        for total, values in ((profile.apart, apart), (profile.product, product), (profile.square, square)):
            np.add.at(total, places, values.sum(axis=others))


def _roll(
    found: Distance, a: NDArray[np.float64], last: NDArray[np.float64] | None, *, whole: bool
) -> NDArray[np.float64] | None:
    """Add what moving by one along the first dim changes; only where boxes are whole rows."""
    if a.ndim == 0 or not whole or not len(a):
        return None
    found.rolled += float(np.sum(np.diff(a, axis=0) ** 2))
    if last is not None:
        found.rolled += float(np.sum((a[0] - last) ** 2))
    rows: NDArray[np.float64] = a[-1]
    return rows
