"""The pass over two saved steps: tensors of both are cut into cells, and read in lock-step, however each is cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from auditor.containers.encoded import open_file
from auditor.model.catalog import Catalog, File, FileState
from auditor.model.dtype import DType, Kind
from auditor.model.joint import Joint, JointResult
from auditor.model.region import as_boxes, refinement
from auditor.observe.decode import to_float64
from auditor.observe.lineup import MAX_MEETINGS
from auditor.observe.placing import Cell, Part, cell_of, parts
from auditor.observe.replay import REPLAY
from auditor.storage.store import Handle, StorageError, Store
from auditor.storage.strided import view

PART_BYTES = 1 << 20
"""Of one side are taken at once; widened to doubles, with what is worked out of them, that is about 20 MB a worker."""

Stream = tuple[bool, int]
"""Whether it is of the later step; the tensor's number."""


@dataclass(frozen=True, slots=True)
class Work:
    """The joints of tensors that go together, cut into cells. A plain record, so that any executor can ship it."""

    store: Store
    files: tuple[File, ...]
    """A side's file is a position in it."""
    joints: tuple[Joint, ...]
    sides: tuple[tuple[int, ...], ...]
    """Per joint, the sides of a cell that hold its tensors."""
    cells: tuple[Cell, ...]
    rows: tuple[tuple[int, ...], ...]
    """Per cell and joint, the row of the piece of the joint's first tensor."""

    @property
    def num_bytes(self) -> int:
        """To be read."""
        return sum(cell.num_bytes for cell in self.cells)

    def __call__(self) -> tuple[list[list[JointResult]] | None, int]:
        """Results per joint, or None where a file can't be read or changed; and the bytes that were read."""
        found: list[dict[int, JointResult]] = [{} for _ in self.joints]
        num_bytes = 0
        with ExitStack() as stack:
            try:
                handles = [stack.enter_context(open_file(self.store, file)) for file in self.files]
                if any(h.entry.identity != f.identity for h, f in zip(handles, self.files, strict=True)):
                    return None, 0
                for cell, rows in zip(self.cells, self.rows, strict=True):
                    for part in parts(cell, PART_BYTES):
                        num_bytes += self._part(part, rows, handles, found)
            except StorageError:
                return None, num_bytes
        return [list(of_joint.values()) for of_joint in found], num_bytes

    def _part(
        self, part: Part, rows: Sequence[int], handles: Sequence[Handle], found: list[dict[int, JointResult]]
    ) -> int:
        starts, length = part.starts(), part.shape[-1]
        loaded = [_load(part, number, handles[side.file]) for number, side in enumerate(part.cell.sides)]
        for number, (joint, sides) in enumerate(zip(self.joints, self.sides, strict=True)):
            with np.errstate(all="ignore"):
                beyond = REPLAY[joint.kind]([loaded[side] for side in sides], joint.constants)
            result = _result(rows[number], beyond, starts, length)
            known = found[number].get(result.row)
            found[number][result.row] = result if known is None else _added(known, result)
        return sum(values.size * side.width for values, side in zip(loaded, part.cell.sides, strict=True))


def _load(part: Part, number: int, handle: Handle) -> NDArray[np.float64]:
    """The numbers of one side of a part, in the tensor's C order."""
    side = part.cell.sides[number]
    first, last = part.extent(side)
    buffer = np.empty(last - first, np.uint8)
    handle.read_into(first, memoryview(buffer))  # type: ignore[arg-type]
    values = view(buffer.view(side.dtype.carrier), part.shape, side.strides)
    return to_float64(np.ascontiguousarray(values).reshape(-1), side.dtype)


