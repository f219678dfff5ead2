"""Observations: what one streaming pass measured of the pieces of one checkpoint, as columns."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.model.catalog import Catalog
from auditor.model.joint import Joint, JointResult
from auditor.model.mesh import Coordinate
from auditor.model.pairing import Pairing, PairResult


class Read(enum.IntEnum):
    """What became of the reading of a piece."""

    NOT_ASKED = 0
    DONE = 1
    LOST = 2
    """The bytes are not there: the file is missing, damaged or too short. Damage of the checkpoint."""
    FAILED = 3
    """Storage did not give the bytes (permission, repeated transient errors). Says nothing of the checkpoint."""
    BROKEN = 4
    """The bytes are there but can't be decoded. Damage of the checkpoint."""


OBSERVED = np.dtype([
    ("read", "i1"), ("lane0", "u8"), ("lane1", "u8"), ("num_nan", "i8"), ("num_infinite", "i8"), ("num_zero", "i8"),
    ("minimum", "f8"), ("maximum", "f8"), ("sum_squares", "f8"), ("bits_used", "u8"),
])  # fmt: skip
"""One row a piece. ``lane0, lane1``: the tensor digest's two sums. ``minimum, maximum``: of the numbers that aren't
NaN (+inf, -inf where there is none); ``sum_squares``: of the finite ones, accumulated in float64. ``bits_used``: the
bitwise or of all elements (of 64-bit ones and smaller). Counts in elements, complex elements by their two parts."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How one replica of a tensor differs from the reference replica."""

    coordinate: Coordinate
    reference: Coordinate
    num_elements_differ: int
    num_elements_compared: int
    num_bits_differ: int
    """Summed over elements; saturates at 2**62."""
    max_abs_difference: float
    """Infinite where one side is not finite and the other is another number."""
    relative_difference: float
    """max |a-b| over max(|a|, |b|), both maxima over all finite elements compared."""
    max_ulps: int
    """Largest distance in representable values; -1 where the dtype is no float."""
    num_equal_as_numbers: int
    """Of the differing elements, those that compare equal as numbers (+0 and -0) or are NaN on both sides."""
    first_index: tuple[int, ...]
    """Global index of the first differing element in C order."""
    coordinates: tuple[Coordinate, ...] = ()
    """All replicas that are equal to ``coordinate``'s, itself included."""


@dataclass(frozen=True, slots=True)
class FileChecksums:
    """What the checksums that one file stores say of its bytes."""

    num_good: int = 0
    bad: tuple[str, ...] = ()
    """Parts of the file whose bytes don't fit their checksum."""
    num_without: int = 0
    """Parts that store none."""
    reason: str = ""
    """Why nothing could be read; empty where it was. No good and no bad parts: the file stores no checksums."""
    sha256: str = ""
    """Of the whole file, hexadecimal, where it was asked for."""


BUCKETS = 64
"""Numbers of a sketch."""


@dataclass(frozen=True, slots=True)
class Sketches:
    """Count-sketches of replicas, by which distances are told; see :mod:`auditor.observe.sketch`. Columns."""

    tensor: NDArray[np.int64]
    replica: NDArray[np.int64]
    values: NDArray[np.float64]
    """Shape (sketches, 64)."""


@dataclass(frozen=True, slots=True)
class Observations:
    """All that was measured of one checkpoint."""

    pieces: NDArray[np.void]
    """Rows of :data:`OBSERVED`, parallel to the Catalog's pieces."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """File number to what storage said, for pieces that are ``LOST`` or ``FAILED``."""
    broken: Mapping[int, str] = field(default_factory=dict)
    """Row to what keeps it from being decoded, for pieces that are ``BROKEN``."""
    changed: tuple[str, ...] = ()
    """Files that changed while they were read."""
    differences: Mapping[int, Sequence[Difference]] = field(default_factory=dict)
    """Tensor number to its measured differences; tensors beyond the evidence budget are not in it."""
    pairs: Mapping[Pairing, Sequence[PairResult]] = field(default_factory=dict)
    """What was measured of pairs of tensors; a pairing that was not asked for, or not read, is not in it."""
    checksums: Mapping[int, FileChecksums] = field(default_factory=dict)
    """File number to what its own checksums say, at level ``full``."""
    joints: Mapping[Joint, Sequence[JointResult]] = field(default_factory=dict)
    """What was measured over this step and the one before it; a joint that was not read whole is not in it."""
    sketches: Sketches | None = None
    """Of every replica of which something was read; None where none were asked for."""
    num_bytes_read: int = 0
    num_bytes_reread: int = 0
    remembered: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What several invariants compute of these observations, so that one does it for all."""


