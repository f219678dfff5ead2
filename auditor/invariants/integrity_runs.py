"""INT: over a run, pointers lead somewhere, steps were finished, each is there once and with all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from auditor.invariants.integrity import TORN, base_name
from auditor.invariants.invariant import Invariant, Needs
from auditor.model.finding import Judgement, Location, Severity, Violation
from auditor.model.observation import same_content
from auditor.model.run import Commit, PointerState, RunState, StepState

SETTLED = 3
"""As many saves in a row with files of equally many ranks show that the run was resumed on that many."""


def called(state: StepState) -> str:
    """What a step's folder is called; its number, where the folder itself was opened or is called by a number alone."""
    name = base_name(state.path)
    return f"step {state.step}" if not name or name == str(state.step) else name


def count(number: int, what: str) -> str:
    """A number of things in words.

    >>> count(1, "file"), count(2, "file")
    ('1 file', '2 files')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def at_step(state: StepState, subject: str, message: str) -> Violation:
    """A violation of a step as a whole."""
    return Violation(subject, (Location(state.step, state.path, detail=message),), message)


def per_step(run: RunState, violations: Iterable[tuple[StepState, Violation]]) -> dict[int, Judgement]:
    """Violations by step; every other step on disk holds."""
    bad: dict[int, list[Violation]] = {}
    for state, violation in violations:
        bad.setdefault(state.step, []).append(violation)
    return {
        state.step: Judgement(0 if state.step in bad else 1, tuple(bad.get(state.step, ())))
        for state in run.on_disk
        if state.commit is not Commit.IN_PROGRESS
    }


def number_in(path: str, otherwise: int) -> int:
    """The step that a folder's name tells, ``otherwise`` if it tells none."""
    digits = re.findall(r"\d+", base_name(path))
    return int(digits[-1]) if digits and len(digits[-1]) < 16 else otherwise


def pointers_lead_to_whole_steps(run: RunState) -> dict[int, Judgement]:
    """The step that a pointer names exists and is whole."""
    by_path = {state.path: state for state in run.on_disk}
    newest = max((state.step for state in run.on_disk), default=-1)
    if not run.pointers:
        reason = "no pointer file is there" if run.complete else "not all saved steps were looked at"
        return {newest: Judgement(not_applicable={reason: 1})}
    judged: dict[int, Judgement] = {}
    for pointer in run.pointers:
        target = by_path.get(pointer.target)
        step = target.step if target else number_in(pointer.target, newest)
        found = Judgement(1) if target and target.whole else Judgement(violations=(_dangling(pointer, target, step),))
        judged[step] = judged[step].merged(found) if step in judged else found
    return judged


def _dangling(pointer: PointerState, target: StepState | None, step: int) -> Violation:
    file = base_name(pointer.file)
    if not pointer.target:
        message = f"{file} does not hold the name of a step folder"
    elif target is None:
        message = f"{file} names {base_name(pointer.target)}, which is not there"
    else:
        message = f"{file} names {base_name(pointer.target)}, which lacks {count(len(target.missing), 'file')}"
    causes = frozenset(target.missing) if target else frozenset()
    return Violation(file, (Location(step, pointer.file, detail=message),), message, explained_by=causes)


def steps_were_finished(run: RunState) -> dict[int, Judgement]:
    """The newest step was finished by its writer, or is being written right now."""
    last = max((at for at, state in enumerate(run.steps) if state.commit is Commit.COMMITTED), default=-1)
    unfinished = [
        (state, _unfinished(state, passed_over=at < last))
        for at, state in enumerate(run.steps)
        if state.commit is Commit.UNCOMMITTED
    ]
    return per_step(run, unfinished)


def _unfinished(state: StepState, passed_over: bool) -> Violation:
    """``passed_over``: whether a later step was finished, so that nobody will resume from this one."""
    locations = tuple(Location(state.step, file, detail="it is not there") for file in state.missing)
    if not state.unfinished:
        message = f"{called(state)} lacks {count(len(state.missing), 'file')} and nothing commits it"
        return Violation("the step", locations, message)
    message = f"{called(state)} was not finished: {state.unfinished}"
    if state.missing:
        message += f"; it lacks {count(len(state.missing), 'file')}"
    else:
        message += "; all that it lists is there"
    locations = locations or (Location(state.step, state.path, detail=state.unfinished),)
    return Violation("the step", locations, message, severity=Severity.WARNING if passed_over else None)


