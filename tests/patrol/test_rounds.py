"""Rounds of a patrol over local folders: what changed is read, the rest is remembered."""

import json
import os
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from auditor.errors import LockedError, UsageError
from auditor.patrol.command import choices_of, round_of, write_files
from auditor.patrol.outcome import Status
from auditor.patrol.rounds import Choices
from auditor.settings import Level, Settings
from auditor.storage.writer import FolderWriter, WriteError
from tests.paths import HEALTHY, RUN


def steps_of(source, target, *numbers):
    """Some steps of a sample as a run of their own, and the pointer to the last."""
    for number in numbers:
        shutil.copytree(source / f"global_step{number}", target / f"global_step{number}")
    (target / "latest").write_text(f"global_step{numbers[-1]}")


@pytest.fixture
def bucket(tmp_path):
    """Two runs at different depths, one of which drifts."""
    root = tmp_path / "bucket"
    steps_of(RUN, root / "team" / "drifted", 40, 50)
    steps_of(HEALTHY, root / "healthy", 10)
    (root / "notes.txt").write_text("no checkpoint")
    return root


def patrol(bucket, settings=None, **choices):
    seen = []
    settings = settings or Settings(level=Level.VALUES, ledger=str(bucket.parent / "ledger"))
    result = round_of(str(bucket), settings, Choices(**choices), seen.append, lambda path, num_bytes: None)
    assert [run.path for run in seen] == [run.path for run in result.runs]
    return result


def by_path(result):
    return {run.path: run for run in result.runs}


def test_finds_runs_at_any_depth_and_says_what_check_says(bucket):
    result = patrol(bucket)
    runs = by_path(result)
    assert set(runs) == {"team/drifted", "healthy"}
    assert [finding["id"] for finding in runs["team/drifted"].findings][:1] == ["REP001"]
    assert runs["team/drifted"].last_good_step == 40
    assert runs["healthy"].findings == []
    assert [int(code) for code in result.exit_codes][:1] == [1]
    assert result.num_keys == sum(path.is_file() for path in bucket.rglob("*"))
    assert [finding["run"] for finding in result.new] == ["team/drifted"] * len(result.new)


def test_second_round_reads_nothing_and_still_fails(bucket):
    first = patrol(bucket)
    second = patrol(bucket)
    assert first.num_bytes_read > 0
    assert second.num_bytes_read == 0
    assert second.count(Status.UNCHANGED) == 2
    assert second.exit_codes == first.exit_codes
    assert second.new == second.resolved == []
    assert by_path(second)["team/drifted"].findings == by_path(first)["team/drifted"].findings


def test_a_new_step_is_read_and_no_other(bucket):
    first = patrol(bucket)
    shutil.copytree(HEALTHY / "global_step20", bucket / "healthy" / "global_step20")
    (bucket / "healthy" / "latest").write_text("global_step20")
    second = patrol(bucket)
    assert by_path(second)["healthy"].status is Status.AUDITED
    # Beside the save before, what lies between small pieces is read in other windows.
    alone = by_path(first)["healthy"].num_bytes_read
    assert alone <= second.num_bytes_read < 1.5 * alone
    assert by_path(second)["team/drifted"].status is Status.UNCHANGED


def test_a_run_that_is_gone_resolves_its_findings(bucket):
    first = patrol(bucket)
    shutil.rmtree(bucket / "team")
    second = patrol(bucket)
    assert by_path(second)["team/drifted"].status is Status.GONE
    assert {item["key"] for item in second.resolved} == {item["key"] for item in first.new}
    assert [int(code) for code in second.exit_codes] == [0]
    assert {run.path for run in patrol(bucket).runs} == {"healthy"}


def test_a_repaired_run_resolves_its_findings(bucket):
    first = patrol(bucket)
    shutil.rmtree(bucket / "team" / "drifted" / "global_step50")
    (bucket / "team" / "drifted" / "latest").write_text("global_step40")
    second = patrol(bucket)
    assert {item["key"] for item in second.resolved} == {item["key"] for item in first.new}
    assert second.new == []


