"""The Catalog: what one checkpoint stores, as columns. Pieces, tensors, files, scalars, problems.

A piece is one stored part of a tensor. A million pieces must fit in about 100 MB, so there is no Python object per
piece: :class:`Pieces` keeps typed columns, and a row becomes a frozen :class:`Piece` only when it is handed out.
Regions and strides have no fixed length, so they lie in one shared pool of int64; a piece holds its position there.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from auditor.model.dtype import DType
from auditor.model.encoding import Encoding
from auditor.model.mesh import EVERYWHERE, Coordinate, Mesh, Replicate, Shard
from auditor.model.optimizer import Export, ParameterGroup, Tie, parameter_of
from auditor.model.region import Box, FlatRange, Region


class Role(enum.Enum):
    """What a tensor is for."""

    PARAMETER = "parameter"
    MASTER = "master"
    FIRST_MOMENT = "first_moment"
    SECOND_MOMENT = "second_moment"
    MOMENT = "moment"
    BUFFER = "buffer"
    COUNTER = "counter"
    EMA = "ema"
    PADDING = "padding"
    OBJECT = "object"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A whole logical array behind one name: what the unsharded model holds."""

    name: str
    role: Role
    dtype: DType
    shape: tuple[int, ...]
    """Global shape."""
    order: int
    """Position in the model: embedding first, head last. Roles of one parameter share it."""
    replica_axes: tuple[str, ...] = ()
    """Mesh axes along which the tensor is replicated and its replicas are stored."""
    stored_once: tuple[str, ...] = ()
    """Mesh axes along which it is replicated in memory but only one replica is stored."""
    placement: tuple[tuple[str, Shard | Replicate], ...] = ()
    """Per mesh axis, how the tensor lies on it, where that is a cut along a dim or replication."""
    undetermined: str = ""
    """Why the layout does not say how the tensor lies on the mesh; empty where it does."""

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


class FileState(enum.Enum):
    """What became of a file that the layout implies."""

    PRESENT = "present"
    MISSING = "missing"
    CUT_SHORT = "cut short"
    """It ends too early, and nothing else is wrong with it: its writer may still be at work."""
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    CHANGED = "changed while it was read"


LOST = frozenset({FileState.MISSING, FileState.CUT_SHORT, FileState.DAMAGED})
"""States in which what a file held is not to be had from this checkpoint."""
WITHHELD = frozenset({FileState.UNREADABLE, FileState.CHANGED})
"""States that say nothing about the checkpoint, only that the auditor could not do its work."""


@dataclass(frozen=True, slots=True)
class File:
    """One stored object of the checkpoint."""

    name: str
    """Path below the root that was opened, with ``/``."""
    num_bytes: int = 0
    identity: str = ""
    """What the storage says to tell this content from another: size, times, etag."""
    state: FileState = FileState.PRESENT
    coordinate: Coordinate = EVERYWHERE
    detail: str = ""
    """For a file that is not simply present: what is wrong with it."""
    container: str = ""
    """The file format, as ``auditor.containers`` calls it."""
    opaque: tuple[tuple[str, int], ...] = ()
    """Calls of unknown globals in its pickles, which were not made: name and count."""
    encoding: Encoding | None = field(default=None, compare=False, repr=False)
    """How its content is stored, where pieces can't address its bytes as they are."""
    save_id: str = ""
    """What its writer drew by chance for the save of which it is a part, where that is recorded."""


FP8_SCALE, FP8_AMAX = "fp8_scale", "fp8_amax"
"""Names of scalars: the worst element of a tensor of scales, and of a history of largest values."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number recorded in a file: a step counter, a world size."""

    name: str
    value: float
    file: str
    coordinate: Coordinate = EVERYWHERE
    tensor: str = ""
    """The parameter whose optimizer state counts these steps, for counters kept per parameter."""
    dtype: DType | None = None
    """In which the file keeps it, for numbers kept as tensors."""
    optimizer: str = ""
    """Which of the optimizers that one file holds counts these steps; each goes at a pace of its own."""

    @property
    def saturated(self) -> bool:
        """Whether it is a count that adding one would not change in its dtype."""
        return self.dtype is not None and self.value >= self.dtype.largest_count


