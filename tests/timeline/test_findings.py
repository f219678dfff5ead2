from dataclasses import replace

import pytest

from auditor.invariants.invariant import Invariant
from auditor.invariants.registry import find
from auditor.model.catalog import Role
from auditor.model.finding import Judgement, Location, Severity, Violation
from auditor.model.mesh import Coordinate
from auditor.model.observation import DifferenceClass
from auditor.timeline.findings import findings

REP = find("REP001")
TP = [Coordinate.of(tp=rank) for rank in range(4)]


def made_up(identifier, **more):
    words = dict.fromkeys(("statement", "rationale", "source", "example", "misses"), "-")
    return Invariant(identifier, f"made-up-{identifier}", Severity.ERROR, hint=f"hint {identifier}", **words, **more)


INT, COV, NUM = made_up("INT001"), made_up("COV001"), made_up("NUM001", one_fault=True)
CHOSEN = (INT, COV, REP, NUM)

ORDERS = {name: at for at, name in enumerate("abcdefgh")}


def differs(step, name="a", role=Role.PARAMETER, sides=((0,), (1,)), minority=(), **numbers):
    """A violation of replica equality: every rank outside the first side differs from that side's first."""
    numbers = {"num_elements_differ": 5000, "num_elements_compared": 8000, "max_abs_difference": 1.0, "max_ulps": 100,
               "relative_difference": 0.1, "num_bits_differ": 9000, "num_equal_as_numbers": 0} | numbers  # fmt: skip
    reference = TP[sides[0][0]]
    locations = [
        Location(step, f"step{step}/{name}.pt", name, role, ORDERS[name], TP[rank], reference, **numbers)
        for side in sides[1:]
        for rank in side
    ]
    places = tuple(tuple(TP[rank] for rank in side) for side in sides)
    return Violation(name, tuple(locations), f"{name} differs", places, None, tuple(TP[rank] for rank in minority))


def in_file(step, file, message="is damaged"):
    return Violation(file, (Location(step, file),), f"{file} {message}")


def in_tensor(step, name="a", role=Role.PARAMETER, message="is wrong", **more):
    return Violation(name, (Location(step, "f.pt", name, role, ORDERS[name]),), f"{name} {message}", **more)


def judged(*violations, num_holds=10, **more):
    return Judgement(num_holds, violations, **more)


GOOD = judged()


def of_replicas(history, chosen=(REP,)):
    """``history``: step to the judgement about replicas."""
    return findings({step: {"REP001": judgement} for step, judgement in history.items()}, chosen)


def brackets(finding):
    return [(item.last_good, item.first_bad, item.last_bad, item.healed) for item in finding.intervals]


def test_nothing_wrong_is_no_finding():
    assert of_replicas({1: GOOD, 2: GOOD}) == []
    assert findings({}, CHOSEN) == []


# Over time


def test_drift_healing_and_drift_again_are_one_finding_with_two_intervals():
    found = of_replicas({10: GOOD, 20: judged(differs(20)), 30: judged(differs(30)), 40: GOOD, 50: judged(differs(50))})
    assert len(found) == 1
    assert brackets(found[0]) == [(10, 20, 30, 40), (40, 50, 50, None)]


def test_a_step_in_which_the_tensor_was_lost_says_nothing():
    lost = judged(undetermined={"a replica is lost with its file": ("a",)})
    (found,) = of_replicas({10: GOOD, 20: judged(differs(20)), 30: lost, 40: GOOD})
    assert brackets(found) == [(10, 20, 20, 40)]
    (found,) = of_replicas({10: GOOD, 20: lost, 30: judged(differs(30))})
    assert brackets(found) == [(10, 30, 30, None)]


def test_another_tensor_that_was_lost_does_not_matter():
    lost = judged(undetermined={"a replica is lost with its file": ("b",)})
    (found,) = of_replicas({10: GOOD, 20: judged(differs(20)), 30: lost})
    assert brackets(found) == [(10, 20, 20, 30)]


def test_a_tensor_that_holds_where_it_is_stored_is_good_although_one_axis_is_not_stored():
    once = judged(undetermined={"stored once along dp": ("a", "b")}, held=frozenset({"a"}))
    (found,) = of_replicas({10: once, 20: judged(differs(20)), 30: once})
    assert brackets(found) == [(10, 20, 20, 30)]


