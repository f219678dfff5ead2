"""Every hostile input through the command line: the right exit code, the file named, no traceback, bounded."""

import re

import pytest

from auditor.audit import audit
from auditor.storage.local import LocalStore
from tests.hostile.corpus import CORPUS
from tests.hostile.harness import harness
from tests.hostile.making import SAFETENSORS, Input, safetensors_folder
from tests.paths import HEALTHY, TP4
from tests.test_cli import auditor

MAX_MIB = 1024
"""Far more than any input takes, far less than what they claim."""
ESCAPES = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")


@pytest.fixture(scope="module")
def machine():
    with harness() as running:
        yield running


@pytest.mark.parametrize("item", CORPUS, ids=lambda item: item.name)
def test_input_is_told_apart_and_does_no_harm(machine, item):
    place = machine.build(item)
    try:
        outcome = machine.run(item, place)
    finally:
        machine.remove(place)
    said = outcome.stdout + outcome.stderr
    assert outcome.code >= 0, f"ended by signal {-outcome.code}: it hung, or took all memory"
    assert "Traceback" not in outcome.stderr
    assert "internal error" not in outcome.stderr
    assert outcome.code == item.code, said[:2000]
    assert item.says in said
    assert item.file in said
    assert not ESCAPES.search(said)
    assert len(said) < 1_000_000
    assert outcome.peak_mib < MAX_MIB


@pytest.mark.parametrize(
    "item",
    [item for item in CORPUS if "escapes" in item.name or "surrogate" in item.name or "UTF-8" in item.name],
    ids=lambda item: item.name,
)
def test_names_are_as_harmless_in_json(machine, item):
    place = machine.build(item)
    try:
        outcome = machine.run(item, place, "--format", "json")
    finally:
        machine.remove(place)
    assert outcome.report["exit_code"] == outcome.code == item.code
    assert not ESCAPES.search(outcome.stdout)


def test_names_are_unique_and_there_are_enough():
    names = [item.name for item in CORPUS]
    assert len(names) == len(set(names))
    assert len(names) > 150


def test_an_input_that_does_harm_would_be_seen(machine):
    """The bounds are those of the process that is measured."""
    item = Input("twin", "nothing", "safetensors", safetensors_folder, 0)
    place = machine.build(item)
    assert machine.run(item, place, "--tensors", "nothing").code == 4
    outcome = machine.run(item, place)
    machine.remove(place)
    assert outcome.code == 0
    assert 10 < outcome.peak_mib < MAX_MIB
    assert outcome.seconds > 0


@pytest.mark.parametrize("name", ["pickle: calls os.system", "safetensors: name with escapes", "config: nesting"])
def test_the_command_itself_says_the_same(tmp_path, name):
    (item,) = [item for item in CORPUS if item.name == name]
    item.build(tmp_path)
    done = auditor("check", tmp_path, "--settle", "1s")
    assert (done.returncode, "Traceback" in done.stderr) == (item.code, False)
    assert item.file in done.stdout
    assert (tmp_path / SAFETENSORS).exists() or "SEC001" in done.stdout


def test_folders_beyond_the_limit_are_said_not_to_be_looked_into(monkeypatch):
    assert not audit(LocalStore(HEALTHY)).runs[0].unrecognised
    monkeypatch.setattr("auditor.discovery.MAX_FOLDERS", 3)
    (run,) = audit(LocalStore(HEALTHY)).runs
    assert len(run.steps) == 3
    assert "only the first 3 folders" in run.unrecognised["."]


def test_only_links_that_lead_back_are_passed_over(tmp_path):
    (tmp_path / "here" / "back").mkdir(parents=True)
    (tmp_path / "here" / "back" / "up").symlink_to("../..")
    (tmp_path / "here" / "run").symlink_to(TP4)
    assert [run.path for run in audit(LocalStore(tmp_path)).runs] == ["here/run"]
