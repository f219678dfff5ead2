"""What became of steps since they were audited: deleted, touched, changed in part, saved again, set back."""

import os
import shutil

import pytest

from auditor.errors import NothingToAuditError
from auditor.ledger.folder import open_ledger
from auditor.report.ledger_report import show_lines
from auditor.report.text_report import text_lines
from auditor.settings import Level, StepChoice
from tests.faults import float32_bits, poke
from tests.ledger.test_recall import read, report, said
from tests.paths import HEALTHY, RUN

NORM = "3.input_layernorm.weight"


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(RUN, tmp_path / "run")


@pytest.fixture
def healthy(tmp_path):
    return shutil.copytree(HEALTHY, tmp_path / "run")


def delete(run, *steps):
    for step in steps:
        shutil.rmtree(run / f"global_step{step}")


def save_again(run, step, source, later=1000):
    """Put other content in the place of a step, as a resumed training does."""
    folder = run / f"global_step{step}"
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(source / f"global_step{step}", folder)
    when = max(file.stat().st_mtime for file in run.rglob("*") if file.is_file()) + later
    for file in folder.rglob("*"):
        os.utime(file, (when, when))


def ids(found):
    return sorted({finding.id for finding in found.runs[0].findings})


def intervals(found, identifier="REP001"):
    return [
        [(i.last_good, i.first_bad, i.last_bad, i.healed) for i in finding.intervals]
        for finding in found.runs[0].findings
        if finding.id == identifier
    ]


def text(found):
    return "\n".join(text_lines(found))


def test_deleted_steps_are_answered_from_the_ledger(run, tmp_path):
    before = report(run, tmp_path / "ledger")
    delete(run, 50, 60, 70, 110)
    again = report(run, tmp_path / "ledger")
    assert read(again) == 0
    assert intervals(again) == intervals(before)
    assert said(again)["findings"] == said(before)["findings"]
    gone = [step.state.step for step in again.runs[0].steps if step.state.deleted]
    assert gone == [50, 60, 70, 110]
    assert "12 of 12 steps from the ledger (50, 60, 70, 110 deleted since)" in text(again)


def test_without_the_ledger_the_onset_is_later(run, tmp_path):
    delete(run, 50, 60, 70)
    assert intervals(report(run, None))[0][0] == (40, 80, 80, 90)


def test_a_deleted_step_is_not_the_last_good_one(healthy, tmp_path):
    report(healthy, tmp_path / "ledger")
    delete(healthy, 110, 120)
    (healthy / "latest").write_text("global_step100")
    again = report(healthy, tmp_path / "ledger")
    assert again.runs[0].last_good.step == 100
    assert again.runs[0].rejected[0] == (120, "it is deleted; the ledger alone knows it")
    assert ids(again) == []


def test_a_pointer_to_a_deleted_step_dangles(healthy, tmp_path):
    report(healthy, tmp_path / "ledger")
    delete(healthy, 120)
    assert ids(report(healthy, tmp_path / "ledger")) == ["INT003"]


def test_steps_that_were_not_asked_for_stay_out(run, tmp_path):
    report(run, tmp_path / "ledger")
    delete(run, 20, 50)
    again = report(run, tmp_path / "ledger", steps=StepChoice("10:40"))
    assert [step.state.step for step in again.runs[0].steps] == [10, 20, 30, 40]
    newest = report(run, tmp_path / "ledger", steps=StepChoice("latest"))
    assert [step.state.step for step in newest.runs[0].steps] == [120]


def test_another_root_tells_the_same(run, tmp_path):
    """A ledger keeps paths from the step on: the run may be named by itself or found in a folder of runs."""
    report(run, tmp_path / "ledger")
    delete(run, 50)
    other = tmp_path / "elsewhere" / "deep"
    other.mkdir(parents=True)
    shutil.move(run, other / "run")
    again = report(tmp_path / "elsewhere", tmp_path / "ledger")
    (found,) = [item for item in again.runs if item.path == "deep/run"]
    files = {place.file for finding in found.findings for place in finding.locations if place.step == 50}
    assert files
    assert all(file.startswith("deep/run/global_step50/") for file in files)


def test_touched_and_copied_steps_are_no_finding(healthy, tmp_path):
    report(healthy, tmp_path / "ledger")
    for file in healthy.rglob("*.pt"):
        os.utime(file, (2_000_000_000, 2_000_000_000))
    shutil.copy(healthy / "global_step50" / "layer_03-model_00-model_states.pt", tmp_path / "copy")
    shutil.move(tmp_path / "copy", healthy / "global_step50" / "layer_03-model_00-model_states.pt")
    again = report(healthy, tmp_path / "ledger")
    assert read(again) > 0
    assert ids(again) == []
    assert read(report(healthy, tmp_path / "ledger")) == 0