@pytest.mark.parametrize("silent", [Judgement(), Judgement(not_applicable={"not replicated": 3})])
def test_a_step_in_which_nothing_held_says_nothing(silent):
    (found,) = of_replicas({10: silent, 20: judged(differs(20)), 30: silent})
    assert brackets(found) == [(None, 20, 20, None)]


def test_a_step_without_a_judgement_says_nothing():
    steps = {10: {"REP001": GOOD}, 20: {"REP001": judged(differs(20))}, 30: {}}
    (found,) = findings(steps, (REP,))
    assert brackets(found) == [(10, 20, 20, None)]


def test_a_step_in_which_a_violation_is_swallowed_is_not_good():
    bad = {"REP001": judged(differs(20)), "COV001": GOOD}
    swallowed = {"REP001": judged(differs(30)), "COV001": judged(in_tensor(30))}
    steps = {10: {"REP001": GOOD}, 20: bad, 30: swallowed, 40: {"REP001": judged(differs(40))}}
    (drift,) = [item for item in findings(steps, CHOSEN) if item.id == "REP001"]
    assert brackets(drift) == [(10, 20, 40, None)]


# What is one fault


def test_many_tensors_and_roles_on_the_same_ranks_are_one_finding_in_model_order():
    early = [differs(10, name, Role.MASTER) for name in "cab"]
    late = [differs(20, name, role) for name in "bca" for role in (Role.SECOND_MOMENT, Role.PARAMETER, Role.MASTER)]
    (found,) = of_replicas({1: GOOD, 10: judged(*early), 20: judged(*late)})
    assert brackets(found) == [(1, 10, 20, None)]
    assert [(item.step, item.tensor, item.role.value) for item in found.locations] == [
        *((10, name, "master") for name in "abc"),
        *((20, name, role) for name in "abc" for role in ("parameter", "master", "second_moment")),
    ]
    assert found.intervals[0].onset_by_role == {"master": 10, "parameter": 20, "second_moment": 20}
    assert found.intervals[0].num_subjects == 3


def test_other_ranks_are_another_fault():
    one, other = differs(10, "a", sides=((0, 2, 3), (1,))), differs(10, "b", sides=((0, 1, 3), (2,)))
    found = of_replicas({10: judged(one, other)})
    assert [item.message for item in found] == ["a differs between tp=0 and tp=1", "b differs between tp=0 and tp=2"]


def test_sides_that_part_further_are_the_same_fault():
    apart = ((0, 3), (1,), (2,))
    history = {
        10: judged(differs(10, "a", sides=((0, 3), (1, 2)))),
        20: judged(differs(20, "a", sides=apart), differs(20, "b", sides=apart)),
    }
    (found,) = of_replicas(history)
    assert brackets(found) == [(None, 10, 20, None)]


def test_which_side_is_named_first_does_not_matter():
    found = of_replicas(
        {10: judged(differs(10, "a", sides=((0, 1), (2, 3))), differs(10, "b", sides=((2, 3), (0, 1))))}
    )
    assert len(found) == 1


def test_a_single_bit_stands_apart_from_a_drift_on_the_same_ranks():
    flip = {"num_elements_differ": 1, "num_bits_differ": 1}
    found = of_replicas({1: GOOD, 10: judged(differs(10, "a"), differs(10, "b"), differs(10, "c", **flip))})
    assert sorted((item.difference_class.value, len(item.locations)) for item in found) == [
        ("gross", 2),
        ("single bit", 1),
    ]


def test_differences_that_are_equal_as_numbers_stand_apart_and_are_notes():
    zeros = {"num_elements_differ": 3, "num_equal_as_numbers": 3, "max_abs_difference": 0.0, "max_ulps": 0}
    found = of_replicas({10: judged(differs(10, "a"), differs(10, "b", **zeros))})
    assert {(item.difference_class, item.severity) for item in found} == {
        (DifferenceClass.GROSS, Severity.ERROR), (DifferenceClass.EQUAL_AS_NUMBERS, Severity.NOTE),
    }  # fmt: skip


def test_faults_that_show_in_the_same_steps_are_one_finding_and_in_others_another():
    steps = {step: {"INT001": judged(*(in_file(step, file) for file in files))}
             for step, files in {1: "", 2: "xy", 3: "z", 4: "xy"}.items()}  # fmt: skip
    found = findings(steps, (INT,))
    assert [(item.message, brackets(item)) for item in found] == [
        ("x is damaged, and 1 more like it", [(1, 2, 2, 3), (3, 4, 4, None)]),
        ("z is damaged", [(2, 3, 3, 4)]),
    ]


