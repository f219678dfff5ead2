"""MOT: over a run, no saved step holds the weights of an earlier one under a new number.

Weights, moments and counters that are all those of an earlier save are no proof by themselves: between two saves no
update may have been made (skipped steps, accumulated gradients). What speaks for a copy is one of three things: saves
in between moved; many updates were due by the pace at which the optimizer counted until then; the files with the
weights bear what the writer drew by chance for that save (their names in OCDBT, a number in DCP's index). The last is
proof. Where these differ no folder was copied: the writer saved that state anew, as after an early stop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from auditor.invariants.integrity_runs import all_skipped, at_step, called
from auditor.invariants.invariant import Invariant, Needs
from auditor.model.finding import Judgement, LikelyCause, Severity, Violation
from auditor.model.observation import same_content
from auditor.model.run import RunState, StepState

_DUE = 16
"""Updates that must have been due: some in a row may have been skipped without a trace, as gradients overflowed."""
_COUNTED = 2
"""Updates by which the pace is known. With gradients of k batches accumulated they take more than k steps, so that of
fewer than k steps no two are said to be due."""
_EXPLAINED = frozenset({"INT005", "INT012", "MOT"})
"""What a copied step violates besides: it records another step, and does not descend from the save before."""
_BY_NAMES = "in files that bear the names or the number drawn for that save"


@dataclass(frozen=True, slots=True)
class _Repeat:
    """A step whose weights are those of an earlier one."""

    states: Sequence[StepState]
    state: StepState
    earlier: StepState
    moved: StepState | None
    """The last save between them that holds other weights."""
    copied: bool | None
    """Whether the files with the weights are that save's, where something tells."""

    @property
    def read_whole(self) -> bool:
        """Whether more weights were read than those stored more than once: a few norms may come to old bits again."""
        held = self.state.parameters
        return len(held) == 1 or held[0] != held[1]

    def violation(self, what: str, told: str, severity: Severity) -> Violation:
        """The finding: what of the earlier step it holds, and what tells that it should not."""
        message = f"{called(self.state)} holds the {what} of step {self.earlier.step} bit by bit, {told}"
        found = at_step(self.state, called(self.earlier), message)
        return replace(found, severity=severity, explains=_EXPLAINED)


def steps_are_no_copies(run: RunState) -> dict[int, Judgement]:
    """No step holds the weights of an earlier one, with its optimizer state or another."""
    of_format: dict[str, list[StepState]] = {}
    for state in run.steps:
        if state.parameters and state.step > 0:
            of_format.setdefault(state.format, []).append(state)
    judged: dict[int, Judgement] = {}
    for states in of_format.values():
        for state, found in _judged(states):
            judged[state.step] = judged[state.step].merged(found) if state.step in judged else found
    return judged


def _judged(states: Sequence[StepState]) -> Iterator[tuple[StepState, Judgement]]:
    wholes: dict[object, StepState] = {}
    weights: dict[object, StepState] = {}
    for state in states:
        trained = (state.parameters, state.moments, state.optimizer_step, state.counters)
        whole = wholes.setdefault(trained, state)
        alone = weights.setdefault(state.parameters, state)
        if state is states[0]:
            yield state, Judgement(not_applicable={"no save before it is known": 1})
        elif state.deleted or alone.step == state.step:
            yield state, Judgement(1)
        elif whole.step < state.step:
            yield state, _of_all(_repeat(states, state, whole))
        else:
            yield state, _of_weights(_repeat(states, state, alone))


def _repeat(states: Sequence[StepState], state: StepState, earlier: StepState) -> _Repeat:
    between = (other for other in reversed(states) if earlier.step < other.step < state.step)
    moved = next((other for other in between if _differ(other, state)), None)
    copied: bool | None = None
    if state.drawn and earlier.drawn:
        copied = state.drawn == earlier.drawn
    if copied and any(other.drawn == state.drawn and _differ(other, state) for other in states):
        # A writer that draws once for all saves.
        copied = None
    return _Repeat(states, state, earlier, moved, copied)


def _differ(one: StepState, other: StepState) -> bool:
    return same_content(one.parameters, other.parameters) is False


