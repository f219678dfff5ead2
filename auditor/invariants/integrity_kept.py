"""INT: a step is what it was when it was audited; told by the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from auditor.invariants.integrity import base_name
from auditor.invariants.integrity_runs import called, count
from auditor.invariants.invariant import Invariant, Needs
from auditor.model.finding import Judgement, Location, Severity, Violation
from auditor.model.run import ChangeKind, Commit, RunState, StepState

_NO_LEDGER = {"no ledger tells what was audited before (--ledger)": 1}
_FIRST = {"it was not audited before": 1}
_NOT_AGAIN = {"what did not change is read again by a patrol alone (--reread)": 1}


def audited_steps_stay(run: RunState) -> dict[int, Judgement]:
    """No step was changed in part since it was audited."""
    return _judged(run, ChangeKind.PARTLY)


def steps_are_saved_for_good(run: RunState) -> dict[int, Judgement]:
    """No step was saved again since it was audited."""
    return _judged(run, ChangeKind.ANEW)


def told_by_a_patrol(run: RunState) -> dict[int, Judgement]:
    """What is read once can't be held against itself: a patrol reads again, and makes the finding."""
    return {state.step: Judgement(not_applicable=_NOT_AGAIN) for state in run.on_disk}


def _judged(run: RunState, kind: ChangeKind) -> dict[int, Judgement]:
    judged: dict[int, Judgement] = {}
    for state in run.on_disk:
        if state.commit is Commit.IN_PROGRESS:
            continue
        if not run.kept or not state.audited_before:
            found = Judgement(not_applicable=_FIRST if run.kept else _NO_LEDGER)
        elif state.change is None or state.change.kind is not kind:
            found = Judgement(1)
        else:
            found = Judgement(violations=(_in_part(state) if kind is ChangeKind.PARTLY else _anew(state),))
        judged[state.step] = judged[state.step].merged(found) if state.step in judged else found
    return judged


def _in_part(state: StepState) -> Violation:
    change = state.change
    assert change is not None
    parts = [
        (change.changed, "holds something else than when it was audited", "changed", None),
        (change.lost, "was there when it was audited, and is gone", "gone", Severity.WARNING),
        (change.rewritten, "was written again since it was audited", "written again", Severity.NOTE),
    ]
    words, locations, severities = list[str](), list[Location](), list[Severity | None]()
    for files, detail, word, severity in parts:
        if files:
            words.append(f"{count(len(files), 'file')} {word}")
            locations += [Location(state.step, file, detail=detail) for file in files]
            severities.append(severity)
    message = f"{called(state)} was changed in part since it was audited: {', '.join(words)} ({_first(locations)})"
    message += f", {count(change.num_kept, 'file')} as before"
    found = Violation("the step", tuple(locations), message)
    return found if None in severities else replace(found, severity=max(filter(None, severities)))


def _anew(state: StepState) -> Violation:
    message = f"{called(state)} was saved again since it was audited; what was said of it before stays in the ledger"
    return Violation("the step", (Location(state.step, state.path, detail=message),), message)


def _first(locations: Sequence[Location]) -> str:
    return base_name(locations[0].file)


INVARIANTS = (
    Invariant(
        "INT017", "changed-in-part", Severity.ERROR,
        statement="Of a step that was audited no file holds something else now while others are as they were. Files "
                  "that are gone are a warning, files without weights that were written again a note. Told by "
                  "storage's identity (size, time, etag) and, where that differs, by the digests of what was read.",
        rationale="Nothing that trains writes part of a saved step again: a restored, copied or repaired file, or rot, "
                  "makes one checkpoint of two.",
        source="docs/ledger.md: what was audited is kept and compared",
        example="global_step300 was changed in part since it was audited: 1 file changed (layer_03-model_01-…), 21 "
                "files as before",
        misses="Changes that keep size, time and inode, or the etag: what looks the same is not read again. Steps "
               "audited without a ledger.",
        hint="Find out who wrote to a saved step; restore the file, or go back to a step that was not touched.",
        judge_run=audited_steps_stay, needs=Needs.NAMES,
    ),
    Invariant(
        "INT018", "saved-again", Severity.NOTE,
        statement="A step that was audited was not saved again as a whole.",
        rationale="After a rollback it is legal; what was said of the first save is then of another branch of the run.",
        source="docs/ledger.md: what was audited is kept and compared",
        example="global_step300 was saved again since it was audited",
        misses="Steps audited without a ledger; a save whose every number is that of the one before.",
        hint="If nobody rolled the run back, find out what wrote the step again.",
        judge_run=steps_are_saved_for_good, needs=Needs.NAMES,
    ),
    Invariant(
        "INT019", "content-changed-at-rest", Severity.ERROR,
        statement="The same version of a step's files holds what it held when it was first read. Told by a patrol that "
                  "reads unchanged steps again: auditor patrol --reread 2%.",
        rationale="Disks and object stores lose bits without a word, and nobody notices until an old checkpoint is "
                  "needed.",
        source="docs/patrol.md: reading again",
        example="global_step300: 2 pieces, first piece 14 of the Catalog, are not what they were when they were first "
                "read, although storage tells the same version of every file",
        misses="Steps whose turn has not come; tensors that the level does not read; what was lost before the first "
               "audit.",
        hint="Restore the step from a copy, and look at the storage: bits were lost at rest or on the way.",
        judge_run=told_by_a_patrol, needs=Needs.NAMES,
    ),
)  # fmt: skip
