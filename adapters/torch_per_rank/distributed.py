"""Tensors of which a rank file holds a part: what torch records of ``DTensor`` and ``ShardedTensor``, as inert data.

A DTensor records its mesh, how it lies along each axis, and the whole shape; this rank's part is a plain tensor in it.
A cut is torch's ``chunk``: parts of ``ceil(n / ranks)``, the last ones shorter or empty; axes cut one after another,
each what those before it left. A strided cut (FSDP over tensor parallelism) cuts first into ``split_factor`` parts, and
each of those over the ranks. A ShardedTensor lists the boxes of all ranks of its group.
Source: torch ``torch/distributed/tensor/placement_types.py``, ``_utils.py``; ``_shard/sharded_tensor/api.py``; 2.13.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from auditor.adapters.adapter import MAX_RANKS
from auditor.adapters.torch_per_rank.rank_mesh import MAX_AXES, RankMesh, device_mesh, grid, root_of, written_by
from auditor.containers.pickle_machine import Global, Opaque
from auditor.containers.torch_zip import MAX_DIMS, StoredTensor
from auditor.model.mesh import Placement, Replicate, Shard
from auditor.model.region import Box

_PARTS = frozenset({"DTensor", "ShardedTensor"})
_MAX_SPANS = 1 << 8
"""Boxes of one part: as many as the degrees of what is cut once more."""
_MAX_BOXES = 1 << 20
"""Boxes of one file's parts beyond one each."""
_MAX_MESHES = 256
_MAX_EXTENT = 1 << 53

Spans = list[tuple[int, int]]
"""Half-open ranges of one dim, in the order in which they lie in a part."""


class Held(NamedTuple):
    """A box of the whole tensor and where it lies in what a rank holds."""

    box: Box
    stored: int
    """Which of the stored parts."""
    start: tuple[int, ...]
    """First element within that."""


class Layout(Protocol):
    """How a tensor lies over ranks."""

    @property
    def mesh(self) -> RankMesh:
        """The ranks among which it is cut or replicated."""

    @property
    def placement(self) -> Placement:
        """By axis of that mesh."""

    def held(self, rank: int) -> Sequence[Held] | None:
        """What a rank has of it; None where it isn't on the mesh."""

    def shapes(self, rank: int) -> Sequence[tuple[int, ...]]:
        """Shapes of what a rank has to store of it."""


@dataclass(frozen=True, slots=True, eq=False)
class DistributedTensor(StoredTensor):
    """A tensor of which this file holds parts: dtype and shape are the whole one's."""

    layout: Layout
    parts: tuple[StoredTensor, ...]
    padded: bool = False
    """Whether the stored part goes on behind what the rank has of the tensor."""

    def fits(self, rank: int) -> bool:
        """Whether what is stored has the shapes that the layout implies for a rank."""
        shapes = [part.shape for part in self.parts]
        expected = [*self.layout.shapes(rank)]
        if self.padded:
            return len(shapes) == len(expected) and all(a >= b for a, b in zip(shapes, expected, strict=True))
        return shapes == expected


@dataclass(frozen=True, slots=True)
class Cut:
    """Along one axis of the mesh: the dim that is cut, and into how many parts first."""

    dim: int
    factor: int = 1


@dataclass(frozen=True)
class MeshLayout:
    """How a DTensor lies on its mesh."""

    shape: tuple[int, ...]
    mesh: RankMesh
    cuts: tuple[Cut | None, ...]
    """By axis; None where it is replicated."""
    order: tuple[int, ...]
    """Axes in the order in which they cut."""

    @property
    def placement(self) -> Placement:
        """By axis."""
        named = zip(self.mesh.names, self.cuts, strict=True)
        return {name: Shard(cut.dim) if cut else Replicate() for name, cut in named}

    def _spans(self, rank: int) -> list[Spans] | None:
        place = self.mesh.place(rank)
        if place is None:
            return None
        spans: list[Spans] = [[(0, extent)] for extent in self.shape]
        for axis in self.order:
            cut = self.cuts[axis]
            if cut is not None:
                spans[cut.dim] = _cut(spans[cut.dim], self.mesh.sizes[axis], place[axis], cut.factor)
        return spans

    def held(self, rank: int) -> Sequence[Held] | None:
        """One box, or several where a strided cut leaves gaps."""
        spans = self._spans(rank)
        return None if spans is None else [*_boxes(spans)]

    def shapes(self, rank: int) -> Sequence[tuple[int, ...]]:
        """The shape of the one part."""
        spans = self._spans(rank) or []
        return [tuple(sum(stop - start for start, stop in of_dim) for of_dim in spans)]


