"""The ranks of one step: where each stands on the mesh, and what that says of a tensor that some of them hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from auditor.adapters.torch_per_rank.distributed import DistributedTensor
from auditor.adapters.torch_per_rank.files import RankState
from auditor.adapters.torch_per_rank.rank_mesh import RankMesh, grid
from auditor.containers.torch_zip import StoredTensor
from auditor.model.mesh import Coordinate, Mesh, Placement, Replicate, coordinates_along

_OWN = frozenset({"pp", "pipe", "pipeline", "pipeline_parallel", "ep", "expert", "expert_parallel"})
"""Axes along which ranks have modules of their own: one name along them need not be one tensor."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a tensor lies over ranks."""

    replica_axes: tuple[str, ...] = ()
    placement: Placement | None = None
    replicas: tuple[Coordinate, ...] = ()


class RankGrid:
    """Ranks by place, and places by rank."""

    def __init__(self, mesh: RankMesh, num_ranks: int, reason: str = "") -> None:
        """``reason``: why ranks have no places, if they don't."""
        self._mesh, self.reason = mesh, reason
        axes = tuple(zip(mesh.names, mesh.sizes, strict=True))
        self.mesh = Mesh(axes, ordered=mesh.in_order)
        self._places = {rank: mesh.coordinate(rank) for rank in range(num_ranks)}

    def place(self, rank: int) -> Coordinate:
        """A rank's coordinate."""
        return self._places.get(rank) or Coordinate()

    def spread(self, held: Mapping[int, StoredTensor], ranks: Collection[int]) -> tuple[Spread | None, str]:
        """How a tensor lies over all ranks, or why that isn't known.

        ``held``: what each rank that has it has. ``ranks``: those whose files could be read.
        """
        first = next(iter(held.values()))
        own: Placement = first.layout.placement if isinstance(first, DistributedTensor) else {}
        if isinstance(first, DistributedTensor) and not set(first.layout.mesh.names) <= set(self._mesh.names):
            return None, f"it lies on a mesh of its own ({', '.join(first.layout.mesh.names)})"
        cut = self._cut(first)
        rest = [name for name in self._mesh.names if name not in cut]
        apart = [name for name in rest if name in _OWN and name not in own and self.mesh.degree(name) > 1]
        whole = {rank for rank in ranks if any(self._same(rank, holder, apart) for holder in held)}
        if whole != set(held):
            return None, "not every rank file holds it"
        if apart and len({self.place(rank).along(apart) for rank in held}) > 1:
            return None, f"ranks along {' and '.join(apart)} have modules of their own"
        axes = tuple(name for name in rest if name not in apart and self.mesh.degree(name) > 1)
        placement = {name: own.get(name, Replicate()) for name in self._mesh.names if name in own or name in axes}
        return Spread(axes, placement, self.replicas(axes)), ""

    def _cut(self, tensor: StoredTensor) -> Sequence[str]:
        """Axes along which ranks have different parts."""
        if not isinstance(tensor, DistributedTensor):
            return ()
        placement = tensor.layout.placement
        return [name for name in tensor.layout.mesh.names if not isinstance(placement.get(name), Replicate)]

    def _same(self, rank: int, other: int, axes: Sequence[str]) -> bool:
        return not axes or self.place(rank).along(axes) == self.place(other).along(axes)

    def replicas(self, axes: Sequence[str]) -> tuple[Coordinate, ...]:
        """Every combination of places along ``axes``."""
        return coordinates_along(tuple((name, range(self.mesh.degree(name))) for name in axes)) if axes else ()


def find_grid(states: Mapping[int, RankState], num_ranks: int, *, whole: bool = False) -> RankGrid:
    """The mesh that the records of parts tell; of files without any, the ranks are data-parallel.

    ``whole``: one file is all that was saved, so that nothing tells of ranks but such records.
    """
    found: dict[RankMesh, int] = {}
    for state in states.values():
        for mesh, count in state.reader.roots.values():
            found[mesh] = found.get(mesh, 0) + count
    fitting = {mesh: count for mesh, count in found.items() if mesh.covers(num_ranks)}
    if fitting:
        return RankGrid(max(fitting, key=lambda mesh: (fitting[mesh], len(mesh.axes))), num_ranks)
    plain = grid((), ()) if whole and num_ranks == 1 else grid(("dp",), (num_ranks,))
    if not found:
        return RankGrid(plain, num_ranks)
    sizes = " · ".join(map(str, next(iter(found)).sizes))
    return RankGrid(plain, num_ranks, f"rank files record a mesh of {sizes}, which {num_ranks} ranks don't make up")
