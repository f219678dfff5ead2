import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.model.catalog import Role
from auditor.model.finding import Location
from auditor.timeline.onset import Mark, intervals

LETTERS = {"g": Mark.GOOD, "b": Mark.BAD, "u": Mark.UNKNOWN}


def brackets(marks, step_size=10):
    """``marks``: one letter a step, the steps being 10, 20, …"""
    found = intervals({step_size * at: LETTERS[letter] for at, letter in enumerate(marks, 1)}, {})
    return [(item.last_good, item.first_bad, item.last_bad, item.healed) for item in found]


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("", []),
        ("g", []),
        ("ggg", []),
        ("uuu", []),
        ("b", [(None, 10, 10, None)]),
        ("gb", [(10, 20, 20, None)]),
        ("bg", [(None, 10, 10, 20)]),
        ("gbbg", [(10, 20, 30, 40)]),
        ("gbgb", [(10, 20, 20, 30), (30, 40, 40, None)]),
        ("bgb", [(None, 10, 10, 20), (20, 30, 30, None)]),
        # A step that says nothing neither heals nor begins, and does not move the last good one.
        ("gub", [(10, 30, 30, None)]),
        ("ub", [(None, 20, 20, None)]),
        ("gbub", [(10, 20, 40, None)]),
        ("gbu", [(10, 20, 20, None)]),
        ("gbug", [(10, 20, 20, 40)]),
        ("gbgub", [(10, 20, 20, 30), (30, 50, 50, None)]),
    ],
)
def test_brackets(marks, expected):
    assert brackets(marks) == expected


@given(st.text("gbu", max_size=12))
def test_intervals_hold_all_bad_steps_and_no_good_one(marks):
    steps = {10 * at: letter for at, letter in enumerate(marks, 1)}
    found = brackets(marks)
    for step, letter in steps.items():
        inside = [first <= step <= last for _, first, last, _ in found]
        assert sum(inside) == 1 if letter == "b" else sum(inside) <= (letter == "u")
    for last_good, first_bad, last_bad, healed in found:
        assert steps[first_bad] == steps[last_bad] == "b"
        assert last_good is None or (steps[last_good] == "g" and last_good < first_bad)
        assert healed is None or (steps[healed] == "g" and healed > last_bad)


def test_steps_may_be_given_in_any_order():
    marks = {30: Mark.GOOD, 10: Mark.GOOD, 20: Mark.BAD}
    assert intervals(marks, {}) == intervals(dict(sorted(marks.items())), {})


def location(step, tensor="a", role=Role.PARAMETER, size=None):
    return Location(step, tensor=tensor, role=role, max_abs_difference=size)


def test_each_role_has_its_own_onset_and_the_interval_the_earliest():
    marks = dict.fromkeys((1, 2, 3), Mark.BAD)
    (found,) = intervals(marks, {
        1: [location(1, role=Role.MASTER)],
        2: [location(2, role=Role.MASTER), location(2, role=Role.FIRST_MOMENT)],
        3: [location(3, role=Role.PARAMETER)],
    })  # fmt: skip
    assert found.first_bad == 1
    assert found.onset_by_role == {"master": 1, "first_moment": 2, "parameter": 3}


def test_onsets_begin_anew_after_healing():
    marks = {1: Mark.BAD, 2: Mark.GOOD, 3: Mark.BAD}
    found = intervals(marks, {1: [location(1)], 3: [location(3, role=Role.MASTER)]})
    assert [item.onset_by_role for item in found] == [{"parameter": 1}, {"master": 3}]


def test_growth_is_the_largest_difference_of_each_measured_step():
    marks = dict.fromkeys((1, 2, 3), Mark.BAD)
    (found,) = intervals(marks, {
        1: [location(1, size=0.5), location(1, "b", size=0.25)], 2: [location(2)],
        3: [location(3, size=1.0), location(3, "c")],
    })  # fmt: skip
    assert found.growth == ((1, 0.5), (3, 1.0))
    assert found.num_subjects == 3


def test_files_are_subjects_too():
    (found,) = intervals({1: Mark.BAD}, {1: [Location(1, "a.pt"), Location(1, "b.pt"), Location(1, "a.pt")]})
    assert (found.num_subjects, found.onset_by_role, found.growth) == (2, {}, ())
