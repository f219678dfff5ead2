"""By which law a fault grows, and since when by few looks."""

import math

import pytest

from auditor.model.finding import Location
from auditor.timeline.bisection import bisect
from auditor.timeline.growth import law_of
from auditor.timeline.onset import Mark, intervals

STEPS = range(100, 1100, 100)


@pytest.mark.parametrize(
    ("size", "law", "rate"),
    [
        (lambda n: 3e-5, "constant", 0.0),
        (lambda n: 3e-5 * (1 + 0.3 * math.sin(n)), "constant", 0.0),
        (lambda n: 2e-6 * n, "linear", 2e-6),
        (lambda n: 2e-6 * (n - 50) * (1 + 0.1 * math.sin(n)), "linear", 2e-6),
        (lambda n: 1e-7 * 2 ** (n / 100), "exponential", 100),
        (lambda n: 1e-7 * 2 ** (n / 50) * (1.2 + math.sin(n)), "exponential", 50),
        (lambda n: (1e-7, 1.0)[n // 100 % 2], "irregular", 0.0),
        (lambda n: 1.0 / n**2, "irregular", 0.0),
    ],
)
def test_the_law_of_growth(size, law, rate):
    found = law_of([(step, size(step)) for step in STEPS])
    assert found.law == law
    assert found.rate == pytest.approx(rate, rel=0.15)


@pytest.mark.parametrize("points", [[], [(1, 1.0)], [(1, 1.0), (2, 9.0)], [(1, 1.0), (2, math.inf), (3, 2.0)],
                                    [(1, 0.0), (2, 1.0), (3, 2.0)]])  # fmt: skip
def test_no_law_of_too_little(points):
    assert law_of(points) is None


def test_holes_in_the_cadence_do_not_bend_a_line():
    found = law_of([(step, 1e-6 * step) for step in (10, 20, 30, 500, 510, 2000)])
    assert (found.law, round(found.rate, 9)) == ("linear", 1e-6)


def test_faults_without_differences_are_counted():
    bad = {step: [Location(step, num_elements=step // 100)] for step in STEPS}
    (found,) = intervals(dict.fromkeys(STEPS, Mark.BAD), bad)
    assert (found.measure, found.law.law) == ("elements", "linear")
    assert found.growth[:2] == ((100, 1.0), (200, 2.0))


def test_beyond_the_budget_sketches_tell():
    bad = {step: [Location(step, sketched_difference=1e-3)] for step in STEPS}
    (found,) = intervals(dict.fromkeys(STEPS, Mark.BAD), bad)
    assert (found.measure, found.law.law) == ("distance by sketch", "constant")


G, B, U = Mark.GOOD, Mark.BAD, Mark.UNKNOWN


def looked(marks, **more):
    seen = []

    def look(at):
        seen.append(at)
        return {"REP001": marks[at], **{name: found[at] for name, found in more.items()}}

    positions = bisect(len(marks), look)
    assert sorted(seen) == positions
    return positions


@pytest.mark.parametrize("onset", [1, 2, 3, 31, 32, 500, 998, 999])
def test_the_border_is_found_with_few_looks(onset):
    positions = looked([G] * onset + [B] * (1000 - onset))
    assert {onset - 1, onset} <= set(positions)
    assert len(positions) <= 2 + 10


def test_one_look_where_the_newest_step_is_good():
    assert looked([B] * 10 + [G]) == [10]


def test_two_looks_where_it_was_bad_from_the_start():
    assert looked([B] * 64) == [0, 63]


def test_a_healed_fault_is_not_seen_but_the_last_border_is():
    positions = looked([G] * 10 + [B] * 10 + [G] * 30 + [B] * 50)
    assert {49, 50} <= set(positions) or {9, 10} <= set(positions)


def test_unknown_steps_are_passed_over():
    marks = [G] * 20 + [U] * 3 + [B] * 41
    positions = looked(marks)
    assert {19, 23} <= set(positions)
    assert looked([U] * 5 + [G] * 20 + [B] * 39)[-1] == 63
    assert {24, 25} <= set(looked([U] * 5 + [G] * 20 + [B] * 39))


def test_everything_unknown_ends():
    assert looked([U] * 6 + [B]) == [0, 1, 2, 3, 4, 5, 6]


def test_faults_share_looks():
    one, two = [G] * 30 + [B] * 34, [G] * 30 + [B] * 34
    assert looked(one, NUM001=two) == looked(one)
    assert {29, 30, 49, 50} <= set(looked(one, NUM001=[G] * 50 + [B] * 14))


def test_one_step():
    assert looked([B]) == [0]
