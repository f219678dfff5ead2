"""The tree of one run. Specified in ``docs/zarr-layout.md``.

steps/<n>/tensors/<role>/<name>                each logical tensor, of its global shape
steps/<n>/replicas/<coordinate>/<role>/<name>  each stored replica
steps/<n>/pieces/<id>                          the stored parts
steps/<n>/catalog/<column>                     the Catalog's columns
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from auditor.containers.zarr_names import escape
from auditor.model.catalog import Catalog, Pieces, Role, Tensor
from auditor.model.mesh import EVERYWHERE, Coordinate, Shard
from auditor.model.region import Box, whole
from auditor.storage.store import Store
from auditor.view.assemble import Seen, SourceLostError, element_type, read_box, read_piece
from auditor.view.description import description
from auditor.view.nodes import Array, Group, Node, group

SCHEMA_VERSION = 1
AGREEMENT_BYTES = 64 << 20
"""Whether replicas agree is found by reading them, when their array is opened, up to this size; else it is unknown."""


@dataclass(frozen=True, slots=True)
class StepNode:
    """One step of the run, whose Catalog is read when something in it is asked for."""

    name: str
    """Node name: the step's number."""
    load: Callable[[], Catalog]


def run_tree(store: Store, steps: Sequence[StepNode]) -> Group:
    """The root group of a run."""
    by_name = {step.name: step for step in steps}

    @lru_cache(maxsize=4)
    def step(name: str) -> Node | None:
        return StepTree(store, by_name[name].load()).node() if name in by_name else None

    root = {"auditor": {"schema_version": SCHEMA_VERSION}}
    return group({"steps": Group(lambda: list(by_name), step)}, root)


