"""A newest file that ends too early and is young is being written; older, or not the newest, it is damaged."""

import os
import shutil
import time

import pytest

from auditor.audit import audit
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.verdict import ExitCode, exit_code
from tests.command import run
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures"
NOW, SETTLE, DAY = 1.9e9, 600.0, 86_400.0


TORCH = ("torch_file/numbered/model_{}.pt", "model_{}.pt")
BERT = "hugging_face/bert/model.safetensors"
FORMATS = {
    "torch_files": TORCH,
    "npz": ("flax/npz/step_{}/state.npz", "state_{}.npz"),
    "flax": ("flax/adamw/checkpoint_{}", "checkpoint_{}"),
    "safetensors": (BERT, "model_{}.safetensors"),
    "folders": (BERT, "step_{}/model.safetensors"),
}
"""Which fixture is saved as which file of a step."""


def save(run, form):
    fixture, name = form
    for step in (2, 4, 6):
        (run / name.format(step)).parent.mkdir(exist_ok=True)
        shutil.copy(FIXTURES / fixture.format(step), run / name.format(step))


@pytest.fixture(params=FORMATS.values(), ids=FORMATS)
def file_of(request, tmp_path):
    """A run; gives where the file of a step lies. All are a day old."""
    save(tmp_path, request.param)
    _, name = request.param
    for step in (2, 4, 6):
        date(tmp_path / name.format(step), DAY)
    return lambda step: tmp_path / name.format(step)


def date(file, age):
    os.utime(file, (NOW - age, NOW - age))


def cut(file, age, share=0.6):
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    date(file, age)


def audited(root):
    report = audit(LocalStore(root), Settings(level=Level.HEADERS), now=NOW)
    (found,) = report.runs
    steps = [(step.state.step, step.state.commit.value) for step in found.steps]
    # The same weights in every step of the made-up runs are none of this test's.
    return steps, [item.id for item in found.findings if item.id == "INT002"], report


@pytest.mark.parametrize("share", [0.6, 0])
@pytest.mark.parametrize("age", [1.0, SETTLE - 1, -300.0])
def test_the_newest_while_it_is_young(tmp_path, file_of, age, share):
    """Nor does it matter whether the clock of the storage is five minutes ahead."""
    cut(file_of(6), age, share)
    steps, found, report = audited(tmp_path)
    assert (steps, found) == ([(2, "committed"), (4, "committed"), (6, "in progress")], [])
    assert exit_code(report) is ExitCode.HOLDS
    assert report.runs[0].last_good.step == 4


@pytest.mark.parametrize(("step", "age"), [(6, SETTLE), (6, -2 * DAY), (4, 1.0)])
def test_settled_dated_far_ahead_or_not_the_newest(tmp_path, file_of, step, age):
    cut(file_of(step), age)
    steps, found, report = audited(tmp_path)
    assert (steps, found) == ([(2, "committed"), (4, "committed"), (6, "committed")], ["INT002"])
    assert exit_code(report) is ExitCode.VIOLATED


def test_other_damage_is_damage_at_once(tmp_path):
    save(tmp_path, TORCH)
    content = (tmp_path / "model_6.pt").read_bytes()
    (tmp_path / "model_6.pt").write_bytes(content + b"more")
    for step, age in ((2, DAY), (4, DAY), (6, 1.0)):
        date(tmp_path / f"model_{step}.pt", age)
    assert audited(tmp_path)[1] == ["INT002"]


def test_a_file_that_grows_on_between_the_listing_and_its_opening(tmp_path):
    save(tmp_path, TORCH)
    file = tmp_path / "model_6.pt"
    content = file.read_bytes()
    file.write_bytes(content[:500])
    date(file, 1.0)

    class Growing(LocalStore):
        def open(self, name):
            if name == "model_6.pt":
                file.write_bytes(content[: file.stat().st_size + 500])
                date(file, 0.0)
            return super().open(name)

    (found,) = audit(Growing(tmp_path), now=NOW).runs
    assert [(step.state.step, step.state.commit.value) for step in found.steps][-1] == (6, "in progress")
    assert found.findings == []


def test_what_is_written_is_named_and_a_later_step_ends_it(tmp_path):
    save(tmp_path, TORCH)
    # By a clock an hour ahead: the command takes the time as it is.
    cut(tmp_path / "model_6.pt", NOW - time.time() - 3600)
    done = run(["check", tmp_path])
    assert done.returncode == ExitCode.HOLDS
    assert b"step 6 is being written; not audited: model_6.pt is cut short so far" in done.stdout
    shutil.copy(tmp_path / "model_4.pt", tmp_path / "model_8.pt")
    assert run(["check", tmp_path]).returncode == ExitCode.VIOLATED


@pytest.mark.parametrize(("names", "recorded", "expected"), [
    ((1, 2, 3, 4), (500, 1000, 1500), 2000), ((0, 1), (500,), 501), ((3, 5, 6), (1500, 2500), 3000),
])  # fmt: skip
def test_a_file_by_epochs_that_can_not_be_read_is_behind_the_others(tmp_path, names, recorded, expected):
    torch = pytest.importorskip("torch")
    for name, step in zip(names, (*recorded, 0), strict=True):
        torch.manual_seed(name)
        content = {"model": torch.nn.Linear(4, 3).state_dict(), "global_step": step}
        torch.save(content, tmp_path / f"epoch_{name}.pt")
        date(tmp_path / f"epoch_{name}.pt", DAY)
    newest = tmp_path / f"epoch_{names[-1]}.pt"
    cut(newest, 1.0)
    (run,) = audit(LocalStore(tmp_path), now=NOW).runs
    assert [step.state.step for step in run.steps] == [*recorded, expected]
    assert (run.findings, run.steps[-1].state.commit.value) == ([], "in progress")
    date(newest, DAY)
    (run,) = audit(LocalStore(tmp_path), now=NOW).runs
    assert [item.id for item in run.findings] == ["INT002"]
