"""The witness of one step: what every rank held in memory when it was saved, by digest.

Writers throw replicas away: of a replicated tensor one copy lands in storage. Each rank digests its own pieces before
that and leaves a part; here the parts are put together into columns, and replicas are held against each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from auditor.model.catalog import Catalog, Role, c_strides
from auditor.model.dtype import DType
from auditor.model.mesh import Coordinate
from auditor.model.region import Box, FlatRange, Region

T = TypeVar("T")

WITNESSED = np.dtype([
    ("tensor", "i4"), ("place", "i4"), ("rank", "i4"), ("start", "i8"), ("stop", "i8"), ("lane0", "u8"),
    ("lane1", "u8"), ("num_nan", "i8"), ("num_infinite", "i8"), ("num_zero", "i8"), ("minimum", "f8"),
    ("maximum", "f8"), ("sum_squares", "f8"),
])  # fmt: skip
"""One row a piece in memory. ``start, stop``: its flat range, or the number of its box and -1. Measures as OBSERVED."""

MEASURES = ("lane0", "lane1", "num_nan", "num_infinite", "num_zero", "minimum", "maximum", "sum_squares")


def plainest(region: Region, shape: Sequence[int]) -> Region:
    """A region as a flat range, where its elements lie without gaps in the tensor's C order; else the box it is."""
    if isinstance(region, FlatRange):
        return region
    strides = c_strides(shape)
    if not region.num_elements:
        return FlatRange(0, 0)
    first = sum(a * s for a, s in zip(region.start, strides, strict=True))
    last = sum((b - 1) * s for b, s in zip(region.stop, strides, strict=True))
    return FlatRange(first, last + 1) if last + 1 - first == region.num_elements else region


@dataclass(frozen=True, slots=True)
class WitnessedTensor:
    """What a rank says of a tensor of which it holds a piece."""

    name: str
    role: Role | None
    """None: the name is the key under which the writer stores it; the Catalog tells what it is. Buffers may be said to
    be buffers all the same."""
    dtype: DType
    shape: tuple[int, ...]
    """Global shape."""


@dataclass(frozen=True, slots=True)
class WitnessPart:
    """What one rank left."""

    step: int
    rank: int
    num_ranks: int
    tensors: tuple[WitnessedTensor, ...]
    places: tuple[Coordinate, ...]
    """Indices along the mesh axes on which a piece's replicas lie."""
    boxes: tuple[Box, ...]
    pieces: NDArray[np.void]
    """Rows of :data:`WITNESSED`."""
    launch: str = ""
    """Equal in all ranks of one launch of the job; empty where nothing told it."""
    attempt: int = 0
    """How often this process had left a part of this step before."""
    taken: float = 0.0
    """Seconds since the epoch."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    file: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    """What the witness says of the replicas of one tensor."""

    held: Mapping[Coordinate, NDArray[np.void]]
    """Place to the rows of what is held there; empty where all replicas are equal."""
    num_places: int
    """In how many places a region is held, at most."""
    declared: bool
    """Whether the framework itself says that it is replicated; not only that every rank has one of that name."""


class Witness:
    """The parts of one step put together."""

    def __init__(
        self, parts: Sequence[WitnessPart], rejected: Mapping[str, str], seconds_before: float = 0.0
    ) -> None:  # fmt: skip
        self.seconds_before = seconds_before
        """How long before the newest file of the step it was taken."""
        self.rejected = dict(rejected)
        """File of a part that can't be used, to why."""
        # Their pieces are held here together, once.
        self.parts = tuple(replace(part, pieces=np.zeros(0, WITNESSED)) for part in parts)
        self.files = {part.rank: part.file for part in parts}
        self.num_ranks = max((part.num_ranks for part in parts), default=0)
        tensors: dict[WitnessedTensor, int] = {}
        places: dict[Coordinate, int] = {}
        boxes: dict[Box, int] = {}
        self.pieces: NDArray[np.void] = np.empty(sum(len(part.pieces) for part in parts), WITNESSED)
        at = 0
        for part in parts:
            _renumber(part, self.pieces[at : at + len(part.pieces)], tensors, places, boxes)
            at += len(part.pieces)
        self.tensors, self.places, self.boxes = tuple(tensors), tuple(places), tuple(boxes)

    @cached_property
    def lacks(self) -> str:
        """Why the witness does not speak for all ranks; empty where it does."""
        if self.rejected:
            file, reason = min(self.rejected.items())
            more = f", and {len(self.rejected) - 1} more like it" if len(self.rejected) > 1 else ""
            return f"a part of the witness can't be used: {file}: {reason}{more}"
        num_absent = self.num_ranks - len(self.files)
        absent = islice((rank for rank in range(self.num_ranks) if rank not in self.files), 4)
        named = ", ".join(map(str, absent)) + (", …" if num_absent > 4 else "")
        return f"{num_absent} of {self.num_ranks} ranks left no witness: {named}" if num_absent else ""

    def numbers(self, catalog: Catalog) -> dict[int, int]:
        """The Catalog's number of a tensor, for each of the witness's that it has in the same shape and dtype."""
        by_name = {(tensor.role, tensor.name): number for number, tensor in enumerate(catalog.tensors)}
        by_key = _tensors_by_key(catalog)
        found = {}
        for own, tensor in enumerate(self.tensors):
            number = None if tensor.role is None else by_name.get((tensor.role, tensor.name))
            if number is None and tensor.role in (None, Role.BUFFER, Role.PARAMETER):
                number = by_key.get(tensor.name)
            if number is not None and catalog.tensors[number].shape == tensor.shape:
                found[own] = number
        return found

    @cached_property
    def compared(self) -> dict[int, Compared]:
        """Own number of every tensor that has elements, to what its replicas say."""
        held = np.flatnonzero(self.pieces["start"] != self.pieces["stop"])
        tensor, start, stop = (self.pieces[name][held] for name in ("tensor", "start", "stop"))
        seen = self.pieces[held[np.lexsort((stop, start, tensor))]]
        if not len(seen):
            return {}
        opens = np.ones(len(seen), bool)
        opens[1:] = (np.diff(seen["tensor"]) != 0) | (np.diff(seen["start"]) != 0) | (np.diff(seen["stop"]) != 0)
        firsts = np.flatnonzero(opens)
        first = firsts[np.cumsum(opens) - 1]
        unlike = (seen["lane0"] != seen["lane0"][first]) | (seen["lane1"] != seen["lane1"][first])
        differing = set(np.unique(seen["tensor"][unlike]).tolist())
        num_places = np.diff(firsts, append=len(seen))
        borders = np.flatnonzero(np.diff(seen["tensor"], prepend=-1, append=-1))
        regions = np.searchsorted(firsts, borders)
        found = {}
        for at, (low, high) in enumerate(zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)):
            number = int(seen["tensor"][low])
            places = self._places(seen[low:high]) if number in differing else {}
            of_ranks = {self.places[place] for place in np.unique(seen["place"][low:high]).tolist()}
            declared = not any("rank" in place.as_dict() for place in of_ranks)
            found[number] = Compared(places, int(num_places[regions[at] : regions[at + 1]].max()), declared)
        return found

    def _places(self, rows: NDArray[np.void]) -> dict[Coordinate, NDArray[np.void]]:
        """The rows of one tensor by place; by rank, where several ranks of one place hold the same region."""
        index = rows["place"]
        axis = ""
        if len(np.unique(rows[["place", "start", "stop"]])) < len(rows):
            index, axis = rows["rank"], "rank"
        numbers = np.unique(index).tolist()
        found = {Coordinate.of(rank=n) if axis else self.places[n]: rows[index == n] for n in numbers}
        return dict(sorted(found.items(), key=lambda item: item[0].indices))

    def region(self, row: np.void) -> Region:
        """Where a piece lies in its tensor."""
        start, stop = int(row["start"]), int(row["stop"])
        return self.boxes[start] if stop < 0 else FlatRange(start, stop)


