"""Of steps that are as the ledger knows them nothing is opened but what tells that they are steps."""

import json
import shutil

import pytest

from auditor.audit import audit
from auditor.ledger.folder import open_ledger
from auditor.settings import Settings
from auditor.storage.local import LocalStore
from auditor.storage.watched import WatchedStore
from tests.ledger.test_recall import said
from tests.paths import ROOT, RUN, TP4

FIXTURES = ROOT / "tests/fixtures"


def watched(path, ledger, **choices):
    """The report, and how often files of each step were looked at."""
    store = WatchedStore(LocalStore(path))
    found = audit(store, Settings(**choices), ledger=open_ledger(str(ledger)) if ledger else None)
    files = [name for name in store.seen if (path / name).is_file() and "/" in name]
    steps = [name.split("/")[0] for name in files]
    return found, {step: steps.count(step) for step in steps}


def copy(source, target, *steps):
    for step in steps:
        shutil.copytree(source / step, target / step, dirs_exist_ok=True)
    return target


@pytest.mark.parametrize(
    ("run", "step"),
    [
        ("megatron_dist/tp2", "iter_0000002"), ("megatron_legacy/tp2", "iter_0000002"), ("orbax/manager", "2"),
        ("hugging_face/trainer", "checkpoint-3"), ("torch_per_rank/healthy", "step_4"), ("levanter/run", "step-2"),
        ("jax_pytree/run", "2"), ("dcp/tp_2", ""),
    ],
)  # fmt: skip
def test_formats(run, step, tmp_path):
    (first, before), (second, after) = (watched(FIXTURES / run, tmp_path / "ledger") for _ in range(2))
    assert said(first) == said(second)
    assert all(item.recalled for item in second.runs[0].steps)
    assert after.get(step, 0) <= min(2, before.get(step, 3))
    assert second.runs[0].coverage.num_bytes_read == 0


@pytest.fixture
def run(tmp_path):
    return copy(RUN, tmp_path / "run", "global_step20", "global_step30", "global_step40")


def test_a_new_step_takes_the_headers_of_the_one_before_it(run, tmp_path):
    """And what all saves before it said is known: MOT008 counts them, drift of the new step has its onset."""
    watched(run, tmp_path / "ledger")
    copy(RUN, run, "global_step50", "global_step60")
    found, files = watched(run, tmp_path / "ledger")
    assert said(found) == said(watched(run, None)[0])
    assert [step.recalled for step in found.runs[0].steps] == [True] * 3 + [False] * 2
    # One of each tells that it is a step.
    assert (files["global_step20"], files["global_step30"]) == (1, 1)
    assert min(files["global_step40"], files["global_step60"]) > 3


def test_history_goes_on(run, tmp_path):
    """Four saves make a past, three of which the ledger knows."""
    watched(run, tmp_path / "ledger")
    copy(RUN, run, "global_step50", "global_step60")
    watched(run, tmp_path / "ledger")
    copy(RUN, run, "global_step70")
    found = watched(run, tmp_path / "ledger")[0]
    whole = watched(run, None)[0]
    assert found.runs[0].steps[-1].judgements["MOT008"] == whole.runs[0].steps[-1].judgements["MOT008"]
    assert found.runs[0].steps[-1].judgements["MOT008"].num_holds > 0


def test_what_lies_in_a_step_or_beside_it_is_looked_at(run, tmp_path):
    watched(run, tmp_path / "ledger")
    (run / "global_step30/notes.txt").write_text("new")
    files = watched(run, tmp_path / "ledger")[1]
    # What follows is judged anew; the step before it is by what it is judged.
    assert min(files[f"global_step{step}"] for step in (20, 30, 40)) > 3
    assert max(watched(run, tmp_path / "ledger")[1].values()) == 1
    (run / ".auditor/witness/global_step40").mkdir(parents=True)
    (run / ".auditor/witness/global_step40/rank-00000.witness").write_bytes(b"none")
    found, files = watched(run, tmp_path / "ledger")
    assert files["global_step40"] > 3
    assert said(found) == said(watched(run, None)[0])
    (run / "latest").write_text("global_step30")
    assert watched(run, tmp_path / "ledger")[1]["global_step30"] > 3


def test_other_choices_are_judged_anew(run, tmp_path):
    watched(run, tmp_path / "ledger", select=("REP",))
    for choices in ({"select": ("OPT",)}, {}, {"strict_buffers": True}):
        found, files = watched(run, tmp_path / "ledger", **choices)
        assert min(files.values()) > 3
        assert said(found) == said(watched(run, None, **choices)[0])
    # What was asked before is known, also where less is asked.
    assert max(watched(run, tmp_path / "ledger", select=("NUM",), strict_buffers=True)[1].values()) == 1


def test_a_record_that_lost_its_measurements_is_not_gone_on_from(run, tmp_path):
    watched(run, tmp_path / "ledger")
    for chunk in (tmp_path / "ledger").rglob("lanes/c/0/0"):
        chunk.unlink()
    copy(RUN, run, "global_step50")
    found, files = watched(run, tmp_path / "ledger")
    assert found.runs[0].ledger_notes
    assert min(files.values()) > 3
    assert said(found)["findings"] == said(watched(run, None)[0])["findings"]


def test_a_step_in_progress_is_not_known(tmp_path):
    run = copy(TP4, tmp_path / "run", "global_step3", "global_step6")
    ledger = tmp_path / "ledger"
    watched(run, ledger)
    (run / "global_step6/layer_03-model_02-model_states.pt").unlink()
    for _ in range(2):
        found = watched(run, ledger, settle_seconds=1e12)[0]
        assert found.runs[0].steps[-1].state.commit.value == "in progress"
    assert json.dumps(said(found))
