"""Grids of ranks as ``torch.distributed`` records them, read from inert records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from auditor.adapters.adapter import MAX_RANKS
from auditor.containers.pickle_machine import Opaque
from auditor.containers.torch_zip import StoredTensor
from auditor.model.mesh import Coordinate

MAX_AXES = 8
_MAX_NAME = 32

Strides = tuple[tuple[int, int], ...]
"""Of one axis: sizes and strides in the list of ranks; several where it was flattened from several."""


@dataclass(frozen=True)
class RankMesh:
    """A grid of ranks."""

    names: tuple[str, ...]
    axes: tuple[Strides, ...]
    ranks: tuple[int, ...]
    """Global ranks by position."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return tuple(math.prod(size for size, _ in axis) for axis in self.axes)

    @cached_property
    def _positions(self) -> Mapping[int, int]:
        return {rank: at for at, rank in enumerate(self.ranks)}

    def place(self, rank: int) -> tuple[int, ...] | None:
        """A rank's index along each axis; None where the grid does not have it."""
        at = self._positions.get(rank)
        return None if at is None else tuple(_index(at, axis) for axis in self.axes)

    def coordinate(self, rank: int) -> Coordinate | None:
        """A rank's place by the names of the axes."""
        place = self.place(rank)
        return None if place is None else Coordinate.of(**dict(zip(self.names, place, strict=True)))

    def covers(self, num_ranks: int) -> bool:
        """Whether each of so many ranks has a place of its own on it."""
        return math.prod(self.sizes) == num_ranks == len(self._positions) == max(self.ranks, default=-1) + 1

    @property
    def in_order(self) -> bool:
        """Whether ranks are numbered along the axes, the last one fastest."""
        return self.axes == _row_major(self.sizes) and self.ranks == tuple(range(len(self.ranks)))


def _index(position: int, axis: Strides) -> int:
    found = 0
    for size, stride in axis:
        found = found * size + position // stride % size
    return found


def _row_major(sizes: Sequence[int]) -> tuple[Strides, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(((size, step if size > 1 else 1),))
        step *= size
    return tuple(reversed(strides))


@lru_cache(maxsize=16)
def grid(names: tuple[str, ...], sizes: tuple[int, ...]) -> RankMesh:
    """Ranks numbered along the axes, the last one fastest. Kept: every tensor of a file may ask for it."""
    return RankMesh(names, _row_major(sizes), tuple(range(math.prod(sizes))))


def device_mesh(record: object) -> RankMesh | None:
    """A ``DeviceMesh``; None where the record is none that could be.

    Source: torch ``torch/distributed/device_mesh.py``: since 2.9 a layout of sizes and strides over a list of ranks;
    before, a tensor of ranks, of which the shape is taken, and the list.
    """
    state = record.attributes() if isinstance(record, Opaque) else {}
    listed = state.get("_flatten_rank_map", state.get("_flatten_mesh_list"))
    ranks = tuple(listed) if isinstance(listed, (tuple, list)) and len(listed) <= MAX_RANKS else ()
    axes = _layout(state.get("_layout")) if "_layout" in state else _of_tensor(state.get("mesh"))
    if not axes or not ranks or not all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in ranks):
        return None
    names = _names(state.get("_mesh_dim_names", state.get("mesh_dim_names")), len(axes))
    return RankMesh(names, axes, ranks)


def written_by(record: object) -> int | None:
    """The rank that a ``DeviceMesh`` was on."""
    rank = record.attributes().get("_rank") if isinstance(record, Opaque) else None
    return rank if type(rank) is int and 0 <= rank < MAX_RANKS else None


def root_of(record: object) -> object:
    """The mesh of which another one is a part; that itself where it is none."""
    root = record.attributes().get("_root_mesh") if isinstance(record, Opaque) else None
    return record if root is None else root


def _layout(record: object) -> tuple[Strides, ...]:
    state = record.attributes() if isinstance(record, Opaque) else {}
    parts = state.get("axes")
    if isinstance(parts, tuple) and len(parts) <= MAX_AXES:
        pairs = [_pairs(part.attributes()) if isinstance(part, Opaque) else () for part in parts]
    else:
        shape, stride = _listed(state.get("shape")), _listed(state.get("stride"))
        if not 0 < len(shape) == len(stride) <= MAX_AXES:
            return ()
        pairs = [_pairs({"shape": n, "stride": s}) for n, s in zip(shape, stride, strict=True)]
    total = math.prod(size for axis in pairs for size, _ in axis)
    return tuple(pairs) if all(pairs) and total <= MAX_RANKS else ()


def _pairs(state: Mapping[str, Any]) -> Strides:
    shape, stride = _listed(state.get("shape")), _listed(state.get("stride"))
    whole = all(type(n) is int and 0 <= n <= MAX_RANKS for n in (*shape, *stride))
    if not whole or not all(shape) or not len(shape) == len(stride) <= MAX_AXES:
        return ()
    if not all(step or size == 1 for size, step in zip(shape, stride, strict=True)):
        return ()
    # An axis of one rank has no sizes at all.
    return tuple((size, step if size > 1 else 1) for size, step in zip(shape, stride, strict=True)) or ((1, 1),)


def _listed(value: object) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _of_tensor(value: object) -> tuple[Strides, ...]:
    shape = value.shape if isinstance(value, StoredTensor) else ()
    whole = 0 < len(shape) <= MAX_AXES and all(shape) and math.prod(shape) <= MAX_RANKS
    return _row_major(shape) if whole else ()


def _names(stated: object, count: int) -> tuple[str, ...]:
    """The axes' own names; a grid without any gets some that say nothing."""
    names = tuple(stated) if isinstance(stated, (tuple, list)) and len(stated) == count else ()
    if all(isinstance(n, str) and n.isidentifier() and len(n) <= _MAX_NAME for n in names) and len({*names}) == count:
        return names
    return ("rank",) if count == 1 else tuple(f"axis{at}" for at in range(count))
