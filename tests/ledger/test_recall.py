"""An unchanged step is not read again, and nothing else is said of it."""

import json
import shutil

import pytest

from auditor.audit import audit
from auditor.ledger.folder import open_ledger
from auditor.report.json_report import to_json
from auditor.settings import Level, Settings, StepChoice
from auditor.storage.local import LocalStore
from tests.faults import float32_bits, poke
from tests.paths import HEALTHY, RUN, TP2_PP2, TP4


def report(path, ledger, **choices):
    return audit(LocalStore(path), Settings(**choices), ledger=open_ledger(str(ledger)) if ledger else None)


def said(found):
    """A report without what was read for it."""
    document = json.loads(to_json(found))
    for run in document.get("runs", [document]):
        for step in run["steps"]:
            del step["from_ledger"]
        for name in ("num_bytes_read", "num_bytes_reread"):
            del run["coverage"][name]
        del run["config_digest"]
    return document


def read(found):
    return sum(run.coverage.num_bytes_read + run.coverage.num_bytes_reread for run in found.runs)


AROUND = StepChoice("40:60")
"""The steps around the onset."""


@pytest.mark.parametrize(
    ("path", "level"),
    [(RUN, Level.VALUES), (HEALTHY, Level.REPLICAS), (TP2_PP2, Level.REPLICAS), (TP4, Level.FULL)],
    ids=lambda given: getattr(given, "name", None),
)
def test_a_second_audit_reads_nothing_and_says_the_same(path, level, tmp_path):
    without = report(path, None, level=level)
    first, second = (report(path, tmp_path / "ledger", level=level) for _ in range(2))
    # At full, files without checksums of their own are read for the digests that a ledger keeps.
    assert read(first) >= read(without) > 0
    assert level is Level.FULL or read(first) == read(without)
    assert read(second) == 0
    assert said(first) == said(second) == said(without)
    assert all(step.recalled for run in second.runs for step in run.steps)


def test_a_lower_level_is_answered_by_a_higher_one(tmp_path):
    report(RUN, tmp_path / "ledger", level=Level.FULL, steps=AROUND)
    for level in Level:
        again = report(RUN, tmp_path / "ledger", level=level, steps=AROUND)
        assert read(again) == 0
        assert said(again) == said(report(RUN, None, level=level, steps=AROUND)), level


def test_a_higher_level_is_read(tmp_path):
    report(RUN, tmp_path / "ledger", steps=AROUND, level=Level.REPLICAS)
    again = report(RUN, tmp_path / "ledger", steps=AROUND, level=Level.VALUES)
    assert read(again) == read(report(RUN, None, steps=AROUND, level=Level.VALUES))
    assert read(report(RUN, tmp_path / "ledger", steps=AROUND, level=Level.VALUES)) == 0


def test_other_invariants_are_read_for(tmp_path):
    report(RUN, tmp_path / "ledger", steps=AROUND, select=("REP",))
    again = report(RUN, tmp_path / "ledger", steps=AROUND, select=("OPT", "NUM"))
    assert read(again) > 0
    assert said(again) == said(report(RUN, None, steps=AROUND, select=("OPT", "NUM")))


@pytest.mark.parametrize("level", [Level.VALUES, Level.FULL])
def test_some_tensors_are_answered_and_nothing_is_kept(level, tmp_path):
    report(RUN, tmp_path / "ledger", level=level, steps=AROUND)
    kept = sorted((tmp_path / "ledger").rglob("*"))
    for tensors in ("4.*", "*norm*"):
        plain, again = (report(RUN, ledger, level=level, steps=AROUND, tensors=tensors)
                        for ledger in (None, tmp_path / "ledger"))  # fmt: skip
        assert said(again) == said(plain)
        assert (again.runs[0].coverage.num_bytes_read, all(step.recalled for step in again.runs[0].steps)) == (0, True)
        assert plain.runs[0].coverage.num_bytes_read > 0
    assert sorted((tmp_path / "ledger").rglob("*")) == kept


def test_a_step_that_changed_is_read_again(tmp_path):
    run, ledger = tmp_path / "run", tmp_path / "ledger"
    shutil.copytree(RUN, run)
    report(run, ledger)
    poke(run, 20, "3.input_layernorm.weight", place="tp=0", value=float32_bits(float("nan")) >> 16)
    again = report(run, ledger)
    assert [step.state.step for step in again.runs[0].steps if not step.recalled] == [20]
    found = {finding["id"]: finding for finding in said(again)["findings"]}
    # What differs by it in this step is a consequence of the change; the drift in other steps stays what it is.
    assert "REP001" in found["INT017"]["consequences"]
    assert found["REP001"] == said(report(RUN, None))["findings"][0]


def test_what_is_no_ledger_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="no ledger"):
        report(RUN, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_ledger_does_not_lie_in_the_run(tmp_path):
    shutil.copytree(RUN, tmp_path / "run")
    with pytest.raises(ValueError, match="choose another place"):
        open_ledger(str(tmp_path / "run" / "ledger"), LocalStore(tmp_path / "run"))