class ProblemKind(enum.Enum):
    """What an adapter can find wrong while it reads names, headers and small metadata."""

    OTHER_RANK = "file of another rank"
    LEFTOVER = "file of no rank of this mesh"
    RANKS_DISAGREE = "ranks disagree"
    METADATA = "metadata contradicts itself"
    UNPLACED = "stored tensor has no place"
    EMPTY = "stored without elements"
    ABSENT = "implied tensor is not stored"
    SHAPE = "shape differs from the configuration"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong that only the layout's knowledge can see; an invariant turns it into a finding."""

    kind: ProblemKind
    file: str
    message: str
    coordinate: Coordinate = EVERYWHERE
    tensor: str = ""
    order: int = -1
    """Position in the model of a tensor that the Catalog does not have."""
    ignored: bool = False
    """Whether loaders don't look at what is wrong: it misleads people and converters, and is a warning."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One row of the piece table."""

    index: int
    tensor: int
    file: int
    offset: int
    """First byte of the piece's first element in the file; where the file has an encoding, in its content."""
    shape: tuple[int, ...]
    """As stored: the region's shape, or ``(n,)`` for a flat range."""
    strides: tuple[int, ...]
    """Elements between neighbours along each dim of ``shape``."""
    region: Region
    coordinate: Coordinate
    replica: int
    """Number of the replica to which the piece belongs, 0 for the lowest coordinate."""
    key: str
    """The name by which the file itself knows the stored array."""


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of an array stored without gaps in C order."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def placed_in_file(piece: Piece, shape: Sequence[int], box: Box) -> tuple[int, tuple[int, ...]]:
    """Where ``box`` of a tensor of ``shape`` lies in a piece that contains it: offset and strides, in elements."""
    if isinstance(piece.region, FlatRange):
        strides = c_strides(shape)
        return sum(a * s for a, s in zip(box.start, strides, strict=True)) - piece.region.start, strides
    moved = (a - b for a, b in zip(box.start, piece.region.start, strict=True))
    return sum(d * s for d, s in zip(moved, piece.strides, strict=True)), piece.strides


class Pieces:
    """The piece table: one numpy column a field."""

    tensor: NDArray[np.int32]
    file: NDArray[np.int32]
    offset: NDArray[np.int64]
    coordinate: NDArray[np.int32]
    replica: NDArray[np.int32]
    key: NDArray[np.int32]
    num_dims: NDArray[np.int8]
    """-1 marks a flat range, which takes two numbers of the pool; a box of n dims takes 2n."""
    region_at: NDArray[np.int64]
    strides_at: NDArray[np.int64]
    """-1: C order of the region's shape."""
    pool: NDArray[np.int64]

    COLUMNS = ("tensor", "file", "offset", "coordinate", "replica", "key", "num_dims", "region_at", "strides_at")

    def __init__(
        self, columns: Mapping[str, NDArray[np.int64]], coordinates: Sequence[Coordinate], keys: Sequence[str]
    ) -> None:
        for name in (*self.COLUMNS, "pool"):
            setattr(self, name, columns[name])
        self.coordinates = tuple(coordinates)
        self.keys = tuple(keys)

    def __len__(self) -> int:
        return len(self.tensor)

    def region(self, index: int) -> Region:
        """The region of piece ``index`` in its tensor."""
        at, dims = int(self.region_at[index]), int(self.num_dims[index])
        if dims < 0:
            return FlatRange(int(self.pool[at]), int(self.pool[at + 1]))
        numbers = self.pool[at : at + 2 * dims].tolist()
        return Box(tuple(numbers[:dims]), tuple(numbers[dims:]))

    def __getitem__(self, index: int) -> Piece:
        region = self.region(index)
        shape = (region.num_elements,) if isinstance(region, FlatRange) else region.shape
        at = int(self.strides_at[index])
        strides = c_strides(shape) if at < 0 else tuple(self.pool[at : at + len(shape)].tolist())
        return Piece(
            index, int(self.tensor[index]), int(self.file[index]), int(self.offset[index]), shape, strides, region,
            self.coordinates[self.coordinate[index]], int(self.replica[index]), self.keys[self.key[index]],
        )  # fmt: skip

    def __iter__(self) -> Iterator[Piece]:
        return (self[index] for index in range(len(self)))

    def only(self, tensors: Sequence[int]) -> Pieces:
        """The pieces of these tensors, which are numbered anew in this order."""
        new_number = np.full(int(self.tensor.max(initial=-1)) + 1, -1, np.int32)
        inside = [number for number in tensors if number < len(new_number)]
        new_number[inside] = np.flatnonzero(np.isin(tensors, inside)).astype(np.int32)
        kept = np.flatnonzero(new_number[self.tensor] >= 0)
        columns = {name: getattr(self, name)[kept] for name in self.COLUMNS}
        columns["tensor"] = new_number[columns["tensor"]]
        return Pieces({**columns, "pool": self.pool}, self.coordinates, self.keys)

    @cached_property
    def _num_elements(self) -> NDArray[np.int64]:
        counts = np.ones(len(self), np.int64)
        flat = self.num_dims < 0
        at = self.region_at[flat]
        counts[flat] = np.maximum(self.pool[at + 1] - self.pool[at], 0) if len(at) else 0
        for dims in np.unique(self.num_dims[self.num_dims > 0]).tolist():
            rows = np.flatnonzero(self.num_dims == dims)
            at = self.region_at[rows]
            for dim in range(dims):
                counts[rows] *= np.maximum(self.pool[at + dims + dim] - self.pool[at + dim], 0)
        counts.flags.writeable = False
        return counts

    def num_elements(self) -> NDArray[np.int64]:
        """Elements of every piece."""
        return self._num_elements


