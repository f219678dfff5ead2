"""Tensors that belong together: the roles of one parameter, one tensor in all layers; and what was seen of each."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from auditor.model.catalog import Catalog, Role
from auditor.model.dtype import Kind
from auditor.model.finding import Judgement, Location, Violation
from auditor.model.mesh import EVERYWHERE
from auditor.model.observation import Observations, Read
from auditor.model.pairing import Pairing, PairResult
from auditor.model.region import FlatRange
from auditor.model.run import StepEvidence

_NUMBER = re.compile(r"(?<![A-Za-z0-9])[0-9]+(?![A-Za-z0-9])")

MOMENTS = (Role.FIRST_MOMENT, Role.SECOND_MOMENT)


def by_role(catalog: Catalog) -> dict[Role, dict[str, int]]:
    """Role to name to the tensor's number. A name that one role has twice is in none: it says nothing certain."""
    counts = Counter((tensor.role, tensor.name) for tensor in catalog.tensors)
    found: dict[Role, dict[str, int]] = {role: {} for role in Role}
    for number, tensor in enumerate(catalog.tensors):
        if counts[tensor.role, tensor.name] == 1:
            found[tensor.role][tensor.name] = number
    return found


def siblings(catalog: Catalog, roles: Iterable[Role]) -> list[list[int]]:
    """Tensors of one role, dtype and shape whose names differ in layer (and expert) numbers alone, in stored order.

    A number counts where no letter or digit touches it: ``h.3.mlp``, ``layers_3/mlp``, not ``fc1`` or ``dense_4h``.
    """
    wanted = frozenset(roles)
    found: dict[object, list[int]] = defaultdict(list)
    for number, tensor in enumerate(catalog.tensors):
        if tensor.role in wanted:
            found[tensor.role, tensor.dtype, tensor.shape, _NUMBER.sub("#", tensor.name)].append(number)
    return list(found.values())


def layer(name: str) -> str:
    """The first number in a name, by the same rule; the name itself where there is none."""
    found = _NUMBER.search(name)
    return found[0] if found else name


@dataclass(frozen=True, slots=True)
class Seen:
    """What was measured of one whole replica of a tensor; see :data:`~auditor.model.observation.OBSERVED`."""

    lanes: tuple[int, int]
    num_elements: int
    num_zero: int
    num_not_finite: int
    minimum: float
    maximum: float
    sum_squares: float
    bits_used: int

    @property
    def largest(self) -> float:
        """The largest absolute value."""
        return max(abs(self.minimum), abs(self.maximum))

    @property
    def num_nonzero(self) -> int:
        """Elements that are not zero."""
        return self.num_elements - self.num_zero

    @property
    def num_telling(self) -> int:
        """Elements that are finite and not zero: equal bits of others say nothing."""
        return self.num_nonzero - self.num_not_finite

    @property
    def root_mean_square(self) -> float:
        """Of the finite elements."""
        return float(np.sqrt(self.sum_squares / max(self.num_elements - self.num_not_finite, 1)))


def seen_whole(catalog: Catalog, observations: Observations) -> dict[int, Seen]:
    """Tensor number to what was measured of its replicas: of the first that was read whole.

    Tensors without elements, and those of which no replica was read whole, are not in it.
    """
    return {tensor: replicas[0] for tensor, replicas in seen_replicas(catalog, observations).items()}


def seen_replicas(catalog: Catalog, observations: Observations) -> Mapping[int, list[Seen]]:
    """The same for every replica that was read whole."""
    of: Catalog | None
    found: Mapping[int, list[Seen]]
    of, found = observations.remembered.get("replicas", (None, {}))
    if of is not catalog:
        found = _seen_replicas(catalog, observations)
        observations.remembered["replicas"] = catalog, found
    return found


def _seen_replicas(catalog: Catalog, observations: Observations) -> dict[int, list[Seen]]:
    pieces, rows = catalog.pieces, observations.pieces
    if not len(pieces):
        return {}
    order = np.lexsort((pieces.replica, pieces.tensor))
    tensor, replica = pieces.tensor[order], pieces.replica[order]
    first = np.flatnonzero(np.concatenate([[True], (tensor[1:] != tensor[:-1]) | (replica[1:] != replica[:-1])]))
    sizes = np.add.reduceat(pieces.num_elements()[order], first)
    # Shapes that nobody can store may be recorded all the same.
    wanted = np.array([min(what.num_elements, 1 << 62) for what in catalog.tensors], np.int64)[tensor[first]]
    done = np.logical_and.reduceat(rows["read"][order] == Read.DONE, first)
    columns = _totals(rows[order], first)
    # Complex elements are counted by their two parts.
    parts = np.array([1 + (what.dtype.kind is Kind.COMPLEX) for what in catalog.tensors], np.int64)[tensor[first]]
    found: dict[int, list[Seen]] = defaultdict(list)
    for at in np.flatnonzero(done & (sizes == wanted) & (sizes > 0)).tolist():
        found[int(tensor[first[at]])].append(_seen(columns, at, int(sizes[at] * parts[at])))
    return dict(found)


