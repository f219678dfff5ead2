"""The numpy kernels: the reference of :mod:`~auditor.observe.kernels`, and what there is without compiled ones.

Runs of one length are taken together as the rows of one array, so that many tiny runs cost no Python loop each. Where
lengths are many, runs are cut into powers of two first. Long runs are taken block by block inside the L2 cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from numpy.typing import NDArray

from auditor.model.dtype import DType, NonFinite
from auditor.model.joint import Joint
from auditor.model.observation import OBSERVED
from auditor.model.pairing import Pairing, PairKind
from auditor.observe.decode import can_round, largest_pattern, nan_mask, ordered, rounded, to_float64
from auditor.observe.digest import digest_rows
from auditor.observe.kernels import Bytes, Rows, Runs, Side, Stream
from auditor.observe.replay import REPLAY
from auditor.observe.sketch import sketch_rows
from auditor.observe.statistics import statistics_of_rows

BLOCK_BYTES = 1 << 20
"""What is measured at once; what is widened of it is taken in parts that stay inside the cache."""
PAIR_BYTES = 128 << 10
"""Of pairs less is taken at once, as they are widened to doubles."""
LONG_BYTES = 32 << 10
"""Runs of so many bytes are worth numpy calls of their own."""
MAX_LENGTHS = 12
"""So many different lengths of short runs are taken one after the other; more are cut into powers of two."""


class NumpyKernels:
    """Measures with numpy alone."""

    name = "numpy"
    sweeps = False

    def measure(self, buffer: Bytes, dtype: DType, runs: Runs, totals: NDArray[np.void]) -> None:
        """As :meth:`~auditor.observe.kernels.Kernels.measure`.

        Raises:
            ValueError: a run lies outside the buffer.
        """
        width = np.dtype(dtype.carrier).itemsize
        for which, skip, length in _alike(runs.length, width, BLOCK_BYTES):
            rows = _gather(buffer, runs.at[which] + skip * width, length, dtype)
            found = statistics_of_rows(rows, dtype)
            found["lane0"], found["lane1"] = digest_rows(rows, runs.start[which] + skip, dtype)
            _add(totals, runs.row[which], found)

    def compare(
        self, pairing: Pairing, left: Side, right: Side, length: NDArray[np.int64], start: NDArray[np.int64],
        tally: NDArray[np.void],
    ) -> None:  # fmt: skip
        """As :meth:`~auditor.observe.kernels.Kernels.compare`.

        Raises:
            ValueError: a run lies outside its buffer, or these dtypes can't be compared so; see
                :func:`~auditor.observe.kernels.comparable`.
        """
        compare = _COMPARE[pairing.kind]
        widths = np.dtype(left.dtype.carrier).itemsize, np.dtype(right.dtype.carrier).itemsize
        for which, skip, count in _alike(length, max(widths), PAIR_BYTES):
            sides = [
                _gather(side.buffer, side.at[which] + skip * width, count, side.dtype)
                for side, width in zip((left, right), widths, strict=True)
            ]
            tally["num_compared"] += sides[0].size
            compare(pairing, (left.dtype, right.dtype), sides, start[which] + skip, tally)

    def sweep(
        self, streams: Sequence[Stream], pairs: Sequence[tuple[Pairing, int, int, NDArray[np.void]]], rows: Rows,
        totals: NDArray[np.void], joints: Sequence[tuple[Joint, Sequence[int], NDArray[np.void]]] = (),
    ) -> int:  # fmt: skip
        """0: these kernels don't read."""
        return 0

    def join(
        self, joint: Joint, sides: Sequence[Side], length: NDArray[np.int64], start: NDArray[np.int64],
        seam: NDArray[np.void],
    ) -> None:  # fmt: skip
        """As :meth:`~auditor.observe.kernels.Kernels.join`.

        Raises:
            ValueError: a run lies outside its buffer.
        """
        widths = [np.dtype(side.dtype.carrier).itemsize for side in sides]
        for which, skip, count in _alike(length, max(widths), PAIR_BYTES):
            numbers = [
                to_float64(_gather(side.buffer, side.at[which] + skip * width, count, side.dtype), side.dtype)
                for side, width in zip(sides, widths, strict=True)
            ]
            with np.errstate(all="ignore"):
                beyond = REPLAY[joint.kind](numbers, joint.constants)
            _add_beyond(beyond, start[which] + skip, seam)

    def sketch(self, buffer: Bytes, dtype: DType, runs: Runs, sketches: NDArray[np.float64]) -> None:
        """As :meth:`~auditor.observe.kernels.Kernels.sketch`.

        Raises:
            ValueError: a run lies outside the buffer.
        """
        width = np.dtype(dtype.carrier).itemsize
        for which, skip, length in _alike(runs.length, width, BLOCK_BYTES):
            values = to_float64(_gather(buffer, runs.at[which] + skip * width, length, dtype), dtype)
            np.add.at(sketches, runs.row[which], sketch_rows(values, runs.start[which] + skip))


