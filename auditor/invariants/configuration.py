"""AUX: what the user states beside the checkpoint still counts. Nothing here is about a step."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from auditor.invariants.invariant import Invariant, Needs
from auditor.model.finding import Judgement, Severity, Violation
from auditor.model.waiver import Waiver


def waivers_are_in_force(waivers: Sequence[Waiver], today: date) -> Judgement:
    """No waiver of the configuration has passed the last day on which it counts."""
    expired = [waiver for waiver in waivers if waiver.expired(today)]
    return Judgement(len(waivers) - len(expired), tuple(map(_expired, expired)))


def _expired(waiver: Waiver) -> Violation:
    what = f"{waiver.id} on {waiver.tensor}" if waiver.tensor != "*" else waiver.id
    message = f"the waiver of {what} ran out on {waiver.until}; its reason was: {waiver.reason}"
    return Violation(what, (), message)


INVARIANTS = (
    Invariant(
        "AUX001", "waiver-expired", Severity.WARNING,
        statement="Every waiver in the configuration still counts: its `until` has not passed.",
        rationale="What was accepted for a time counts again, or is over and its waiver forgotten. Either way somebody "
                  "who promised to look has not.",
        source="docs/design.md: a waiver that ran out is a finding about no step",
        example="the waiver of REP001 on *layernorm* ran out on 2026-03-01; its reason was: resynchronised at 20448",
        misses="Waivers without `until`, which never run out; waivers that cover nothing any more.",
        hint="Remove the waiver, or look again at what it accepted and state a new day.",
        needs=Needs.NAMES, judge_waivers=waivers_are_in_force,
    ),
)  # fmt: skip