def test_one_touched_file_is_no_finding(healthy, tmp_path):
    report(healthy, tmp_path / "ledger")
    os.utime(healthy / "global_step50" / "layer_03-model_00-model_states.pt", (2_000_000_000, 2_000_000_000))
    assert ids(report(healthy, tmp_path / "ledger")) == []


def test_a_step_that_was_changed_in_part_is_an_error_and_stays_one(healthy, tmp_path):
    report(healthy, tmp_path / "ledger", select=("INT",))
    report(healthy, tmp_path / "ledger")
    # Equal on all replicas, so that no other invariant sees it.
    for place in ("tp=0", "tp=1"):
        poke(healthy, 50, NORM, place=place, value=float32_bits(1.5) >> 16)
    for _ in range(3):
        again = report(healthy, tmp_path / "ledger")
        (finding,) = [found for found in again.runs[0].findings if found.id == "INT017"]
        assert finding.severity.name == "ERROR"
        assert {place.step for place in finding.locations} == {50}
        assert sorted(place.file.rsplit("/", 1)[1] for place in finding.locations) == [
            "layer_03-model_00-model_states.pt", "layer_03-model_01-model_states.pt",
        ]  # fmt: skip
        assert finding.message.startswith("global_step50 was changed in part since it was audited: 2 files changed")


def test_files_that_are_gone_are_a_warning_beside_what_it_breaks(healthy, tmp_path):
    report(healthy, tmp_path / "ledger")
    (healthy / "global_step50" / "layer_03-model_01-model_states.pt").unlink()
    again = report(healthy, tmp_path / "ledger")
    found = {finding.id: finding for finding in again.runs[0].findings}
    assert found["INT001"].severity.name == "ERROR"
    assert "INT017" not in found or found["INT017"].severity.name == "WARNING"


def test_a_step_that_was_saved_again_is_a_note_and_a_branch(healthy, tmp_path):
    for step in (70, 80, 90, 100, 110, 120):
        shutil.rmtree(healthy / f"global_step{step}")
        shutil.copytree(RUN / f"global_step{step}", healthy / f"global_step{step}")
    first = report(healthy, tmp_path / "ledger")
    assert "REP001" in ids(first)
    for step in (70, 80, 90):
        save_again(healthy, step, HEALTHY)
    delete(healthy, 100, 110, 120)
    (healthy / "latest").write_text("global_step90")
    for _ in range(2):
        again = report(healthy, tmp_path / "ledger")
        assert ids(again) == ["INT018"]
        assert again.runs[0].findings[0].severity.name == "NOTE"
        assert [step.state.step for step in again.runs[0].steps] == [10, 20, 30, 40, 50, 60, 70, 80, 90]
        (branch,) = again.runs[0].branches
        assert branch.steps == (70, 80, 90, 100, 110, 120)
        assert branch.violated["REP001"] == 70
        assert again.runs[0].last_good.step == 90
        (line,) = [line for line in text(again).splitlines() if "set back" in line]
        assert "set back        the ledger holds steps 6 of 70 … 120 of before: " in line
        assert "REP001 from 70" in line


def test_a_second_setback_keeps_both_branches(healthy, tmp_path):
    report(healthy, tmp_path / "ledger")
    save_again(healthy, 110, RUN)
    delete(healthy, 120)
    (healthy / "latest").write_text("global_step110")
    report(healthy, tmp_path / "ledger")
    save_again(healthy, 100, HEALTHY, later=5000)
    poke(healthy, 100, NORM, place="tp=0", value=float32_bits(1.5) >> 16)
    poke(healthy, 100, NORM, place="tp=1", value=float32_bits(1.5) >> 16)
    for file in (healthy / "global_step100").rglob("*"):
        os.utime(file, (2_100_000_000, 2_100_000_000))
    delete(healthy, 110)
    (healthy / "latest").write_text("global_step100")
    again = report(healthy, tmp_path / "ledger")
    assert [(branch.number, branch.steps) for branch in again.runs[0].branches] == [(0, (100, 110, 120)), (1, (110,))]
    assert [step.state.step for step in again.runs[0].steps][-1] == 100
    shown = [line.split(" · ") for line in show_lines(open_ledger(str(tmp_path / "ledger")))][1:]
    told = [(int(line[0].split()[1]), line[-1]) for line in shown if int(line[0].split()[1]) > 90]
    back = "the run was set back behind it since"
    assert told == [(100, back), (100, "current"), (110, back), (110, back), (120, back)]


