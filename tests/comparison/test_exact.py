"""Equal by digest over formats and layouts; one planted error each is found at its place and named."""

import json
import shutil

import jsonschema
import numpy as np
import pytest

import auditor
from auditor.comparison.outcome import Standing
from auditor.comparison.verdict import exit_code
from auditor.configuration import make_settings
from auditor.errors import NothingToAuditError, UsageError
from auditor.report.compare_json import to_json
from auditor.report.compare_text import compare_lines
from tests import command
from tests.faults import rewrite
from tests.paths import HEALTHY, ROOT, RUN

FIXTURES = ROOT / "tests" / "fixtures"
MEGATRON, DEEPSPEED, DCP = FIXTURES / "megatron_dist", FIXTURES / "deepspeed", FIXTURES / "dcp"
SETTINGS = make_settings({})
SCHEMA = json.loads((ROOT / "auditor" / "report" / "compare.schema.json").read_text())
VALIDATOR = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)


def compared(reference, candidate, **choices):
    """A comparison whose reports are as they must be."""
    found = auditor.compare(str(reference), str(candidate), **choices)
    document = json.loads(to_json(found, SETTINGS))
    VALIDATOR.validate(document)
    assert document["exit_code"] == int(exit_code(found, SETTINGS))
    assert "\n".join(compare_lines(found, SETTINGS, verbose=True))
    return found


def code(found):
    return int(exit_code(found, SETTINGS))


def standings(found):
    return {row.standing for step in found.steps for row in step.rows}


