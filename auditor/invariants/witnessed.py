"""INT: what a rank held in memory is what landed in storage, told by the witness that the hook left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.invariants.invariant import Invariant, Needs
from auditor.model.catalog import Catalog, Role
from auditor.model.finding import Judgement, LikelyCause, Location, Severity, Violation
from auditor.model.observation import Read
from auditor.model.region import Box
from auditor.model.run import StepEvidence
from auditor.model.tiling import flat_ranges
from auditor.model.witness import Witness

STALE_SECONDS = 3600.0
"""A step whose files are this much younger than its witness may have been saved again, by a job without the hook."""
STALE_SHARE = 0.5
"""… and was, where more than this share of its tensors hold something else."""

Rows = NDArray[np.int64]


def stored_as_witnessed(evidence: StepEvidence) -> Judgement:
    """Every stored piece has the bits that some rank held in memory when the step was saved."""
    if evidence.witness is None:
        return Judgement(not_applicable={"no witness was left of this step": 1})
    if not evidence.witness.parts:
        return Judgement(undetermined={evidence.witness.lacks: ("the witness",)})
    found = landed(evidence)
    if found.stale:
        return Judgement(undetermined={found.stale: tuple(sorted(found.names(found.unlike)))})
    violations, doubtful = [], dict(found.undetermined)
    for number, rows in found.unlike.items():
        writers = {row: _rank(evidence.catalog, row) for row in rows}
        if evidence.witness.lacks and any(rank not in evidence.witness.files for rank in writers.values()):
            # It may be what a rank held that left no witness.
            doubtful[number] = evidence.witness.lacks
        else:
            violations.append(_violation(evidence, number, rows))
    undetermined: dict[str, list[str]] = {}
    for number, reason in doubtful.items():
        undetermined.setdefault(reason, []).append(evidence.catalog.tensors[number].name)
    return Judgement(
        len(found.alike - doubtful.keys() - found.unlike.keys()), tuple(violations),
        {reason: tuple(names) for reason, names in undetermined.items()},
    )  # fmt: skip


class Landed:
    """What of a witness was found in storage."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.alike: set[int] = set()
        """Tensors of which something was compared."""
        self.unlike: dict[int, list[int]] = {}
        """Tensor to the rows of its pieces whose bits no rank held."""
        self.undetermined: dict[int, str] = {}
        self.stale = ""
        """Why the witness is not of this save; empty where nothing says so."""

    def names(self, numbers: Mapping[int, Any]) -> Iterator[str]:
        """The names of tensors."""
        return (self.catalog.tensors[number].name for number in numbers)


def landed(evidence: StepEvidence) -> Landed:
    """What was found of the witness, computed once for all that ask."""
    known = evidence.observations.remembered
    if "landed" not in known:
        known["landed"] = _landed(evidence)
    found: Landed = known["landed"]
    return found


def _landed(evidence: StepEvidence) -> Landed:
    catalog, witness, found = evidence.catalog, evidence.witness, Landed(evidence.catalog)
    assert witness is not None
    numbers = witness.numbers(catalog)
    rows = _rows(catalog, set(numbers.values()))
    read = evidence.observations.pieces["read"][rows] == Read.DONE
    for number in np.unique(catalog.pieces.tensor[rows[~read]]).tolist():
        found.undetermined[number] = evidence.unread or "storage did not give all of its bytes"
    rows = rows[read]
    stored, held = _keys(catalog, evidence, rows, witness), _witnessed_keys(witness, numbers)
    placed = _within(stored[:, :3], held[:, :3])
    same = _within(stored, held)
    tensors = catalog.pieces.tensor[rows]
    found.alike.update(np.unique(tensors[same]).tolist())
    for row in rows[placed & ~same].tolist():
        found.unlike.setdefault(int(catalog.pieces.tensor[row]), []).append(row)
    for number in np.unique(tensors[~placed]).tolist():
        if number not in found.undetermined:
            _compare_whole(evidence, number, held[held[:, 0] == number], found)
    compared = len(found.alike | found.unlike.keys())
    if witness.seconds_before > STALE_SECONDS and len(found.unlike) > STALE_SHARE * compared:
        found.stale = "the witness is of an earlier save of this step: most of what is stored now is something else"
    return found


def _compare_whole(evidence: StepEvidence, number: int, held: Rows, found: Landed) -> None:
    """A tensor that is cut otherwise in storage than in memory: sums over the whole do not depend on cuts."""
    catalog, seen = evidence.catalog, evidence.observations.pieces
    regions, first = np.unique(held[:, 1:3], axis=0, return_index=True)
    alike = len(np.unique(held[:, 1:], axis=0)) == len(regions)
    assert evidence.witness is not None
    boxes = evidence.witness.boxes
    count = sum(stop - start if stop >= 0 else boxes[start].num_elements for start, stop in regions.tolist())
    if not alike or count != catalog.tensors[number].num_elements:
        why = "its replicas differ in memory" if not alike else evidence.witness.lacks or "its parts in memory overlap"
        found.undetermined[number] = f"cut otherwise in storage than in memory, where {why}"
        return
    total = held[first][:, 3:].view(np.uint64).sum(axis=0)
    for replica in range(len(catalog.replicas[number])):
        rows = catalog.rows_of(number, replica)
        stored = [int(seen[lane][rows].sum(dtype=np.uint64)) for lane in ("lane0", "lane1")]
        if stored == total.tolist():
            found.alike.add(number)
        else:
            found.unlike.setdefault(number, []).extend(rows.tolist())


