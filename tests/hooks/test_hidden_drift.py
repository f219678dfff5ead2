"""Drift of replicas that DCP threw away before it wrote: the witness shows it, and faults of the witness are told."""

import json
import os
import shutil

import pytest

from auditor.audit import audit
from auditor.committed import NAME, described, is_as_committed
from auditor.containers.witness_file import read_part
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.verdict import ExitCode, exit_code
from tests.faults import poke
from tests.paths import ROOT

SAMPLE = ROOT / "samples" / "hsdp_hidden_drift"
NORMS = ["blocks.0.norm.weight", "blocks.1.norm.weight", "norm.weight"]


def checked(run, **choices):
    report = audit(LocalStore(run), Settings(**choices))
    (found,) = report.runs
    return report, found


@pytest.fixture
def run(tmp_path):
    shutil.copytree(SAMPLE / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def healthy(tmp_path):
    shutil.copytree(SAMPLE / "healthy", tmp_path / "run")
    return tmp_path / "run"


def witness(run, step, rank):
    return run / ".auditor" / "witness" / f"step-{step}" / f"rank-{rank:05d}.witness"


@pytest.fixture(scope="module")
def truth():
    return {int(step): found for step, found in json.loads((SAMPLE / "run.json").read_text()).items()}


def test_the_drift_is_found_with_onset_tensors_and_ranks():
    report, run = checked(SAMPLE / "run")
    (finding,) = run.findings
    assert finding.id == "REP001"
    (interval,) = finding.intervals
    assert (interval.last_good, interval.first_bad, interval.last_bad, interval.healed) == (30, 40, 60, None)
    assert [str(x.coordinate) for x in finding.locations] == ["dp_replicate=1"] * len(finding.locations)
    assert {rank for x in finding.locations for rank in x.ranks} == {2, 3}
    assert run.last_good.step == 30
    assert exit_code(report) is ExitCode.VIOLATED


def test_the_tensors_are_those_that_torch_found_unequal_in_memory(truth):
    _, run = checked(SAMPLE / "run")
    (finding,) = run.findings
    keys = {"parameter": "model.{}", "first_moment": "optimizer.state.{}.exp_avg",
            "second_moment": "optimizer.state.{}.exp_avg_sq"}  # fmt: skip
    found = {step: set() for step in truth}
    for location in finding.locations:
        found[location.step].add(keys[location.role.value].format(location.tensor))
    assert found == {step: set(unequal) for step, unequal in truth.items()}
    assert len(truth[60]) == 3 * len(NORMS)
    assert not truth[30]


def test_without_the_witness_nothing_of_it_is_on_disk(run):
    shutil.rmtree(run / ".auditor")
    report, found = checked(run)
    assert found.findings == []
    assert exit_code(report) is ExitCode.HOLDS
    reasons = {reason for _, reason in found.undetermined()}
    assert "stored once along rank: other replicas are not on disk (auditor.hooks witnesses them)" in reasons


def test_the_healthy_twin_holds_and_nothing_is_undetermined():
    report, run = checked(SAMPLE / "healthy", level=Level.FULL)
    assert run.findings == []
    assert not {identifier for identifier, _ in run.undetermined()} & {"REP001", "INT014"}
    assert exit_code(report) is ExitCode.HOLDS
    for step in run.steps:
        assert step.judgements["REP001"].num_holds == 36
        assert step.judgements["INT014"].num_holds == 36


def test_at_level_replicas_the_drift_is_found_without_reading_weights():
    _, run = checked(SAMPLE / "run", level=Level.REPLICAS, select=("REP",))
    assert [finding.id for finding in run.findings] == ["REP001"]
    assert run.coverage.num_bytes_read == 0


@pytest.mark.parametrize("cut", [0, 8, 100, -1])
def test_a_truncated_part_is_told_and_the_drift_still_found(run, cut):
    path = witness(run, 50, 0)
    path.write_bytes(path.read_bytes()[:cut])
    _, found = checked(run)
    (finding,) = found.findings
    assert {x.step for x in finding.locations} == {40, 50, 60}
    reasons = found.steps_undetermined
    assert any("rank-00000.witness" in reason and reasons("REP001", reason) == [50]
               for _, reason in found.undetermined())  # fmt: skip


def test_a_rank_that_died_leaves_its_replicas_undetermined(healthy):
    witness(healthy, 20, 3).unlink()
    _, found = checked(healthy)
    assert found.findings == []
    why = "1 of 4 ranks left no witness: 3"
    assert found.steps_undetermined("REP001", why) == [20]
    assert found.last_good.step == 30


def test_all_ranks_of_a_replica_gone_is_no_equality(healthy):
    for rank in (2, 3):
        witness(healthy, 20, rank).unlink()
    _, found = checked(healthy)
    assert "2 of 4 ranks left no witness: 2, 3" in {reason for _, reason in found.undetermined()}
    step = next(step for step in found.steps if step.state.step == 20)
    assert step.judgements["REP001"].num_holds == 0


def test_a_witness_of_another_step_says_nothing(healthy):
    folder = healthy / ".auditor" / "witness"
    shutil.rmtree(folder / "step-20")
    shutil.copytree(folder / "step-10", folder / "step-20")
    _, found = checked(healthy)
    assert found.findings == []
    assert any("it is of step 10" in reason for _, reason in found.undetermined())


@pytest.mark.parametrize("role", ["parameter", "second_moment"])
def test_a_bit_that_flips_between_memory_and_storage(healthy, role):
    file = poke(healthy, 20, "head.weight", role, element=3, flip=1)
    report, found = checked(healthy)
    (finding,) = found.findings
    assert finding.id == "INT014"
    ((where),) = finding.locations
    assert (where.step, where.tensor, where.role.value, where.file) == (20, "head.weight", role, file)
    assert exit_code(report) is ExitCode.VIOLATED
    assert found.last_good.step == 30


def test_a_flipped_bit_of_a_rank_without_a_witness_is_undetermined(healthy):
    file = poke(healthy, 20, "head.weight", element=3, flip=1)
    rank = int(file.rpartition("/")[2].split("_")[2])
    witness(healthy, 20, rank).unlink()
    _, found = checked(healthy)
    assert found.findings == []


@pytest.mark.parametrize("linked", [False, True])
def test_a_step_by_itself_is_held_against_its_witness(run, linked):
    path = run / "step-40"
    if linked:
        path = run.parent / "newest"
        path.symlink_to("run/step-40")
    _, found = checked(path)
    assert [(finding.id, x.step) for finding in found.findings for x in finding.locations[:1]] == [("REP001", 40)]
    _, good = checked(run / "step-30")
    assert good.findings == []
    assert good.steps[0].judgements["INT014"].num_holds == good.steps[0].judgements["REP001"].num_holds == 36


def test_a_copied_step_is_known_again(healthy):
    """Copies are younger than the witness: that the files are those which were committed is told by samples of them."""
    store, folder = LocalStore(healthy), ".auditor/witness/step-20"
    assert is_as_committed(store, folder, "step-20")
    assert not is_as_committed(store, folder, "step-30")
    for told in (b"", b"[]", b'{"files": [{"name": "../step-20/.metadata"}]}', b'{"files": []}', b"{" * 9999, None):
        path = witness(healthy, 20, 0).with_name(NAME)
        path.unlink() if told is None else path.write_bytes(told)
        assert not is_as_committed(store, folder, "step-20")


def test_most_of_a_step_saved_again_without_the_hook(healthy):
    """Files of another step under the old witness: damage when they are of its time, another save when younger."""
    for path in (healthy / "step-30").iterdir():
        shutil.copyfile(path, healthy / "step-20" / path.name)
    part = witness(healthy, 20, 0)
    with LocalStore(part.parent).open(part.name) as handle:
        taken = read_part(handle, part.name).taken
    for path in (healthy / "step-20").iterdir():
        os.utime(path, (taken + 60, taken + 60))
    assert "INT014" in {finding.id for finding in checked(healthy, ignore=("INT005", "INT011", "MOT"))[1].findings}
    for path in (healthy / "step-20").iterdir():
        os.utime(path, (taken + 7200, taken + 7200))
    _, found = checked(healthy)
    assert "INT014" not in {finding.id for finding in found.findings}
    assert any("of an earlier save" in reason for _, reason in found.undetermined())
    # Had these files been committed then, they would be younger by copying, and INT014 would hold them to it.
    witness(healthy, 20, 0).with_name(NAME).write_bytes(described(str(healthy), "step-20", 20))
    assert "INT014" in {finding.id for finding in checked(healthy, ignore=("INT005", "INT011", "MOT"))[1].findings}


def test_the_folder_of_witnesses_is_no_step(run):
    for step in (10, 20, 30, 40, 50, 60):
        shutil.rmtree(run / f"step-{step}")
    from auditor.errors import NothingToAuditError

    with pytest.raises(NothingToAuditError):
        checked(run)