@dataclass(frozen=True)
class Catalog:
    """All that one checkpoint stores for one step. Immutable; made by an adapter from names and headers alone."""

    step: int
    path: str
    """Folder (or file) of the checkpoint below the root that was opened."""
    format: str
    mesh: Mesh
    tensors: tuple[Tensor, ...]
    replicas: tuple[tuple[Coordinate, ...], ...]
    """Per tensor, the coordinates (along its replica axes) of its replicas, lowest first."""
    pieces: Pieces
    files: tuple[File, ...]
    scalars: tuple[Scalar, ...] = ()
    problems: tuple[Problem, ...] = ()
    opaque: Mapping[str, int] = field(default_factory=dict)
    """Objects of unknown classes that were met and not made: class name to count."""
    unclaimed: tuple[str, ...] = ()
    """Files in the folder that no loader of this format reads."""
    not_implied: str | None = None
    """For formats whose configuration implies which tensors the model has: why this one doesn't, empty where it does.
    None for formats whose own records say it."""
    groups: tuple[ParameterGroup, ...] = ()
    """The optimizer's parameter groups, one entry a file and group."""
    ties: tuple[Tie, ...] = ()
    """Parameters that are said to be tied."""
    exports: tuple[Export, ...] = ()
    """Parameters that are stored once more for others to load."""
    unseen: str = ""
    """Why it isn't known whether files are there that belong to these; empty where it is."""
    masters_alone: bool = False
    """Whether a parameter may be stored as its fp32 master alone, as ZeRO stage 3 does."""
    unfinished: str = ""
    """What says that the step's writer did not finish it, in formats that mark this; empty where nothing does."""
    finished: bool = False
    """Whether the format's own mark says that it did; what lacks was lost later then."""
    ranks_counted: bool = False
    """Whether the mesh has as many ranks as there are files of: nothing records how many there should be."""

    @cached_property
    def rows_by_tensor(self) -> dict[int, NDArray[np.int64]]:
        """Tensor number to the rows of its pieces in stored order, for tensors that have pieces."""
        order = np.argsort(self.pieces.tensor, kind="stable")
        tensors, starts = np.unique(self.pieces.tensor[order], return_index=True)
        return dict(zip(tensors.tolist(), np.split(order, starts[1:]), strict=True)) if len(order) else {}

    def rows_of(self, tensor: int, replica: int) -> NDArray[np.int64]:
        """The rows of one replica's pieces."""
        rows = self.rows_by_tensor.get(tensor, np.zeros(0, np.int64))
        mine: NDArray[np.int64] = rows[self.pieces.replica[rows] == replica]
        return mine

    def only(self, chosen: Callable[[str], bool]) -> Catalog:
        """This Catalog with only the tensors whose name is ``chosen``; files, scalars and problems stay.

        Moments with names of their own (``<parameter>.<key>``) are chosen with their parameter. Of the ties stay those
        of which all members are chosen.
        """
        kept = self.chosen(chosen)
        return replace(
            self,
            tensors=tuple(self.tensors[number] for number in kept),
            replicas=tuple(self.replicas[number] for number in kept),
            pieces=self.pieces.only(kept),
            ties=tuple(tie for tie in self.ties if all(map(chosen, tie.names))),
        )

    def chosen(self, chosen: Callable[[str], bool]) -> list[int]:
        """The numbers of the tensors that :meth:`only` keeps."""
        mine = {tensor.name for tensor in self.tensors if tensor.role is Role.PARAMETER and chosen(tensor.name)}
        return [
            number
            for number, tensor in enumerate(self.tensors)
            if chosen(tensor.name) or (tensor.role is Role.MOMENT and parameter_of(tensor.name) in mine)
        ]

    def within(self, path: str) -> str:
        """A file's path below its step: what it is called in every step. A file that is a step is ``its file``."""
        return "its file" if path == self.path != "" else path.removeprefix(f"{self.path}/") if self.path else path

    def file_of(self, piece: int) -> File:
        """The file in which a piece lies."""
        return self.files[int(self.pieces.file[piece])]

    def num_bytes(self) -> NDArray[np.int64]:
        """Logical bytes of every piece."""
        bits = np.array([tensor.dtype.stored_bits for tensor in self.tensors] or [0], np.int64)
        sizes: NDArray[np.int64] = (self.pieces.num_elements() * bits[self.pieces.tensor] + 7) // 8
        return sizes
