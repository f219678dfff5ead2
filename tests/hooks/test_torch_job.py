"""Real ranks save through the hook: what is found is what was done to them."""

import pytest

from auditor.audit import audit
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from tests.hooks.running import run_job

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder in which four ranks have saved everything once."""
    folder = tmp_path_factory.mktemp("job")
    run_job("torch_job", folder)
    return folder


def found(job, scene, **choices):
    (run,) = audit(LocalStore(job / scene), Settings(level=Level.VALUES, **choices)).runs
    return run


def told(run):
    """Finding, step, tensor and place of everything that is wrong."""
    return {
        (finding.id, finding.severity.name, x.step, x.tensor, str(x.coordinate))
        for finding in run.findings
        for x in finding.locations
    }


def holding(run, step, identifier):
    return next(item for item in run.steps if item.state.step == step).judgements[identifier].num_holds


def test_hsdp(job):
    run = found(job, "hsdp")
    assert told(run) == {("REP001", "ERROR", 2, "norm.weight", "dp_replicate=1")}
    assert {rank for x in run.findings[0].locations for rank in x.ranks} == {2}
    assert [holding(run, step, "REP001") for step in (1, 2)] == [3, 2]
    assert [holding(run, step, "INT014") for step in (1, 2)] == [3, 3]


def test_boxes(job):
    run = found(job, "two_dims")
    assert told(run) == {("REP001", "ERROR", 2, "down.weight", "dp=1")}
    assert holding(run, 1, "INT014") == 2
    assert not run.undetermined()


def test_ddp(job):
    """Buffers that every rank has of its own are a warning; which rank is wrong is what the majority says."""
    run = found(job, "ddp")
    errors = {item for item in told(run) if item[1] == "ERROR"}
    assert errors == {("REP001", "ERROR", 2, "up.weight", "rank=1")}
    (error,) = [finding for finding in run.findings if finding.severity.name == "ERROR"]
    assert [str(place) for place in error.minority] == ["rank=1"]
    assert {item[3] for item in told(run) if item[1] == "WARNING"} == {"seen"}


def test_plain(job):
    """What changes after the witness and before the file is not what was in memory; the replica differs on disk too."""
    run = found(job, "plain")
    assert {(finding.id) for finding in run.findings} == {"INT014"}
    (finding,) = run.findings
    assert finding.consequences == ("REP001",)
    assert {(x.step, x.tensor, x.file) for x in finding.locations} == {(2, "norm.weight", "step_2/rank_1.pt")}
    assert holding(run, 1, "INT014") == 2


def test_asynchronous(job):
    run = found(job, "asynchronous")
    assert {(item[0], item[2], item[3]) for item in told(run)} == {("INT014", 2, "up.weight")}
    assert len(run.findings[0].locations) == 4


def test_odd_states_stop_nothing_and_are_told_apart(job):
    run = found(job, "odd", select=("REP", "INT"))
    assert run.findings == []
    assert holding(run, 1, "REP001") == 3
    assert holding(run, 2, "INT014") == holding(run, 1, "INT014") > 0
    why = "1 of 4 ranks left no witness: 3"
    assert run.steps_undetermined("REP001", why) == [3]


def test_another_mesh_at_the_next_step(job):
    run = found(job, "resharded")
    assert run.findings == []
    assert [holding(run, step, "REP001") for step in (1, 2)] == [3, 0]
    assert [holding(run, step, "INT014") for step in (1, 2)] == [3, 3]
    # Nothing is trained between the saves.
    assert {identifier for identifier, _ in run.undetermined()} <= {"MOT004"}
