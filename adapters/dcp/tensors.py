"""Puts tensors of ``torch.distributed.checkpoint`` into the Catalog, and tells which of their pieces are replicas.

With one index for all ranks every part is stored once, whoever else held it. Which tensors were replicated is recorded
nowhere: one that is stored in fewer parts than there are ranks may have been. Without a coordinator each rank's index
lists what that rank has, and parts that several of them have are replicas. A replica that several ranks hold together
goes by the lowest of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.dcp.names import Names
from auditor.adapters.dcp.sources import Source, coordinate_of, every_key
from auditor.containers.dcp_columns import Described
from auditor.model.catalog import Problem, ProblemKind, Role
from auditor.model.dtype import DType
from auditor.model.mesh import Coordinate
from auditor.model.region import Box, SweepTooLarge, coverage
from auditor.storage.store import base_name

AXIS = "rank"


@dataclass(frozen=True, slots=True)
class _Held:
    """One part of a tensor, as one index has it."""

    source: Source
    row: int
    region: Box

    @property
    def rank(self) -> int:
        """The rank whose index lists it."""
        return dict(self.source.coordinate.indices).get(AXIS, 0)


class TensorPlacing:
    """Adds all tensors of one step."""

    def __init__(self, builder: CatalogBuilder, names: Names, sources: Sequence[Source], num_ranks: int) -> None:
        self.builder, self.names, self.sources, self.num_ranks = builder, names, sources, num_ranks
        self.lost = [source for source in sources if source.opened.lost]
        self.unknown: Counter[str] = Counter()
        """Dtypes and forms of tensors that are not known here."""
        self.num_missing = 0
        """Chunks that an index describes and places nowhere."""
        self._places: dict[tuple[int, int], tuple[int, Coordinate]] = {}
        """Index and number of a file in it to its number in the Catalog, and the rank that wrote it."""

    def add_all(self) -> None:
        """Add every tensor of every index."""
        taken: set[tuple[Role, str]] = set()
        order: dict[str, int] = {}
        for key, described in self._described():
            tensor = described[0][1]
            role, name = self.names.tensor(key, tensor.dtype, tensor.shape)
            if (role, name) in taken:
                # Two optimizers or models whose parameters have the same names.
                name = key if (role, key) not in taken else described[0][0].path_of(key)
            taken.add((role, name))
            if tensor.dtype is None or tensor.dtype.bits < 8:
                self.unknown[f"torch dtype {tensor.dtype_name}"] += 1
                continue
            self._add(key, role, name, tensor.dtype, described, order.setdefault(name, len(order)))

    def _described(self) -> Iterator[tuple[str, list[tuple[Source, Described]]]]:
        """Every key with the indexes that describe it. Folders beside each other may both have it: a count of steps."""
        for key in every_key(self.sources):
            by_part: dict[str, list[tuple[Source, Described]]] = {}
            for source in self.sources:
                if key in source.index.tensors:
                    by_part.setdefault(source.part.folder.path, []).append((source, source.index.tensors[key]))
            yield from ((key, described) for described in by_part.values())

    def _add(
        self, key: str, role: Role, name: str, dtype: DType, described: Sequence[tuple[Source, Described]], order: int
    ) -> None:  # fmt: skip
        shape = described[0][1].shape
        held = [one for source, tensor in described for one in self._held(source, tensor, name, described[0][1])]
        if any(one.row in one.source.contents.unknown for one in held):
            self.unknown["a stored tensor in a form that is not known"] += 1
            return
        doubt = self.names.doubt(key)
        if described[0][0].part.coordinated:
            # Those without elements count: each rank with nothing of a tensor has one, though they fall together.
            source, tensor = described[0]
            once = (AXIS,) if len(source.rows.get(tensor.name, ())) < self.num_ranks else ()
            number = self.builder.tensor(name, role, dtype, shape, order, stored_once=once, undetermined=doubt)
            for one in held:
                self._add_piece(number, one, key)
            return
        replicas = _replicas(held)
        places = [Coordinate.of(rank=rank) for rank in replicas] if len(replicas) > 1 else []
        axes = (AXIS,) if places else ()
        number = self.builder.tensor(
            name, role, dtype, shape, order, replicas=places, replica_axes=axes, undetermined=doubt
        )
        for rank, members in replicas.items():
            for one in members:
                self._add_piece(number, one, key, Coordinate.of(rank=rank) if places else None)
        if self.lost and not places:
            self._add_lost(number, key, held, shape)

    def _held(self, source: Source, tensor: Described, name: str, first: Described) -> Iterator[_Held]:
        """The parts of a tensor by one index; what contradicts itself is among the problems."""
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            message = f"describes {tensor.name} as {_said(tensor)}, other ranks as {_said(first)}"
            self._problem(ProblemKind.RANKS_DISAGREE, source, message, name)
            return
        for row, region in source.placed(tensor):
            if region is None:
                corner = [*(source.index.corner(row) or ())]
                message = f"places a part of {tensor.name} that it does not describe, at {corner}"
                self._problem(ProblemKind.METADATA, source, message, name)
            elif row < 0:
                self.num_missing += 1
            else:
                yield _Held(source, row, region)

    def _add_piece(self, number: int, one: _Held, key: str, coordinate: Coordinate | None = None) -> None:
        source, row = one.source, one.row
        place = id(source), source.index.item_file[row]
        if place not in self._places:
            path = source.file_of(row)
            self._places[place] = self.builder.file_id(path), coordinate_of(base_name(path))
        file, where = self._places[place]
        self.builder.piece(
            number, file, source.contents.offset[row], one.region, coordinate or where,
            key=key, strides=source.contents.strides.get(row),
        )  # fmt: skip

    def _add_lost(self, number: int, key: str, held: Sequence[_Held], shape: tuple[int, ...]) -> None:
        """What no index that could be read lists must be in those that are lost."""
        try:
            gaps = coverage([one.region for one in held], shape).gaps
        except SweepTooLarge:
            return
        lost = self.lost[0]
        for gap in gaps:
            self.builder.piece(number, self.builder.file_id(lost.path), 0, gap, lost.coordinate, key=key)

    def _problem(self, kind: ProblemKind, source: Source, message: str, tensor: str) -> None:
        self.builder.problems.append(Problem(kind, source.path, message, source.coordinate, tensor))


def _said(tensor: Described) -> str:
    return f"{tensor.dtype_name}{list(tensor.shape)}"


def _replicas(held: Sequence[_Held]) -> dict[int, list[_Held]]:
    """Parts by the lowest rank of the replica that they make up, in order.

    The first rank that has a region has it for the first replica, the second one for the second.
    """
    seen: Counter[Box] = Counter()
    copies: dict[int, list[_Held]] = {}
    for one in sorted(held, key=lambda one: one.rank):
        copies.setdefault(seen[one.region], []).append(one)
        seen[one.region] += 1
    found: dict[int, list[_Held]] = {}
    for _, members in sorted(copies.items()):
        # An index that lists a part twice would give two replicas of one rank: then they overlap.
        found.setdefault(members[0].rank, []).extend(members)
    return found