def _rows(catalog: Catalog, numbers: set[int]) -> Rows:
    """The stored pieces of the witnessed tensors."""
    wanted = np.zeros(len(catalog.tensors) + 1, bool)
    wanted[[n for n in numbers if catalog.tensors[n].role not in (Role.PADDING, Role.OBJECT)]] = True
    rows = np.flatnonzero(wanted[catalog.pieces.tensor] & (catalog.pieces.num_elements() > 0))
    return rows.astype(np.int64)


def _keys(catalog: Catalog, evidence: StepEvidence, rows: Rows, witness: Witness) -> Rows:
    """Tensor, region and digest of stored pieces, one a row."""
    starts, stops = (column[rows] for column in flat_ranges(catalog))
    numbers: dict[Box, int] = {box: number for number, box in enumerate(witness.boxes)}
    for at in np.flatnonzero(stops < 0).tolist():
        region = catalog.pieces.region(int(rows[at]))
        # A box that no rank held alone has no number there.
        starts[at] = numbers.get(region, -1) if isinstance(region, Box) else -1
    seen = evidence.observations.pieces[rows]
    return _columns(catalog.pieces.tensor[rows], starts, stops, seen)


def _witnessed_keys(witness: Witness, numbers: Mapping[int, int]) -> Rows:
    to_catalog = np.full(len(witness.tensors) + 1, -1, np.int64)
    to_catalog[[*numbers]] = [*numbers.values()]
    pieces = witness.pieces[to_catalog[witness.pieces["tensor"]] >= 0]
    return _columns(to_catalog[pieces["tensor"]], pieces["start"], pieces["stop"], pieces)


def _columns(tensor: NDArray[Any], start: Rows, stop: Rows, seen: NDArray[np.void]) -> Rows:
    lanes = (np.ascontiguousarray(seen[name]).view(np.int64) for name in ("lane0", "lane1"))
    return np.stack([tensor.astype(np.int64), start, stop, *lanes], axis=1)


def _within(rows: Rows, known: Rows) -> NDArray[np.bool_]:
    """Which of ``rows`` are among ``known``."""
    if not len(rows) or not len(known):
        return np.zeros(len(rows), bool)
    _, which = np.unique(np.concatenate([known, rows]), axis=0, return_inverse=True)
    which = which.reshape(-1)
    there = np.zeros(int(which.max()) + 1, bool)
    there[which[: len(known)]] = True
    found: NDArray[np.bool_] = there[which[len(known) :]]
    return found


def _rank(catalog: Catalog, row: int) -> int:
    """The rank that wrote a piece, -1 where that isn't known."""
    place = catalog.pieces.coordinates[catalog.pieces.coordinate[row]]
    ranks = (place.as_dict()["rank"],) if "rank" in place.as_dict() else catalog.mesh.global_ranks(place)
    return ranks[0] if ranks and len(ranks) == 1 else -1


def _violation(evidence: StepEvidence, number: int, rows: list[int]) -> Violation:
    catalog, tensor = evidence.catalog, evidence.catalog.tensors[number]
    locations = []
    for row in rows:
        piece = catalog.pieces[row]
        locations.append(
            Location(
                catalog.step, catalog.file_of(row).name, tensor.name, tensor.role, tensor.order, piece.coordinate,
                region=piece.region if isinstance(piece.region, Box) else None, num_elements=piece.region.num_elements,
                detail="holds bits that no rank held in memory when it was saved",
            )
        )  # fmt: skip
    return Violation(tensor.name, tuple(locations), f"{tensor.name} is stored with bits that no rank held in memory")


INVARIANTS = (
    Invariant(
        "INT014", "stored-not-as-held", Severity.ERROR,
        statement="Every stored piece has the bits that some rank held in memory when the step was saved.",
        rationale="Between memory and storage lie copies to the host, staging, serialization and the network. What "
                  "changed there is read back at the next resume as if it had been trained so.",
        source="pytorch/pytorch#144657; docs/witness.md",
        example="layers.3.up.weight is stored with bits that no rank held in memory",
        misses="Steps without a witness; what was wrong in memory already.",
        hint="Don't resume from this step. Where most tensors differ, weights were changed while an asynchronous save "
             "copied them, or the step was saved again without the hook: then remove its witness.",
        needs=Needs.WEIGHTS, judge_step=stored_as_witnessed,
        likely_causes=(
            LikelyCause("weights were changed while an asynchronous save still copied them", "pytorch/pytorch#144657"),
            LikelyCause("a bit flipped between memory and storage", "pytorch/torchtitan#4324"),
        ),
    ),
)  # fmt: skip
