"""INT: the files of a step are there, whole, of this step and this rank. What is of the run: ``integrity_runs``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from auditor.invariants.invariant import Invariant, Needs
from auditor.model.catalog import WITHHELD, Catalog, FileState, ProblemKind, Role, Scalar
from auditor.model.finding import Judgement, LikelyCause, Location, Severity, Violation
from auditor.model.observation import Read
from auditor.model.run import StepEvidence, counters_of_files, counters_that_go_together, optimizer_steps


def base_name(path: str) -> str:
    """The last part of a path."""
    return path.rsplit("/", 1)[-1]


def _files_in_state(catalog: Catalog, *states: FileState) -> Judgement:
    bad = [file for file in catalog.files if file.state in states]
    unreadable = tuple(catalog.within(file.name) for file in catalog.files if file.state in WITHHELD)
    violations = tuple(
        Violation(
            catalog.within(file.name),
            (Location(catalog.step, file.name, coordinate=file.coordinate, detail=file.detail),),
            f"{catalog.within(file.name)}: {file.detail}",
        )
        for file in bad
    )
    undetermined = {"storage did not let the file be read": unreadable} if unreadable else {}
    return Judgement(len(catalog.files) - len(bad) - len(unreadable), violations, undetermined)


def rank_files_are_there(evidence: StepEvidence) -> Judgement:
    """Every file that the recorded mesh implies is there."""
    judged, unseen = _files_in_state(evidence.catalog, FileState.MISSING), evidence.catalog.unseen
    return judged.merged(Judgement(undetermined={unseen: ("the files beside it",)})) if unseen else judged


def files_are_whole(evidence: StepEvidence) -> Judgement:
    """Every file's structure fits its size."""
    judged = _files_in_state(evidence.catalog, FileState.CUT_SHORT, FileState.DAMAGED)
    missing = sum(file.state is FileState.MISSING for file in evidence.catalog.files)
    not_applicable = {"the file is missing": missing} if missing else {}
    return Judgement(judged.num_holds - missing, judged.violations, judged.undetermined, not_applicable)


def files_are_of_this_rank(evidence: StepEvidence) -> Judgement:
    """No file is a copy of another rank's."""
    return _files_with(evidence.catalog, ProblemKind.OTHER_RANK)


def files_are_of_this_mesh(evidence: StepEvidence) -> Judgement:
    """No file is left over from another mesh."""
    return _files_with(evidence.catalog, ProblemKind.LEFTOVER)


def _files_with(catalog: Catalog, kind: ProblemKind) -> Judgement:
    problems = [problem for problem in catalog.problems if problem.kind is kind]
    violations = tuple(
        Violation(
            catalog.within(problem.file),
            (Location(catalog.step, problem.file, coordinate=problem.coordinate, detail=problem.message),),
            f"{catalog.within(problem.file)} {problem.message}",
            severity=Severity.WARNING if problem.ignored else None,
        )
        for problem in problems
    )
    present = {file.name for file in catalog.files if file.state is FileState.PRESENT}
    return Judgement(len(present - {problem.file for problem in problems}), violations)


def steps_agree(evidence: StepEvidence) -> Judgement:
    """Every file that records a step records this one."""
    catalog = evidence.catalog
    counters = [scalar for scalar in catalog.scalars if scalar.name == "global_steps"]
    counters += counters_that_go_together(catalog)
    usual = optimizer_steps(catalog)
    odd: dict[str, Location] = {}
    for scalar in counters:
        wanted = float(catalog.step) if scalar.name == "global_steps" else usual[scalar.optimizer]
        if scalar.value != wanted:
            odd.setdefault(scalar.file, _odd_step(catalog, scalar, wanted))
    violations = tuple(
        Violation(catalog.within(file), (at,), f"{catalog.within(file)} {at.detail}") for file, at in odd.items()
    )
    apart = {scalar.file for scalar in counters_of_files(catalog)} - {scalar.file for scalar in counters}
    reason = "its parameters were not all updated in every step, so that it has no one count to compare"
    return Judgement(
        len({scalar.file for scalar in counters}) - len(odd), violations,
        not_applicable={reason: len(apart)} if apart else {},
    )  # fmt: skip


def _odd_step(catalog: Catalog, scalar: Scalar, wanted: float) -> Location:
    what = "is the state of optimizer step" if scalar.name == "optimizer_step" else "records step"
    detail = f"{what} {scalar.value:g}, the checkpoint's is {wanted:g}"
    return Location(catalog.step, scalar.file, coordinate=scalar.coordinate, detail=detail)