def test_a_fault_that_spreads_is_one_finding_where_the_invariant_says_so():
    steps = {2: {"NUM001": judged(in_tensor(2))}, 3: {"NUM001": judged(in_tensor(3), in_tensor(3, "b"))}}
    (found,) = findings(steps, (NUM,))
    assert brackets(found) == [(None, 2, 3, None)]
    assert found.message == "a is wrong, and 1 more like it"


# Majority, class, severity, words


def test_the_minority_is_named_where_a_majority_says_so():
    sides = ((0, 2, 3), (1,))
    (found,) = of_replicas({10: judged(differs(10, "a", sides=sides, minority=(1,)), differs(10, "b", sides=sides))})
    assert found.minority == (TP[1],)


def test_the_minorities_of_all_steps_are_named_in_order():
    split = ((0, 3), (1,), (2,))
    history = {
        step: judged(differs(step, sides=split, minority=minority)) for step, minority in ((1, (2,)), (2, (1, 2)))
    }
    (found,) = of_replicas(history)
    assert found.minority == (TP[1], TP[2])


def test_no_minority_without_a_majority():
    (found,) = of_replicas({10: judged(differs(10))})
    assert found.minority == ()


def test_the_class_is_judged_over_the_whole_history():
    ulps = {"num_elements_differ": 2, "max_ulps": 1, "max_abs_difference": 1e-7}
    (found,) = of_replicas({10: judged(differs(10, **ulps)), 20: judged(differs(20))})
    assert (found.difference_class, found.severity) == (DifferenceClass.GROWING, Severity.ERROR)
    assert found.intervals[0].growth == ((10, 1e-7), (20, 1.0))


@pytest.mark.parametrize(("stated", "severity"), [(Severity.WARNING, Severity.WARNING), (None, Severity.ERROR)])
def test_buffers_are_warnings_unless_asked_for_strictly(stated, severity):
    violation = differs(10, role=Role.BUFFER)
    violation = Violation(violation.subject, violation.locations, violation.message, violation.sides, stated)
    (found,) = of_replicas({10: judged(violation)})
    assert (found.difference_class, found.severity) == (DifferenceClass.BUFFERS, severity)


def test_a_violation_may_state_its_own_severity():
    (found,) = findings({1: {"INT001": judged(in_tensor(1, severity=Severity.NOTE))}}, (INT,))
    assert found.severity is Severity.NOTE


def test_a_mild_violation_is_no_part_of_an_error_of_the_same_steps():
    found = findings(
        {1: {"COV001": judged(in_tensor(1), in_tensor(1, "b", severity=Severity.WARNING))}}, (COV,)
    )  # fmt: skip
    assert [(finding.severity, len(finding.locations)) for finding in found] == [
        (Severity.ERROR, 1), (Severity.WARNING, 1),
    ]  # fmt: skip


def test_findings_carry_the_words_of_their_invariant():
    (found,) = findings({1: {"INT001": judged(in_file(1, "x"))}}, (INT,))
    assert (found.id, found.name, found.hint, found.severity) == ("INT001", INT.name, "hint INT001", Severity.ERROR)
    assert (found.difference_class, found.minority, found.waived) == (None, (), False)
    (found,) = of_replicas({10: judged(differs(10))})
    assert found.likely_causes == REP.causes_by_class[found.difference_class]


@pytest.mark.parametrize(("axis", "first"), [("tp", "DeepSpeed#1801"), ("dp", "pytorch#128949")])
def test_likely_causes_fit_the_axis_along_which_replicas_differ(axis, first):
    history = {}
    for step, size in ((10, 1e-6), (20, 1e-3), (30, 1.0)):
        violation = differs(step, max_abs_difference=size)
        places = tuple(Coordinate.of(**{axis: rank}) for rank in (0, 1))
        (location,) = violation.locations
        location = replace(location, coordinate=places[1], reference=places[0])
        history[step] = judged(replace(violation, locations=(location,), sides=((places[0],), (places[1],))))
    (found,) = of_replicas(history)
    assert found.difference_class is DifferenceClass.GROWING
    assert first in found.likely_causes[0].source
    assert all(not cause.axes or axis in cause.axes for cause in found.likely_causes)


