"""INT013: where ranks are only counted by their files, a step that has fewer than the saves around it."""

import io
import os

import pytest

from auditor.audit import audit
from auditor.invariants.integrity_runs import files_of_as_many_ranks
from auditor.model.finding import Outcome, Severity
from auditor.model.run import Commit, RunState, StepState
from auditor.report.last_good_report import last_good_lines
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore

ID = "INT013"
SEVERITIES = {None: "e", Severity.WARNING: "w"}


def judged(counts, **fields):
    """One letter a step: e error, w warning, . silent."""
    given = {"ranks_counted": True, **fields}
    states = tuple(StepState(at, f"step_{at}", "made-up", True, num_ranks=n, **given) for at, n in enumerate(counts))
    found = files_of_as_many_ranks(RunState(states))
    assert set(found) == set(range(len(counts)))
    return "".join(
        SEVERITIES[found[at].violations[0].severity] if found[at].violations else "." for at in range(len(counts))
    )


@pytest.mark.parametrize(("counts", "expected"), [
    ([4, 4, 3, 4], "..e."),
    ([4, 3, 2, 4], ".ee."),
    ([4, 4, 3], "..w"),
    ([4, 3, 3], ".ww"),
    ([8, 4, 5], ".ew"),
    ([8, 4, 8, 4, 4], ".e.ww"),
    ([4, 1, 3, 3, 3], ".e..."),
    ([8, 4, 4, 4, 3, 4], "....e."),
    ([2, 2, 4, 3, 4, 4], "...e.."),
])  # fmt: skip
def test_fewer_files_than_around(counts, expected):
    assert judged(counts) == expected
    assert judged(counts, ranks_counted=False) == "." * len(counts)


@pytest.mark.parametrize("counts", [[4], [4, 4, 4], [2, 4, 8], [8, 4, 4, 4], [8, 4, 4, 4, 4, 2, 2, 2], [8, 4, 4, 4, 8]])
def test_meshes_that_changed_for_good_are_silent(counts):
    assert judged(counts) == "." * len(counts)


def test_saves_of_another_format_and_steps_being_written_do_not_count():
    export = StepState(1, "export", "another", True, num_ranks=9)
    one, two = (StepState(at, f"step_{at}", "made-up", True, num_ranks=4, ranks_counted=True) for at in (0, 2))
    written = StepState(3, "step_3", "made-up", True, commit=Commit.IN_PROGRESS, num_ranks=2, ranks_counted=True)
    found = files_of_as_many_ranks(RunState((one, export, two, written)))
    assert {step: judgement.outcome for step, judgement in found.items()} == {
        0: Outcome.HOLDS, 1: Outcome.NOT_APPLICABLE, 2: Outcome.HOLDS,
    }  # fmt: skip


# On files


def run_of(steps=(10, 11, 12, 13), count=4, **recorded):
    """What a script saves that records no world size unless it is ``recorded``."""
    torch = pytest.importorskip("torch")
    objects = {}
    for step in steps:
        model = {"layer.weight": torch.full((3, 2), float(step)), "layer.bias": torch.full((3,), step / 2)}
        for rank in range(count):
            buffer = io.BytesIO()
            torch.save({"model": model, "step": step, **recorded}, buffer)
            objects[f"step_{step}/rank_{rank}.pt"] = buffer.getvalue()
    return objects


def audited(objects, **settings):
    (run,) = audit(MemoryStore(objects), Settings(**settings), now=1e9).runs
    return run


@pytest.mark.parametrize("level", [Level.NAMES, Level.VALUES])
def test_the_last_ranks_file_lost_in_the_middle_is_an_error(level):
    objects = run_of()
    del objects["step_12/rank_3.pt"]
    run = audited(objects, level=level)
    (finding,) = run.findings
    assert (finding.id, finding.severity) == (ID, Severity.ERROR)
    assert [(place.step, place.file) for place in finding.locations] == [(12, "step_12")]
    assert finding.message == "step_12 has files of 3 ranks, step_11 of 4, step_13 of 4 again"
    assert level is Level.NAMES or run.last_good.step == 13


def test_an_answer_that_lost_its_last_file_in_the_middle_is_not_given():
    objects = run_of()
    del objects["step_12/rank_3.pt"], objects["step_13/rank_0.pt"]
    assert audited(objects).last_good.step == 11


def test_the_last_ranks_file_lost_from_the_newest_step_is_a_warning_that_last_good_tells():
    objects = run_of((10, 11, 12))
    del objects["step_12/rank_3.pt"]
    run = audited(objects)
    (finding,) = run.findings
    assert (finding.id, finding.severity) == (ID, Severity.WARNING)
    assert run.last_good.step == 12
    told = [line for line in last_good_lines(run, Settings()) if line.startswith("in it: ")]
    assert told == [f"in it: {ID} {finding.message} (warning)"]
    assert audited(objects, fail_on=Severity.WARNING).last_good.step == 11


def test_a_step_whose_files_are_still_being_written_is_not_the_answer(tmp_path):
    objects = run_of((10, 11))
    del objects["step_11/rank_3.pt"], objects["step_11/rank_2.pt"]
    for name, content in objects.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, (1e9, 1e9))
    for now, commit, good, ids in ((1e9 + 5, Commit.IN_PROGRESS, 10, []), (1e9 + 5000, Commit.COMMITTED, 11, [ID])):
        (run,) = audit(LocalStore(tmp_path), now=now).runs
        assert (run.steps[-1].state.commit, run.last_good.step) == (commit, good)
        assert [finding.id for finding in run.findings] == ids


def test_a_recorded_world_size_leaves_it_to_the_missing_file():
    objects = run_of(world_size=4)
    del objects["step_12/rank_3.pt"]
    assert [finding.id for finding in audited(objects).findings] == ["INT001"]
    assert not audited(run_of(count=3, world_size=3) | run_of((8, 9), count=4, world_size=4)).findings


@pytest.mark.parametrize("objects", [run_of, lambda: run_of((1, 2), 4) | run_of((3, 4, 5), 2)])
def test_healthy_runs_are_silent(objects):
    run = audited(objects())
    assert not run.findings
    assert not [line for line in last_good_lines(run, Settings()) if line.startswith(("in it", "not audited"))]
    assert run.counts(ID)[Outcome.HOLDS] == len(run.steps)


def test_folders_that_were_not_audited_are_told_if_they_are_newer():
    objects = run_of((10, 12)) | {"step_11/notes.txt": b"-", "step_13/notes.txt": b"-", "step_9/notes.txt": b"-"}
    run = audited(objects)
    assert len(run.unrecognised) == 3
    told = [line for line in last_good_lines(run, Settings()) if line.startswith("not audited")]
    assert told == ["not audited: step_13: named like a step, but nothing in it is recognised"]
