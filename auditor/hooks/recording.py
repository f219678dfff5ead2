"""Collects what one rank holds in memory into its part of the witness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from auditor.model.catalog import Role, c_strides
from auditor.model.dtype import DType, Kind
from auditor.model.mesh import Coordinate
from auditor.model.region import Box, FlatRange, Region
from auditor.model.witness import MEASURES, WITNESSED, WitnessedTensor, WitnessPart, plainest
from auditor.observe.kernels import Bytes, Kernels, Runs, empty_rows
from auditor.observe.placing import lattice

MAX_RUNS = 1 << 18
"""Runs that are described at once: of a column's part every element is one."""


class Recorder:
    """One rank's part of one step while it grows."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.scalars: dict[str, float] = {}
        self.skipped: dict[str, int] = {}
        """Why pieces were left out, to how many."""
        self._tensors: dict[WitnessedTensor, int] = {}
        self._places: dict[Coordinate, int] = {}
        self._boxes: dict[Box, int] = {}
        self._rows: list[tuple[int, int, Region]] = []
        self._measured: list[NDArray[np.void]] = []

    def add(
        self, name: str, dtype: DType, shape: tuple[int, ...], region: Region, place: Coordinate,
        measured: NDArray[np.void], role: Role | None = None,
    ) -> None:  # fmt: skip
        """Add a piece. ``measured``: one row of OBSERVED, shape (1,)."""
        tensor = WitnessedTensor(name, role, dtype, shape)
        number = self._tensors.setdefault(tensor, len(self._tensors))
        at = self._places.setdefault(place, len(self._places))
        self._rows.append((number, at, plainest(region, shape)))
        self._measured.append(measured)

    def skip(self, why: str) -> None:
        """Count a piece that can't be digested."""
        self.skipped[why] = self.skipped.get(why, 0) + 1

    def part(self, step: int, *, launch: str = "", attempt: int = 0, taken: float = 0.0) -> WitnessPart:
        """The finished part."""
        rows = np.zeros(len(self._rows), WITNESSED)
        if self._rows:
            measured = np.concatenate(self._measured)
            for name in MEASURES:
                rows[name] = measured[name]
        for row, (tensor, place, region) in zip(rows, self._rows, strict=True):
            row["tensor"], row["place"], row["rank"] = tensor, place, self.rank
            if isinstance(region, FlatRange):
                row["start"], row["stop"] = region.start, region.stop
            else:
                row["start"], row["stop"] = self._boxes.setdefault(region, len(self._boxes)), -1
        return WitnessPart(
            step, self.rank, self.num_ranks, tuple(self._tensors), tuple(self._places), tuple(self._boxes), rows,
            launch, attempt, taken, self.scalars,
        )  # fmt: skip


def measured_on_cpu(
    kernels: Kernels, buffer: Bytes, dtype: DType, shape: tuple[int, ...], region: Region
) -> NDArray[np.void]:
    """One row of OBSERVED of a piece whose elements lie without gaps, in the region's C order, in ``buffer``."""
    totals = empty_rows(1)
    for runs in runs_of(region, shape, dtype):
        kernels.measure(buffer, dtype, runs, totals)
    return totals


def add_measured(totals: NDArray[np.void], found: NDArray[np.void]) -> None:
    """Add what was measured of a further part of the same piece."""
    for name in ("lane0", "lane1", "num_nan", "num_infinite", "num_zero", "sum_squares"):
        totals[name] += found[name]
    totals["minimum"] = np.minimum(totals["minimum"], found["minimum"])
    totals["maximum"] = np.maximum(totals["maximum"], found["maximum"])


def runs_of(region: Region, shape: tuple[int, ...], dtype: DType) -> Iterator[Runs]:
    """Where the elements of a region lie in a buffer that holds it in C order, and in its tensor of ``shape``."""
    factor = 2 if dtype.kind is Kind.COMPLEX else 1
    width = np.dtype(dtype.carrier).itemsize
    found = plainest(region, shape)
    if isinstance(found, FlatRange):
        if found.num_elements:
            yield _runs(np.array([found.start], np.int64), 0, found.num_elements, factor, width)
        return
    strides = c_strides(shape)
    dims = len(shape)
    # Trailing dims that are whole join the run; the first that is cut ends it.
    while dims > 1 and found.shape[dims - 1] == shape[dims - 1]:
        dims -= 1
    length = found.shape[dims - 1] * strides[dims - 1]
    base = sum(a * s for a, s in zip(found.start, strides, strict=True))
    outer = found.shape[: dims - 1]
    rest = int(np.prod(outer[1:], dtype=np.int64)) if outer else 1
    together = max(1, MAX_RUNS // max(1, rest))
    for low in range(0, outer[0] if outer else 1, together):
        extents = (min(together, outer[0] - low), *outer[1:]) if outer else ()
        starts = lattice(extents, strides, base + low * strides[0])
        yield _runs(starts, low * rest, length, factor, width)


def _runs(starts: NDArray[np.int64], before: int, length: int, factor: int, width: int) -> Runs:
    """Runs of one length that follow each other in the buffer, ``before`` runs of it before them."""
    count = len(starts)
    each = np.arange(before, before + count, dtype=np.int64) * (length * factor * width)
    return Runs(each, np.full(count, length * factor), starts * factor, np.zeros(count, np.int64))


def as_scalars(values: Mapping[str, object]) -> dict[str, float]:
    """Of what a state dict holds besides tensors, the plain numbers."""
    return {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
