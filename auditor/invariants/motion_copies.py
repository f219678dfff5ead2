"""MOT: over a run, no saved step is an earlier one under a new number.

Weights, moments and counters that are all those of an earlier save are no proof by themselves: between two saves no
update may have been made (skipped steps, accumulated gradients). What proves a copy is one of three things: saves in
between moved; many updates were due by the pace at which the optimizer counted until then; the files have the very
names of that save, where the writer draws them by chance (OCDBT).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from auditor.invariants.integrity_runs import all_skipped, at_step, called
from auditor.invariants.invariant import Invariant, Needs
from auditor.model.finding import Judgement, LikelyCause, Severity
from auditor.model.observation import same_content
from auditor.model.run import RunState, StepState

_DUE = 16
"""Updates that must have been due: some in a row may have been skipped without a trace, as gradients overflowed."""
_COUNTED = 2
"""Updates by which the pace is known. With gradients of k batches accumulated they take more than k steps, so that of
fewer than k steps no two are said to be due."""
_EXPLAINED = frozenset({"INT005", "INT012", "MOT"})
"""What a copied step violates besides: it records another step, and does not descend from the save before."""


def steps_are_no_copies(run: RunState) -> dict[int, Judgement]:
    """No step holds the weights and the optimizer state of an earlier one."""
    of_format: dict[str, list[StepState]] = {}
    for state in run.steps:
        if state.parameters and state.step > 0:
            of_format.setdefault(state.format, []).append(state)
    judged: dict[int, Judgement] = {}
    for states in of_format.values():
        for state, earlier in _repeats(states):
            if state is states[0]:
                found = Judgement(not_applicable={"no save before it is known": 1})
            else:
                found = Judgement(1) if earlier is None or state.deleted else _judged(states, state, earlier)
            judged[state.step] = judged[state.step].merged(found) if state.step in judged else found
    return judged


def _repeats(states: Sequence[StepState]) -> Iterator[tuple[StepState, StepState | None]]:
    """Every step with the first one before it that holds the same, if there is one."""
    first: dict[object, StepState] = {}
    for state in states:
        key = (state.parameters, state.moments, state.optimizer_step, state.counters)
        earlier = first.setdefault(key, state)
        yield state, earlier if earlier.step < state.step else None


def _judged(states: Sequence[StepState], state: StepState, earlier: StepState) -> Judgement:
    between = [other for other in states if earlier.step < other.step < state.step]
    moved = [other for other in between if same_content(other.parameters, state.parameters) is False]
    what = "weights, optimizer state and counters" if state.moments else "weights"
    told, severity = "", Severity.ERROR
    if moved and (state.moments or _read_whole(state)):
        told = f"though step {moved[-1].step} between them holds others"
        severity = Severity.ERROR if state.moments else Severity.WARNING
    elif state.drawn and state.drawn == earlier.drawn and same_content(earlier.everything, state.everything):
        told = "in files of the same names, which are drawn anew for every save"
    elif state.moments and (due := _due(states, state, earlier)) >= _DUE:
        told = f"though about {due:.3g} updates were due since"
    elif not state.moments:
        # MOT004 speaks of weights alone: they may be frozen.
        return Judgement(1)
    else:
        reason = "no update was counted since an earlier save, by which all stayed as it was, or it is a copy of that"
        return Judgement(undetermined={reason: (called(state),)})
    message = f"{called(state)} holds the {what} of step {earlier.step} bit by bit, {told}"
    violation = replace(at_step(state, called(state), message), severity=severity, explains=_EXPLAINED)
    return Judgement(violations=(violation,))


def _read_whole(state: StepState) -> bool:
    """Whether more weights were read than those stored more than once: a few norms may come to old bits again."""
    return len(state.parameters) == 1 or state.parameters[0] != state.parameters[1]


def _due(states: Sequence[StepState], state: StepState, earlier: StepState) -> float:
    """About how many updates were due since an earlier step, by the pace until then; 0 where none is known."""
    known = next((other for other in states if other.optimizer_step is not None), earlier)
    counted = (earlier.optimizer_step or 0.0) - (known.optimizer_step or 0.0)
    if counted < _COUNTED or all_skipped(earlier, state):
        return 0.0
    since = state.step - earlier.step - (state.num_skipped - earlier.num_skipped)
    return counted / (earlier.step - known.step) * since


INVARIANTS = (
    Invariant(
        "MOT015", "step-copied", Severity.ERROR,
        statement="No step holds the weights, the moments and the counters of an earlier one bit by bit where saves in "
                  "between hold others, where 16 updates or more were due by the pace at which the optimizer counted "
                  "until then, or where its files have names that are drawn anew for every save (OCDBT). A warning "
                  "where weights are all that is stored and saves in between hold others. Undetermined where nothing "
                  "tells a copy from steps without an update.",
        rationale="An old step lies in a newer one's place: resuming from it loses what was trained since, and the "
                  "step's number says otherwise.",
        source="hiyouga/LlamaFactory#655; measured: Orbax and JAX keep the step in the folder's name alone, so that "
               "a copied folder restores in silence",
        example="step_6 holds the weights, optimizer state and counters of step 4 bit by bit, in files of the "
                "same names, which are drawn anew for every save",
        misses="A copy of which anything was changed; a copy of the save before where few steps lie "
               "between and no names tell; a copy of "
               "a step that is not among those looked at, or of step 0; best weights that were restored on purpose "
               "(a warning).",
        hint="Find out who copied the folder. Resume from the step that it is a copy of, or from a newer true one.",
        judge_run=steps_are_no_copies, needs=Needs.WEIGHTS, goes_first=True, ranks_as="INT",
        likely_causes=(LikelyCause("a folder was copied or restored by hand", "hiyouga/LlamaFactory#655"),),
    ),
)  # fmt: skip