@dataclass(frozen=True)
class ListedLayout:
    """The boxes of each rank, as a ShardedTensor lists them."""

    mesh: RankMesh
    boxes: Mapping[int, tuple[Box, ...]]
    """By index in the group that shares the tensor."""

    @property
    def placement(self) -> Placement:
        """Cut along the last axis; groups, where there are several, have all of it each."""
        return {name: Replicate() for name in self.mesh.names[:-1]}

    def held(self, rank: int) -> Sequence[Held] | None:
        """The rank's boxes, each a stored part of its own."""
        place = self.mesh.place(rank)
        if place is None:
            return None
        boxes = self.boxes.get(place[-1], ())
        return [Held(box, at, (0,) * len(box.start)) for at, box in enumerate(boxes)]

    def shapes(self, rank: int) -> Sequence[tuple[int, ...]]:
        """The shapes of the rank's boxes."""
        return [held.box.shape for held in self.held(rank) or ()]


def _chunk(spans: Spans, number: int, step: int) -> Spans:
    """Elements ``[number·step, (number+1)·step)`` of what the spans hold end to end."""
    low, high, at = number * step, (number + 1) * step, 0
    found: Spans = []
    for start, stop in spans:
        first, last = max(low - at, 0), min(high - at, stop - start)
        if first < last:
            found.append((start + first, start + last))
        at += stop - start
    return found


