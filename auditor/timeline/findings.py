"""From judgements of single steps to findings of the run: one fault, one finding.

1. In each step, a violation that the damage of a file explains, or that concerns the same tensors and roles as a
   violation of higher precedence, becomes a consequence of that one.
2. What is left is grouped into faults: replicas by the sides that disagree, the rest by the steps in which they show.
3. Every fault gets its intervals, its class and its words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from auditor.invariants.invariant import IN_ALL_ROLES, NEVER_A_CONSEQUENCE, Invariant
from auditor.model.catalog import Role
from auditor.model.finding import Finding, Judgement, LikelyCause, Location, Outcome, Severity, Violation
from auditor.model.mesh import Coordinate
from auditor.model.observation import DifferenceClass
from auditor.timeline.classify import SEVERITIES, classify
from auditor.timeline.onset import Mark, intervals

ANY_ROLE = "any role"
StepJudgements = Mapping[str, Judgement]
"""Invariant id to what it says about one step."""


@dataclass(slots=True)
class _Fault:
    """Violations that are one fault."""

    invariant: Invariant
    subjects: set[str] = field(default_factory=set)
    violations: dict[int, list[Violation]] = field(default_factory=lambda: defaultdict(list))
    consequences: set[str] = field(default_factory=set)

    def locations(self, step: int) -> list[Location]:
        found = [location for violation in self.violations[step] for location in violation.locations]
        return sorted(found, key=lambda x: (x.order, x.tensor, _role_rank(x.role), x.coordinate.indices, x.file))

    def all_locations(self) -> tuple[Location, ...]:
        return tuple(location for step in sorted(self.violations) for location in self.locations(step))


def _role_rank(role: Role | None) -> int:
    return list(Role).index(role) if role else -1


def findings(steps: Mapping[int, StepJudgements], chosen: Sequence[Invariant]) -> list[Finding]:
    """All findings of a run, in order of precedence, then of onset.

    Args:
        steps: per audited step, the judgement of every invariant that spoke about it.
        chosen: the invariants that were asked for.
    """
    by_id = {invariant.id: invariant for invariant in chosen}
    kept, consequences = _without_consequences(steps, by_id)
    found = []
    for invariant in chosen:
        for fault in _faults(invariant, kept[invariant.id]):
            for step, violations in fault.violations.items():
                for violation in violations:
                    fault.consequences |= consequences.get((invariant.id, step, violation.subject), set())
            found.append(_finding(fault, steps))
    return sorted(found, key=lambda f: (by_id[f.id].rank, f.intervals[0].first_bad if f.intervals else -1))


def findings_of_no_step(invariant: Invariant, judged: Judgement) -> list[Finding]:
    """What is wrong beside the checkpoint: a finding a violation, without location and interval."""
    return [
        Finding(invariant.id, invariant.name, violation.severity or invariant.severity, violation.message,
                invariant.hint, (), likely_causes=invariant.likely_causes)
        for violation in judged.violations
    ]  # fmt: skip


_Explainers = dict[object, list[tuple[Severity, tuple[str, str]]]]
"""Tensor and role, or file, to what is wrong with it in a step, with its severity, in order of precedence."""
_Kept = dict[str, dict[int, list[Violation]]]


def _without_consequences(
    steps: Mapping[int, StepJudgements], by_id: Mapping[str, Invariant]
) -> tuple[_Kept, dict[tuple[str, int, str], set[str]]]:
    """Violations that stand for themselves, and what others each of them explains."""
    kept: _Kept = {identifier: {} for identifier in by_id}
    consequences: dict[tuple[str, int, str], set[str]] = defaultdict(set)
    mild = _mild_subjects(steps)
    for step, judgements in steps.items():
        explainers: _Explainers = defaultdict(list)
        for identifier in sorted(judgements.keys() & by_id.keys(), key=lambda i: by_id[i].rank):
            remaining = []
            for violation in judgements[identifier].violations:
                causes = _causes(violation, by_id[identifier], explainers)
                if causes and by_id[identifier].family not in NEVER_A_CONSEQUENCE:
                    for cause, subject in causes:
                        consequences[cause, step, subject].add(identifier)
                else:
                    remaining.append(violation)
            for violation in remaining:
                severity = violation.severity or by_id[identifier].severity
                if (identifier, violation.subject) not in mild:
                    for key in (*violation.explains, *_keys_given(violation)):
                        explainers[key].append((severity, (identifier, violation.subject)))
            kept[identifier][step] = remaining
    return kept, consequences


def _mild_subjects(steps: Mapping[int, StepJudgements]) -> set[tuple[str, str]]:
    """Replicas whose differences are no error over the run: a note must not swallow an error of the same tensor."""
    history: dict[tuple[str, str], list[Location]] = defaultdict(list)
    for judgements in steps.values():
        for identifier, judgement in judgements.items():
            for violation in judgement.violations:
                if violation.sides:
                    history[identifier, violation.subject].extend(violation.locations)
    return {key for key, locations in history.items() if SEVERITIES[classify(locations)] < Severity.ERROR}


def _causes(violation: Violation, invariant: Invariant, explainers: _Explainers) -> set[tuple[str, str]]:
    """What explains a violation at every one of its places; empty where some place stays unexplained.

    What is milder does not explain what is more severe: a note must not swallow an error.
    """
    least, in_all_roles = violation.severity or invariant.severity, invariant.family in IN_ALL_ROLES

    def first(keys: Iterable[object]) -> tuple[str, str] | None:
        known = (cause for key in keys if key in explainers for severity, cause in explainers[key] if severity >= least)
        return next(known, None)

    if cause := first([invariant.id, invariant.family]):
        return {cause}
    if violation.explained_by:
        found = [first([file]) for file in violation.explained_by]
    else:
        found = [first(_keys_needed(location, in_all_roles)) for location in violation.locations]
    return set() if None in found else {cause for cause in found if cause is not None}


def _keys_given(violation: Violation) -> Iterable[object]:
    """What a violation explains: trouble of its tensors; where it is about a file, of that file."""
    for location in violation.locations:
        if location.tensor:
            yield location.tensor, location.role
            yield location.tensor, ANY_ROLE
        if not violation.sides and location.file and (not location.tensor or location.role is None):
            yield location.file


def _keys_needed(location: Location, in_all_roles: bool) -> Iterable[object]:
    if location.tensor:
        yield location.tensor, location.role
        if in_all_roles:
            yield location.tensor, ANY_ROLE
    yield from filter(None, (location.file, location.reference_file))


def _faults(invariant: Invariant, steps: Mapping[int, Sequence[Violation]]) -> list[_Fault]:
    by_subject: dict[str, dict[int, list[Violation]]] = defaultdict(lambda: defaultdict(list))
    for step, violations in steps.items():
        for violation in violations:
            by_subject[violation.subject][step].append(violation)
    faults: dict[object, _Fault] = {}
    for subject, whole_history in by_subject.items():
        for history in _apart(whole_history):
            fault = faults.setdefault(_fault_key(invariant, history), _Fault(invariant))
            fault.subjects.add(subject)
            for step, violations in history.items():
                fault.violations[step].extend(violations)
    return list(faults.values())


def _apart(history: Mapping[int, list[Violation]]) -> list[dict[int, list[Violation]]]:
    """A subject's history, cut where other sides disagree than before.

    A drift may split its sides further ({0|123}, then {0|1|2|3}); sides that are no refinement of each other
    ({023|1}, then {013|2}) are another fault.
    """
    parts: list[dict[int, list[Violation]]] = []
    known: list[frozenset[frozenset[Coordinate]]] = []
    for step in sorted(history):
        sides = _finest([violation.sides for violation in history[step]])
        if parts and all(_comparable(sides, other) for other in known):
            parts[-1][step] = history[step]
            known.append(sides)
        else:
            parts.append({step: history[step]})
            known = [sides]
    return parts


def _comparable(one: frozenset[frozenset[Coordinate]], other: frozenset[frozenset[Coordinate]]) -> bool:
    """Whether one partition refines the other."""
    return any(
        all(any(part <= whole for whole in coarse) for part in fine) for fine, coarse in ((one, other), (other, one))
    )


def _fault_key(invariant: Invariant, history: Mapping[int, Sequence[Violation]]) -> object:
    violations = [violation for members in history.values() for violation in members]
    if violations[0].sides:
        locations = [location for violation in violations for location in violation.locations]
        kind = classify(locations)
        apart = (DifferenceClass.SINGLE_BIT, DifferenceClass.EQUAL_AS_NUMBERS, DifferenceClass.BUFFERS)
        return _finest([violation.sides for violation in violations]), kind if kind in apart else None
    if invariant.one_fault:
        return ""
    # What is but a warning must not soften an error of the same steps, nor the other way round.
    return frozenset(history), frozenset(violation.severity for violation in violations)


def _finest(partitions: Sequence[tuple[tuple[Coordinate, ...], ...]]) -> frozenset[frozenset[Coordinate]]:
    """The classes into which all the partitions together cut the coordinates."""
    signature: dict[Coordinate, list[tuple[int, int]]] = defaultdict(list)
    for position, partition in enumerate(partitions):
        for number, members in enumerate(partition):
            for place in members:
                signature[place].append((position, number))
    classes: dict[tuple[tuple[int, int], ...], set[Coordinate]] = defaultdict(set)
    for place, numbers in signature.items():
        classes[tuple(numbers)].add(place)
    return frozenset(frozenset(members) for members in classes.values())


_SPOKEN = frozenset({Outcome.HOLDS, Outcome.VIOLATED, Outcome.UNDETERMINED})


def _marks(fault: _Fault, steps: Mapping[int, StepJudgements]) -> dict[int, Mark]:
    """What every step says of the fault. A step says nothing where a subject was lost or could not be judged.

    What jumped is not over where it moves on as it should: the steps since descend from it, until one undid it.
    """
    marks = {}
    jumped: set[str] = set()
    for step, judgements in sorted(steps.items()):
        judgement = judgements.get(fault.invariant.id, Judgement())
        lost = {name for names in judgement.undetermined.values() for name in names} - judgement.held
        # What became a consequence of something else in this step is no good news either.
        lost |= {violation.subject for violation in judgement.violations}
        jumped -= judgement.held
        if fault.invariant.lasting:
            jumped |= {violation.subject for violation in fault.violations.get(step, ())}
        if step in fault.violations or (jumped and judgement.outcome in _SPOKEN):
            marks[step] = Mark.BAD
        elif judgement.num_holds and not fault.subjects & lost:
            marks[step] = Mark.GOOD
        else:
            marks[step] = Mark.UNKNOWN
    return marks


def _finding(fault: _Fault, steps: Mapping[int, StepJudgements]) -> Finding:
    invariant = fault.invariant
    locations = fault.all_locations()
    found = intervals(_marks(fault, steps), {step: fault.locations(step) for step in fault.violations})
    violations = [violation for members in fault.violations.values() for violation in members]
    kind = classify(locations) if violations[0].sides else None
    severity = SEVERITIES[kind] if kind else invariant.severity
    stated = [violation.severity for violation in violations if violation.severity is not None]
    if kind is DifferenceClass.BUFFERS or (kind is None and stated):
        severity = max(stated, default=Severity.ERROR)
    minority = {place for violation in violations for place in violation.minority}
    return Finding(
        invariant.id, invariant.name, severity, _message(fault, locations), invariant.hint, locations, found, kind,
        tuple(sorted(minority, key=lambda place: place.indices)), tuple(sorted(fault.consequences)),
        _fitting_causes(invariant, kind, locations),
    )  # fmt: skip


def _fitting_causes(
    invariant: Invariant, kind: DifferenceClass | None, locations: Sequence[Location]
) -> tuple[LikelyCause, ...]:
    """The likely causes that fit the class of the differences and the axes along which replicas differ."""
    # Where no difference could be measured, the class says little about the cause.
    measured = any(location.num_elements_differ is not None for location in locations)
    causes = invariant.likely_causes
    if kind and (measured or kind is not DifferenceClass.GROSS):
        causes = invariant.causes_by_class.get(kind, causes)
    # Scripts call a part of an axis by its name and what it is for: dp_replicate.
    axes = {
        axis.partition("_")[0] for x in locations for axis, _ in set(x.coordinate.indices) ^ set(x.reference.indices)
    }
    return tuple(cause for cause in causes if not cause.axes or axes & set(cause.axes))


def _message(fault: _Fault, locations: Sequence[Location]) -> str:
    if fault.invariant.id == "REP001":
        return _replica_message(fault, locations)
    first = min(fault.violations)
    lines = [violation.message for violation in fault.violations[first]]
    more = len(fault.subjects) - 1
    return lines[0] + (f", and {more} more like it" if more else "")


def _replica_message(fault: _Fault, locations: Sequence[Location]) -> str:
    tensors = list(dict.fromkeys(x.tensor for x in sorted(locations, key=lambda x: x.order)))
    places = sorted({x.coordinate for x in locations} | {x.reference for x in locations}, key=lambda c: c.indices)
    between = " and ".join(map(str, places)) if len(places) == 2 else ", ".join(map(str, places))
    what = tensors[0] if len(tensors) == 1 else f"{len(tensors)} replicated tensors, first {tensors[0]},"
    return f"{what} differ{'s' if len(tensors) == 1 else ''} between {between}"
