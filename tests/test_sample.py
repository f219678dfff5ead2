"""The sample's finding is the truth that torch alone finds, tensor by tensor; its healthy twin is silent."""

import json
import subprocess
import sys

import pytest

from auditor.audit import audit
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.verdict import ExitCode, exit_code
from tests.paths import HEALTHY, ROOT, RUN, SAMPLE, TP2_PP2, TP4


@pytest.fixture(scope="module")
def report():
    return audit(LocalStore(RUN))


@pytest.fixture(scope="module")
def truth():
    found = json.loads((SAMPLE / "expected.json").read_text())
    return {int(step): entries for step, entries in found["steps"].items()}


def test_one_finding_with_two_intervals(report):
    (run,) = report.runs
    (finding,) = run.findings
    assert finding.id == "REP001"
    assert finding.difference_class.value == "growing"
    first, second = finding.intervals
    assert (first.last_good, first.first_bad, first.last_bad, first.healed) == (40, 50, 80, 90)
    assert (second.last_good, second.first_bad, second.last_bad, second.healed) == (100, 110, 120, None)
    assert run.last_good.step == 100
    assert exit_code(report) is ExitCode.VIOLATED


def test_masters_and_moments_show_the_second_drift_before_the_weights(report):
    onset = report.runs[0].findings[0].intervals[1].onset_by_role
    assert onset == {"master": 110, "first_moment": 110, "second_moment": 110, "parameter": 120}


def test_finding_agrees_with_torch_on_every_tensor_role_and_number(report, truth):
    (finding,) = report.runs[0].findings
    found = {(x.step, x.tensor, x.role.value): (x.num_elements_differ, x.max_abs_difference) for x in finding.locations}
    expected = {
        (step, entry["tensor"], entry["role"]): (entry["num_elements_differ"], entry["max_abs_difference"])
        for step, entries in truth.items()
        for entry in entries
    }
    assert len(expected) > 250
    assert found == expected


def test_every_other_replicated_tensor_is_judged_equal(report, truth):
    for step in report.runs[0].steps:
        judged = step.judgements["REP001"]
        assert judged.num_holds + len(judged.violations) == 64
        assert len(judged.violations) == len(truth[step.state.step])


def test_finding_says_where(report):
    (finding,) = report.runs[0].findings
    tensors = list(dict.fromkeys(x.tensor for x in finding.locations if x.step == 50))
    assert len(tensors) == 16
    assert tensors[0] == "tied_modules.embed.word_embeddings.norm.weight"
    assert tensors[-1] == "6.bias"
    assert {str(x.coordinate) for x in finding.locations} == {"tp=1"}


@pytest.mark.parametrize("folder", [HEALTHY, TP2_PP2, TP4], ids=lambda folder: folder.name)
@pytest.mark.parametrize("level", list(Level), ids=lambda level: level.name)
def test_healthy_runs_are_silent(folder, level):
    found = audit(LocalStore(folder), Settings(level=level))
    assert [finding for run in found.runs for finding in run.findings] == []
    assert exit_code(found) is ExitCode.HOLDS
    if level >= Level.REPLICAS:
        assert found.runs[0].last_good.step == max(step.state.step for step in found.runs[0].steps)


def test_level_replicas_finds_the_same_with_fewer_bytes(report):
    fewer = audit(LocalStore(RUN), Settings(level=Level.REPLICAS))
    assert fewer.runs[0].findings == report.runs[0].findings
    # Tensors are so small here that the gaps between them, less than a page, are most of what is read.
    assert fewer.runs[0].coverage.num_bytes_read < 0.6 * report.runs[0].coverage.num_bytes_read


def test_tied_embedding_is_compared_over_stages_and_its_siblings_are_not():
    found = audit(LocalStore(TP2_PP2), Settings(select=("REP",)))
    assert found.runs[0].findings == []
    # Sharded over tp, the tied weight's master and moments are replicas over pp alone: 3 of them are judged.
    judged = found.runs[0].steps[0].judgements["REP001"]
    assert judged.num_holds > 64
    assert "stored once along pp: other replicas are not on disk (auditor.hooks witnesses them)" in judged.undetermined


def test_expected_truth_is_what_its_script_finds_with_torch_alone(truth):
    pytest.importorskip("torch")
    script = SAMPLE / "expect.py"
    assert "auditor" not in script.read_text().replace("nothing of the auditor is used", "")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(RUN)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert {int(k): v for k, v in json.loads(done.stdout)["steps"].items()} == truth
