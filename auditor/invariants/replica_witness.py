"""What a witness says of replicas that are not on disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from auditor.invariants.witnessed import landed
from auditor.model.catalog import Role, Tensor
from auditor.model.finding import Location, Severity, Violation
from auditor.model.mesh import Coordinate
from auditor.model.observation import classes_of
from auditor.model.run import StepEvidence
from auditor.model.witness import Compared


@dataclass(frozen=True, slots=True)
class InMemory:
    """What a witness says of one tensor's replicas."""

    violation: Violation | None = None
    num_places: int = 0
    """1: no other rank held any of it, so it has no replicas."""
    undetermined: str = ""


def in_memory(evidence: StepEvidence) -> Mapping[int, InMemory]:
    """Per tensor of the Catalog that was witnessed, what its replicas in memory say."""
    witness, catalog = evidence.witness, evidence.catalog
    if witness is None:
        return {}
    stale = landed(evidence).stale
    found: dict[int, InMemory] = {}
    for own, number in witness.numbers(catalog).items():
        compared, tensor = witness.compared.get(own), catalog.tensors[number]
        if compared is None or tensor.role is Role.PADDING or (tensor.role is Role.OBJECT and not compared.declared):
            continue
        if stale:
            found[number] = InMemory(undetermined=stale)
        elif compared.held:
            buffer = Role.BUFFER in (tensor.role, witness.tensors[own].role)
            found[number] = InMemory(_violation(evidence, tensor, compared, buffer), compared.num_places)
        else:
            found[number] = InMemory(None, compared.num_places, witness.lacks)
    return found


def _violation(evidence: StepEvidence, tensor: Tensor, compared: Compared, buffer: bool) -> Violation:
    held = _by_fewest_axes(compared.held)
    places = list(held)
    classes = classes_of({number: _contents(rows) for number, rows in enumerate(held.values())})
    sides = tuple(tuple(places[member] for member in members) for members in classes)
    majority = 2 * len(sides[0]) > len(places)
    reference = sides[0] if majority else min(sides, key=lambda side: side[0].indices)
    others = tuple(place for side in sides if side != reference for place in side)
    if buffer:
        tensor = replace(tensor, role=Role.BUFFER)
    severity = Severity.WARNING if buffer and not evidence.strict_buffers else None
    return Violation(
        tensor.name, tuple(_location(evidence, tensor, held, place, reference[0]) for place in others),
        f"{tensor.name} differs", sides, severity, others if majority else (),
    )  # fmt: skip


def _by_fewest_axes(held: Mapping[Coordinate, NDArray[np.void]]) -> Mapping[Coordinate, NDArray[np.void]]:
    """The same by the one axis that tells apart what differs, where there is such an axis; as it is otherwise."""
    contents = {place: _contents(rows) for place, rows in held.items()}
    axes = [axis for axis, _ in next(iter(held)).indices]
    for axis in axes if len(axes) > 1 else ():
        found: dict[Coordinate, list[Coordinate]] = {}
        for place in held:
            found.setdefault(place.along((axis,)), []).append(place)
        agreeing = all(_agree([contents[member] for member in members]) for members in found.values())
        if agreeing and len(found) > 1 and all(place.indices for place in found):
            return {place: np.concatenate([held[member] for member in members]) for place, members in found.items()}
    return held


def _agree(contents: Sequence[Mapping[object, tuple[int, int]]]) -> bool:
    """Whether all hold the same wherever the first of them holds something."""
    return all(other.get(key, pair) == pair for other in contents for key, pair in contents[0].items())


def _contents(rows: NDArray[np.void]) -> dict[object, tuple[int, int]]:
    keys = zip(rows["start"].tolist(), rows["stop"].tolist(), strict=True)
    lanes = zip(rows["lane0"].tolist(), rows["lane1"].tolist(), strict=True)
    return dict(zip(keys, lanes, strict=True))


def _location(
    evidence: StepEvidence, tensor: Tensor, held: Mapping[Coordinate, NDArray[np.void]], place: Coordinate,
    reference: Coordinate,
) -> Location:  # fmt: skip
    witness = evidence.witness
    assert witness is not None
    mine, theirs = held[place], held[reference]
    other = {(row["start"], row["stop"]): row for row in theirs}
    pairs = [(row, other[row["start"], row["stop"]]) for row in mine if (row["start"], row["stop"]) in other]
    unlike = [(a, b) for a, b in pairs if (a["lane0"], a["lane1"]) != (b["lane0"], b["lane1"])]
    ranks, reference_ranks = ({int(pair[side]["rank"]) for pair in unlike} for side in (0, 1))
    apart_by_rank = not ranks & reference_ranks
    gaps = [abs(float(a[name]) - float(b[name])) for a, b in unlike for name in ("minimum", "maximum")]
    apart = max((gap for gap in gaps if math.isfinite(gap)), default=0.0)
    much = f"; by their extrema at least {apart:.2g} apart" if apart > 0 else ""
    return Location(
        evidence.catalog.step, witness.files.get(min(ranks, default=-1), ""), tensor.name, tensor.role, tensor.order,
        place, reference, reference_file=witness.files.get(min(reference_ranks, default=-1), ""),
        ranks=tuple(sorted(ranks)) if apart_by_rank else (),
        reference_ranks=tuple(sorted(reference_ranks)) if apart_by_rank else (),
        detail=f"unequal in memory, by the witness's digests{much}",
    )  # fmt: skip