def name_tells_the_step(evidence: StepEvidence) -> Judgement:
    """A folder that the framework named after a step holds that step."""
    step, named, path = evidence.catalog.step, evidence.named_step, evidence.catalog.path
    if named is None:
        return Judgement(not_applicable={"the folder's name tells no step, or no file records one": 1})
    if named == step:
        return Judgement(1)
    what = f"{base_name(path)} is" if path else "its folder is"
    message = f"{what} named after step {named}, its files record step {step}"
    return Judgement(violations=(Violation("the step", (Location(step, path, detail=message),), message),))


def checksums_hold(evidence: StepEvidence) -> Judgement:
    """Every checksum that a file stores fits its bytes."""
    catalog = evidence.catalog
    violations, num_holds, without = [], 0, 0
    unknown: dict[str, list[str]] = {}
    for number, found in evidence.observations.checksums.items():
        file = catalog.files[number]
        if found.bad:
            count = "1 part doesn't fit its" if len(found.bad) == 1 else f"{len(found.bad)} parts don't fit their"
            detail = f"{count} checksum: {found.bad[0]}"
            location = Location(catalog.step, file.name, coordinate=file.coordinate, detail=detail)
            violations.append(
                Violation(catalog.within(file.name), (location,), f"{catalog.within(file.name)}: {detail}")
            )
        elif found.reason:
            unknown.setdefault(found.reason, []).append(catalog.within(file.name))
        else:
            without += not found.num_good
            num_holds += bool(found.num_good)
    not_applicable = {"the file stores no checksums": without} if without else {}
    return Judgement(
        num_holds, tuple(violations), {reason: tuple(names) for reason, names in unknown.items()}, not_applicable
    )


def chunks_decode(evidence: StepEvidence) -> Judgement:
    """Every chunk that was read decodes to what its array says; padding is never read."""
    catalog, broken = evidence.catalog, evidence.observations.broken
    encoded = np.array([file.encoding is not None for file in catalog.files] or [False])
    meant = np.array([tensor.role is not Role.PADDING for tensor in catalog.tensors] or [False])
    inside = encoded[catalog.pieces.file] & meant[catalog.pieces.tensor] if len(catalog.pieces) else np.zeros(0, bool)
    rows = np.flatnonzero(inside)
    if not len(rows):
        return Judgement(not_applicable={"no tensor is stored under a codec": 1})
    by_tensor: dict[int, list[int]] = {}
    for row in sorted(broken):
        by_tensor.setdefault(int(catalog.pieces.tensor[row]), []).append(row)
    violations = tuple(_broken(evidence, number, members) for number, members in by_tensor.items())
    read = evidence.observations.pieces["read"][rows]
    unread = {catalog.tensors[n].name for n in np.unique(catalog.pieces.tensor[rows[read == Read.NOT_ASKED]]).tolist()}
    reason = evidence.unread or "not all of its chunks were asked for"
    num_holds = len(np.unique(catalog.pieces.tensor[rows])) - len(by_tensor) - len(unread)
    return Judgement(num_holds, violations, {reason: tuple(sorted(unread))} if unread else {})


def _broken(evidence: StepEvidence, number: int, rows: Sequence[int]) -> Violation:
    catalog, broken = evidence.catalog, evidence.observations.broken
    tensor = catalog.tensors[number]
    locations = tuple(
        Location(
            catalog.step, catalog.file_of(row).name, tensor.name, tensor.role, tensor.order,
            catalog.pieces[row].coordinate, detail=broken[row],
        )
        for row in rows
    )  # fmt: skip
    many = f"{len(rows)} chunks; the first: " if len(rows) > 1 else ""
    return Violation(tensor.name, locations, f"{tensor.name} ({tensor.role.value}): {many}{broken[rows[0]]}")


TORN = LikelyCause(
    "the job was killed, or a disk filled up, while the checkpoint was written", "huggingface/transformers#35782"
)

