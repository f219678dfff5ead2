"""What others' converters make is proved equal, and one planted error each is found at its place and named."""

import shutil

import pytest

from auditor.comparison.outcome import PROVED, Standing
from auditor.model.finding import Severity
from tests.comparison.conversions import CONVERSIONS, PAIRS, SAMPLE, plant
from tests.comparison.test_exact import code, compared

PLANTED = [(conversion, planted) for conversion in CONVERSIONS for planted in conversion.planted]


def told(found, severity=Severity.ERROR):
    """What is told from the reference."""
    return found.failing(found.steps[0], severity)


@pytest.mark.parametrize("conversion", CONVERSIONS, ids=lambda one: one.what)
def test_a_conversion_is_proved(conversion):
    found = compared(conversion.source, conversion.converted, **{"exact": True, **conversion.choices})
    (step,) = found.steps
    assert code(found) == 0
    # What a converter adds (a mask, the master of a tied name) takes nothing away.
    assert {row.standing for row in step.rows if row.standing is not Standing.EXTRA and not row.computed} <= {*PROVED}
    assert sum(row.standing in PROVED for row in step.rows) > 16


@pytest.mark.parametrize(("conversion", "planted"), PLANTED, ids=lambda one: one.what)
def test_an_error_is_found_and_named(conversion, planted, tmp_path):
    found = compared(conversion.source, plant(conversion, planted, tmp_path / "planted"), **conversion.choices)
    assert code(found) == (1 if planted.severity is Severity.ERROR else 0)
    rows = told(found, planted.severity)
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
    for row in rows:
        assert "2 replicas of the reference differ from each other; " in row.detail
        assert "it is the mean of the reference's 2 replicas" in row.detail
    # Weights of another run are no mean of these.
    healthy = compared(SAMPLE / "run" / "global_step80", PAIRS / "bloom" / "healthy")
    assert not any("it is the mean" in row.detail for row in told(healthy))


def test_a_merged_adapter_differs_where_it_was_merged_and_nowhere_else():
    found = compared(PAIRS / "adapter" / "source", PAIRS / "adapter" / "converted")
    names = {row.pair.name for row in told(found)}
    assert names == {f"model.layers.{n}.self_attn.{part}_proj.weight" for n in (0, 1) for part in "qv"}
    assert {row.standing for row in found.steps[0].rows if row.pair.name not in names} == {Standing.EQUAL}
    rest = compared(
        PAIRS / "adapter" / "source", PAIRS / "adapter" / "converted", ignore=["*.[qv]_proj.weight"], exact=True
    )
    assert code(rest) == 0


@pytest.mark.parametrize(("version", "order"), [(0, (1, 0, 2, 3)), (1.0, (0, 2, 1, 3))], ids=str)
def test_older_megatron_keeps_query_key_and_value_in_other_orders(version, order, tmp_path):
    """One after the other, then element by element; the file says which. Its rows are [head, part, element, …]."""
    torch = pytest.importorskip("torch")
    source = PAIRS / "megatron_gpt2" / "source"
    file = "iter_0000005/mp_rank_00/model_optim_rng.pt"
    state = torch.load(source / file, weights_only=True)
    state["checkpoint_version"] = version
    layers = state["model"]["language_model"]["transformer"]
    for name in [name for name in layers if "query_key_value" in name]:
        rows = layers[name]
        layers[name] = rows.reshape(2, 3, 4, -1).permute(order).reshape(rows.shape).clone()
    shutil.copytree(source, tmp_path / "run")
    torch.save(state, tmp_path / "run" / file)
    converted = PAIRS / "megatron_gpt2" / "converted"
    assert code(compared(tmp_path / "run", converted, exact=True)) == 0
    names = {row.pair.name for row in told(compared(tmp_path / "run", source))}
    assert names == {
        name for name in (f"language_model.transformer.{own}" for own in layers) if "query_key_value" in name
    }


def test_heads_that_nothing_records_are_told_by_the_numbers_which_is_said(tmp_path):
    folder = tmp_path / "converted"
    folder.mkdir()
    shutil.copy(PAIRS / "meta_llama" / "converted" / "model.safetensors", folder)
    shutil.copy(PAIRS / "meta_llama" / "source" / "consolidated.00.pth", tmp_path)
    found = compared(tmp_path / "consolidated.00.pth", folder, exact=True)
    assert code(found) == 3
    assert "how they lie is told by the numbers (a head is 4 wide)" in found.maps[0]
    names = {row.pair.name.split(".")[-2] for row in found.steps[0].of(Standing.UNDETERMINED)}
    assert names == {"q_proj", "k_proj"}
    recorded = compared(PAIRS / "meta_llama" / "source" / "consolidated.00.pth", PAIRS / "meta_llama" / "converted")
    assert "told by the numbers" not in recorded.maps[0]
