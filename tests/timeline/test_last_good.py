from dataclasses import replace

import pytest

from auditor.model.finding import Finding, Interval, Judgement, Location, Severity, Violation
from auditor.model.run import Commit, StepState
from auditor.timeline.last_good import bad_steps, last_good

HOLDS = Judgement(5)
ALL_HOLD = {"INT001": HOLDS, "INT002": HOLDS, "COV001": HOLDS, "REP001": HOLDS}
UNKNOWN = Judgement(undetermined={"stored once": ("a",)})


def state(step, **more):
    return StepState(step, f"global_step{step}", "made-up", more.pop("whole", True), **more)


def finding(*steps, severity=Severity.ERROR, waived=False):
    return Finding(
        "REP001", "replicas-differ", severity, "", "", tuple(Location(step) for step in steps), waived=waived
    )


def chosen(steps, *found, states=None, fail_on=Severity.ERROR, strict=False, serious=frozenset()):
    states = [state(step) for step in steps] if states is None else states
    good, _ = last_good(states, steps, found, fail_on, serious=serious, strict=strict)
    return good.step if good else None


def test_the_newest_step_is_good_if_nothing_is_wrong():
    assert chosen({1: ALL_HOLD, 2: ALL_HOLD}) == 2


def test_findings_in_newer_steps_make_an_older_one_the_last_good():
    assert chosen({1: ALL_HOLD, 2: ALL_HOLD, 3: ALL_HOLD}, finding(2, 3)) == 1
    assert chosen({1: ALL_HOLD, 2: ALL_HOLD}, finding(1, 2)) is None


def test_a_healed_fault_leaves_the_newest_step_good():
    assert chosen({1: ALL_HOLD, 2: ALL_HOLD, 3: ALL_HOLD}, finding(2)) == 3


@pytest.mark.parametrize(("healed", "good"), [(None, 1), (4, 4), (3, 4)])
def test_steps_since_a_fault_of_which_nothing_was_determined_are_not_good(healed, good):
    """A tensor that stood still at step 2 can't be judged at step 3: the save before is a bad one."""
    still = replace(finding(2), intervals=(Interval(1, 2, 2, healed),))
    assert chosen({1: ALL_HOLD, 2: ALL_HOLD, 3: ALL_HOLD, 4: ALL_HOLD}, still) == good
    if healed == 4:
        assert chosen({1: ALL_HOLD, 2: ALL_HOLD, 3: ALL_HOLD}, still) == 1


def test_findings_below_the_threshold_and_waived_ones_do_not_count():
    steps = {1: ALL_HOLD, 2: ALL_HOLD}
    assert chosen(steps, finding(2, severity=Severity.WARNING)) == 2
    assert chosen(steps, finding(2, severity=Severity.WARNING), fail_on=Severity.WARNING) == 1
    assert chosen(steps, finding(2, waived=True)) == 2


@pytest.mark.parametrize(("severity", "good"), [(None, 1), (Severity.ERROR, 1), (Severity.WARNING, 2)])
def test_a_violation_of_the_needed_families_counts_by_its_own_severity(severity, good):
    left = Judgement(5, (Violation("f", (Location(2, "f"),), severity=severity),))
    steps = {1: ALL_HOLD, 2: {**ALL_HOLD, "INT009": left}}
    assert chosen(steps, serious=frozenset({"INT009"})) == good


def test_bad_steps_are_those_with_locations():
    found = [finding(2, 5), finding(7, severity=Severity.NOTE), finding(9, waived=True)]
    assert set(bad_steps(found, Severity.ERROR)) == {2, 5}


def test_a_pointer_makes_no_step_bad():
    dangling = Finding("INT003", "dangling-pointer", Severity.ERROR, "", "", (Location(2),))
    assert bad_steps([dangling], Severity.ERROR) == {}


@pytest.mark.parametrize(
    ("others", "own"),
    [
        (["last", "step-20-backup", "best_of_120"], "step-20"), (["20.bak", "20_copy"], "20"),
        (["step_20.bak.npz", "last.npz"], "step_20.npz"), (["steps/20@step-20"], "steps/20"),
    ],
)  # fmt: skip
def test_of_two_folders_of_a_step_it_is_that_with_its_own_name(others, own):
    states = [StepState(20, path, "made-up", True) for path in sorted([*others, own])]
    states.insert(0, StepState(10, "step-10", "made-up", True))
    good, _ = last_good(states, {10: ALL_HOLD, 20: ALL_HOLD}, [], Severity.ERROR, serious=frozenset(), strict=False)
    assert good.path == own


def test_newer_steps_are_rejected_with_a_reason():
    steps = {1: ALL_HOLD, 2: ALL_HOLD, 3: ALL_HOLD}
    states = [state(1), state(2), state(3, commit=Commit.UNCOMMITTED)]
    good, rejected = last_good(states, steps, [finding(2)], Severity.ERROR, serious=frozenset(), strict=False)
    assert good.step == 1
    assert rejected == [(3, "it is uncommitted"), (2, "REP001 replicas-differ")]


@pytest.mark.parametrize("unfit", [{"whole": False}, {"commit": Commit.UNCOMMITTED}, {"commit": Commit.IN_PROGRESS}])
def test_only_whole_committed_steps_are_good(unfit):
    assert chosen({1: ALL_HOLD, 2: ALL_HOLD}, states=[state(1), state(2, **unfit)]) == 1


def test_a_step_that_was_not_judged_is_not_good():
    assert chosen({1: ALL_HOLD}, states=[state(1), state(2)]) == 1


@pytest.mark.parametrize("needed", ["INT001", "INT002", "COV001"])
def test_integrity_and_coverage_must_be_determined(needed):
    unknown = {**ALL_HOLD, needed: UNKNOWN}
    unasked = {key: judgement for key, judgement in ALL_HOLD.items() if key != needed}
    assert chosen({1: ALL_HOLD, 2: unknown}) == 1
    assert chosen({1: ALL_HOLD, 2: unasked}) == 1


def test_other_families_may_be_undetermined_unless_strict():
    steps = {1: ALL_HOLD, 2: {**ALL_HOLD, "REP001": UNKNOWN}}
    assert chosen(steps) == 2
    assert chosen(steps, strict=True) == 1


def test_serious_violations_count_although_no_finding_was_made_of_them():
    torn = {**ALL_HOLD, "INT002": Judgement(4, (Violation("x.pt", (Location(2, "x.pt"),)),))}
    assert chosen({1: ALL_HOLD, 2: torn}, serious=frozenset({"INT002"})) == 1
    assert chosen({1: ALL_HOLD, 2: torn}) == 2


def test_no_steps():
    assert chosen({}) is None
