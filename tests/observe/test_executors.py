"""Dask's workers do the units as well: a real scheduler and two worker processes on this machine."""

import json
import os
import time

import pytest

from auditor.audit import audit
from auditor.errors import UsageError
from auditor.observe.executors import executor_of
from auditor.report.json_report import to_json
from auditor.settings import Level, Settings, StepChoice
from auditor.storage.local import LocalStore
from tests.paths import SAMPLE


@pytest.fixture(scope="module")
def cluster():
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as found:
        yield found


def report(**more):
    settings = Settings(StepChoice("40:60"), level=Level.VALUES, **more)
    return json.loads(to_json(audit(LocalStore(SAMPLE / "run"), settings)))


def test_two_workers_make_the_same_report(cluster):
    found = report(scheduler=cluster.scheduler_address)
    assert found["findings"]
    assert found == report(threads=1)


def test_work_goes_to_both_workers(cluster):
    with executor_of(1, cluster.scheduler_address) as executor:
        found = set(executor.map(_process, range(40)))
    assert len(found) == 2
    assert os.getpid() not in found


def _process(number):
    time.sleep(0.05)
    return os.getpid()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense"])
def test_a_scheduler_that_does_not_answer_is_named(address, monkeypatch):
    monkeypatch.setattr("auditor.observe.executors.CONNECT_SECONDS", 0.5)
    pytest.importorskip("distributed")
    with pytest.raises(UsageError, match="--scheduler"), executor_of(1, address):
        pass
