"""The audit after a commit: what it says, within which bounds, and that it never stops training unless asked."""

import logging
import shutil
import threading

import pytest

from auditor.errors import AuditorError
from auditor.hooks import after_commit
from auditor.hooks.after_commit import AfterCommit, ViolationError
from auditor.storage.store import StorageError
from tests.faults import poke
from tests.paths import ROOT

SAMPLE = ROOT / "samples" / "hsdp_hidden_drift"
DRIFTED, GOOD = 40, 30


@pytest.fixture
def run(tmp_path):
    shutil.copytree(SAMPLE / "run", tmp_path / "run")
    return tmp_path / "run"


def step(run, number):
    return str(run / f"step-{number}")


@pytest.mark.parametrize("mode", ["thread", "process", "wait"])
def test_a_drift_is_raised_where_that_is_asked_for(run, mode):
    after = AfterCommit(mode, "raise")
    after.committed(GOOD, step(run, GOOD))

    def drifted():
        after.committed(DRIFTED, step(run, DRIFTED))
        after.close()

    with pytest.raises(ViolationError, match="REP001") as raised:
        drifted()
    assert raised.value.report["findings"][0]["id"] == "REP001"


def test_by_default_it_is_logged_and_training_goes_on(run, caplog):
    after = AfterCommit("wait")
    with caplog.at_level(logging.WARNING, "auditor"):
        after.committed(DRIFTED, step(run, DRIFTED))
        after.committed(GOOD, step(run, GOOD))
        after.close()
    assert ["REP001" in record.message for record in caplog.records] == [True]


def test_callback_and_numbers(run):
    reports, numbers = [], []
    after = AfterCommit(
        "wait", "callback", callback=reports.append, log=lambda found, step: numbers.append((step, found))
    )
    after.committed(DRIFTED, step(run, DRIFTED))
    after.committed(GOOD, step(run, GOOD))
    assert [report["findings"][0]["id"] for report in reports] == ["REP001"]
    assert [number for number, _ in numbers] == [DRIFTED, GOOD]
    assert [found["auditor/errors"] for _, found in numbers] == [1, 0]


def test_the_queue_is_bounded(run, caplog, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(AfterCommit, "_audit", lambda self, *item: gate.wait(20))
    after = AfterCommit(pending=2)
    with caplog.at_level(logging.WARNING, "auditor"):
        for _ in range(6):
            after.committed(GOOD, step(run, GOOD))
    assert 3 <= after.num_left <= 4
    assert "not audited here" in caplog.text
    gate.set()
    after.close()


@pytest.mark.parametrize("mode", ["wait", "process"])
def test_an_audit_ends_when_its_time_is_spent(run, mode, caplog):
    after = AfterCommit(mode, "raise", seconds=1e-9)
    with caplog.at_level(logging.WARNING, "auditor"):
        after.committed(DRIFTED, step(run, DRIFTED))
        after.close()
    assert after.num_left == 1
    assert "was ended after" in caplog.text


def test_a_step_deleted_while_it_is_audited_is_no_violation(run, monkeypatch):
    original = after_commit.audit

    def deleting(store, settings, **choices):
        (run / "step-40" / "__1_0.distcp").unlink()
        report = original(store, settings, **choices)
        shutil.rmtree(run / "step-40")
        return report

    monkeypatch.setattr(after_commit, "audit", deleting)
    after = AfterCommit("wait", "raise")
    after.committed(DRIFTED, step(run, DRIFTED))
    assert after.num_left == 1


def test_a_step_deleted_before_its_audit_is_left(run):
    shutil.rmtree(run / "step-40")
    after = AfterCommit("wait", "raise")
    after.committed(DRIFTED, step(run, DRIFTED))
    assert after.num_left == 1


@pytest.mark.parametrize("error", [StorageError("no"), RuntimeError("bug"), MemoryError(), KeyError("x")])
def test_a_failure_of_the_auditor_stops_nothing(run, monkeypatch, caplog, error):
    def failing(*arguments, **choices):
        raise error

    monkeypatch.setattr(after_commit, "audit", failing)
    after = AfterCommit("wait", "raise")
    with caplog.at_level(logging.WARNING, "auditor"):
        after.committed(GOOD, step(run, GOOD))
    assert "training goes on" in caplog.text


def test_a_failure_of_the_auditor_is_raised_where_that_is_asked_for(run, monkeypatch):
    def failing(*arguments, **choices):
        raise StorageError("no")

    monkeypatch.setattr(after_commit, "audit", failing)
    with pytest.raises(AuditorError):
        AfterCommit("wait", raising=True).committed(GOOD, step(run, GOOD))


def test_none_leaves_it_to_others(run):
    AfterCommit("none", "raise").committed(DRIFTED, step(run, DRIFTED))


def test_damage_between_memory_and_storage_is_raised(run):
    poke(run, GOOD, "head.weight", flip=1)
    with pytest.raises(ViolationError, match="INT014"):
        AfterCommit("wait", "raise").committed(GOOD, step(run, GOOD))