@pytest.mark.parametrize(
    ("reference", "candidate", "count"),
    [
        (MEGATRON / "tp1", MEGATRON / "tp2", 80),
        (MEGATRON / "tp1", MEGATRON / "legacy_tp1", 80),
        (MEGATRON / "legacy_tp2", MEGATRON / "tp2_pp2", 80),
        (DEEPSPEED / "same_zero1_dp2", DEEPSPEED / "same_zero3_dp4", 55),
        (DCP / "same_state" / "ddp_2", DCP / "same_state" / "fsdp2_2", 20),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_resharded_or_converted_checkpoint_is_proved_equal(reference, candidate, count):
    found = compared(reference, candidate, exact=True)
    assert standings(found) == {Standing.EQUAL}
    assert code(found) == 0
    assert sum(step.counts()[Standing.EQUAL] for step in found.steps) >= count


def test_more_optimizer_state_than_there_was_is_a_warning():
    found = compared(DEEPSPEED / "same_zero2_dp3", DEEPSPEED / "same_universal_from_zero2")
    extra = found.steps[0].of(Standing.EXTRA)
    assert [(row.pair.name, row.pair.role.value) for row in extra] == [("head.weight", "master")]
    assert code(found) == 0


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """One step of a healthy run, to be changed."""
    folder = tmp_path_factory.mktemp("healthy")
    shutil.copytree(HEALTHY / "global_step10", folder / "global_step10")
    return folder


NAME = "3.mlp.dense_h_to_4h.weight"


def plain(change, shape=(64, 16)):
    """A change of a whole tensor, made on its tensor-parallel halves one after the other."""
    return lambda bits: change(bits.reshape(-1, shape[1])).reshape(-1)


@pytest.mark.parametrize(
    ("change", "standing", "detail"),
    [
        (lambda rows: np.roll(rows, 1, axis=0), Standing.REORDERED, "along dim 0"),
        (lambda rows: np.concatenate(np.split(rows, 2)[::-1]), Standing.REORDERED, "along dim 0"),
        (lambda rows: rows[:, ::-1], Standing.REORDERED, "reversed, in blocks of 1 along dim 1"),
        (lambda rows: rows ^ 0x8000, Standing.BEYOND, ""),
    ],
    ids=["rolled", "halves", "columns", "negated"],
)
def test_what_a_changed_tensor_is_called(healthy, tmp_path, change, standing, detail):
    shutil.copytree(healthy, tmp_path / "run")
    rewrite(tmp_path / "run", 10, NAME, "parameter", plain(change))
    found = compared(HEALTHY, tmp_path / "run", steps="10")
    wrong = [row for row in found.steps[0].rows if row.standing is not Standing.EQUAL]
    assert [(row.pair.name, row.pair.role.value, row.standing) for row in wrong] == [(NAME, "parameter", standing)]
    assert detail in wrong[0].detail
    assert code(found) == 1


def test_layers_that_were_exchanged_are_named(healthy, tmp_path):
    shutil.copytree(healthy, tmp_path / "run")
    kept = {}
    for layer in (3, 4):
        rewrite(tmp_path / "run", 10, f"{layer}.mlp.dense_h_to_4h.weight", "parameter",
                lambda bits, layer=layer: kept.setdefault(layer, []).append(bits) or bits)  # fmt: skip
    for layer, other in ((3, 4), (4, 3)):
        parts = iter(kept[other])
        rewrite(tmp_path / "run", 10, f"{layer}.mlp.dense_h_to_4h.weight", "parameter", lambda bits, p=parts: next(p))
    found = compared(HEALTHY, tmp_path / "run", steps="10")
    wrong = {row.pair.name: row.detail for row in found.steps[0].rows if row.standing is not Standing.EQUAL}
    assert wrong == {
        "3.mlp.dense_h_to_4h.weight": "holds the reference's 4.mlp.dense_h_to_4h.weight",
        "4.mlp.dense_h_to_4h.weight": "holds the reference's 3.mlp.dense_h_to_4h.weight",
    }


def test_a_drift_is_found_from_its_first_step_on_and_equality_before_it():
    found = compared(HEALTHY, RUN, steps="30:60")
    assert (found.last_equal, found.first_beyond.step, code(found)) == (40, 50, 1)
    names = {row.pair.name for row in found.failing(found.first_beyond)}
    assert "3.input_layernorm.weight" in names


def test_globs_renames_and_what_is_no_choice():
    both = MEGATRON / "tp1", MEGATRON / "tp2"
    found = compared(*both, only=["*.layers.0.*"], ignore=["*.bias"])
    names = {row.pair.name for row in found.steps[0].rows}
    assert names
    assert all(".layers.0." in name and not name.endswith(".bias") for name in names)
    found = compared(*both, rename=["decoder.layers.{n}.mlp.{w}.{p}=decoder.layers.{n}.ffn.{w}.{p}"])
    assert {row.pair.name.split(".")[3] for row in found.steps[0].of(Standing.EXTRA)} == {"ffn"}
    for choice in ({"rename": ["a"]}, {"map": "nothing"}, {"compute": "int8"}):
        with pytest.raises(UsageError):
            auditor.compare(str(both[0]), str(both[1]), **choice)
    with pytest.raises(NothingToAuditError, match="no step in common"):
        auditor.compare(str(MEGATRON / "tp2"), str(RUN))


def test_two_ledgers_tell_without_weights(tmp_path):
    for name, run in (("one", HEALTHY), ("two", RUN)):
        auditor.check(str(run), ledger=str(tmp_path / name), steps="40:50")
    found = compared(tmp_path / "one", tmp_path / "two")
    assert (found.last_equal, found.first_beyond.step, code(found)) == (40, 50, 1)
    assert sum(step.num_bytes_read for step in found.steps) == 0
    read = compared(HEALTHY, RUN, steps="50")
    exact = {(r.pair.name, r.pair.role): r.amount.relative for r in read.steps[0].rows if r.amount}
    told = {(r.pair.name, r.pair.role): r.amount.relative for r in found.steps[1].rows if r.amount}
    assert told.keys() == exact.keys()
    ratios = np.array([told[key] / exact[key] for key in told])
    assert 0.5 < ratios.min() < ratios.max() < 1.6
    mixed = compared(tmp_path / "one", HEALTHY, steps="40")
    assert standings(mixed) == {Standing.EQUAL}


def test_the_command_line():
    done = command.run(["compare", MEGATRON / "tp1", MEGATRON / "tp2", "--exact"])
    assert (done.returncode, b"80 equal" in done.stdout) == (0, True)
    done = command.run(["compare", HEALTHY, RUN, "--steps", "50", "--format", "json"])
    assert done.returncode == 1
    jsonschema.validate(json.loads(done.stdout), SCHEMA)
    assert command.run(["compare", HEALTHY, ROOT / "docs"]).returncode == 4


def test_what_cannot_be_read_is_never_equal(tmp_path):
    shutil.copytree(MEGATRON / "tp2", tmp_path / "cut")
    largest = max((tmp_path / "cut").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-400])
    found = compared(MEGATRON / "tp1", tmp_path / "cut", steps="2")
    assert (code(found), bool(found.steps[0].failures)) == (3, True)
    assert found.steps[0].of(Standing.UNDETERMINED)
    with pytest.raises(NothingToAuditError):
        auditor.compare(str(MEGATRON / "tp1"), str(MEGATRON / "tp1"), steps="7")


def test_zeros_and_numbers_that_are_none(healthy, tmp_path):
    shutil.copytree(healthy, tmp_path / "run")
    rewrite(tmp_path / "run", 10, NAME, "parameter", lambda bits: bits * 0)
    for sides in ((healthy, tmp_path / "run"), (tmp_path / "run", healthy)):
        (wrong,) = compared(*sides, only=[NAME]).steps[0].of(Standing.BEYOND)
        assert wrong.pair.role.value == "parameter"
    rewrite(tmp_path / "run", 10, NAME, "parameter", lambda bits: bits * 0 + 0x7FC0)
    found = compared(healthy, tmp_path / "run", only=[NAME])
    (wrong,) = found.steps[0].of(Standing.BEYOND)
    assert "finite on one side alone" in wrong.detail
    assert {row.pair.name for row in found.steps[0].rows} == {NAME}
    assert found.steps[0].num_bytes_read < compared(healthy, healthy).steps[0].num_bytes_read / 4


def test_replicas_that_drifted_apart_are_equal_to_themselves(tmp_path):
    run = ROOT / "samples" / "bloom_drift" / "run"
    found = compared(run, run, steps="50")
    assert code(found) == 0
    torn = [row for row in found.steps[0].of(Standing.EQUAL) if "alike on both sides" in row.detail]
    assert len(torn) > 16
    assert code(compared(ROOT / "samples" / "bloom_drift" / "healthy", run, steps="50")) == 1
