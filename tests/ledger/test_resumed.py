"""Onset over a run that was resumed on another mesh, with saves deleted, with holes in its cadence."""

import json
import shutil

import pytest

from auditor.report.json_report import to_json
from tests.faults import catalog_of, float32_bits, poke
from tests.ledger.test_recall import read, report
from tests.ledger.test_since import delete, ids, intervals
from tests.paths import HEALTHY, TP2_PP2, TP4


@pytest.fixture
def resumed(tmp_path):
    """Step 3 of two tensor-parallel ranks in two stages, step 6 of four."""
    run = tmp_path / "run"
    shutil.copytree(TP2_PP2 / "global_step3", run / "global_step3")
    shutil.copytree(TP4 / "global_step6", run / "global_step6")
    (run / "latest").write_text("global_step6")
    return run


def norm(run, step):
    catalog = catalog_of(run, step)
    both = zip(catalog.tensors, catalog.replicas, strict=True)
    return next(what.name for what, places in both if len(places) == 4 and what.role.value == "parameter")


def test_a_mesh_that_changes_at_resume_is_no_fault(resumed, tmp_path):
    found = report(resumed, tmp_path / "ledger", select=("REP", "COV", "MET"))
    assert ids(found) == []
    assert len({str(step.mesh) for step in found.runs[0].steps}) == 2
    delete(resumed, 3)
    again = report(resumed, tmp_path / "ledger", select=("REP", "COV", "MET"))
    assert [str(step.mesh) for step in again.runs[0].steps] == [str(step.mesh) for step in found.runs[0].steps]


def test_a_drift_after_the_mesh_changed_has_its_onset_and_ranks(resumed, tmp_path):
    poke(resumed, 6, norm(resumed, 6), place="tp=3", value=float32_bits(1.5) >> 16)
    first = report(resumed, tmp_path / "ledger", select=("REP",))
    delete(resumed, 3)
    for found in (first, report(resumed, tmp_path / "ledger", select=("REP",))):
        assert intervals(found) == [[(3, 6, 6, None)]]
        (finding,) = json.loads(to_json(found))["findings"]
        assert finding["minority"] == [{"tp": 3}]
        assert finding["locations"][0]["coordinate"] == {"tp": 3}
        assert all(3 in place["global_ranks"] for place in finding["locations"])


def test_holes_in_the_cadence_widen_the_bracket(tmp_path):
    """Steps that were never audited are in no bracket; those that the ledger knows are."""
    run = shutil.copytree(HEALTHY, tmp_path / "run")
    for step in (100, 110, 120):
        poke(run, step, "3.input_layernorm.weight", place="tp=1", value=float32_bits(1.5) >> 16)
    delete(run, 60, 70, 90)
    assert intervals(report(run, tmp_path / "ledger"))[0] == [(80, 100, 120, None)]
    delete(run, 80)
    again = report(run, tmp_path / "ledger")
    assert (intervals(again)[0], read(again)) == ([(80, 100, 120, None)], 0)
    assert intervals(report(run, None))[0] == [(50, 100, 120, None)]