def _alike(
    length: NDArray[np.int64], width: int, block: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], int]]:
    """Parts of runs that have one length: the runs' numbers, elements to skip in each, and the length."""
    for run in np.flatnonzero(length * width >= LONG_BYTES).tolist():
        for low in range(0, int(length[run]), block // width):
            count = min(block // width, int(length[run]) - low)
            yield np.array([run]), np.array([low]), count
    short = np.flatnonzero((length > 0) & (length * width < LONG_BYTES))
    lengths = np.unique(length[short])
    for which, skip, count in _equal(short, length[short], lengths) if len(lengths) else ():
        together = max(1, block // (count * width))
        for low in range(0, len(which), together):
            yield which[low : low + together], skip[low : low + together], count


def _equal(
    which: NDArray[np.int64], length: NDArray[np.int64], lengths: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], int]]:
    if len(lengths) <= MAX_LENGTHS:
        for count in lengths.tolist():
            members = which[length == count]
            yield members, np.zeros(len(members), np.int64), count
        return
    for bit in range(int(lengths[-1]).bit_length()):
        members = np.flatnonzero(length >> bit & 1)
        if len(members):
            yield which[members], length[members] >> (bit + 1) << (bit + 1), 1 << bit


def _gather(buffer: Bytes, at: NDArray[np.int64], length: int, dtype: DType) -> NDArray[np.unsignedinteger]:
    """Runs of one length as the rows of an aligned array."""
    carrier = np.dtype(dtype.carrier)
    count = length * carrier.itemsize
    if int(at.min()) < 0 or int(at.max()) + count > len(buffer):
        raise ValueError("a run lies outside the buffer")
    step = int(at[1] - at[0]) if len(at) > 1 else count
    if len(at) == 1 or (step > 0 and (np.diff(at) == step).all()):
        rows = as_strided(buffer[int(at[0]) : int(at[-1]) + count], (len(at), count), (step, 1), writeable=False)
    else:
        rows = sliding_window_view(buffer, count)[at]
    rows = np.ascontiguousarray(rows)
    values = rows.view(carrier)
    return values if values.flags.aligned else values.copy()


def _add(totals: NDArray[np.void], row: NDArray[np.int64], found: NDArray[np.void]) -> None:
    """Add what was found of runs to their rows: neighbouring runs of one row together first."""
    first = np.flatnonzero(np.concatenate([[True], row[1:] != row[:-1]]))
    for name in OBSERVED.names or ():
        if name != "read":
            combine = _COMBINE.get(name, np.add)
            part = combine.reduceat(found[name], first) if len(first) < len(row) else found[name]
            combine.at(totals[name], row[first], part)


def _add_beyond(worst: NDArray[np.float64], start: NDArray[np.int64], seam: NDArray[np.void]) -> None:
    """Add what a joint found: runs as rows, elements as multiples of what is allowed. NaN is not beyond."""
    beyond = worst > 1
    seam["num_compared"] += worst.size
    runs, places = np.nonzero(beyond)
    if len(runs):
        at = start[runs] + places
        seam["num_beyond"] += len(runs)
        seam["largest"] = max(float(seam["largest"][0]), float(worst[runs, places].max()))
        first = int(seam["first"][0])
        seam["first"] = min(int(at.min()), first) if first >= 0 else int(at.min())
        seam["last"] = max(int(seam["last"][0]), int(at.max()))


_COMBINE = {"minimum": np.minimum, "maximum": np.maximum, "bits_used": np.bitwise_or}

_DTypes = tuple[DType, DType]
_Rows = list[NDArray[np.unsignedinteger]]


def _beyond(tally: NDArray[np.void], beyond: NDArray[np.bool_], start: NDArray[np.int64]) -> None:
    """Count the elements beyond, and note the first in C order."""
    runs = np.flatnonzero(beyond.any(axis=1))
    if len(runs):
        tally["num_beyond"] += np.count_nonzero(beyond)
        first = int((start[runs] + beyond[runs].argmax(axis=1)).min())
        known = int(tally["first"][0])
        tally["first"] = first if known < 0 else min(known, first)


def _compare_bits(
    pairing: Pairing, dtypes: _DTypes, sides: _Rows, start: NDArray[np.int64], tally: NDArray[np.void]
) -> None:
    if sides[0].dtype != sides[1].dtype:
        raise ValueError(f"{dtypes[0].name} and {dtypes[1].name} differ in width")
    _beyond(tally, sides[0] != sides[1], start)


def _compare_cast(
    pairing: Pairing, dtypes: _DTypes, sides: _Rows, start: NDArray[np.int64], tally: NDArray[np.void]
) -> None:
    target, source = dtypes
    if not can_round(source, target):
        raise ValueError(f"{source.name} is not rounded to {target.name}")
    wanted = rounded(sides[1], source, target)
    beyond = sides[0] != wanted
    if not beyond.any():
        return
    stored, expected, master = sides[0][beyond], wanted[beyond], sides[1][beyond]
    distance = _distance(stored, expected, target)
    lost, unknown = nan_mask(stored, target), nan_mask(master, source)
    distance[lost != unknown] = math.inf
    same = lost & (unknown | _overflows(master, source, target))
    distance[same] = 0
    tally["num_one_ulp"] += np.count_nonzero(distance == 1)
    tally["largest"] = max(float(tally["largest"][0]), float(distance.max()))
    beyond[beyond] = ~same
    _beyond(tally, beyond, start)


def _distance(
    one: NDArray[np.unsignedinteger], other: NDArray[np.unsignedinteger], dtype: DType
) -> NDArray[np.float64]:
    left, right = ordered(one, dtype), ordered(other, dtype)
    # In 64 bits the difference itself can overflow; beyond 2**53 its size is all that matters.
    far = np.abs(left.astype(np.float64) - right.astype(np.float64))
    return np.where(far < 1 << 53, np.abs(left - right).astype(np.float64), far)


def _overflows(master: NDArray[np.unsignedinteger], source: DType, target: DType) -> NDArray[np.bool_]:
    """Numbers too large for a target without infinity: some casts store NaN for them, others the largest number."""
    if target.non_finite is NonFinite.IEEE:
        return np.zeros(master.shape, bool)
    top = largest_pattern(target)
    below, largest = to_float64(np.array([top - 1, top], target.carrier), target).tolist()
    beyond: NDArray[np.bool_] = np.abs(to_float64(master, source)) >= largest + (largest - below) / 2
    return beyond


def _compare_bound(
    pairing: Pairing, dtypes: _DTypes, sides: _Rows, start: NDArray[np.int64], tally: NDArray[np.void]
) -> None:
    first, second = (to_float64(bits, dtype) for bits, dtype in zip(sides, dtypes, strict=True))
    with np.errstate(all="ignore"):
        second += pairing.floor
        if max(dtype.bits for dtype in dtypes) <= 32 and not _may_be_beyond(first, second, pairing, tally):
            return
        root = np.sqrt(second)
        np.abs(first, out=first)
        judged = np.isfinite(first) & np.isfinite(second) & (to_float64(sides[1], dtypes[1]) >= 0)
        ratio = np.where(judged & (first > 0), first / root, 0)
        beyond = judged & (first > pairing.limit * root)
    tally["largest"] = max(float(tally["largest"][0]), float(ratio.max()))
    _beyond(tally, beyond, start)


def _may_be_beyond(
    first: NDArray[np.float64], second: NDArray[np.float64], pairing: Pairing, tally: NDArray[np.void]
) -> bool:
    """A quick look without roots: whether something may lie beyond the limit, or beyond the largest ratio so far.

    Squares of float32 neither overflow nor vanish in float64. The factor keeps rounding from hiding anything.
    """
    least = min(pairing.limit, float(tally["largest"][0]))
    bound = second * (least * least * 0.9999999999)
    return bool((np.square(first) > bound).any())


_COMPARE = {PairKind.CAST: _compare_cast, PairKind.BOUND: _compare_bound, PairKind.EQUAL: _compare_bits}
