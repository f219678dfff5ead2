"""INT: over a run, each save holds optimizer state if most do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from auditor.invariants.integrity_runs import at_step, called
from auditor.invariants.invariant import Invariant, Needs
from auditor.model.finding import Judgement, Severity
from auditor.model.run import Commit, RunState, StepState

MOST = 2
"""More than this many saves with state to each without it: scripts may keep it in every other save only."""


def saves_hold_optimizer_state(run: RunState) -> dict[int, Judgement]:
    """No save lacks optimizer state that most of its format hold, those around it included."""
    of_format: dict[str, list[StepState]] = {}
    judged: dict[int, Judgement] = {}
    for state in run.on_disk:
        if state.commit is Commit.COMMITTED and state.state_files is not None:
            of_format.setdefault(state.format, []).append(state)
    for states in of_format.values():
        for state, found in zip(states, _judged(states), strict=True):
            judged[state.step] = judged[state.step].merged(found) if state.step in judged else found
    return judged


def _judged(states: Sequence[StepState]) -> list[Judgement]:
    with_state = [at for at, state in enumerate(states) if state.state_files]
    if not with_state:
        return [Judgement(not_applicable={"no save of the run holds optimizer state": 1})] * len(states)
    # Before the first save with state the optimizer may not have taken a step.
    first = with_state[0]
    lacking = [at for at in range(first, len(states)) if not states[at].state_files]
    found = [Judgement(1)] * len(states)
    if len(lacking) * MOST < len(with_state):
        for before, after in pairwise((*with_state, len(states))):
            for at in range(before + 1, after):
                found[at] = _lacking(states[at], states[before], states[after] if after < len(states) else None)
    return found


def _lacking(state: StepState, before: StepState, after: StepState | None) -> Judgement:
    names = before.state_files or ()
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    if after is None:
        # The last save of a training is often of its weights alone.
        reason = f"it holds no optimizer state, the saves before it do ({names[0]}{more}): lost, or not saved"
        return Judgement(undetermined={reason: (called(state),)})
    message = f"{called(state)} holds no optimizer state; {called(before)} does ({names[0]}{more}), {called(after)} too"
    return Judgement(violations=(at_step(state, called(state), message),))


INVARIANTS = (
    Invariant(
        "INT020", "optimizer-state-lost", Severity.WARNING,
        statement="Where more than two thirds of a run's saves hold optimizer state, those between them do. Without a "
                  "later save that does it is undetermined: a last save is often of weights alone.",
        rationale="Resuming from it starts the optimizer anew, in silence: the loss jumps and nothing tells why.",
        source="huggingface/transformers#35782",
        example="step_12 holds no optimizer state; step_8 does (opt_state.msgpack), step_16 too",
        misses="State that more saves lack; files that keep none of the optimizer's tensors and counters (schedules, "
               "random states); optimizers without state.",
        hint="Restore the optimizer's files from another copy, or resume from a step that has them.",
        judge_run=saves_hold_optimizer_state, needs=Needs.HEADERS,
    ),
)  # fmt: skip