def _result(row: int, beyond: NDArray[np.float64], starts: NDArray[np.int64], length: int) -> JointResult:
    worst = np.nan_to_num(beyond, nan=0.0, posinf=np.inf)
    places = np.flatnonzero(worst > 1)
    ends = [int(starts[at // length] + at % length) for at in places[[0, -1]].tolist()] if len(places) else [-1, -1]
    return JointResult(row, worst.size, len(places), float(worst.max(initial=0.0)), *ends)


def _added(one: JointResult, other: JointResult) -> JointResult:
    firsts = [first for first in (one.first, other.first) if first >= 0]
    return replace(
        one, num_compared=one.num_compared + other.num_compared, num_beyond=one.num_beyond + other.num_beyond,
        largest=max(one.largest, other.largest), first=min(firsts, default=-1), last=max(one.last, other.last),
    )  # fmt: skip


def works(store: Store, earlier: Catalog, later: Catalog, joints: Sequence[Joint]) -> list[Work]:
    """The joints, those that share tensors together."""
    groups: dict[tuple[int, ...], list[Joint]] = defaultdict(list)
    of_tensor: dict[Stream, list[Joint]] = {}
    for joint in joints:
        mine = [joint]
        for stream in _streams(joint):
            known = of_tensor.get(stream, [])
            mine += [other for other in known if other not in mine]
        for member in mine:
            for stream in _streams(member):
                of_tensor[stream] = mine
    groups = {tuple(map(id, members)): members for members in of_tensor.values()}
    return [
        work for members in groups.values() if (work := _work(store, earlier, later, tuple(members))) is not None
    ]  # fmt: skip


def _streams(joint: Joint) -> list[Stream]:
    return [*((True, number) for number in joint.later), *((False, number) for number in joint.earlier)]


def _work(store: Store, earlier: Catalog, later: Catalog, joints: tuple[Joint, ...]) -> Work | None:
    streams = list(dict.fromkeys(stream for joint in joints for stream in _streams(joint)))
    catalogs = [later if is_later else earlier for is_later, _ in streams]
    tensors = [catalog.tensors[number] for catalog, (_, number) in zip(catalogs, streams, strict=True)]
    if len({tensor.shape for tensor in tensors}) > 1 or not all(map(_readable, (tensor.dtype for tensor in tensors))):
        return None
    pieces = [
        [catalog.pieces[int(row)] for row in catalog.rows_of(number, 0)]
        for catalog, (_, number) in zip(catalogs, streams, strict=True)
    ]
    shape = tensors[0].shape
    boxes = [[(box, piece) for piece in own for box in as_boxes(piece.region, shape)] for own in pieces]
    meetings = 1
    for of_stream in boxes:
        meetings *= max(1, len(of_stream))
        if meetings > MAX_MEETINGS:
            return None
    cells, chosen = [], []
    files: dict[tuple[bool, int], int] = {}
    for cell, where in refinement([[box for box, _ in of_stream] for of_stream in boxes]):
        own = [side[at][1] for side, at in zip(boxes, where, strict=True)]
        made = cell_of(tensors[0], cell, own, [tensor.dtype for tensor in tensors])
        sides = tuple(
            replace(side, file=files.setdefault((stream[0], side.file), len(files)))
            for side, stream in zip(made.sides, streams, strict=True)
        )
        cells.append(replace(made, sides=sides))
        chosen.append(tuple(own[streams.index((True, joint.later[0]))].index for joint in joints))
    stored = tuple((later if is_later else earlier).files[number] for is_later, number in files)
    if any(file.state is not FileState.PRESENT for file in stored):
        return None
    places = tuple(tuple(streams.index(stream) for stream in _streams(joint)) for joint in joints)
    return Work(store, stored, joints, places, tuple(cells), tuple(chosen))


def _readable(dtype: DType) -> bool:
    return dtype.kind is Kind.FLOAT and dtype.bits >= 8


def compare_steps(work: Sequence[Work], executor: Executor) -> tuple[Mapping[Joint, Sequence[JointResult]], int]:
    """What was measured of every joint that could be read whole, and the bytes that were read for it."""
    found: dict[Joint, Sequence[JointResult]] = {}
    total = 0
    for one, (results, num_bytes) in zip(work, _done(work, executor), strict=True):
        total += num_bytes
        if results is not None:
            found.update(zip(one.joints, results, strict=True))
    return found, total


def _done(work: Sequence[Work], executor: Executor) -> Iterator[tuple[list[list[JointResult]] | None, int]]:
    return executor.map(_call, work)


def _call(work: Work) -> tuple[list[list[JointResult]] | None, int]:
    return work()
