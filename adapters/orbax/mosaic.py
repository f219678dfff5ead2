"""Which replica wrote which stripe: Orbax by default lets each of R replicas write one part in R of every shard.

The first dim of the shard that R divides is cut into R stripes; replica r writes the r-th. R may be limited to fewer
than there are. Where there is no such dim, or where it was switched off, replica 0 writes the whole shard. Replicas
are numbered in the mesh's order over the axes that the partition spec does not name. Sources: orbax-checkpoint
``_src/serialization/replica_slices.py``; measured on a mesh whose replicas had drifted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from auditor.adapters.orbax.metadata import Sharding
from auditor.model.mesh import EVERYWHERE, Coordinate, Placement, Replicate, Shard


@dataclass(frozen=True, slots=True)
class Mosaic:
    """How one array's stripes lie on the mesh."""

    sharding: Sharding
    shard_shape: tuple[int, ...]
    stripe_dim: int = -1
    """The dim of the shard that is cut into stripes; -1: replica 0 wrote all of it."""
    num_stripes: int = 1
    """Into which a shard is cut."""

    @property
    def replicated(self) -> tuple[str, ...]:
        """Axes along which the array is replicated, in the mesh's order."""
        used = {axis for axes in self.sharding.spec for axis in axes}
        return tuple(axis for axis, degree in self.sharding.axes if axis not in used and degree > 1)

    @property
    def placement(self) -> Placement:
        """Per axis of the mesh, how the array lies on it."""
        cut = {axis: dim for dim, axes in enumerate(self.sharding.spec) for axis in axes}
        return {axis: Shard(cut[axis]) if axis in cut else Replicate() for axis, _ in self.sharding.axes}

    def coordinate(self, start: Sequence[int]) -> Coordinate:
        """The place of the rank that wrote the chunk that begins at ``start``."""
        degrees = dict(self.sharding.axes)
        indices: dict[str, int] = {}
        for dim, axes in enumerate(self.sharding.spec):
            indices |= _unravelled(start[dim] // self.shard_shape[dim], axes, degrees)
        indices |= _unravelled(self._replica(start), self.replicated, degrees)
        return Coordinate.of(**{axis: index for axis, index in indices.items() if degrees[axis] > 1})

    def _replica(self, start: Sequence[int]) -> int:
        if self.stripe_dim < 0:
            return 0
        extent = self.shard_shape[self.stripe_dim]
        return start[self.stripe_dim] % extent // (extent // self.num_stripes)


def _unravelled(number: int, axes: Sequence[str], degrees: dict[str, int]) -> dict[str, int]:
    """Index along each of ``axes``, the last fastest."""
    found = {}
    for axis in reversed(axes):
        number, found[axis] = divmod(number, degrees[axis])
    return found


def mosaic(
    sharding: Sharding | None, shape: tuple[int, ...], chunk_shape: tuple[int, ...], written: tuple[int, ...] | None
) -> Mosaic | None:
    """How an array of ``shape`` lies on its mesh; None where that isn't known or contradicts itself.

    ``written``: what one replica wrote, as recorded; else it is the shape of the chunks.
    """
    if sharding is None or len(sharding.spec) > len(shape) or not all(shape):
        return None
    degrees = dict(sharding.axes)
    counts = [math.prod(degrees[axis] for axis in axes) for axes in sharding.spec]
    counts += [1] * (len(shape) - len(counts))
    if any(extent % count for extent, count in zip(shape, counts, strict=True)):
        return None
    shard = tuple(extent // count for extent, count in zip(shape, counts, strict=True))
    whole = Mosaic(sharding, shard)
    num_replicas = math.prod(degrees[axis] for axis in whole.replicated)
    stripe = written if written is not None and len(written) == len(shape) else chunk_shape
    if num_replicas == 1 or stripe == shard:
        return whole if _fits(chunk_shape, shard) else None
    cut = [at for at, (extent, part) in enumerate(zip(shard, stripe, strict=True)) if part != extent]
    if len(cut) != 1 or not 0 < stripe[cut[0]] < shard[cut[0]]:
        return None
    num_stripes = shard[cut[0]] // stripe[cut[0]]
    first = next((at for at, extent in enumerate(shard) if extent % num_stripes == 0), -1)
    fits = first == cut[0] and num_stripes * stripe[first] == shard[first] and num_stripes <= num_replicas
    return Mosaic(sharding, shard, first, num_stripes) if fits and _fits(chunk_shape, stripe) else None


def _fits(chunk_shape: Sequence[int], stripe: Sequence[int]) -> bool:
    """Whether no chunk reaches over the border of a stripe."""
    return all(extent % chunk == 0 for chunk, extent in zip(chunk_shape, stripe, strict=True))


def coordinates_of(found: Mosaic | None, starts: NDArray[np.int64]) -> tuple[list[Coordinate], NDArray[np.int64]]:
    """The places of the ranks that wrote many chunks, a row of ``starts`` each: coordinates, and which is whose."""
    if found is None or not len(starts):
        return [EVERYWHERE], np.zeros(len(starts), np.int64)
    cells = starts // np.array(found.shard_shape, np.int64)
    if found.stripe_dim >= 0:
        extent = found.shard_shape[found.stripe_dim]
        stripes = starts[:, found.stripe_dim] % extent // (extent // found.num_stripes)
        cells = np.concatenate([cells, stripes[:, None]], axis=1)
    place = np.zeros(len(cells), np.int64)
    for column in cells.T:
        place = place * (int(column.max()) + 1) + column
    _, first, which = np.unique(place, return_index=True, return_inverse=True)
    return [found.coordinate(start) for start in starts[first].tolist()], which


def coordinate_of(found: Mosaic | None, start: Sequence[int]) -> Coordinate:
    """The place of the rank that wrote a chunk; nothing where it isn't known."""
    return found.coordinate(start) if found else EVERYWHERE
