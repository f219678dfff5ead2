"""The grid of ranks, a rank's place on it, and how a tensor lies on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from auditor.model.region import Box

AXIS_ORDER = ("pp", "ep", "edp", "cp", "dp", "tp")
"""The order in which axes are written; unknown axes follow by name."""


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A place on the mesh: index along some or all axes. What is not stated is not known or does not matter."""

    indices: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, /, **indices: int) -> Coordinate:
        """The coordinate with these indices, in :data:`AXIS_ORDER`."""
        return cls(tuple(sorted(indices.items(), key=_axis_rank)))

    def as_dict(self) -> dict[str, int]:
        """Axis name to index."""
        return dict(self.indices)

    def along(self, axes: Iterable[str]) -> Coordinate:
        """This coordinate restricted to ``axes``."""
        wanted = frozenset(axes)
        return Coordinate(tuple(entry for entry in self.indices if entry[0] in wanted))

    def merged(self, other: Coordinate) -> Coordinate:
        """Both statements together; ``other`` wins where both speak."""
        return Coordinate.of(**{**self.as_dict(), **other.as_dict()})

    def __str__(self) -> str:
        return ",".join(f"{axis}={index}" for axis, index in self.indices) or "all ranks"


EVERYWHERE = Coordinate()
"""The coordinate that states nothing."""


def _axis_rank(entry: tuple[str, int]) -> tuple[int, str]:
    axis = entry[0]
    return (AXIS_ORDER.index(axis) if axis in AXIS_ORDER else len(AXIS_ORDER), axis)


@lru_cache(maxsize=256)
def coordinates_along(axes: tuple[tuple[str, Sequence[int]], ...]) -> tuple[Coordinate, ...]:
    """The coordinates of all combinations of indices along ``axes``, the last axis fastest.

    Kept: there are as many as ranks, and every rank's part of every tensor asks for them. Indices must be hashable; a
    ``range`` costs nothing to look up.

    >>> [str(place) for place in coordinates_along((("pp", (0, 1)), ("tp", (3,))))]
    ['pp=0,tp=3', 'pp=1,tp=3']
    """
    places = [EVERYWHERE]
    for axis, indices in axes:
        places = [known.merged(Coordinate.of(**{axis: index})) for known in places for index in indices]
    return tuple(places)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named grid of ranks."""

    axes: tuple[tuple[str, int], ...] = ()
    """Axis name and degree, slowest first *if* ``ordered``."""
    ordered: bool = False
    """Whether the order of the axes is the order of global ranks (last axis fastest)."""

    def degree(self, axis: str) -> int:
        """Ranks along ``axis``; 1 for an axis that the mesh does not have."""
        return dict(self.axes).get(axis, 1)

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        total = 1
        for _, degree in self.axes:
            total *= degree
        return total

    def global_ranks(self, coordinate: Coordinate) -> tuple[int, ...] | None:
        """Global ranks at ``coordinate`` (several where it leaves axes open), or None where the order is unknown."""
        if not self.ordered:
            return None
        known = coordinate.as_dict()
        ranks = [0]
        for axis, degree in self.axes:
            indices = (known[axis],) if axis in known else range(degree)
            ranks = [rank * degree + index for rank in ranks for index in indices]
        return tuple(ranks)

    def __str__(self) -> str:
        if self.axes == (("rank", 1),):
            return "one rank"
        return " · ".join(f"{axis} {degree}" for axis, degree in self.axes) or "one rank"


NO_MESH = Mesh()
"""The mesh of one rank."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The tensor is cut into equal parts along ``dim``, one a rank of the axis."""

    dim: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the same."""


Placement = Mapping[str, Shard | Replicate]
"""Per mesh axis, how a tensor lies on it. Axes that are left out: one rank's part is the whole along them."""


def global_shape(local: tuple[int, ...], placement: Placement, mesh: Mesh) -> tuple[int, ...]:
    """Shape of the whole tensor, given one rank's part of it."""
    shape = list(local)
    for axis, how in placement.items():
        if isinstance(how, Shard):
            shape[how.dim] *= mesh.degree(axis)
    return tuple(shape)


def local_box(local: tuple[int, ...], placement: Placement, mesh: Mesh, coordinate: Coordinate) -> Box:
    """Where the part of shape ``local`` held at ``coordinate`` lies in the whole tensor.

    Several axes that cut one dim are nested in the order of ``placement``, the first outermost.
    """
    number = [0] * len(local)
    for axis, how in placement.items():
        if isinstance(how, Shard):
            number[how.dim] = number[how.dim] * mesh.degree(axis) + coordinate.as_dict().get(axis, 0)
    start = tuple(k * n for k, n in zip(number, local, strict=True))
    return Box(start, tuple(a + n for a, n in zip(start, local, strict=True)))
