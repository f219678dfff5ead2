"""What others' converters make is proved equal, and one planted error each is found at its place and named."""

import pytest

from auditor.comparison.outcome import PROVED, Standing
from tests.comparison.conversions import CONVERSIONS, PAIRS, SAMPLE, plant
from tests.comparison.test_exact import code, compared

PLANTED = [(conversion, planted) for conversion in CONVERSIONS for planted in conversion.planted]


def told(found):
    """What is told from the reference and fails."""
    return found.failing(found.steps[0])


@pytest.mark.parametrize("conversion", CONVERSIONS, ids=lambda one: one.what)
def test_a_conversion_is_proved(conversion):
    found = compared(conversion.source, conversion.converted, exact=True)
    (step,) = found.steps
    assert code(found) == 0
    assert {row.standing for row in step.rows if not row.computed} == {Standing.EQUAL}
    assert sum(row.standing in PROVED for row in step.rows) > 16


@pytest.mark.parametrize(("conversion", "planted"), PLANTED, ids=lambda one: one.what)
def test_an_error_is_found_and_named(conversion, planted, tmp_path):
    found = compared(conversion.source, plant(conversion, planted, tmp_path / "planted"))
    assert code(found) == 1
    rows = told(found)
    assert sorted(row.pair.name for row in rows) == sorted(planted.tensors)
    said = [row.detail for row in rows] + [row.cause.text for row in rows if row.cause is not None]
    said += [cause.text for cause in found.steps[0].causes]
    assert any(planted.said in text for text in said), said


def test_norms_that_drifted_apart_are_told_from_their_mean():
    """BLOOM's converter averages what ranks hold alike: of norms that drifted, no rank had what comes of it."""
    found = compared(SAMPLE / "run" / "global_step80", PAIRS / "bloom" / "run")
    assert code(found) == 1
    rows = told(found)
    assert len(rows) == 16
    assert all("2 replicas of the reference differ from each other" in row.detail for row in rows)


def test_a_merged_adapter_differs_where_it_was_merged_and_nowhere_else():
    found = compared(PAIRS / "adapter" / "source", PAIRS / "adapter" / "converted")
    names = {row.pair.name for row in told(found)}
    assert names == {f"model.layers.{n}.self_attn.{part}_proj.weight" for n in (0, 1) for part in "qv"}
    assert {row.standing for row in found.steps[0].rows if row.pair.name not in names} == {Standing.EQUAL}
    rest = compared(
        PAIRS / "adapter" / "source", PAIRS / "adapter" / "converted", ignore=["*.[qv]_proj.weight"], exact=True
    )
    assert code(rest) == 0
