"""INT012: a folder that its framework named after a step holds that step; other names say nothing."""

import shutil

import pytest

from auditor.audit import audit
from auditor.model.finding import Outcome, Severity
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.verdict import ExitCode, exit_code
from tests.paths import FIXTURES as DEEPSPEED
from tests.paths import HEALTHY, ROOT

OTHERS = ROOT / "tests" / "fixtures"
STEPS = {
    "DeepSpeed": (HEALTHY / "global_step20", "global_step300"),
    "Megatron": (OTHERS / "megatron_legacy" / "tp2" / "iter_0000004", "iter_0000300"),
    "Trainer": (OTHERS / "hugging_face" / "trainer" / "checkpoint-6", "checkpoint-300"),
}
"""Framework to a healthy step and the name that it gives step 300."""
ID = "INT012"


def audited(path, **choices):
    report = audit(LocalStore(path), Settings(level=Level.HEADERS, **choices))
    return report, report.runs[0]


def copied(step, folder, name):
    shutil.copytree(step, folder / name)
    return folder


@pytest.mark.parametrize(("step", "name"), STEPS.values(), ids=STEPS)
def test_a_step_in_a_folder_of_another_step_is_a_note(tmp_path, step, name):
    report, run = audited(copied(step, tmp_path, name))
    (finding,) = run.findings
    assert (finding.id, finding.severity) == (ID, Severity.NOTE)
    recorded = run.steps[0].state.step
    assert finding.message == f"{name} is named after step 300, its files record step {recorded}"
    assert [(x.step, x.file) for x in finding.locations] == [(recorded, name)]
    assert exit_code(report) is ExitCode.HOLDS
    assert run.last_good.step == recorded


@pytest.mark.parametrize(("step", "name"), STEPS.values(), ids=STEPS)
def test_also_where_the_step_was_opened_by_itself(tmp_path, step, name):
    (finding,) = audited(copied(step, tmp_path, name) / name)[1].findings
    assert finding.message.startswith("its folder is named after step 300, its files record step ")


@pytest.mark.parametrize(("step", "name"), STEPS.values(), ids=STEPS)
def test_a_step_under_its_own_name_holds(step, name):
    _, run = audited(step)
    assert run.findings == []
    assert run.counts(ID)[Outcome.HOLDS] == 1


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (STEPS["DeepSpeed"][0], "step_300"), (STEPS["DeepSpeed"][0], "global_step300_old"),
        (STEPS["Megatron"][0], "release"), (STEPS["Trainer"][0], "bert-base-2"), (STEPS["Trainer"][0], "llama-3-8b"),
        (OTHERS / "hugging_face" / "bert", "checkpoint-300"),
        (OTHERS / "torch_per_rank" / "healthy" / "step_6", "run_3"),
    ],
)  # fmt: skip
def test_names_that_people_gave_and_steps_that_nothing_records_say_nothing(tmp_path, step, name):
    _, run = audited(copied(step, tmp_path, name))
    assert run.findings == []
    assert run.counts(ID)[Outcome.NOT_APPLICABLE] == 1


def test_a_step_beside_its_misnamed_copy_is_one_finding(tmp_path):
    copied(HEALTHY / "global_step20", tmp_path, "global_step20")
    _, run = audited(copied(HEALTHY / "global_step20", tmp_path, "global_step300"))
    (finding,) = run.findings
    assert (finding.id, finding.consequences) == ("INT007", (ID,))


def test_whole_runs_are_silent():
    for path in (HEALTHY, DEEPSPEED / "tp4", OTHERS / "megatron_legacy" / "tp2", OTHERS / "hugging_face" / "trainer"):
        assert audited(path, select=(ID,))[1].findings == []