def test_replica_messages():
    one = differs(10, "a")
    assert of_replicas({10: judged(one)})[0].message == "a differs between tp=0 and tp=1"
    (several,) = of_replicas({10: judged(differs(10, "c"), differs(10, "b"), one, differs(10, "b", Role.MASTER))})
    assert several.message == "3 replicated tensors, first a, differ between tp=0 and tp=1"
    (wide,) = of_replicas({10: judged(differs(10, sides=((0,), (1, 3), (2,))))})
    assert wide.message == "a differs between tp=0, tp=1, tp=2, tp=3"


# Consequences


def test_trouble_of_the_same_tensor_and_role_is_a_consequence_of_what_goes_before():
    steps = {1: {"NUM001": judged(in_tensor(1)), "REP001": judged(differs(1)), "COV001": judged(in_tensor(1))}}
    (found,) = findings(steps, CHOSEN)
    assert (found.id, found.consequences) == ("COV001", ("NUM001", "REP001"))


def test_another_role_or_another_step_is_no_consequence():
    steps = {1: {"COV001": judged(in_tensor(1)), "REP001": judged(differs(1, role=Role.MASTER))},
             2: {"COV001": GOOD, "REP001": judged(differs(2))}}  # fmt: skip
    found = findings(steps, CHOSEN)
    assert [(item.id, item.consequences) for item in found] == [("COV001", ()), ("REP001", ())]


def test_what_is_only_partly_explained_stays():
    both = (Location(1, "", "a", Role.PARAMETER), Location(1, "", "b", Role.PARAMETER))
    steps = {1: {"COV001": judged(in_tensor(1, "a")), "NUM001": judged(Violation("a and b", both, "are wrong"))}}
    assert [item.id for item in findings(steps, CHOSEN)] == ["COV001", "NUM001"]
    steps[1]["COV001"] = judged(in_tensor(1, "a"), in_tensor(1, "b"))
    (found,) = findings(steps, CHOSEN)
    assert found.consequences == ("NUM001",)


def test_damage_of_a_file_swallows_what_it_explains():
    lost = in_tensor(1, "a", explained_by=frozenset({"x", "y"}))
    steps = {1: {"INT001": judged(in_file(1, "x"), in_file(1, "y")), "COV001": judged(lost)}}
    (found,) = findings(steps, CHOSEN)
    assert (found.id, found.consequences) == ("INT001", ("COV001",))


def test_damage_of_one_file_does_not_explain_what_needs_two():
    lost = in_tensor(1, "a", explained_by=frozenset({"x", "y"}))
    steps = {1: {"INT001": judged(in_file(1, "x")), "COV001": judged(lost)}}
    assert [(item.id, item.consequences) for item in findings(steps, CHOSEN)] == [("INT001", ()), ("COV001", ())]


def test_damage_of_another_step_explains_nothing():
    lost = in_tensor(2, "a", explained_by=frozenset({"x"}))
    steps = {1: {"INT001": judged(in_file(1, "x"))}, 2: {"INT001": GOOD, "COV001": judged(lost)}}
    assert [item.id for item in findings(steps, CHOSEN)] == ["INT001", "COV001"]


def test_one_file_may_explain_much():
    lost = [in_tensor(1, name, explained_by=frozenset({"x"})) for name in "ab"]
    steps = {1: {"INT001": judged(in_file(1, "x")), "COV001": judged(*lost), "NUM001": judged(lost[1])}}
    (found,) = findings(steps, CHOSEN)
    assert found.consequences == ("COV001", "NUM001")


def test_an_invariant_that_was_not_chosen_neither_shows_nor_explains():
    steps = {1: {"COV001": judged(in_tensor(1)), "NUM001": judged(in_tensor(1))}}
    assert [item.id for item in findings(steps, (NUM,))] == ["NUM001"]


def test_findings_come_in_order_of_precedence_then_of_onset():
    steps = {
        1: {"NUM001": judged(in_tensor(1, "d")), "REP001": GOOD, "INT001": GOOD},
        2: {"REP001": judged(differs(2, "a", sides=((0,), (2,)))), "INT001": judged(in_file(2, "x"))},
        3: {"REP001": judged(differs(3, "b", sides=((0,), (1,)))), "INT001": GOOD},
    }
    found = findings(steps, (NUM, REP, INT))
    assert [(item.id, item.intervals[0].first_bad) for item in found] == [
        ("INT001", 2), ("REP001", 2), ("REP001", 3), ("NUM001", 1),
    ]  # fmt: skip
