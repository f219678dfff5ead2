"""NUM004: one element beyond all others, and what must not look like one."""

import numpy as np
import pytest

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.invariants.outliers import no_element_outweighs_all
from auditor.model.catalog import File, Role
from auditor.model.dtype import FLOAT32
from auditor.model.mesh import Coordinate, Mesh
from auditor.model.observation import OBSERVED, Observations, Read
from auditor.model.region import Box
from auditor.model.run import StepEvidence


def judged(values, role=Role.SECOND_MOMENT):
    """The judgement of one tensor in two pieces along dim 0."""
    values = np.asarray(values, np.float32)
    builder = CatalogBuilder()
    number = builder.tensor("w", role, FLOAT32, values.shape, 0)
    seen = np.zeros(2, OBSERVED)
    for at, half in enumerate(np.split(values, 2)):
        start = (at * len(half), *[0] * (values.ndim - 1))
        box = Box(start, tuple(a + n for a, n in zip(start, half.shape, strict=True)))
        builder.piece(number, builder.file(File(f"f{at}")), 0, box, Coordinate.of(dp=at))
        finite = half[np.isfinite(half)].astype(np.float64)
        seen[at]["read"], seen[at]["num_zero"] = Read.DONE, (half == 0).sum()
        seen[at]["num_infinite"] = half.size - finite.size
        seen[at]["minimum"], seen[at]["maximum"] = half.min(), half.max()
        seen[at]["sum_squares"] = (finite**2).sum()
    catalog = builder.build(1, "", "test", Mesh((("dp", 2),)), {}, [])
    return no_element_outweighs_all(StepEvidence(catalog, Observations(seen)))


def healthy(seed=0, shape=(64, 32), spread=3.0):
    return np.exp(np.random.default_rng(seed).normal(-20, spread, shape))


@pytest.mark.parametrize("role", [Role.PARAMETER, Role.MASTER, Role.FIRST_MOMENT, Role.SECOND_MOMENT])
@pytest.mark.parametrize("value", [1e31, -3e20, 1e7])
def test_one_element_beyond_all(role, value):
    values = healthy()
    values[40, 3] = value
    (violation,) = judged(values, role).violations
    (location,) = violation.locations
    assert (location.file, str(location.coordinate), location.num_elements) == ("f1", "dp=1", 1)
    assert judged(healthy(), role).num_holds == 1


@pytest.mark.parametrize("spread", [0.1, 3.0, 6.0])
def test_wide_spreads_are_healthy(spread):
    for seed in range(50):
        assert not judged(healthy(seed, spread=spread)).violations


def test_a_hot_row_is_healthy():
    values = healthy()
    values[5] = 2e4
    assert not judged(values).violations


def test_a_large_element_among_large_ones_is_healthy():
    values = 100 * np.random.default_rng(1).standard_normal((64, 32))
    values[0, 0] = 1e6
    assert not judged(values, Role.PARAMETER).violations


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.eye(1, 4096).reshape(64, 64) * 1e9, "aren't zero"), (np.full((64, 64), np.inf), "not finite"),
    ],
)  # fmt: skip
def test_where_it_says_nothing(values, reason):
    found = judged(values)
    assert not found.violations
    assert not found.num_holds
    assert reason in next(iter(found.not_applicable))


def test_vectors_may_hold_a_mask():
    values = np.full(4096, 0.1)
    values[0] = -1e9
    assert not judged(values, Role.PARAMETER).violations
