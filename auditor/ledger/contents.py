"""What the replicas of a step hold, each distinct content once: sums over pieces, and a sketch."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """Rows of :data:`~auditor.model.observation.OBSERVED`, over all pieces of the replica; kept are digests, counts,
    extrema and squares."""
    sketches: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, BUCKETS)))
    """Shape (contents, 64)."""

    def __len__(self) -> int:
        return len(self.tensor)


_NONE = np.zeros(0, np.int64)
NOTHING = Contents(_NONE, _NONE, _NONE, np.zeros(0, OBSERVED))


def contents_of(catalog: Catalog, observations: Observations) -> Contents:
    """The contents of all replicas that were read whole; equal ones share a sketch."""
    pieces, seen = catalog.pieces, observations.pieces
    order = np.lexsort((pieces.replica, pieces.tensor)) if len(pieces) else np.zeros(0, np.int64)
    if not len(order):
        return NOTHING
    tensor, replica = pieces.tensor[order].astype(np.int64), pieces.replica[order].astype(np.int64)
    opens = np.concatenate([[True], (tensor[1:] != tensor[:-1]) | (replica[1:] != replica[:-1])])
    first = np.flatnonzero(opens)
    whole = np.logical_and.reduceat(seen["read"][order] == Read.DONE, first)
    totals = np.zeros(len(first), OBSERVED)
    for name in OBSERVED.names or ():
        combine = {"minimum": np.minimum, "maximum": np.maximum, "bits_used": np.bitwise_or, "read": np.maximum}
        totals[name] = combine.get(name, np.add).reduceat(seen[name][order], first)
    first, totals = first[whole], totals[whole]
    sketch, sketches = _sketches(catalog, observations, tensor[first], replica[first], totals)
    return Contents(tensor[first], replica[first], sketch, totals, sketches)


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