def test_a_full_disk_under_the_ledger_silences_no_finding(bucket, monkeypatch):
    """All but the lock is refused: a round tells what it found, is not clean, and the next tells it again."""
    original = FolderWriter.draft

    def full(self, name):
        if "/locks/" not in name and name != "zarr.json":
            raise WriteError(f"{name}: No space left on device")
        return original(self, name)

    monkeypatch.setattr(FolderWriter, "draft", full)
    for _ in range(2):
        result = patrol(bucket)
        drifted = by_path(result)["team/drifted"]
        assert "REP001" in [finding["id"] for finding in drifted.findings]
        assert {finding["run"] for finding in result.new} == {"team/drifted"}
        assert [int(code) for code in result.exit_codes][:2] == [1, 3]
        assert "No space left" in drifted.detail
        assert any("told again: patrol/runs/" in note for note in result.notes)
    monkeypatch.setattr(FolderWriter, "draft", original)
    assert patrol(bucket).new
    assert patrol(bucket).num_bytes_read == 0


def test_a_step_that_can_not_be_held_against_the_ledger_is_not_said_to_be_read_again(bucket, monkeypatch):
    patrol(bucket)

    def full(self, name):
        if name.startswith("runs/"):
            raise WriteError(f"{name}: No space left on device")
        return original(self, name)

    original = FolderWriter.draft
    monkeypatch.setattr(FolderWriter, "draft", full)
    result = patrol(bucket, reread=1.0)
    assert result.num_steps_reread == 0
    assert any("not held against the ledger" in note for note in result.notes)


def test_nothing_there_is_code_4(tmp_path):
    (tmp_path / "empty").mkdir()
    assert [int(code) for code in patrol(tmp_path / "empty").exit_codes] == [4]


def test_a_step_in_progress_is_looked_at_again(bucket):
    step = bucket / "healthy" / "global_step20"
    shutil.copytree(HEALTHY / "global_step20", step)
    for path in step.iterdir():
        path.touch()
    victim = next(step.glob("bf16_zero*"))
    held = victim.read_bytes()
    victim.unlink()
    assert by_path(patrol(bucket))["healthy"].findings == []
    # Nothing changes, but time passes: it is torn now.
    later = Settings(level=Level.VALUES, ledger=str(bucket.parent / "ledger"), settle_seconds=0)
    assert [item["id"] for item in by_path(patrol(bucket, later))["healthy"].findings]
    victim.write_bytes(held)
    (bucket / "healthy" / "latest").write_text("global_step20")
    assert by_path(patrol(bucket, later))["healthy"].findings == []


def test_budget_of_bytes_reaches_everything_in_some_rounds_newest_first(bucket):
    os.utime(next((bucket / "healthy").rglob("mp_rank_00*")), (2e9, 2e9))
    whole = patrol(bucket, Settings(level=Level.VALUES, ledger=str(bucket.parent / "other")))
    rounds = [patrol(bucket, budget_bytes=1.0)]
    assert rounds[0].count(Status.UNREACHED) >= 1
    assert 3 in [int(code) for code in rounds[0].exit_codes]
    assert by_path(rounds[0])["healthy"].num_bytes_read > 0, "the newest comes first"
    while rounds[-1].count(Status.UNREACHED):
        rounds.append(patrol(bucket, budget_bytes=1.0))
        assert len(rounds) < 10
    # A save that is read beside the one before it is read in other windows.
    assert 0 < sum(one.num_bytes_read for one in rounds) <= whole.num_bytes_read, "nothing is read twice"
    assert by_path(rounds[-1])["team/drifted"].findings == by_path(whole)["team/drifted"].findings


def test_shards_share_the_runs(bucket):
    for name in "abcdef":
        steps_of(HEALTHY, bucket / "more" / name, 10)
    names_only = Settings(level=Level.NAMES, ledger=str(bucket.parent / "ledger"))
    shares = [patrol(bucket, names_only, share=(number, 3)) for number in (1, 2, 3)]
    paths = [run.path for share in shares for run in share.runs]
    assert len(paths) == len(set(paths)) == 8
    assert all(run.status is not Status.GONE for share in shares for run in share.runs)