def _cut(spans: Spans, ranks: int, index: int, factor: int) -> Spans:
    found: Spans = []
    step = -(-sum(stop - start for start, stop in spans) // factor)
    for number in range(factor):
        whole = _chunk(spans, number, step)
        size = sum(stop - start for start, stop in whole)
        found += _chunk(whole, index, -(-size // ranks))
    return found


def _boxes(spans: list[Spans]) -> Iterator[Held]:
    starts = [[*itertools.accumulate((b - a for a, b in of_dim), initial=0)] for of_dim in spans]
    for numbers in itertools.product(*(range(len(of_dim)) for of_dim in spans)):
        chosen = [of_dim[n] for of_dim, n in zip(spans, numbers, strict=True)]
        box = Box(tuple(a for a, _ in chosen), tuple(b for _, b in chosen))
        yield Held(box, 0, tuple(of_dim[n] for of_dim, n in zip(starts, numbers, strict=True)))


# From records


def is_part(value: object) -> bool:
    """Whether a record stands for a rank's part of a tensor. Its module moved between releases, its name did not."""
    if not isinstance(value, Opaque):
        return False
    return any(isinstance(item, Global) and item.name in _PARTS for item in (value.maker, *value.arguments))


class PartReader:
    """Reads the records of one file; what tensors share is read once."""

    def __init__(self) -> None:
        self._meshes: dict[int, RankMesh | None] = {}
        self._boxes: dict[int, dict[int, tuple[Box, ...]] | None] = {}
        self._boxes_left = _MAX_BOXES
        self.roots: dict[int, tuple[RankMesh, int]] = {}
        """Grids of which the tensors' meshes are parts, with the number of tensors."""
        self.writer: int | None = None
        """The rank that the records say wrote the file."""

    def num_ranks(self) -> list[int]:
        """How many ranks make up each of the grids."""
        return [math.prod(mesh.sizes) for mesh, _ in self.roots.values()]

    def read(self, value: object) -> DistributedTensor | None:
        """The tensor of a record; None where it can't be placed."""
        if not is_part(value) or not isinstance(value, Opaque):
            return None
        state = value.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            return self._dtensor(state[1])
        if isinstance(state, tuple) and len(state) >= 4 and isinstance(state[0], list):
            return self._sharded(state[0], state[1], state[2])
        return None

    def _mesh(self, record: object) -> RankMesh | None:
        if id(record) not in self._meshes and len(self._meshes) < _MAX_MESHES:
            self._meshes[id(record)] = device_mesh(record)
        return self._meshes.get(id(record))

    def _count(self, root: RankMesh, writer: int | None) -> None:
        self.roots[id(root)] = root, self.roots.get(id(root), (root, 0))[1] + 1
        self.writer = writer if self.writer is None else self.writer

    def _dtensor(self, state: Mapping[Any, Any]) -> DistributedTensor | None:
        local, record = state.get("_local_tensor"), state.get("_spec")
        spec = record.attributes() if isinstance(record, Opaque) else {}
        shape, mesh = _whole_shape(spec.get("tensor_meta")), self._mesh(spec.get("mesh"))
        if not isinstance(local, StoredTensor) or mesh is None or shape is None or len(shape) != len(local.shape):
            return None
        cuts = _cuts(spec.get("placements"), len(mesh.names), len(shape))
        num_boxes = math.prod(cut.factor for cut in cuts or () if cut)
        if cuts is None or num_boxes > _MAX_SPANS or num_boxes - 1 > self._boxes_left:
            return None
        self._boxes_left -= num_boxes - 1
        self._count(self._mesh(root_of(spec.get("mesh"))) or mesh, written_by(spec.get("mesh")))
        layout = MeshLayout(shape, mesh, cuts, _order(spec.get("shard_order"), len(cuts)))
        return DistributedTensor(local.dtype, shape, local.strides, local.offset, local.storage, layout, (local,))

    def _sharded(self, shards: Sequence[object], metadata: object, group: object) -> DistributedTensor | None:
        about = metadata.attributes() if isinstance(metadata, Opaque) else {}
        shape, listed = _counts(about.get("size")), about.get("shards_metadata")
        if shape is None or not isinstance(listed, list) or not 0 < len(listed) <= MAX_RANKS:
            return None
        mesh, members = _group(group)
        if mesh is None:
            return None
        if id(listed) not in self._boxes:
            self._boxes[id(listed)] = _listed_boxes(listed, members, len(shape))
        boxes, parts = self._boxes[id(listed)], [_shard_tensor(shard) for shard in shards]
        local = [part for part in parts if part is not None]
        if boxes is None or len(local) != len(parts) or not local:
            return None
        self._count(mesh, members.global_rank)
        first = local[0]
        return DistributedTensor(
            first.dtype, shape, first.strides, first.offset, first.storage, ListedLayout(mesh, boxes), tuple(local)
        )


def flat_state(owner: StoredTensor, kept: StoredTensor) -> StoredTensor:
    """What an optimizer keeps of a flat parameter: of each rank's part as much, and padding behind the last ones."""
    if not isinstance(owner, DistributedTensor) or isinstance(kept, DistributedTensor):
        return kept
    if len(owner.shape) != 1 or len(kept.shape) != 1 or len(owner.parts) != 1 or len(owner.layout.mesh.names) > 2:
        return kept
    ranks = owner.layout.mesh.sizes[-1]
    if kept.shape[0] != -(-owner.shape[0] // ranks):
        return kept
    return DistributedTensor(
        kept.dtype, owner.shape, kept.strides, kept.offset, kept.storage, owner.layout, (kept,), padded=True
    )


def _counts(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, (tuple, list)) or len(value) > MAX_DIMS:
        return None
    if not all(type(n) is int and 0 <= n < _MAX_EXTENT for n in value) or math.prod(value) >= _MAX_EXTENT:
        return None
    return tuple(value)


def _whole_shape(record: object) -> tuple[int, ...] | None:
    """Of a ``TensorMeta``: a named tuple of shape, strides and dtype."""
    arguments = record.arguments if isinstance(record, Opaque) else ()
    return _counts(arguments[0]) if arguments else None


def _cuts(records: object, num_axes: int, num_dims: int) -> tuple[Cut | None, ...] | None:
    if not isinstance(records, (tuple, list)) or len(records) != num_axes:
        return None
    found: list[Cut | None] = []
    for record in records:
        kind = record.maker.name if isinstance(record, Opaque) and isinstance(record.maker, Global) else ""
        state = record.attributes() if isinstance(record, Opaque) else {}
        dim, factor = state.get("dim"), state.get("split_factor", 1)
        if kind == "Replicate":
            found.append(None)
        elif kind not in ("Shard", "_StridedShard") or type(dim) is not int or type(factor) is not int:
            return None
        elif -num_dims <= dim < num_dims and 0 < factor <= _MAX_SPANS:
            found.append(Cut(dim % num_dims, factor))
        else:
            return None
    return tuple(found)


def _order(records: object, num_axes: int) -> tuple[int, ...]:
    """Axes in the order in which they cut: as they are listed, unless the record has it otherwise."""
    axes: list[int] = []
    for record in records if isinstance(records, tuple) and len(records) <= MAX_AXES else ():
        arguments = record.arguments if isinstance(record, Opaque) else ()
        stated = arguments[1] if len(arguments) > 1 and isinstance(arguments[1], tuple) else ()
        axes += [axis for axis in stated if type(axis) is int and 0 <= axis < num_axes and axis not in axes]
    return (*axes, *(axis for axis in range(num_axes) if axis not in axes))


class _Members(NamedTuple):
    """A ``ProcessGroupState``."""

    global_rank: int
    local_size: int


def _group(record: object) -> tuple[RankMesh | None, _Members]:
    """The grid of a sharded tensor's ranks: one group, or several of neighbours that each have the whole."""
    state = record.attributes() if isinstance(record, Opaque) else {}
    keys = ("local_rank", "global_rank", "local_world_size", "global_world_size")
    numbers = [n for key in keys if type(n := state.get(key)) is int and 0 <= n <= MAX_RANKS]
    if len(numbers) < len(keys) or not numbers[2] or numbers[3] % numbers[2]:
        return None, _Members(0, 0)
    local, rank, size, world = numbers
    if rank >= world or rank % size != local:
        return None, _Members(rank, size)
    groups = world // size
    mesh = grid(("dp",), (size,)) if groups == 1 else grid(("dp_replicate", "dp_shard"), (groups, size))
    return mesh, _Members(rank, size)


def _listed_boxes(records: Sequence[object], members: _Members, num_dims: int) -> dict[int, tuple[Box, ...]] | None:
    found: dict[int, list[Box]] = {}
    for record in records:
        state = _fields(record)
        start, sizes, place = (
            _counts(state.get("shard_offsets")),
            _counts(state.get("shard_sizes")),
            state.get("placement"),
        )
        rank = place.attributes().get("_rank") if isinstance(place, Opaque) else None
        if start is None or sizes is None or not len(start) == len(sizes) == num_dims or type(rank) is not int:
            return None
        box = Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
        found.setdefault(rank % members.local_size, []).append(box)
    return {index: tuple(boxes) for index, boxes in found.items()}


def _shard_tensor(record: object) -> StoredTensor | None:
    tensor = _fields(record).get("tensor")
    return tensor if isinstance(tensor, StoredTensor) else None


def _fields(record: object) -> Mapping[str, Any]:
    """Of a class with slots: its state is a pair, the second of which has the names."""
    state = record.state if isinstance(record, Opaque) else None
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        return state[1]
    return state if isinstance(state, dict) else {}


def likeness(tensor: StoredTensor) -> object:
    """What rank files that hold one tensor agree on."""
    how = tuple(tensor.layout.placement.items()) if isinstance(tensor, DistributedTensor) else None
    return tensor.shape, tensor.dtype, how
