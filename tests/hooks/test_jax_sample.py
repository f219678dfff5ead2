"""Replicas that JAX and Orbax took for equal: the finding is what numpy found buffer by buffer."""

import json

import pytest

from auditor.audit import audit
from auditor.storage.local import LocalStore
from tests.paths import ROOT

SAMPLE = ROOT / "samples" / "jax_replica_drift"


@pytest.fixture(scope="module")
def run():
    (found,) = audit(LocalStore(SAMPLE / "run")).runs
    return found


def test_the_arrays_are_those_that_numpy_found_unequal(run):
    truth = {int(step): set(keys) for step, keys in json.loads((SAMPLE / "run.json").read_text()).items()}
    (finding,) = run.findings
    assert finding.id == "REP001"
    found = {step: set() for step in truth}
    for x in finding.locations:
        assert str(x.coordinate) == "data=1"
        found[x.step].add(x.tensor if x.tensor.startswith("momentum") else f"params.{x.tensor}")
    assert found == truth
    assert len(truth[50]) == 6
    (interval,) = finding.intervals
    assert (interval.last_good, interval.first_bad, interval.healed) == (20, 30, None)
    assert run.last_good.step == 20


def test_every_stripe_is_what_its_replica_held(run):
    assert [step.judgements["INT014"].num_holds for step in run.steps] == [3] * 5


def test_the_healthy_twin_is_silent():
    (found,) = audit(LocalStore(SAMPLE / "healthy")).runs
    assert found.findings == []
    assert [step.judgements["REP001"].num_holds for step in found.steps] == [6, 6]
    assert not {reason for identifier, reason in found.undetermined() if identifier == "REP001"}


def test_without_the_witness_it_is_not_on_disk(tmp_path):
    import shutil

    shutil.copytree(SAMPLE / "run", tmp_path / "run", ignore=shutil.ignore_patterns(".auditor"))
    (found,) = audit(LocalStore(tmp_path / "run")).runs
    assert found.findings == []
    assert any("stored once" in reason for _, reason in found.undetermined())