def unobserved(catalog: Catalog) -> Observations:
    """Observations of a checkpoint of which no weights were read."""
    return Observations(np.zeros(len(catalog.pieces), OBSERVED))


@dataclass(frozen=True, slots=True)
class Content:
    """A digest of what some tensors hold, by which two steps are compared after their observations are gone."""

    tensors: str
    """Digest of the tensors' roles and names: contents of other tensors are not compared."""
    digest: str


def contents(catalog: Catalog, observations: Observations, tensors: Iterable[int]) -> tuple[Content, ...]:
    """What those of ``tensors`` hold that were read whole; then those alone that are stored more than once.

    The latter are all that is read at level ``replicas``, so that steps read at different levels have something in
    common. A tensor's lowest replica speaks for it. Empty where nothing was read.
    """
    wanted = sorted(tensors, key=lambda number: (catalog.tensors[number].role.value, catalog.tensors[number].name))
    lanes: dict[int, _Lanes] = {}
    for (number, _), found in sorted(_totals(catalog, observations, wanted).items()):
        lanes.setdefault(number, found)
    read = [number for number in wanted if number in lanes]
    chosen = (read, [number for number in read if len(catalog.replicas[number]) > 1])
    return tuple(
        Content(
            _hashed((catalog.tensors[number].role.value, catalog.tensors[number].name) for number in numbers),
            _hashed(lanes[number] for number in numbers),
        )
        for numbers in chosen
        if numbers
    )