INVARIANTS = (
    Invariant(
        "INT001", "rank-file-missing", Severity.ERROR,
        statement="Every file that the recorded mesh sizes imply, or that an index names, is there.",
        rationale="A step that lacks one rank's file cannot be resumed, or resumes with random numbers in its place.",
        source="huggingface/transformers#35782; sgl-project/sglang#32279",
        example="layer_03-model_01-model_states.pt: it is not there",
        misses="Files of kinds that no recorded size implies; a mesh that is recorded nowhere.",
        hint="Resume from the last good step; restore the file from another copy if there is one.",
        judge_step=rank_files_are_there, needs=Needs.NAMES, likely_causes=(TORN,),
    ),
    Invariant(
        "INT002", "file-damaged", Severity.ERROR,
        statement="Every file's structure is whole and fits its size.",
        rationale="A cut file fails to load at best; some readers fill the missing tail with zeros in silence.",
        source="Lightning-AI/pytorch-lightning#21431; QwenLM/Qwen#462",
        example="mp_rank_01_model_states.pt: it begins as a zip file but has no end record: cut short",
        misses="Changed bytes inside tensors: stored checksums tell of those (INT010, at level full).",
        hint="Restore the file from another copy, or resume from the last good step.",
        judge_step=files_are_whole, likely_causes=(TORN,),
    ),
    Invariant(
        "INT005", "step-disagrees", Severity.ERROR,
        statement="All files that record the engine's step record this one, and all that record the optimizer's own "
                  "counter record the same. The two may differ: fp16 runs skip steps, older DeepSpeed counts one at "
                  "start.",
        rationale="A file of another save among the others: weights and optimizer state don't belong together.",
        source="deepspeedai/DeepSpeed#5289; hiyouga/LlamaFactory#655",
        example="…_mp_rank_00_optim_states.pt is the state of optimizer step 200, the checkpoint's is 300",
        misses="Layer files: they record no step. One on some ranks shows as REP001; on all ranks only against its "
               "masters or the steps before and after. Where counters of single parameters differ within any file "
               "(dropped layers, experts without a token), files that count so: OPT003 compares their parameters.",
        hint="Restore the file from this step's save, or resume from the last good step.",
        judge_step=steps_agree,
    ),
    Invariant(
        "INT006", "file-of-another-rank", Severity.ERROR,
        statement="The name that a file was saved under, kept inside it, is its name.",
        rationale="A copied or renamed file holds another rank's part under this rank's name; shapes fit all the same.",
        source="deepspeedai/DeepSpeed#5342",
        example="layer_03-model_01-model_states.pt was saved as layer_03-model_00-model_states.pt",
        misses="Files written to a buffer (their inner name is `archive`); files that were swapped and written again.",
        hint="Restore the rank's own file from another copy.",
        judge_step=files_are_of_this_rank,
    ),
    Invariant(
        "INT009", "leftover-file", Severity.ERROR,
        statement="No file of this format is there that belongs to no rank of the recorded mesh, or twice. One that "
                  "loaders pass over (layers of a deeper model in a pipeline's folder) is a warning.",
        rationale="Loaders and converters that list the folder pick it up and take another save's part for this one's.",
        source="huggingface/diffusers#14769; DeepSpeed loads layer files by listing",
        example="layer_03-model_02-model_states.pt is of no rank of the mesh (pp 1 · dp 2 · tp 2), or there twice",
        misses="Leftovers of the same mesh, which only values and steps tell.",
        hint="Move the file out of the folder.",
        judge_step=files_are_of_this_mesh, needs=Needs.NAMES,
    ),
    Invariant(
        "INT010", "checksum-mismatch", Severity.ERROR,
        statement="Every checksum that a file stores itself (CRC-32 of a zip member; the SHA-256 in the name of a blob "
                  "in a Hugging Face cache) fits the bytes it was taken of.",
        rationale="torch.load does not look at them: a flipped bit in storage becomes a weight in silence.",
        source="pytorch/pytorch#126952",
        example="layer_03-model_01-model_states.pt: 1 part doesn't fit its checksum: …/data/7",
        misses="Bits that rotted before the checksum was taken; files whose writer computed none.",
        hint="Restore the file from another copy.",
        judge_step=checksums_hold, needs=Needs.CHECKSUMS,
    ),
    Invariant(
        "INT015", "chunk-undecodable", Severity.ERROR,
        statement="Every chunk that is stored under a codec (zstd, gzip, a Zarr shard) decodes, to as many bytes as "
                  "its array says.",
        rationale="Readers raise when they come to it, in the middle of a restore, or fill it with zeros.",
        source="Measured: a bit flipped in a zstd frame raises in 2 of 100 cases and decodes to other numbers in 98",
        example="params.embed (parameter): …/d/5e37b562…: the chunk at bytes 512 to 2348: its zstd frame is broken",
        misses="Bits flipped so that the frame still decodes: zstd by Orbax carries no checksum of its content. What "
               "such bits make of numbers may show as NUM001, NUM003, OPT011 or between steps.",
        hint="Restore the file from another copy, or resume from the last good step.",
        judge_step=chunks_decode, needs=Needs.WEIGHTS, likely_causes=(TORN,),
    ),
    Invariant(
        "INT012", "step-named-otherwise", Severity.NOTE,
        statement="A folder that its framework named after a step holds the step of that number.",
        rationale="Somebody renamed or copied it, or its files are of another save: people and scripts go by the name.",
        source="DeepSpeed engine.py (global_step<n>); Megatron checkpointing.py (iter_<n>); Trainer (checkpoint-<n>)",
        example="global_step300 is named after step 300, its files record step 200",
        misses="Names that people gave; folders in which nothing records a step, or a single file alone does.",
        hint="If nobody renamed it on purpose, find out where its files are from before resuming from it.",
        judge_step=name_tells_the_step, needs=Needs.NAMES,
    ),
)  # fmt: skip
