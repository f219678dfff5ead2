"""Ranks that die or come late in a real job: nobody waits for them, and what they held is told to be unknown."""

import json

import pytest

from auditor.audit import audit
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from tests.hooks.running import run_job

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    printed, errors = run_job("dying_job", folder)
    assert json.loads(printed) == [0, -9, 0, -9], errors[-3000:]
    return folder


def witnessed(folder):
    """Step to why its replicas are undetermined; empty where they hold."""
    (run,) = audit(LocalStore(folder), Settings(level=Level.VALUES, select=("REP", "INT"))).runs
    assert run.findings == []
    assert [step.judgements["INT014"].num_holds for step in run.steps] == [1, 1, 1]
    return {step.state.step: "; ".join(step.judgements["REP001"].undetermined) for step in run.steps}


def test_a_rank_that_comes_late_is_heard_and_one_that_died_is_named(job):
    """On a shared disk. What a killed rank had written of its part is not read."""
    assert witnessed(job / "shared") == {1: "", 2: "", 3: "2 of 4 ranks left no witness: 1, 3"}
    left = [path.name for path in (job / "shared" / ".auditor" / "witness" / "step-3").iterdir()]
    assert ".rank-00003.witness.partial" in left


def test_rank_0_waits_for_nobody_longer_than_it_was_told(job):
    """On disks of their own: who comes after the commit is too late, and everybody else's part is fetched.

    A rank that waited for the dead would not have ended by itself: the job sees to that.
    """
    told = witnessed(job / "disk0")
    assert told[1] == ""
    assert (told[2], told[3]) == ("1 of 4 ranks left no witness: 2", "2 of 4 ranks left no witness: 1, 3")