class StepTree:
    """The nodes of one step."""

    def __init__(self, store: Store, catalog: Catalog) -> None:
        self.store, self.catalog = store, catalog
        self.ids: dict[tuple[Role, str], int] = {}
        """Role and node name to the tensor's number."""
        for number, tensor in enumerate(catalog.tensors):
            node = escape(tensor.name)
            # Ranks that disagree on a shape hold several tensors of one name: each is shown.
            self.ids[tensor.role, f"{node}@{number}" if (tensor.role, node) in self.ids else node] = number
        self.places = sorted({place for places in catalog.replicas for place in places}, key=lambda c: c.indices)

    def node(self) -> Group:
        """The step's group."""
        return group({
            "tensors": self.roles(None),
            "replicas": Group(lambda: map(place_name, self.places), self.replica),
            "pieces": Group(lambda: map(str, range(len(self.catalog.pieces))), self.piece),
            "catalog": self.columns(),
        }, {"auditor": self.attributes()})  # fmt: skip

    def attributes(self) -> dict[str, Any]:
        """What is said of the step."""
        catalog = self.catalog
        order = {"rank_order": [axis for axis, _ in catalog.mesh.axes]} if catalog.mesh.ordered else {}
        return {
            "schema_version": SCHEMA_VERSION, "step": catalog.step, "format": catalog.format, "path": catalog.path,
            "mesh": dict(catalog.mesh.axes), **order,
        }  # fmt: skip

    def replica(self, name: str) -> Node | None:
        """The roles of the replicas at one place."""
        place = next((place for place in self.places if place_name(place) == name), None)
        return self.roles(place) if place is not None else None

    def roles(self, place: Coordinate | None) -> Group:
        """Groups of roles; of all tensors, or of those that have a replica at ``place``."""
        present: dict[Role, list[str]] = {}
        for (role, node), number in self.ids.items():
            if place is None or place in self.catalog.replicas[number]:
                present.setdefault(role, []).append(node)
        return group({role.value: self.role(role, nodes, place) for role, nodes in present.items()})

    def role(self, role: Role, nodes: Sequence[str], place: Coordinate | None) -> Group:
        """The tensors of one role."""
        known = frozenset(nodes)
        return Group(lambda: nodes, lambda node: self.tensor(self.ids[role, node], place) if node in known else None)

    def tensor(self, number: int, place: Coordinate | None) -> Array:
        """One tensor, or its replica at ``place``."""
        places = self.catalog.replicas[number]
        replica = 0 if place is None else places.index(place)
        if place is None and len(places) > 1:
            return self.array(number, replica, lambda: {"replicas_agree": self.agree(number)})
        return self.array(number, replica)

    def array(
        self, number: int, replica: int, more: Callable[[], Mapping[str, Any]] = dict, seen: Seen | None = None
    ) -> Array:
        """One replica of a tensor; ``more``: attributes besides the usual ones; ``seen``: is shown what is read."""
        what = self.catalog.tensors[number]
        names = tuple(f"{escape(what.name)}.{dim}" for dim in range(len(what.shape)))
        return Array(
            what.shape, element_type(what), lambda box: read_box(self.store, self.catalog, number, replica, box, seen),
            names, lambda: {"auditor": {**self.of_replica(number, replica), **more()}},
        )  # fmt: skip

    def of_replica(self, number: int, replica: int) -> dict[str, Any]:
        """What is said of one replica."""
        catalog, what, places = self.catalog, self.catalog.tensors[number], self.catalog.replicas[number]
        rows = catalog.rows_of(number, replica)
        shared = [set(catalog.pieces.coordinates[at].indices) for at in set(catalog.pieces.coordinate[rows].tolist())]
        held = Coordinate.of(**dict(set.intersection(*shared))) if shared else Coordinate()
        stated = {"stored_once": list(what.stored_once), "undetermined": what.undetermined}
        several = {"replicas": [place.as_dict() for place in places]} if len(places) > 1 else {}
        files = np.unique(catalog.pieces.file[rows])
        return {
            **self.common(what), "order": what.order, "coordinate": places[replica].as_dict(),
            "ranks": held.merged(places[replica]).as_dict(), **several,
            **{key: value for key, value in stated.items() if value},
            "source": [catalog.files[file].name for file in files.tolist()],
        }  # fmt: skip

    def common(self, what: Tensor) -> dict[str, Any]:
        """What is said of a tensor, whichever replica or piece of it is shown."""
        placement = {
            axis: f"shard:{how.dim}" if isinstance(how, Shard) else "replicate" for axis, how in what.placement
        }
        return {
            "schema_version": SCHEMA_VERSION, "role": what.role.value, "name": what.name,
            "source_dtype": what.dtype.name, "packing": "none", "mesh": dict(self.catalog.mesh.axes),
            "placement": placement, "step": self.catalog.step,
        }  # fmt: skip

    def agree(self, number: int) -> bool | None:
        """Whether all replicas are equal; None where that is not known."""
        rows = self.catalog.rows_by_tensor.get(number, np.zeros(0, np.int64))
        if int(self.catalog.num_bytes()[rows].sum()) > AGREEMENT_BYTES:
            return None
        box = whole(self.catalog.tensors[number].shape)
        try:
            contents = {
                read_box(self.store, self.catalog, number, replica, box).tobytes()
                for replica in range(len(self.catalog.replicas[number]))
            }
        except SourceLostError:
            return None
        return len(contents) == 1

    def piece(self, name: str) -> Node | None:
        """One stored part."""
        if not name.isdigit() or len(name) > 18 or str(int(name)) != name or int(name) >= len(self.catalog.pieces):
            return None
        row = int(name)
        piece = self.catalog.pieces[row]
        what = self.catalog.tensors[piece.tensor]

        def attributes() -> Mapping[str, Any]:
            region = {"start": list(piece.region.start), "stop": list(piece.region.stop)} if isinstance(
                piece.region, Box
            ) else {"flat_start": piece.region.start, "flat_stop": piece.region.stop}  # fmt: skip
            return {"auditor": {**self.common(what), "coordinate": piece.coordinate.as_dict(), "region": region,
                                "source": [self.catalog.files[piece.file].name], "offset": piece.offset,
                                "key": piece.key}}  # fmt: skip

        def read(box: Box) -> Any:
            inside = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            return read_piece(self.store, self.catalog, row)[inside]

        names = tuple(f"{name}.{dim}" for dim in range(len(piece.shape)))
        return Array(piece.shape, element_type(what), read, names, attributes)

    def columns(self) -> Group:
        """The Catalog's columns, and what else it holds as attributes."""
        pieces = self.catalog.pieces
        arrays: dict[str, Node] = {name: _column(name, getattr(pieces, name)) for name in (*Pieces.COLUMNS, "pool")}
        return Group(
            lambda: arrays, arrays.get,
            lambda: {"auditor": {"schema_version": SCHEMA_VERSION, **description(self.catalog)}},
        )  # fmt: skip


def place_name(place: Coordinate) -> str:
    """The node name of a replica's coordinate."""
    return "all" if place == EVERYWHERE else str(place)


def _column(name: str, values: np.ndarray[Any, Any]) -> Array:
    little = values.astype(values.dtype.newbyteorder("<"))
    return Array(values.shape, little.dtype, lambda box: little[slice(box.start[0], box.stop[0])], (f"{name}.0",))


def lookup(root: Group, path: str) -> tuple[Node, str] | None:
    """The node to which ``path`` leads, and what of the path is left when an array is reached."""
    node: Node = root
    parts: list[str] = [part for part in path.split("/") if part]
    for at, part in enumerate(parts):
        if isinstance(node, Array) or part == "zarr.json":
            return node, "/".join(parts[at:])
        found = node.child(part)
        if found is None:
            return None
        node = found
    return node, ""


def keys(node: Node, prefix: str) -> Iterable[str]:
    """All keys at and below a node."""
    yield f"{prefix}zarr.json"
    if isinstance(node, Array):
        yield from (f"{prefix}{key}" for key in node.chunk_keys())
        return
    for name in node.children():
        child = node.child(name)
        if child is not None:
            yield from keys(child, f"{prefix}{name}/")