def _tensors_by_key(catalog: Catalog) -> dict[str, int]:
    """Stored keys that are of one tensor alone."""
    pieces = catalog.pieces
    if not len(pieces):
        return {}
    pairs = np.unique(np.stack([pieces.key.astype(np.int64), pieces.tensor.astype(np.int64)]), axis=1)
    keys, counts = np.unique(pairs[0], return_counts=True)
    alone = set(keys[counts == 1].tolist())
    return {pieces.keys[key]: tensor for key, tensor in pairs.T.tolist() if key in alone}


def _renumber(
    part: WitnessPart, rows: NDArray[np.void], tensors: dict[WitnessedTensor, int], places: dict[Coordinate, int],
    boxes: dict[Box, int],
) -> None:  # fmt: skip
    """Put a part's rows, with the numbers that tensors, places and boxes have in all parts together, into ``rows``."""
    rows[:] = part.pieces
    rows["tensor"] = _numbered(part.tensors, tensors)[rows["tensor"]]
    rows["place"] = _numbered(part.places, places)[rows["place"]]
    of_box = rows["stop"] < 0
    rows["start"][of_box] = _numbered(part.boxes, boxes)[rows["start"][of_box]]
    rows["rank"] = part.rank


def _numbered(items: Iterable[T], known: dict[T, int]) -> NDArray[np.int64]:
    return np.array([known.setdefault(item, len(known)) for item in items], np.int64)


def usable(parts: Iterable[WitnessPart], step: int) -> tuple[list[WitnessPart], dict[str, str]]:
    """The parts that belong together, and why each of the others doesn't.

    The newest part tells of which launch of the job the step is: what an earlier one left of the same step, before it
    was rolled back, is not of the checkpoint that is there now.
    """
    rejected = {part.file: f"it is of step {part.step}" for part in parts if part.step != step}
    ours = sorted((part for part in parts if part.step == step), key=lambda part: part.taken)
    if not ours:
        return [], rejected
    newest = ours[-1]
    attempt = max(part.attempt for part in ours if part.launch == newest.launch)
    kept = []
    for part in ours:
        if (part.launch, part.num_ranks) != (newest.launch, newest.num_ranks):
            rejected[part.file] = "it is of another launch of the job than the newest"
        elif part.attempt != attempt:
            rejected[part.file] = "it is of an earlier save of this step"
        elif not 0 <= part.rank < part.num_ranks:
            rejected[part.file] = f"it is of rank {part.rank} of {part.num_ranks}"
        else:
            kept.append(part)
    return sorted(kept, key=lambda part: part.rank), rejected