def _hashed(items: Iterable[object]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for item in items:
        found.update(repr(item).encode())
    return found.hexdigest()


def same_content(one: Sequence[Content], other: Sequence[Content]) -> bool | None:
    """Whether the same tensors hold the same in two steps; None where no tensors were read in both."""
    known = {content.tensors: content.digest for content in one}
    return next((known[content.tensors] == content.digest for content in other if content.tensors in known), None)


def distance(sketches: Sketches | None, tensor: int, one: int, other: int) -> float | None:
    """The relative distance of two replicas by their sketches, |a - b| / max(|a|, |b|); None where one has none."""
    if sketches is None:
        return None
    rows = [np.flatnonzero((sketches.tensor == tensor) & (sketches.replica == replica)) for replica in (one, other)]
    if not all(len(found) for found in rows):
        return None
    left, right = (sketches.values[found[0]] for found in rows)
    scale = max(float(np.linalg.norm(left)), float(np.linalg.norm(right)))
    apart = float(np.linalg.norm(left - right))
    return apart / scale if scale > 0 and np.isfinite(apart) else None


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """The replicas of one tensor, sorted into classes of equal content."""

    tensor: int
    classes: tuple[tuple[int, ...], ...]
    """Replica numbers; the replicas inside one class are bitwise equal. Largest class first, then lowest number."""
    incomplete: tuple[int, ...]
    """Replicas of which some part was not read."""

    @property
    def majority(self) -> tuple[int, ...] | None:
        """The class that holds more than half of the compared replicas, if there is one."""
        total = sum(map(len, self.classes))
        return self.classes[0] if self.classes and 2 * len(self.classes[0]) > total else None


def replica_groups(catalog: Catalog, observations: Observations) -> list[ReplicaGroup]:
    """Every tensor that is stored more than once, with its replicas sorted by content.

    Replicas are equal when their digests are: sums over pieces do not depend on where the pieces are cut. Where a
    replica is not whole, its pieces are compared with the pieces of the same region in the others.
    """
    stored = [tensor for tensor, replicas in enumerate(catalog.replicas) if len(replicas) > 1]
    totals = _totals(catalog, observations, stored)
    return [_sort_replicas(catalog, observations, tensor, totals) for tensor in stored]


_Lanes = tuple[int, int]


def _totals(catalog: Catalog, observations: Observations, tensors: Sequence[int]) -> dict[tuple[int, int], _Lanes]:
    """Tensor and replica to the sums over its pieces, of replicas of which all pieces were read."""
    pieces, seen = catalog.pieces, observations.pieces
    wanted = np.zeros(len(catalog.tensors), bool)
    wanted[list(tensors)] = True
    rows = np.flatnonzero(wanted[pieces.tensor]) if len(pieces) else np.zeros(0, np.int64)
    if not len(rows):
        return {}
    rows = rows[np.lexsort((pieces.replica[rows], pieces.tensor[rows]))]
    tensor, replica = pieces.tensor[rows], pieces.replica[rows]
    opens = (tensor[1:] != tensor[:-1]) | (replica[1:] != replica[:-1])
    first = np.flatnonzero(np.concatenate([[True], opens]))
    done = np.logical_and.reduceat(seen["read"][rows] == Read.DONE, first)
    # Unsigned sums wrap around, as those of a digest shall.
    lanes = [np.add.reduceat(seen[name][rows], first)[done].tolist() for name in ("lane0", "lane1")]
    whole = first[done]
    return dict(
        zip(
            zip(tensor[whole].tolist(), replica[whole].tolist(), strict=True),
            zip(*lanes, strict=True),
            strict=True,
        )
    )


def _sort_replicas(
    catalog: Catalog, observations: Observations, tensor: int, totals: Mapping[tuple[int, int], _Lanes]
) -> ReplicaGroup:
    replicas = range(len(catalog.replicas[tensor]))
    incomplete = tuple(replica for replica in replicas if (tensor, replica) not in totals)
    contents: dict[int, dict[object, _Lanes]]
    if incomplete:
        # Per piece, so that a replica with a hole is still compared where it has something to say.
        contents = {replica: _by_region(catalog, observations, tensor, replica) for replica in replicas}
    else:
        contents = {replica: {"all": totals[tensor, replica]} for replica in replicas}
    return ReplicaGroup(tensor, classes_of(contents), incomplete)


def _by_region(catalog: Catalog, observations: Observations, tensor: int, replica: int) -> dict[object, _Lanes]:
    mine = catalog.rows_of(tensor, replica)
    done = mine[observations.pieces["read"][mine] == Read.DONE]
    lanes = zip(*(observations.pieces[name][done].tolist() for name in ("lane0", "lane1")), strict=True)
    return {catalog.pieces.region(row): pair for row, pair in zip(done.tolist(), lanes, strict=True)}


def classes_of(contents: Mapping[int, Mapping[object, tuple[int, int]]]) -> tuple[tuple[int, ...], ...]:
    """Sort replicas into classes that agree on every region both have.

    A replica that has no region in common with any class was compared with nothing and is in no class.
    """
    classes: list[tuple[list[int], dict[object, tuple[int, int]]]] = []
    for replica, found in contents.items():
        met = [entry for entry in classes if not found.keys().isdisjoint(entry[1])]
        if not found or (classes and not met):
            continue
        for members, known in met:
            if all(known.get(region, value) == value for region, value in found.items()):
                members.append(replica)
                known.update(found)
                break
        else:
            classes.append(([replica], dict(found)))
    return tuple(sorted((tuple(members) for members, _ in classes), key=lambda c: (-len(c), c[0])))


class DifferenceClass(enum.Enum):
    """What kind of difference replicas show. Values are the report's words."""

    SINGLE_BIT = "single bit"
    GROSS = "gross"
    GROWING = "growing"
    ISOLATED_ULPS = "isolated ulps"
    NOISE_SEEDED_GROWTH = "noise-seeded growth"
    EQUAL_AS_NUMBERS = "equal as numbers"
    BUFFERS = "buffers"
