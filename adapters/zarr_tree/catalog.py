"""Turns one step of a Zarr tree into a Catalog: a piece a chunk, and what contradicts itself.

Which replicas a tensor must have is told by its attribute ``replicas``, else by the mesh: one at every index of the
axes that its coordinates name. The replica of the lowest coordinate is the one under ``tensors/`` unless ``replicas/``
has it as well. What must be there but isn't has its pieces all the same, laid to the file that is lost.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from auditor.adapters.adapter import Folder
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.step_file import Opened
from auditor.adapters.zarr_tree.chunks import ChunkPlacing
from auditor.adapters.zarr_tree.description import (
    Description,
    Listed,
    coordinate,
    count,
    globs,
    mesh,
    placement,
    places,
    words,
)
from auditor.adapters.zarr_tree.files import DOCUMENT, StepFiles, Stored, said
from auditor.containers.zarr_names import escape, unescape
from auditor.containers.zarr_shards import Entries
from auditor.model.catalog import Catalog, File, FileState, Problem, ProblemKind, Role, Scalar
from auditor.model.dtype import UINT8, DType
from auditor.model.mesh import EVERYWHERE, Coordinate, Mesh, coordinates_along
from auditor.model.region import whole
from auditor.storage.store import Store, join

MAX_ABSENT = 1 << 14
"""Replicas of one step that only the mesh implies and that are not there; beyond it the mesh is no honest one."""


@dataclass(slots=True)
class _Tensor:
    """A tensor that is stored, or must be."""

    role: Role
    node: str
    name: str
    arrays: dict[Coordinate | None, Stored]
    listed: Listed | None = None
    replicas: tuple[Coordinate, ...] = ()

    @property
    def placed(self) -> bool:
        """Whether its replicas have coordinates."""
        return self.replicas != (EVERYWHERE,)

    @property
    def shown(self) -> Stored | None:
        """The array whose attributes speak for the tensor."""
        return next((stored for stored in self.arrays.values() if stored.array), None)


class ZarrTreeReading:
    """One step being read."""

    def __init__(self, store: Store, folder: Folder) -> None:
        self.folder, self.files = folder, StepFiles(store, folder)
        self.document = self.files.node("")
        self.said = said(self.document.content)
        described = said(self.files.node("catalog").content) if "catalog" in folder.folders else {}
        self.description = Description(described, self._path)
        self.builder = CatalogBuilder()
        self.num_absent = 0
        self.entries = Entries()
        self.tensors = self._tensors()
        self.mesh = self._mesh()

    def _path(self, name: str) -> str:
        return join(self.folder.path, name)

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the step."""
        self.builder.file(self.document.as_file(self.folder.path, "zarr"))
        stated = count(self.said.get("step"))
        if stated is not None and stated < 1 << 53:
            self.builder.scalars.append(Scalar("global_steps", float(stated), self._path(DOCUMENT)))
        for path, reason in self.files.foreign.items():
            self.builder.file(File(self._path(path), state=FileState.UNREADABLE, detail=f"it {reason}"))
        orders = self._orders()
        for tensor in self.tensors:
            self._add(tensor, orders[tensor.name], step)
        self._add_described()
        names = [name for name in self.folder.files if name != DOCUMENT]
        unclaimed = [*map(self._path, names), *self.files.unclaimed, *self._shown_twice()]
        catalog = self.builder.build(step, self.folder.path, format_name, self.mesh, {}, unclaimed)
        return replace(catalog, not_implied=self.description.not_implied())

    def _add_described(self) -> None:
        for file in self.description.lost_files():
            self.builder.file(file)
        self.builder.scalars += self.description.scalars()
        self.builder.problems += self.description.problems()
        self.builder.groups += self.description.groups(self._chosen)
        self.builder.ties += self.description.ties(self._chosen)

    def _problem(self, kind: ProblemKind, path: str, message: str, place: Coordinate, tensor: str = "") -> None:
        self.builder.problems.append(Problem(kind, self._path(path), message, place, tensor))

    # Which tensors there are

    def _tensors(self) -> list[_Tensor]:
        """Those that must be there first, in their order; then the others by name."""
        arrays = dict(self.files.arrays)
        found: list[_Tensor] = []
        for (role, node), listed in self._expected().items():
            found.append(_Tensor(role, node, listed.name, arrays.pop((role, node), {}), listed, listed.replicas))
        taken = {(tensor.role, tensor.name) for tensor in found}
        for role, node in sorted(arrays, key=lambda at: (_natural(at[1]), at[1], list(Role).index(at[0]))):
            name = unescape(node)
            if (role, name) in taken:
                path = next(iter(arrays[role, node].values())).path
                self._problem(ProblemKind.METADATA, path, f"is called {name}, as another array is", EVERYWHERE, name)
                continue
            taken.add((role, name))
            found.append(_Tensor(role, node, name, arrays[role, node]))
        for tensor in found:
            stated = (places(stored.said.get("replicas")) for stored in tensor.arrays.values())
            tensor.replicas = tensor.replicas or next(filter(None, stated), ())
        return found

    def _expected(self) -> dict[tuple[Role, str], Listed]:
        """Role and node name of what the step's own list says must be there."""
        expected: dict[tuple[Role, str], Listed] = {}
        seen: set[tuple[Role, str]] = set()
        for position, listed in enumerate(self.description.tensors()):
            if listed is None:
                continue
            node = escape(listed.name)
            node = f"{node}@{position}" if (listed.role, node) in seen else node
            seen.add((listed.role, node))
            if self._chosen(listed.name):
                expected[listed.role, node] = listed
        return expected

    def _chosen(self, name: str) -> bool:
        """Whether the tensor is among those that were exported."""
        return any(fnmatchcase(name, glob) for glob in globs(self.said))

    def _orders(self) -> dict[str, int]:
        """Name to position in the model: as stated, else by name."""
        orders: dict[str, int] = {}
        for position, tensor in enumerate(self.tensors):
            shown = tensor.shown
            stated = shown.said.get("order") if shown else None
            listed = tensor.listed.order if tensor.listed else position
            orders.setdefault(tensor.name, stated if type(stated) is int and abs(stated) < 1 << 62 else listed)
        return orders

    # Mesh and replicas

    def _mesh(self) -> Mesh:
        """The mesh that the step states, as large as the coordinates in it need."""
        stated = mesh(self.said)
        seen = {place for tensor in self.tensors for place in (*tensor.arrays, *tensor.replicas) if place is not None}
        degrees = dict(stated.axes) if stated else {}
        for place in sorted(seen, key=lambda place: place.indices):
            beyond = {axis: index for axis, index in place.indices if index >= degrees.get(axis, 0)}
            if beyond and stated:
                message = f"states the mesh {stated}, there is a replica at {place}"
                self._problem(ProblemKind.METADATA, DOCUMENT, message, place)
            degrees |= {axis: index + 1 for axis, index in beyond.items()}
        if degrees and stated is None and self.document.state is FileState.PRESENT:
            message = "states no mesh, so it is not known how many replicas there must be"
            self._problem(ProblemKind.METADATA, DOCUMENT, message, EVERYWHERE)
        if stated and degrees == dict(stated.axes):
            return stated
        return Mesh(tuple(degrees.items()))

    def _replicas(self, tensor: _Tensor) -> tuple[Coordinate, ...]:
        """Where replicas must be, lowest coordinate first."""
        present = sorted((place for place in tensor.arrays if place is not None), key=lambda place: place.indices)
        if tensor.replicas:
            return tensor.replicas
        axes = dict.fromkeys(axis for place in present for axis, _ in place.indices)
        due = math.prod(map(self.mesh.degree, axes))
        self.num_absent += due - len(present)
        if self.num_absent > MAX_ABSENT:
            message = f"states the mesh {self.mesh}: {tensor.name} must have {due} replicas, {len(present)} are there"
            self._problem(ProblemKind.METADATA, DOCUMENT, message, EVERYWHERE, tensor.name)
            return tuple(present)
        return coordinates_along(tuple((axis, tuple(range(self.mesh.degree(axis)))) for axis in axes))

    def _held(self, tensor: _Tensor) -> dict[Coordinate, Stored]:
        """The array of every replica, or the place where it must be."""
        held: dict[Coordinate, Stored] = {}
        for place in tensor.replicas:
            lowest = place == tensor.replicas[0]
            stored = tensor.arrays.get(place) or (tensor.arrays.get(None) if lowest else None)
            folder = "tensors" if lowest else f"replicas/{place}"
            path = f"{folder}/{tensor.role.value}/{tensor.node}"
            held[place] = stored or Stored(path, Opened.absent(DOCUMENT))
        return held

    def _shown_twice(self) -> Iterator[str]:
        """Arrays under ``tensors/`` whose replica lies under ``replicas/`` as well: that one is read."""
        for tensor in self.tensors:
            shown = tensor.arrays.get(None)
            if shown and tensor.replicas and tensor.replicas[0] in tensor.arrays:
                yield self._path(shown.path)

    # Tensors and pieces

    def _add(self, tensor: _Tensor, order: int, step: int) -> None:
        tensor.replicas = self._replicas(tensor)
        held = self._held(tensor)
        for place in tensor.arrays.keys() - held.keys() - {None}:
            message = "is a replica at a place where the tensor has none"
            self._problem(ProblemKind.LEFTOVER, tensor.arrays[place].path, message, place or EVERYWHERE, tensor.name)
        for place, stored in held.items():
            self._check_origin(tensor, place, stored, step)
        known = _usual(held, tensor.listed)
        files = {place: self._add_document(stored, place) for place, stored in held.items()}
        if known is None:
            return
        dtype, shape = known
        attributes = next((stored.said for stored in held.values() if stored.array), {})
        reasons = list(filter(None, map(_unread, held.values())))
        undetermined = attributes.get("undetermined")
        stated = undetermined if isinstance(undetermined, str) else ""
        number = self.builder.tensor(
            tensor.name, tensor.role, dtype, shape, order, replicas=tensor.replicas if tensor.placed else (),
            replica_axes=tuple(dict.fromkeys(axis for place in tensor.replicas for axis, _ in place.indices)),
            stored_once=words(attributes.get("stored_once")), placement=placement(attributes.get("placement")),
            undetermined=stated or (f"{reasons[0]} is not read" if reasons else ""),
        )  # fmt: skip
        for place, stored in held.items():
            self._add_pieces(number, tensor, stored, self._ranks(stored, place), files[place], known)

    def _ranks(self, stored: Stored, place: Coordinate) -> Coordinate:
        """What all ranks that hold the array share; its replica's place wins."""
        stated = coordinate(stored.said.get("ranks")) or EVERYWHERE
        return stated.along(axis for axis, index in stated.indices if index < self.mesh.degree(axis)).merged(place)

    def _add_document(self, stored: Stored, place: Coordinate) -> int:
        opened = stored.opened
        if reason := _unread(stored):
            opened = replace(opened, state=FileState.UNREADABLE, detail=f"{reason} is not read")
        return self.builder.file(opened.as_file(self._path(stored.path), "zarr", place))

    def _add_pieces(
        self, number: int, tensor: _Tensor, stored: Stored, place: Coordinate, document: int,
        known: tuple[DType, tuple[int, ...]],
    ) -> None:  # fmt: skip
        array, (dtype, shape) = stored.array, known
        key = stored.path
        if array is None or _unread(stored):
            self.builder.piece(number, document, 0, whole(shape), place, key=key)
            return
        own = _dtype(stored)
        if (own, array.shape) != known:
            found = f"{own.name if own else array.data_type}{list(array.shape)}"
            message = f"holds {tensor.name} as {found}, expected is {dtype.name}{list(shape)}"
            self._problem(ProblemKind.RANKS_DISAGREE, f"{stored.path}/{DOCUMENT}", message, place, tensor.name)
            return
        if not array.num_chunks:
            self.builder.piece(number, document, 0, whole(shape), place, key=key)
        ChunkPlacing(self.builder, self.files.store, stored, array, dtype, self._path, self.entries).add(number, place)

    def _check_origin(self, tensor: _Tensor, place: Coordinate, stored: Stored, step: int) -> None:
        """An array that was put in another's place still says what it was written as."""
        there = stored.said
        due: dict[str, object] = {"name": tensor.name, "role": tensor.role.value, "step": step}
        if tensor.placed:
            due["coordinate"] = place.as_dict()
        wrong = [f"{key} {there[key]}"[:200] for key, value in due.items() if key in there and there[key] != value]
        if wrong:
            message = f"was written as {', '.join(wrong)}"
            self._problem(ProblemKind.OTHER_RANK, f"{stored.path}/{DOCUMENT}", message, place, tensor.name)


