"""What the replicas of a step hold, each distinct content once: sums over pieces, and a sketch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from auditor.model.catalog import Catalog
from auditor.model.observation import BUCKETS, OBSERVED, Observations, Read


@dataclass(frozen=True, slots=True)
class Contents:
    """One row a replica of which all pieces were read."""

    tensor: NDArray[np.int64]
    """Number of the tensor."""
    replica: NDArray[np.int64]
    sketch: NDArray[np.int64]
    """Row of ``sketches``; -1 where there is none."""
    totals: NDArray[np.void]
    """Rows of :data:`~auditor.model.observation.OBSERVED`, over all pieces of the replica."""
    num_elements: NDArray[np.int64]
    """Of all its pieces."""
    sketches: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, BUCKETS)))
    """Shape (contents, 64)."""

    def __len__(self) -> int:
        return len(self.tensor)


_NONE = np.zeros(0, np.int64)
NOTHING = Contents(_NONE, _NONE, _NONE, np.zeros(0, OBSERVED), _NONE)
_COMBINE = {"minimum": np.minimum, "maximum": np.maximum, "bits_used": np.bitwise_or, "read": np.maximum}


def places_of(catalog: Catalog) -> NDArray[np.int64]:
    """Of every piece, tensor, replica and number of elements; shape (3, pieces)."""
    pieces = catalog.pieces
    return np.array([pieces.tensor, pieces.replica, pieces.num_elements()], np.int64)


def contents_of(catalog: Catalog, observations: Observations) -> Contents:
    """The contents of all replicas that were read whole; equal ones share a sketch."""
    found = summed(places_of(catalog), observations.pieces)
    sketch, sketches = _sketches(catalog, observations, found.tensor, found.replica, found.totals)
    return replace(found, sketch=sketch, sketches=sketches)


def summed(places: NDArray[np.int64], pieces: NDArray[np.void]) -> Contents:
    """The replicas of which all pieces were read, in order of tensor and replica, without sketches.

    ``places``: as :func:`places_of`; ``pieces``: rows of OBSERVED.
    """
    order = np.lexsort((places[1], places[0]))
    if not len(order):
        return NOTHING
    tensor, replica, sizes = places[:, order]
    opens = np.concatenate([[True], (tensor[1:] != tensor[:-1]) | (replica[1:] != replica[:-1])])
    first = np.flatnonzero(opens)
    whole = np.logical_and.reduceat(pieces["read"][order] == Read.DONE, first)
    totals = np.zeros(len(first), OBSERVED)
    for name in OBSERVED.names or ():
        totals[name] = _COMBINE.get(name, np.add).reduceat(pieces[name][order], first)
    sizes, first = np.add.reduceat(sizes, first)[whole], first[whole]
    return Contents(tensor[first], replica[first], np.full(len(first), -1), totals[whole], sizes)


def _sketches(
    catalog: Catalog, observations: Observations, tensor: NDArray[np.int64], replica: NDArray[np.int64],
    totals: NDArray[np.void],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:  # fmt: skip
    """Which sketch every content has, and the sketches."""
    made = observations.sketches
    if made is None:
        return np.full(len(tensor), -1), np.zeros((0, BUCKETS))
    places = {pair: row for row, pair in enumerate(zip(made.tensor.tolist(), made.replica.tolist(), strict=True))}
    kept: dict[object, int] = {}
    rows, found = list[int](), list[int]()
    lanes = zip(totals["lane0"].tolist(), totals["lane1"].tolist(), strict=True)
    for number, place, pair in zip(tensor.tolist(), replica.tolist(), lanes, strict=True):
        what = catalog.tensors[number]
        row = places.get((number, place))
        if row is None or not np.isfinite(made.values[row]).all():
            found.append(-1)
            continue
        key = what.dtype.name, what.shape, pair
        if key not in kept:
            kept[key] = len(rows)
            rows.append(row)
        found.append(kept[key])
    return np.array(found, np.int64), made.values[rows]