def _of_all(repeat: _Repeat) -> Judgement:
    """Of a step that holds all that is trained as an earlier one does: moments and counters as well as weights."""
    state, moved = repeat.state, repeat.moved
    what = "weights, optimizer state and counters" if state.moments else "weights"
    told, anew = "", ""
    if repeat.copied:
        told = _BY_NAMES
    elif moved and (state.moments or repeat.read_whole):
        told, anew = f"though step {moved.step} between them holds others", "that state was restored"
    elif state.moments and (due := _due(repeat.states, state, repeat.earlier)) >= _DUE:
        told, anew = f"though about {due:.3g} updates were due since", "no update was made"
    elif not state.moments:
        # MOT004 speaks of weights alone: they may be frozen.
        return Judgement(1)
    else:
        reason = "no update was counted since an earlier save, by which all stayed as it was, or it is a copy of that"
        return Judgement(undetermined={reason: (called(state),)})
    severity = Severity.ERROR
    if repeat.copied is False:
        told += f". It was saved anew: {anew}, or the writer kept an old one"
    if not repeat.copied and (repeat.copied is False or not state.moments):
        severity = Severity.WARNING
    return Judgement(violations=(repeat.violation(what, told, severity),))


def _of_weights(repeat: _Repeat) -> Judgement:
    """Of a step that holds an earlier one's weights with another optimizer state."""
    if repeat.copied:
        found = repeat.violation("weights", f"{_BY_NAMES}, and another optimizer state", Severity.ERROR)
    elif repeat.moved and repeat.read_whole:
        told = f"though step {repeat.moved.step} between them holds others, and another optimizer state"
        found = repeat.violation("weights", told, Severity.ERROR if _mixed(repeat) else Severity.WARNING)
    else:
        return Judgement(1)
    return Judgement(violations=(found,))


def _mixed(repeat: _Repeat) -> bool:
    """Whether old weights lie under an optimizer that went on, so that the step is a mix of two.

    As the counter tells, or the moments where none counts: a new optimizer, begun over weights that were put back, is
    no mix. Where averages of weights are saved in turns with the weights, more than one step comes back.
    """
    counts = repeat.earlier.optimizer_step, repeat.state.optimizer_step
    if counts[0] is not None and counts[1] is not None:
        newer = counts[1] > counts[0]
    else:
        newer = same_content(repeat.earlier.moments, repeat.state.moments) is False
    return newer and _num_returns(repeat.states) == 1


def _num_returns(states: Sequence[StepState]) -> int:
    """How often weights were those of an earlier save again, after others."""
    seen, last, count = set[object](), None, 0
    for state in states:
        count += state.parameters != last and state.parameters in seen
        seen.add(last := state.parameters)
    return count


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
                  "until then, or where the files with the weights bear what is drawn for every save (their names in "
                  "OCDBT, a number in DCP's index). A warning where weights are all that is stored, and where what is "
                  "drawn shows that the state was saved anew. Nor does it hold the weights alone, with another "
                  "optimizer state, of an earlier one whose drawn names its files bear, or while saves in between hold "
                  "others: an error where the optimizer went on, as its counter tells, or its moments where none "
                  "counts, and no other step comes back so; else a warning. Undetermined where nothing tells a copy "
                  "from steps without an update.",
        rationale="An old step, or its weights, lies in a newer one's place: resuming from it loses what was trained "
                  "since, and the step's number says otherwise.",
        source="hiyouga/LlamaFactory#655; measured: Orbax and JAX keep the step in the folder's name alone, so that "
               "a copied folder restores in silence",
        example="step_6 holds the weights, optimizer state and counters of step 4 bit by bit, in files that bear the "
                "names or the number drawn for that save",
        misses="A copy of which a weight was changed; a copy of the save before where few steps lie between and "
               "nothing is drawn; weights of the save before (MOT004); a copy of a step that is not among those looked "
               "at, or of step 0. A state that was restored on purpose is a warning.",
        hint="Find out whether files were copied or an older state was put back on purpose, as the best weights at the "
             "end are. If not, or if its optimizer is a newer one, resume from the newest sound step before it.",
        judge_run=steps_are_no_copies, needs=Needs.WEIGHTS, goes_first=True, ranks_as="INT",
        likely_causes=(
            LikelyCause("files were copied or restored by hand, or an old state was saved", "hiyouga/LlamaFactory#655"),
        ),
    ),
)  # fmt: skip
