"""COV: the pieces of every tensor tile it, and no tensor that must be there is absent or without elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from auditor.invariants.invariant import Invariant
from auditor.model.catalog import LOST, WITHHELD, Catalog, Problem, ProblemKind, Role, Tensor
from auditor.model.finding import Judgement, LikelyCause, Location, Severity, Violation
from auditor.model.region import Box, SweepTooLarge, coverage
from auditor.model.run import StepEvidence
from auditor.model.tiling import tiled_replicas


def pieces_tile_tensors(evidence: StepEvidence) -> Judgement:
    """Every replica of every tensor is tiled by its pieces: no gap, no overlap, nothing out of bounds."""
    catalog = evidence.catalog
    violations: list[Violation] = []
    undetermined: dict[str, list[str]] = {}
    num_holds = 0
    gone = _lost_files(catalog)
    whole = tiled_replicas(catalog) - _losing(catalog, gone)
    for tensor in range(len(catalog.tensors)):
        for replica in range(len(catalog.replicas[tensor])):
            if (tensor, replica) in whole:
                num_holds += 1
                continue
            try:
                found = _judge(catalog, tensor, replica, catalog.rows_of(tensor, replica), gone)
            except SweepTooLarge:
                undetermined.setdefault("its pieces are cut too irregularly", []).append(catalog.tensors[tensor].name)
                continue
            violations.extend([found] if found else [])
            num_holds += found is None
    return Judgement(num_holds, tuple(violations), {reason: tuple(names) for reason, names in undetermined.items()})


def _losing(catalog: Catalog, gone: NDArray[np.bool_]) -> set[tuple[int, int]]:
    """Tensor and replica of all that lost a piece with its file."""
    pieces = catalog.pieces
    lost = np.flatnonzero(gone[pieces.file])
    return set(zip(pieces.tensor[lost].tolist(), pieces.replica[lost].tolist(), strict=True))


def _lost_files(catalog: Catalog) -> NDArray[np.bool_]:
    """Which files are gone with their pieces."""
    return np.array([file.state in LOST for file in catalog.files] or [False])


def _judge(
    catalog: Catalog, tensor: int, replica: int, rows: NDArray[np.int64], gone: NDArray[np.bool_]
) -> Violation | None:
    """``gone``: which files are gone with their pieces."""
    what = catalog.tensors[tensor]
    lost = rows[gone[catalog.pieces.file[rows]]].tolist()
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


_SHELLS = LikelyCause(
    "parameters were saved without being gathered first (ZeRO stage 3 leaves empty shells)",
    "huggingface/transformers#20082",
)
_TAKEN_FOR_TIED = LikelyCause(
    "tensors that share one flat buffer were taken for tied ones and dropped on saving",
    "huggingface/transformers#28630",
)


def exports_hold_elements(evidence: StepEvidence) -> Judgement:
    """No tensor of an export is stored without elements where the model has some."""
    catalog = evidence.catalog
    if catalog.not_implied is None:
        return Judgement(not_applicable={"no export: the format's own records tell every shape": 1})
    violations = tuple(_of_problems(catalog, ProblemKind.EMPTY))
    accused = {violation.subject for violation in violations}
    exported = [tensor for tensor in catalog.tensors if tensor.role is Role.PARAMETER]
    empty = [tensor.name for tensor in exported if tensor.num_elements == 0]
    doubtful = tuple(name for name in empty if name not in accused)
    reason = "it has no elements, and nothing tells whether the model has some there"
    return Judgement(len(exported) - len(empty), violations, {reason: doubtful} if doubtful else {})


def implied_tensors_are_stored(evidence: StepEvidence) -> Judgement:
    """Every tensor that the recorded configuration or an index implies is stored."""
    catalog = evidence.catalog
    violations = tuple(_of_problems(catalog, ProblemKind.ABSENT))
    if catalog.not_implied is None:
        # An index that lists what is not there (Orbax's tree) is heard all the same.
        own = {"the format's own records tell every tensor": 1}
        return Judgement(violations=violations, not_applicable={} if violations else own)
    withheld = tuple(catalog.within(file.name) for file in catalog.files if file.state in WITHHELD)
    undetermined = {"storage did not let the file be read": withheld} if withheld else {}
    # Without a configuration there is no statement to hold; what is not known of shapes is MET003's to say.
    not_applicable = {catalog.not_implied: 1} if catalog.not_implied and not violations else {}
    num_holds = 0 if catalog.not_implied else sum(tensor.role is Role.PARAMETER for tensor in catalog.tensors)
    return Judgement(num_holds, violations, undetermined, not_applicable)


def _of_problems(catalog: Catalog, kind: ProblemKind) -> Iterator[Violation]:
    """Problems of one kind as violations; what a lost or left-over file explains is laid to the file."""
    places = {tensor.name: tensor for tensor in catalog.tensors}
    explaining = {file.name for file in catalog.files if file.state in LOST}
    explaining |= {problem.file for problem in catalog.problems if problem.kind is ProblemKind.LEFTOVER}
    for problem in catalog.problems:
        if problem.kind is kind:
            message = f"{catalog.within(problem.file)} {problem.message}"
            causes = frozenset({problem.file} & explaining)
            subject = problem.tensor or catalog.within(problem.file)
            yield Violation(subject, (_of_problem(catalog.step, problem, places),), message, explained_by=causes)


def _of_problem(step: int, problem: Problem, places: Mapping[str, Tensor]) -> Location:
    tensor = places.get(problem.tensor)
    return Location(
        step, problem.file, problem.tensor, tensor.role if tensor else None,
        tensor.order if tensor else problem.order, problem.coordinate, detail=problem.message,
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
    Invariant(
        "COV002", "zero-size-export", Severity.ERROR,
        statement="No tensor of an export is stored without elements where the configuration implies some, and no "
                  "export holds no tensor at all.",
        rationale="Training looks healthy, the file has all the names; the weights themselves are not in it.",
        source="huggingface/transformers#20082; OpenRLHF/OpenRLHF#839; huggingface/peft#2892",
        example="model.safetensors holds model.layers.0.self_attn.k_proj.weight without elements, config.json implies "
                "[512, 3584]",
        misses="Tensors of architectures that are not known: undetermined. Placeholders of another size than none "
               "(MET003).",
        hint="Don't use this export. Make it anew from the training checkpoint of the same step, which may be whole.",
        judge_step=exports_hold_elements, likely_causes=(_SHELLS,),
    ),
    Invariant(
        "COV003", "tensor-missing", Severity.ERROR,
        statement="Every tensor that the recorded configuration or an index implies is stored; a tied head may be "
                  "absent where the configuration ties it.",
        rationale="Loaders fill what is missing with random numbers and go on with a warning.",
        source="huggingface/transformers#28630; huggingface/huggingface_hub#4725",
        example="model.safetensors lacks model.layers.1.mlp.down_proj.weight, which config.json implies as [64, 172]",
        misses="Tensors of architectures that are not known, which also no index names.",
        hint="Don't use this export. Restore the file, or make the export anew from the training checkpoint.",
        judge_step=implied_tensors_are_stored, likely_causes=(_TAKEN_FOR_TIED,),
    ),
)  # fmt: skip