def _totals(rows: NDArray[np.void], first: NDArray[np.int64]) -> Mapping[str, NDArray[np.generic]]:
    combine = {"minimum": np.minimum, "maximum": np.maximum, "bits_used": np.bitwise_or}
    names = [name for name in rows.dtype.names or () if name != "read"]
    return {name: combine.get(name, np.add).reduceat(rows[name], first) for name in names}


def _seen(columns: Mapping[str, NDArray[np.generic]], at: int, num_elements: int) -> Seen:
    value = {name: column[at].item() for name, column in columns.items()}
    return Seen(
        (value["lane0"], value["lane1"]), num_elements, value["num_zero"], value["num_nan"] + value["num_infinite"],
        value["minimum"], value["maximum"], value["sum_squares"], value["bits_used"],
    )  # fmt: skip


def drifted(catalog: Catalog, observations: Observations) -> frozenset[int]:
    """Tensors whose wholly read replicas are not all equal: REP speaks of them, and what compares them follows."""
    found = seen_replicas(catalog, observations)
    return frozenset(tensor for tensor, seen in found.items() if len({one.lanes for one in seen}) > 1)


UNREAD = "some of its bytes were not read"


def why_unread(evidence: StepEvidence) -> str:
    """The reason why an invariant can't speak about a tensor that was not read."""
    return evidence.unread or UNREAD


@dataclass(slots=True)
class Collected:
    """A judgement in the making."""

    num_holds: int = 0
    violations: list[Violation] = field(default_factory=list)
    undetermined: dict[str, list[str]] = field(default_factory=dict)
    not_applicable: Counter[str] = field(default_factory=Counter)
    held: set[str] = field(default_factory=set)
    """Subjects of which something was wrong before, and was undone."""

    def unknown(self, reason: str, subject: str) -> None:
        """Nothing can be said about ``subject``."""
        self.undetermined.setdefault(reason, []).append(subject)

    def undone(self, subject: str) -> None:
        """``subject`` holds, and what was wrong with it in the save before is over."""
        self.num_holds += 1
        self.held.add(subject)

    def judgement(self) -> Judgement:
        """The finished one."""
        undetermined = {reason: tuple(subjects) for reason, subjects in self.undetermined.items()}
        held = frozenset(self.held)
        return Judgement(self.num_holds, tuple(self.violations), undetermined, dict(self.not_applicable), held)


def of_tensor(evidence: StepEvidence, number: int, num_elements: int = 0, detail: str = "") -> Location:
    """Where a whole tensor is: the file and the place of its first piece."""
    rows = evidence.catalog.rows_of(number, 0)
    return of_row(evidence, number, int(rows[0]) if len(rows) else None, num_elements, detail)


def of_row(evidence: StepEvidence, number: int, row: int | None, num_elements: int = 0, detail: str = "") -> Location:
    """Where one piece of a tensor is."""
    catalog, tensor = evidence.catalog, evidence.catalog.tensors[number]
    place = EVERYWHERE if row is None else catalog.pieces[row].coordinate
    return Location(
        catalog.step, "" if row is None else catalog.file_of(row).name, tensor.name, tensor.role, tensor.order, place,
        num_elements=num_elements, detail=detail,
    )  # fmt: skip


def of_pair(
    evidence: StepEvidence, pairing: Pairing, result: PairResult, detail: str, accused: int | None = None
) -> Location:
    """Where two tensors that were compared element by element don't fit: the pieces that hold the first such element.

    ``accused``: which of the two is named, the left one if none is given; the other one's file is the reference.
    """
    sides = {pairing.left: result.left_replica, pairing.right: result.right_replica}
    rows = {number: _row_at(evidence.catalog, number, replica, result.first) for number, replica in sides.items()}
    accused = pairing.left if accused is None else accused
    other = pairing.right if accused == pairing.left else pairing.left
    index = np.unravel_index(max(result.first, 0), evidence.catalog.tensors[accused].shape)
    return replace(
        of_row(evidence, accused, rows[accused], result.num_beyond, detail),
        reference_file=of_row(evidence, other, rows[other]).file, num_elements_compared=result.num_compared,
        first_index=tuple(int(at) for at in index),
    )  # fmt: skip


def _row_at(catalog: Catalog, number: int, replica: int, index: int) -> int | None:
    """The piece that holds the element with this C-order index."""
    place = tuple(int(at) for at in np.unravel_index(max(index, 0), catalog.tensors[number].shape))
    rows = [int(row) for row in catalog.rows_of(number, replica)]
    for row in rows:
        region = catalog.pieces.region(row)
        if isinstance(region, FlatRange):
            inside = region.start <= index < region.stop
        else:
            inside = all(low <= at < high for at, low, high in zip(place, region.start, region.stop, strict=True))
        if inside:
            return row
    return rows[0] if rows else None