def _unread(stored: Stored) -> str:
    """What in an array keeps its values from being read; empty where nothing does, or there is no array."""
    if stored.array is None or stored.array.unsupported:
        return stored.array.unsupported if stored.array else ""
    if isinstance(stored.said.get("unexported"), str):
        return "an array that was not exported"
    source = stored.said.get("source_dtype")
    return "" if _dtype(stored) else f"data type {stored.array.data_type}{f' for {source}' if source else ''}"[:200]


def _dtype(stored: Stored) -> DType | None:
    source = stored.said.get("source_dtype")
    return stored.array.dtype(source if isinstance(source, str) else "") if stored.array else None


def _usual(held: Mapping[Coordinate, Stored], listed: Listed | None) -> tuple[DType, tuple[int, ...]] | None:
    """Dtype and shape as listed, else as most replicas have them; None where nothing tells the shape."""
    if listed:
        return listed.dtype, listed.shape
    counts = Counter((_dtype(stored) or UINT8, stored.array.shape) for stored in held.values() if stored.array)
    return counts.most_common(1)[0][0] if counts else None


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts ``2.weight`` before ``10.weight``."""
    parts = re.split(r"(\d{1,18})", name, flags=re.A)
    return tuple((int(part), "") if part.isascii() and part.isdigit() else (-1, part) for part in parts)