def optimizer_states_advance(run: RunState) -> dict[int, Judgement]:
    """No two saved steps with different parameters hold the moments of one optimizer step."""
    counted = [state for state in run.steps if state.optimizer_step is not None]
    earlier: dict[tuple[float | None, str], list[StepState]] = {}
    repeated, since = [], 0
    for at, state in enumerate(counted):
        if _began_anew(counted, at):
            since = state.step
        known = earlier.setdefault((state.optimizer_step, state.counters), [])
        found = _with_its_state(state, known, since) if state.moved else None
        if found:
            repeated.append((state, found))
        known.append(state)
    return per_step(run, repeated)


def _began_anew(counted: Sequence[StepState], at: int) -> bool:
    """Whether the optimizer counts less than in the save before, and the save after it goes on from there."""
    if not 0 < at < len(counted) - 1:
        return False
    before, state, after = (counted[near].optimizer_step or 0.0 for near in (at - 1, at, at + 1))
    return state < before and 0 < after - state <= counted[at + 1].step - counted[at].step


def _with_its_state(state: StepState, known: Sequence[StepState], since: int) -> Violation | None:
    """What is wrong with a save whose counters are all those of earlier ones, ``known``; None where nothing is.

    Between two saves no update may have been made (skipped steps, accumulated gradients): parameters are the same
    then. An optimizer that began anew has other moments. Where that was not read the counters are a suspicion, but
    only with saves ``since`` the step in which it seems to have begun anew.
    """
    certain, suspected = list[StepState](), list[StepState]()
    for other in known:
        moments = same_content(other.moments, state.moments)
        unmoved = same_content(other.updated, state.updated)
        if unmoved or same_content(other.parameters, state.parameters):
            return None
        if other.step == state.step or not other.moved or moments is False:
            continue
        if moments and unmoved is False:
            certain.append(other)
        elif other.step >= since and not all_skipped(other, state):
            suspected.append(other)
    if certain:
        message = f"its optimizer state is that of optimizer step {state.optimizer_step:g}"
        return _of_optimizer(state, f"{message}, as in step {certain[0].step}")
    if suspected:
        message = (
            f"its optimizer counts {state.optimizer_step:g} steps, as in step {suspected[0].step}: it took none since, "
            "or its state is of that save; which, shows where moments and their parameters are read (--level values)"
        )
        return replace(_of_optimizer(state, message), severity=Severity.WARNING)
    return None


def all_skipped(before: StepState, state: StepState) -> bool:
    """Whether it is recorded why no update was made between two saves."""
    if state.num_skipped - before.num_skipped >= state.step - before.step:
        return True
    # A scale falls where steps are skipped, and stays or grows else.
    return before.loss_scale is not None and state.loss_scale is not None and state.loss_scale < before.loss_scale


def _of_optimizer(state: StepState, message: str) -> Violation:
    locations = tuple(Location(state.step, file, detail=message) for file in state.optimizer_files)
    return replace(at_step(state, called(state), f"{called(state)}: {message}"), locations=locations)


def steps_are_saved_once(run: RunState) -> dict[int, Judgement]:
    """No two folders hold one step in one format."""
    seen: dict[tuple[int, str], StepState] = {}
    twice = []
    for state in run.on_disk:
        if state.unfinished:
            # What a writer left behind when it died is no second step.
            continue
        first = seen.setdefault((state.step, state.format), state)
        # Step 0 is also what a folder without any record of a step has: several exports side by side.
        if first is not state and state.step > 0:
            twice.append((state, _twice(first, state)))
    return per_step(run, twice)


def _twice(first: StepState, state: StepState) -> Violation:
    both = f"{called(first)} and {called(state)} both say that they are step {state.step}"
    same = same_content(first.everything, state.everything)
    if first.sizes != state.sizes or same is False or _named_otherwise(first) or _named_otherwise(state):
        return at_step(state, called(state), both)
    if same is None:
        return at_step(state, called(state), f"{both}; whether they hold the same was not read (--level values)")
    message = f"{both}, and hold the same bit by bit in files of the same sizes: one is a copy of the other"
    return replace(at_step(state, called(state), message), severity=Severity.NOTE)


def _named_otherwise(state: StepState) -> bool:
    """Whether a step's folder has numbers in its name, and none of them is the step."""
    numbers = re.findall(r"\d+", base_name(state.path))
    return bool(numbers) and str(state.step) not in {number.lstrip("0") for number in numbers}


