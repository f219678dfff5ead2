import pytest

from auditor.model.catalog import Role
from auditor.model.finding import Location, Severity
from auditor.model.mesh import Coordinate
from auditor.model.observation import DifferenceClass
from auditor.timeline.classify import SEVERITIES, classify


def measured(
    step=1, tensor="a", *, role=Role.PARAMETER, count=1, total=131_072, size=1e-6, relative=1e-7, ulps=1, bits=3,
    equal=0, tp=1,
):  # fmt: skip
    return Location(
        step, tensor=tensor, role=role, coordinate=Coordinate.of(tp=tp), num_elements_differ=count,
        num_elements_compared=total, max_abs_difference=size, relative_difference=relative, max_ulps=ulps,
        num_bits_differ=bits, num_equal_as_numbers=equal,
    )  # fmt: skip


def unmeasured(step=1, tensor="a"):
    return Location(step, tensor=tensor, role=Role.PARAMETER)


def test_every_class_has_a_severity():
    assert set(SEVERITIES) == set(DifferenceClass)
    assert SEVERITIES[DifferenceClass.SINGLE_BIT] is Severity.ERROR
    assert SEVERITIES[DifferenceClass.ISOLATED_ULPS] is Severity.WARNING
    assert SEVERITIES[DifferenceClass.EQUAL_AS_NUMBERS] is Severity.NOTE


def test_one_bit_of_one_tensor():
    assert classify([measured(bits=1, ulps=1 << 20, size=3.0)]) is DifferenceClass.SINGLE_BIT
    # The same bit on several ranks or steps is still one tensor's.
    assert classify([measured(1, bits=1, tp=1), measured(2, bits=1, tp=2)]) is DifferenceClass.SINGLE_BIT


def test_one_bit_in_each_of_several_tensors_is_no_single_bit():
    assert classify([measured(bits=1), measured(tensor="b", bits=1)]) is DifferenceClass.ISOLATED_ULPS
    assert classify([measured(bits=1), measured(role=Role.MASTER, bits=1)]) is DifferenceClass.ISOLATED_ULPS


def test_few_elements_by_last_bits_are_isolated_ulps():
    assert classify([measured(count=15, ulps=2)]) is DifferenceClass.ISOLATED_ULPS
    assert classify([measured(count=4, total=8, ulps=2)]) is DifferenceClass.ISOLATED_ULPS


@pytest.mark.parametrize("much", [{"count": 5, "total": 8}, {"count": 1000}, {"ulps": 3}, {"ulps": -1}])
def test_many_elements_or_many_ulps_are_gross(much):
    assert classify([measured(**much)]) is DifferenceClass.GROSS


def test_ulps_that_grow_were_seeded_by_noise():
    history = [measured(1, size=1e-7, ulps=1), measured(2, size=4e-7, ulps=2)]
    assert classify(history) is DifferenceClass.NOISE_SEEDED_GROWTH
    later = [*history, measured(3, count=60_000, size=1e-5, relative=1e-3, ulps=900)]
    assert classify(later) is DifferenceClass.NOISE_SEEDED_GROWTH


def test_growth_past_the_limit_of_noise_is_growth():
    history = [measured(1, size=1e-7), measured(2, count=60_000, size=0.5, relative=0.1, ulps=9000)]
    assert classify(history) is DifferenceClass.GROWING


def test_growth_that_did_not_begin_as_noise_is_growth():
    history = [measured(1, count=5000, ulps=50, size=1e-4, relative=1e-4), measured(2, count=5000, ulps=100, size=2e-4)]
    assert classify(history) is DifferenceClass.GROWING


def test_large_differences_of_steady_size_are_gross():
    history = [measured(step, count=5000, ulps=50, size=size) for step, size in ((1, 1.0), (2, 1.9), (3, 0.4))]
    assert classify(history) is DifferenceClass.GROSS


def test_growth_is_judged_tensor_by_tensor_and_role_by_role():
    """A large tensor that joins later is not the growth of a small one."""
    history = [measured(1, size=1e-3, count=5000, ulps=9), measured(2, "b", size=1.0, count=5000, ulps=9)]
    assert classify(history) is DifferenceClass.GROSS
    history = [measured(1, size=1e-3, count=5000, ulps=9), measured(2, role=Role.MASTER, size=1.0, count=5000, ulps=9)]
    assert classify(history) is DifferenceClass.GROSS


@pytest.mark.parametrize(("more", "expected"), [({"count": 5000, "ulps": 50}, DifferenceClass.GROSS),
                                                ({}, DifferenceClass.ISOLATED_ULPS)])  # fmt: skip
def test_unlike_ranks_in_one_step_are_no_growth(more, expected):
    assert classify([measured(1, size=1e-6, tp=1, **more), measured(1, size=1e-5, tp=2, **more)]) is expected


def test_zeros_and_nans_that_are_equal_as_numbers():
    assert classify([measured(count=7, equal=7, ulps=0, size=0.0)]) is DifferenceClass.EQUAL_AS_NUMBERS
    assert classify([measured(count=7, equal=6, ulps=50)]) is DifferenceClass.GROSS
    # One bit that makes 0 to -0 is equal as a number, and says so.
    assert classify([measured(count=1, equal=1, bits=1, size=0.0)]) is DifferenceClass.EQUAL_AS_NUMBERS


def test_buffers_are_a_class_of_their_own():
    assert classify([measured(role=Role.BUFFER, count=5000, ulps=900, size=9.0)]) is DifferenceClass.BUFFERS
    assert classify([measured(role=Role.BUFFER), measured(count=5000)]) is DifferenceClass.GROSS


def test_what_was_not_measured_is_not_called_small():
    assert classify([unmeasured()]) is DifferenceClass.GROSS
    assert classify([measured(), unmeasured(tensor="b")]) is DifferenceClass.GROSS
    assert classify([measured(bits=1), unmeasured(2)]) is DifferenceClass.GROSS
    grown = [measured(1, size=1e-7), measured(2, size=1e-6), unmeasured(3)]
    assert classify(grown) is DifferenceClass.GROWING