def test_a_run_set_back_whose_earlier_steps_were_deleted_too(healthy, tmp_path):
    report(healthy, tmp_path / "ledger")
    delete(healthy, 70, 80, 90, 100, 110, 120)
    shutil.copytree(RUN / "global_step80", healthy / "global_step80")
    for file in (healthy / "global_step80").rglob("*"):
        os.utime(file, (2_100_000_000, 2_100_000_000))
    (healthy / "latest").write_text("global_step80")
    again = report(healthy, tmp_path / "ledger")
    # 70 lies before what was saved again: it is on the way to it.
    assert [step.state.step for step in again.runs[0].steps if step.state.deleted] == [70]
    assert again.runs[0].branches[0].steps == (80, 90, 100, 110, 120)


def test_levels_may_differ_between_audits(healthy, tmp_path):
    report(healthy, tmp_path / "ledger", level=Level.VALUES)
    poke(healthy, 50, NORM, place="tp=0", value=float32_bits(1.5) >> 16)
    poke(healthy, 50, NORM, place="tp=1", value=float32_bits(1.5) >> 16)
    assert "INT017" in ids(report(healthy, tmp_path / "ledger", level=Level.REPLICAS))
    assert "INT017" in ids(report(healthy, tmp_path / "ledger", level=Level.HEADERS))


def test_the_newest_step_that_grows_is_no_change(healthy, tmp_path):
    """A step that was in progress was not kept."""
    away = tmp_path / "away"
    shutil.move(healthy / "global_step120" / "layer_03-model_01-model_states.pt", away)
    (healthy / "latest").write_text("global_step110")
    first = report(healthy, tmp_path / "ledger", settle_seconds=1e12)
    assert first.runs[0].steps[-1].state.commit.value == "in progress"
    shutil.move(away, healthy / "global_step120" / "layer_03-model_01-model_states.pt")
    assert "INT017" not in ids(report(healthy, tmp_path / "ledger"))


def test_two_runs_of_one_name_do_not_mix(tmp_path):
    one, other = (shutil.copytree(source, tmp_path / place / "run") for source, place in ((HEALTHY, "a"), (RUN, "b")))
    for run in (one, other):
        for step in (10, 20, 30, 40, 60, 70, 80, 90, 100, 110):
            shutil.rmtree(run / f"global_step{step}")
    report(one, tmp_path / "ledger")
    first = report(other, tmp_path / "ledger")
    assert ids(first) == ids(report(other, None))
    assert not first.runs[0].branches
    delete(other, 50)
    again = report(other, tmp_path / "ledger")
    assert [step.state.step for step in again.runs[0].steps] == [50, 120]
    assert read(again) == 0
    # A step that the other one has and this one never had is none of its own.
    delete(one, 50)
    assert ids(report(one, tmp_path / "ledger")) == []


def test_what_was_said_by_another_save_before_is_not_repeated(healthy, tmp_path):
    for step in (10, 20, 30, 40, 50, 60, 70, 80):
        shutil.rmtree(healthy / f"global_step{step}")
    away = tmp_path / "away"
    shutil.move(healthy / "global_step110", away)
    report(healthy, tmp_path / "ledger")
    shutil.move(away, healthy / "global_step110")
    # 120 is judged by 110 now, which was not there.
    first = report(healthy, tmp_path / "ledger")
    assert {step.state.step: step.recalled for step in first.runs[0].steps}[120]
    assert first.runs[0].coverage.num_bytes_reread > 0
    assert read(report(healthy, tmp_path / "ledger")) == 0
    # A deleted one is answered from the ledger: what was said by it is kept.
    delete(healthy, 110)
    assert read(report(healthy, tmp_path / "ledger")) == 0


def test_a_run_of_which_every_step_was_deleted(run, tmp_path):
    before = report(run, tmp_path / "ledger")
    delete(run, *range(10, 130, 10))
    (run / "latest").unlink()
    again = report(run, tmp_path / "ledger")
    assert (read(again), again.runs[0].last_good) == (0, None)
    assert intervals(again) == intervals(before)
    assert all(step.state.deleted for step in again.runs[0].steps)
    with pytest.raises(NothingToAuditError):
        report(run, None)
    assert "12 of 12 steps from the ledger" in text(again)