def pointer_is_newest(run: RunState) -> dict[int, Judgement]:
    """No whole step lies behind the step that the pointer names."""
    by_path = {state.path: state for state in run.on_disk}
    targets = [by_path[pointer.target].step for pointer in run.pointers if pointer.target in by_path]
    if not targets:
        return {}
    behind = (
        (
            state,
            at_step(state, called(state), f"{called(state)} is whole, the pointer names step {max(targets)}"),
        )
        for state in run.on_disk
        if state.whole and state.step > max(targets)
    )
    return per_step(run, behind)


def pointers_agree(run: RunState) -> dict[int, Judgement]:
    """Roots that hold the ranks of one run point to one step."""
    by_path = {state.path: state.step for state in run.steps}
    named: dict[str, dict[str, int]] = {}
    for pointer in run.pointers:
        if pointer.target in by_path:
            named.setdefault(base_name(pointer.file), {})[pointer.target] = by_path[pointer.target]
    judged: dict[int, Judgement] = {}
    for file, targets in named.items():
        newest = max(targets, key=lambda path: targets[path])
        found = Judgement(1)
        if len(targets) > 1:
            names = " and ".join(base_name(path) for path in sorted(targets, key=lambda path: targets[path]))
            message = f"{file} names {names} in different roots"
            found = Judgement(
                violations=(Violation(file, (Location(targets[newest], file, detail=message),), message),)
            )
        judged[targets[newest]] = judged.get(targets[newest], Judgement()).merged(found)
    return judged


def files_of_as_many_ranks(run: RunState) -> dict[int, Judgement]:
    """Where ranks are only counted by their files, no step has fewer than the saves around it."""
    fewer: dict[str, Violation] = {}
    of_format: dict[str, list[StepState]] = {}
    settled = [state for state in run.steps if state.commit is not Commit.IN_PROGRESS]
    for state in settled:
        of_format.setdefault(state.format, []).append(state)
    for states in of_format.values():
        for state, before, after in _with_fewer(states):
            if state.ranks_counted:
                fewer[state.path] = _lacking(state, before, after)
    judged: dict[int, Judgement] = {}
    for state in settled:
        if not state.ranks_counted:
            found = Judgement(not_applicable={"how many ranks there are is not left to counting files": 1})
        elif len(of_format[state.format]) == 1:
            found = Judgement(not_applicable={"no other save is there to tell how many ranks there are": 1})
        else:
            found = Judgement(violations=(fewer[state.path],)) if state.path in fewer else Judgement(1)
        judged[state.step] = judged[state.step].merged(found) if state.step in judged else found
    return judged


def _with_fewer(states: Sequence[StepState]) -> list[tuple[StepState, StepState, StepState | None]]:
    """Saves of fewer ranks than the usual one before them, with that one and the first later one of more again, if any.

    Left out are those that are followed by none of more because the run went on with fewer.
    """
    found: list[tuple[StepState, StepState, StepState | None]] = []
    usual, since = states[0], list[StepState]()
    for state in states[1:]:
        since.append(state)
        last = {item.num_ranks for item in since[-SETTLED:]}
        if state.num_ranks >= usual.num_ranks or (len(since) >= SETTLED and len(last) == 1):
            found += [item for item in _of_stretch(usual, since) if item[2] is not None]
            usual, since = state, []
    return found + _of_stretch(usual, since)


def _of_stretch(
    usual: StepState, since: Sequence[StepState]
) -> list[tuple[StepState, StepState, StepState | None]]:  # fmt: skip
    return [
        (state, usual, next((later for later in since[at:] if later.num_ranks > state.num_ranks), None))
        for at, state in enumerate(since)
        if state.num_ranks < usual.num_ranks
    ]


def _lacking(state: StepState, before: StepState, after: StepState | None) -> Violation:
    message = f"{called(state)} has files of {count(state.num_ranks, 'rank')}, {called(before)} of {before.num_ranks}"
    if after is None:
        message += ", and no later save tells why"
        return replace(at_step(state, called(state), message), severity=Severity.WARNING)
    return at_step(state, called(state), f"{message}, {called(after)} of {after.num_ranks} again")