def rot(path):
    """Change a bit of weights so that the file system tells nothing of it."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_reading_again_covers_every_step_and_finds_rot(bucket):
    patrol(bucket)
    rot(next((bucket / "healthy" / "global_step10").glob("bf16_zero*")))
    assert by_path(patrol(bucket))["healthy"].findings == [], "storage tells nothing"
    rounds = [patrol(bucket, reread=0.25) for _ in range(4)]
    assert sum(one.num_steps_reread for one in rounds) == 3, "every step once in four rounds"
    assert [item["id"] for item in by_path(rounds[-1])["healthy"].findings] == ["INT019"]
    assert sum(len(one.new) for one in rounds) == 1, "told once"
    assert not by_path(rounds[-1])["team/drifted"].findings[1:]
    assert by_path(patrol(bucket))["healthy"].findings, "and remembered"


def test_reading_again_under_a_budget_goes_on_with_the_turn(bucket):
    patrol(bucket)
    rounds = [patrol(bucket, reread=1.0, budget_bytes=1.0) for _ in range(3)]
    assert [one.num_steps_reread for one in rounds] == [1, 1, 1]
    assert ["to be gone on with" in one.turn for one in rounds] == [True, True, False]


def test_two_at_once_are_refused(bucket):
    from auditor.ledger.folder import open_ledger
    from auditor.patrol.lease import Lease

    ledger = open_ledger(str(bucket.parent / "ledger"))
    ledger.begin()
    with (
        Lease(ledger.store, ledger.writer, "patrol/locks/1-of-1").held(),
        pytest.raises(LockedError, match="holds the"),
    ):
        patrol(bucket)
    assert patrol(bucket).exit_codes


def test_the_ledger_may_not_lie_in_what_is_read(bucket):
    with pytest.raises(UsageError, match="lies in"):
        patrol(bucket, Settings(ledger=str(bucket / "ledger")))


def test_files_for_machines(bucket, tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    result = patrol(bucket)
    write_files(result, tmp_path / "out.xml", tmp_path / "metrics" / "auditor.prom")
    suites = {suite.get("name"): suite for suite in ET.parse(tmp_path / "out.xml").getroot()}
    assert suites["team/drifted"].get("failures") == str(len(by_path(result)["team/drifted"].findings))
    assert suites["healthy"].get("failures") == "0"
    text = (tmp_path / "metrics" / "auditor.prom").read_text()
    metrics = {metric.name: metric for metric in parser.text_string_to_metric_families(text)}
    assert metrics["auditor_patrol_exit_code"].samples[0].value == 1
    labels = {name for metric in metrics.values() for sample in metric.samples for name in sample.labels}
    assert labels == {"run", "severity", "status"}
    assert "layernorm" not in text
    assert [path.name for path in (tmp_path / "metrics").iterdir()] == ["auditor.prom"]


@pytest.mark.parametrize(
    "words",
    [
        ("x", "0", "0", "1/1", ""), ("0", "soon", "0", "1/1", ""), ("0", "0", "200%", "1/1", ""),
        ("0", "0", "0", "4/3", ""), ("0", "0", "0", "one", ""), ("0", "0", "0", "1/1", "ftp://secret@host"),
    ],
)  # fmt: skip
def test_wrong_choices_are_wrong_usage(words):
    with pytest.raises(UsageError) as caught:
        choices_of(*words)
    assert "secret" not in str(caught.value)


def test_damaged_memory_is_found_out_anew(bucket):
    first = patrol(bucket)
    for path in (bucket.parent / "ledger" / "patrol" / "runs").iterdir():
        path.write_text("{broken")
    second = patrol(bucket)
    assert second.num_bytes_read == 0, "the ledger still knows what was measured"
    assert [(run.path, run.findings) for run in second.runs if run.findings] == [
        (run.path, run.findings) for run in first.runs if run.findings
    ]


def test_what_is_remembered_is_small(bucket):
    patrol(bucket)
    for path in Path(bucket.parent / "ledger" / "patrol" / "runs").iterdir():
        assert json.loads(path.read_text())["digest"]
        assert path.stat().st_size < 20_000
