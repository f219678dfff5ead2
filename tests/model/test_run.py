from dataclasses import replace
from itertools import product

import pytest

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.model.catalog import File, FileState
from auditor.model.mesh import NO_MESH
from auditor.model.run import Commit, PointerState, StepState, decide_commits, step_state

NOW, SETTLE = 10_000.0, 600.0


def state(step, *, whole, age=SETTLE * 2):
    return StepState(step, f"global_step{step}", "made-up", whole, modified=NOW - age)


def commits(states, *targets):
    pointers = [PointerState("latest", target) for target in targets]
    decided = decide_commits(states, pointers, NOW, SETTLE)
    assert [item.step for item in decided] == [item.step for item in states]
    return [item.commit for item in decided]


@pytest.mark.parametrize(("whole", "pointed", "later", "newest", "young"), list(product([False, True], repeat=5)))
def test_truth_table(whole, pointed, later, newest, young):
    """``later``: a later step is committed. ``newest``: no step follows."""
    if later and newest:
        return
    judged = state(1, whole=whole, age=1.0 if young else SETTLE * 2)
    states = [judged] if newest else [judged, state(2, whole=later)]
    targets = ["global_step1"] if pointed else []
    if whole or pointed or later:
        expected = Commit.COMMITTED
    elif newest and young:
        expected = Commit.IN_PROGRESS
    else:
        expected = Commit.UNCOMMITTED
    assert commits(states, *targets)[0] is expected


@pytest.mark.parametrize(("ahead", "expected"), [
    (300.0, Commit.IN_PROGRESS), (2 * 86_400.0, Commit.UNCOMMITTED),
])  # fmt: skip
def test_a_step_dated_ahead_by_a_clock_that_is_a_little_wrong_is_young_and_no_other_is(ahead, expected):
    assert commits([state(1, whole=True), state(2, whole=False, age=-ahead)])[1] is expected


def test_all_steps_before_a_committed_one_are_committed():
    states = [state(1, whole=False), state(2, whole=False), state(3, whole=True), state(4, whole=False)]
    assert commits(states) == [Commit.COMMITTED, Commit.COMMITTED, Commit.COMMITTED, Commit.UNCOMMITTED]


def test_a_pointer_commits_what_it_names_and_what_came_before():
    states = [state(1, whole=False), state(2, whole=False), state(3, whole=False, age=1.0)]
    assert commits(states, "global_step2") == [Commit.COMMITTED, Commit.COMMITTED, Commit.IN_PROGRESS]


@pytest.mark.parametrize(("counts", "age", "pointed", "expected"), [
    ((4, 3), 1.0, False, Commit.IN_PROGRESS),
    ((4, 4), 1.0, False, Commit.COMMITTED),
    ((4, 3), SETTLE * 2, False, Commit.COMMITTED),
    ((4, 3), 1.0, True, Commit.COMMITTED),
    ((3,), 1.0, False, Commit.COMMITTED),
])  # fmt: skip
def test_a_young_step_with_files_of_fewer_ranks_is_in_progress_where_they_are_only_counted(
    counts, age, pointed, expected
):  # fmt: skip
    states = [state(at, whole=True, age=age) for at in range(len(counts))]
    targets = [states[-1].path] if pointed else []
    for counted, wanted in ((True, expected), (False, Commit.COMMITTED)):
        given = [replace(s, num_ranks=n, ranks_counted=counted) for s, n in zip(states, counts, strict=True)]
        assert commits(given, *targets)[-1] is wanted
    other = [replace(s, format=str(s.step)) for s in given]
    assert commits([replace(s, ranks_counted=True) for s in other], *targets)[-1] is Commit.COMMITTED


def test_a_pointer_elsewhere_commits_nothing():
    assert commits([state(1, whole=False)], "global_step9", "") == [Commit.UNCOMMITTED]


@pytest.mark.parametrize(("age", "pointed", "finished", "expected"), [
    (1.0, False, False, Commit.IN_PROGRESS), (-300.0, False, False, Commit.IN_PROGRESS),
    (SETTLE, False, False, Commit.COMMITTED), (1.0, True, False, Commit.COMMITTED),
    (1.0, False, True, Commit.COMMITTED),
])  # fmt: skip
def test_a_young_step_of_which_only_ends_lack_is_in_progress_unless_something_says_that_it_is_done(
    age, pointed, finished, expected
):  # fmt: skip
    states = [state(1, whole=True), replace(state(2, whole=True, age=age), cut_short=("x",), finished=finished)]
    assert commits(states, *(["global_step2"] if pointed else []))[1] is expected


def test_only_the_newest_step_can_be_in_progress():
    states = [state(1, whole=False, age=1.0), state(2, whole=False, age=1.0)]
    assert commits(states) == [Commit.UNCOMMITTED, Commit.IN_PROGRESS]


def test_a_step_settles_at_the_very_second():
    assert commits([state(1, whole=False, age=SETTLE)]) == [Commit.UNCOMMITTED]


def test_no_steps():
    assert commits([]) == []


def test_the_state_of_a_step_names_what_is_missing_and_only_that():
    builder = CatalogBuilder()
    for number, condition in enumerate(FileState):
        builder.file(File(f"s/{number}.pt", state=condition))
    found = step_state(builder.build(5, "s", "made-up", NO_MESH, {}, ()), 12.5)
    assert found.missing == ("s/1.pt",)
    # Where one is damaged otherwise, time will not mend the step.
    assert found.cut_short == ()
    assert (found.step, found.path, found.whole, found.modified) == (5, "s", False, 12.5)
