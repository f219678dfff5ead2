"""COV: the pieces of every tensor tile it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from auditor.invariants.registry import Invariant
from auditor.model.catalog import Catalog, FileState
from auditor.model.finding import Judgement, Location, Severity, Violation
from auditor.model.region import Box, SweepTooLarge, coverage
from auditor.model.run import StepEvidence


def pieces_tile_tensors(evidence: StepEvidence) -> Judgement:
    """Every replica of every tensor is tiled by its pieces: no gap, no overlap, nothing out of bounds."""
    catalog = evidence.catalog
    violations: list[Violation] = []
    undetermined: dict[str, list[str]] = {}
    num_holds = 0
    for tensor in range(len(catalog.tensors)):
        for replica in range(len(catalog.replicas[tensor])):
            try:
                found = _judge(catalog, tensor, replica, catalog.rows_of(tensor, replica))
            except SweepTooLarge:
                undetermined.setdefault("its pieces are cut too irregularly", []).append(catalog.tensors[tensor].name)
                continue
            violations.extend([found] if found else [])
            num_holds += found is None
    return Judgement(num_holds, tuple(violations), {reason: tuple(names) for reason, names in undetermined.items()})


def _judge(catalog: Catalog, tensor: int, replica: int, rows: NDArray[np.int64]) -> Violation | None:
    what = catalog.tensors[tensor]
    lost = [row for row in rows.tolist() if catalog.file_of(row).state in (FileState.MISSING, FileState.DAMAGED)]
    regions = [catalog.pieces.region(int(row)) for row in rows]
    found = coverage(regions, what.shape)
    if found.exact and not lost:
        return None
    locations = list(_locations(catalog, tensor, replica, lost))
    locations.extend(_location(catalog, tensor, replica, box, "no piece holds it") for box in found.gaps)
    for box, one, other in found.overlaps:
        pair = catalog.file_of(int(rows[one])).name, catalog.file_of(int(rows[other])).name
        locations.append(_location(catalog, tensor, replica, box, "stored twice", pair[0]))
    for at in found.out_of_bounds:
        file = catalog.file_of(int(rows[at])).name
        locations.append(_location(catalog, tensor, replica, None, "a piece leaves the tensor", file))
    parts = [
        f"{found.num_elements_missing} elements are in no piece" if found.num_elements_missing else "",
        f"{found.num_elements_overlapping} elements are in two" if found.num_elements_overlapping else "",
        f"{len(found.out_of_bounds)} pieces leave it" if found.out_of_bounds else "",
        f"{len(lost)} pieces are lost with their file" if lost else "",
    ]
    message = f"{what.name} ({what.role.value}) is not tiled: {', '.join(filter(None, parts))}"
    causes = frozenset(catalog.file_of(row).name for row in lost) if found.exact else frozenset()
    return Violation(what.name, tuple(locations), message, explained_by=causes)


def _locations(catalog: Catalog, tensor: int, replica: int, lost: list[int]) -> Iterator[Location]:
    for row in lost:
        region = catalog.pieces.region(row)
        box = region if isinstance(region, Box) else None
        file = catalog.file_of(row)
        yield _location(
            catalog, tensor, replica, box, f"its file is {file.state.value}", file.name, region.num_elements
        )


def _location(
    catalog: Catalog, tensor: int, replica: int, box: Box | None, detail: str, file: str = "", count: int = 0
) -> Location:
    what = catalog.tensors[tensor]
    return Location(
        catalog.step, file, what.name, what.role, what.order, catalog.replicas[tensor][replica], region=box,
        num_elements=count or (box.num_elements if box else 0), detail=detail,
    )  # fmt: skip


INVARIANTS = (
    Invariant(
        "COV001", "tensor-not-tiled", Severity.ERROR,
        statement="The pieces of every replica of every tensor tile its global shape: no gap, no overlap, nothing "
                  "outside.",
        rationale="A gap is filled with whatever memory held; where pieces overlap, the last one read wins.",
        source="pytorch/pytorch#126595; NVIDIA/Megatron-LM#4378",
        example="layers.3.mlp.weight (parameter) is not tiled: 2048 elements are in no piece",
        misses="Pieces that tile the tensor but hold another tensor's values.",
        hint="Don't resume from this step. If a file is missing, restore it; else the save itself was wrong.",
        judge_step=pieces_tile_tensors,
    ),
)  # fmt: skip