INVARIANTS = (
    Invariant(
        "INT003", "dangling-pointer", Severity.ERROR,
        statement="The step that a pointer file names exists and is whole.",
        rationale="Resuming follows the pointer: it fails, or starts from scratch and overwrites what is left.",
        source="KempnerForge#102; NVIDIA/Megatron-LM tracker files",
        example="latest names global_step300, which is not there",
        misses="A pointer to a whole step that is the wrong one.",
        hint="Write the last good step's name into the pointer before resuming.",
        judge_run=pointers_lead_to_whole_steps, needs=Needs.NAMES,
    ),
    Invariant(
        "INT004", "step-uncommitted", Severity.ERROR,
        statement="The newest step was finished by its writer, unless it is younger than --settle. An unfinished one "
                  "before a finished one, which its format marks so that loaders pass over it, is a warning.",
        rationale="A torn save looks like the newest checkpoint; resuming from it fails or loads part of the state.",
        source="huggingface/transformers#35782; NVIDIA-NeMo/Speech#7952; Orbax's temporary names",
        example="global_step300 lacks 4 files and nothing commits it",
        misses="A save in which every file is there but the last of them is not wholly flushed.",
        hint="Remove the torn step or finish copying it; resume from the last good step.",
        judge_run=steps_were_finished, needs=Needs.NAMES, likely_causes=(TORN,), goes_first=True,
    ),
    Invariant(
        "INT011", "optimizer-state-repeats", Severity.ERROR,
        statement="Two saved steps with different parameters don't have the same moments and the same counters of "
                  "optimizer steps. Where moments were not read, counters that all repeat are a warning, unless the "
                  "file records that steps were skipped. Legal are equal counters with equal parameters (no update "
                  "was made between the saves) or with other moments (the optimizer began anew).",
        rationale="A step whose optimizer files are all those of an earlier save: weights and moments don't belong "
                  "together, and every file fits every other.",
        source="deepspeedai/DeepSpeed#5289; hiyouga/LlamaFactory#655",
        example="global_step300: its optimizer state is that of optimizer step 200, as in step 200",
        misses="Optimizer files of a step that was not saved, or is not among those looked at; a step that is a copy "
               "of another as a whole (MOT015); optimizers that don't count.",
        hint="Restore the optimizer files of this step, or resume from the last good step.",
        judge_run=optimizer_states_advance, needs=Needs.HEADERS,
    ),
    Invariant(
        "INT007", "step-saved-twice", Severity.ERROR,
        statement="No two folders of a run hold the same step in the same format. One that was converted is another. A "
                  "note where both hold the same bit by bit in files of the same sizes, unless the name of one tells "
                  "another step.",
        rationale="It is not known which of the two was trained on, and which a loader will take.",
        source="hiyouga/LlamaFactory#655",
        example="global_step300 and global_step300_old both say that they are step 300",
        misses="A step that was saved again into the same folder.",
        hint="Move the folder that is not part of this run out of it.",
        judge_run=steps_are_saved_once, needs=Needs.NAMES,
    ),
    Invariant(
        "INT008", "pointer-behind", Severity.NOTE,
        statement="No whole step is newer than the step that the pointer names.",
        rationale="Somebody set the pointer back, or it was not moved; resuming will not start from the newest step.",
        source="docs/design.md, section 5: a pointer set back by hand is legal",
        example="global_step400 is whole, the pointer names step 300",
        misses="Newer steps that are not whole (INT004).",
        hint="If nobody set it back on purpose, find out why the last save did not move it.",
        judge_run=pointer_is_newest, needs=Needs.NAMES,
    ),
    Invariant(
        "INT016", "pointers-disagree", Severity.ERROR,
        statement="Where the ranks of one run saved under several roots (node-local disks), the roots' pointers name "
                  "the same step.",
        rationale="Each node restores the step that its own pointer names: ranks resume from different steps, in "
                  "silence.",
        source="hiyouga/LlamaFactory#655; NVIDIA/Megatron-LM#1530",
        example="latest names global_step300 and global_step400 in different roots",
        misses="Roots that were not given together; a root without pointer.",
        hint="Set all pointers to the newest step that is whole on all nodes.",
        judge_run=pointers_agree, needs=Needs.NAMES,
    ),
    Invariant(
        "INT013", "fewer-ranks-than-around", Severity.ERROR,
        statement="Where nothing records how many ranks there are, a step has files of no fewer than the saves before "
                  "and after it. Without a later save of more it is a warning, and none once three saves in a row have "
                  "equally few: the run was then resumed on fewer ranks.",
        rationale="The last ranks' files are lost and nothing else shows it: the step looks like one of a smaller run.",
        source="torch.save of one file a rank, as training scripts write it: the files carry no world size unless the "
               "script records it",
        example="step_12 has files of 3 ranks, step_10 of 4, step_14 of 4 again",
        misses="Files that the first save lacks, or three saves in a row or more; any, if one save alone is looked at. "
               "Record `world_size` in every file: INT001 then speaks for each step by itself.",
        hint="Restore the lost files from another copy, or resume from a step that has as many as the others.",
        judge_run=files_of_as_many_ranks, needs=Needs.NAMES,
    ),
)  # fmt: skip
