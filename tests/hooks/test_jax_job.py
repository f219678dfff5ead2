"""Orbax saves replicas that have drifted without complaint: the witness names them. Needs jax and orbax-checkpoint."""

import os
import subprocess
import sys

import pytest

from auditor.audit import audit
from auditor.storage.local import LocalStore
from tests.paths import ROOT
from tests.s3 import free_port

pytest.importorskip("jax")
pytest.importorskip("orbax.checkpoint")


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def job(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    command = [sys.executable, "-W", "ignore", "-m", "tests.hooks.jax_job", str(folder)]
    port = str(free_port())
    processes = [
        subprocess.Popen([*command, str(number), port] if request.param > 1 else command, cwd=ROOT, text=True,
                         stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        for number in range(request.param)
    ]  # fmt: skip
    try:
        for process in processes:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
    (run,) = audit(LocalStore(folder)).runs
    return run


def test_the_replica_that_drifted_is_named(job):
    finding = next(finding for finding in job.findings if finding.id == "REP001")
    assert {(x.step, x.tensor, str(x.coordinate)) for x in finding.locations} == {
        (step, "scale", "data=1") for step in (2, 3)
    }
    assert finding.intervals[0].last_good == 1


def test_the_mosaic_that_orbax_stored_is_what_its_replicas_held(job):
    """Stripe by stripe: no replica holds the whole of it, but each stripe is of one."""
    assert not [finding for finding in job.findings if finding.id == "INT014"]
    assert [step.judgements["INT014"].num_holds for step in job.steps] == [3, 3, 3]


def test_replicas_that_agree_hold(job):
    assert job.steps[0].judgements["REP001"].num_holds == 3
