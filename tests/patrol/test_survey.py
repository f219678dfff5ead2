"""What lies below a prefix: found from one listing, in little memory, gone on with where it stopped."""

import json
import sys
import tracemalloc

import pytest

from auditor.patrol.memory import Memory
from auditor.patrol.survey import Survey
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.storage.store import Entry, ObjectMissingError
from auditor.storage.walking import walk
from auditor.storage.writer import FolderWriter
from tests.paths import HEALTHY, ROOT


class Many:
    """A bucket of so many keys, a thousand a folder, none of which is a checkpoint; it can't be read."""

    location = "many"

    def __init__(self, num_keys):
        self.num_keys, self.yielded = num_keys, 0

    def stat(self, name):
        raise ObjectMissingError(name)

    list = open = stat

    def walk(self, after=""):
        for number in range(self.num_keys):
            name = f"data/{number // 1000:06d}/{number % 1000:03d}.tar"
            if name > after:
                self.yielded += 1
                yield Entry(name, False, 1, "x", 1.0)


def survey(store):
    return Survey(store).run()


def test_many_keys_take_no_more_memory_than_few():
    num_keys = 50_000
    survey(Many(1))  # imports the adapters
    tracemalloc.start()
    found = survey(Many(num_keys))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found.num_keys, found.found) == (num_keys, [])
    # What the process does besides costs under half a megabyte; the names alone would take 3.5 MB.
    assert peak < 1_500_000 < num_keys * sys.getsizeof("data/000000/000.tar")


def test_what_lies_inside_a_step_is_its_own():
    step = HEALTHY / "global_step10"
    objects = objects_of("x00", step) | objects_of("x00/run/global_step10", step) | objects_of("x01", step)
    assert {found.path for found in survey(MemoryStore(objects)).found} == {""}, "they lie right below the prefix"


@pytest.mark.parametrize("every", [1, 7])
def test_a_survey_that_was_killed_is_gone_on_with(monkeypatch, every):
    """Between any two keys, also inside a run and a step: by what was written down, nothing of it is listed again."""
    step = HEALTHY / "global_step10"
    store = MemoryStore({
        **objects_of("a/run/global_step10", step), "a/run/latest": b"global_step10", "a/x": b"",
        **objects_of("b/global_step10", step), "b/global_step9/part": b"", "c/deep/er/file": b"", "top": b"",
    })  # fmt: skip
    whole = survey(store)
    assert [found.path for found in whole.found] == ["a/run", "b"]
    monkeypatch.setattr("auditor.patrol.survey.SAVE_EVERY", every)
    kept = []
    Survey(store).run(lambda survey: kept.append(json.dumps(survey.to_json())))
    assert len(kept) == (whole.num_keys - 1) // every
    for text in kept:
        said = json.loads(text)
        rest = Survey.from_json(store, said).run()
        assert (rest.found, rest.num_keys, rest.refused) == (whole.found, whole.num_keys, whole.refused)


def test_what_was_written_down_is_listed_no_more_and_garbage_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("auditor.patrol.survey.SAVE_EVERY", 1000)
    memory = Memory(LocalStore(tmp_path), FolderWriter(tmp_path))
    store = Many(2000)
    survey = Survey(store).run(lambda survey: memory.save_survey(survey, 1000.0))
    before, store.yielded = store.yielded, 0
    rest = memory.survey(store, 1001.0, 60.0)
    assert rest.num_keys == 1000
    assert rest.run().num_keys == survey.num_keys
    assert store.yielded == before - 1000
    assert memory.survey(store, 2000.0, 60.0).num_keys == 0, "too old"
    said = json.loads((tmp_path / "patrol/survey-1-of-1.json").read_text())
    for change in ({"stack": []}, {"stack": 3}, {"stack": [{}]}, {"refused": 1}, {"num_keys": "x"}, {"at": None},
                   {"stack": [{**said["stack"][0], "files": {"x": 1}}]}, {"stack": said["stack"][1:]}):  # fmt: skip
        (tmp_path / "patrol/survey-1-of-1.json").write_text(json.dumps({**said, **change}))
        assert memory.survey(store, 1001.0, 60.0).num_keys == 0, change


def objects_of(prefix, folder):
    return {f"{prefix}/{path.relative_to(folder).as_posix()}": path.read_bytes()
            for path in folder.rglob("*") if path.is_file()}  # fmt: skip


def test_runs_of_every_format_are_found_at_any_depth():
    fixtures = ROOT / "tests" / "fixtures"
    store = MemoryStore({
        **objects_of("deep/er/still/run/global_step10", HEALTHY / "global_step10"),
        **objects_of("orbit", fixtures / "megatron_legacy" / "tp2_pp2"),
        **objects_of("hf/model", next(path.parent for path in fixtures.rglob("model.safetensors.index.json"))),
        "readme.md": b"hello", "logs/0.txt": b"x",
    })  # fmt: skip
    found = {one.path for one in survey(store).found}
    assert {"deep/er/still/run", "hf"} <= found
    assert any(path.startswith("orbit") for path in found)


def test_the_digest_tells_every_change_below_a_run():
    objects = objects_of("team/run/global_step10", HEALTHY / "global_step10")
    store = MemoryStore(objects)
    (before,) = survey(store).found
    assert before.path == "team/run"
    assert survey(store).found == [before]
    name = next(iter(objects))
    for changed in ({**objects, name: objects[name] + b"x"}, {**objects, "team/run/latest": b"global_step10"}):
        (after,) = survey(MemoryStore(changed)).found
        assert after.digest != before.digest


def test_a_folder_of_too_many_files_is_told(monkeypatch):
    monkeypatch.setattr("auditor.patrol.survey.MAX_FILES", 5)
    assert survey(MemoryStore({f"data/{number}": b"" for number in range(10)})).refused.keys() == {"data"}


@pytest.mark.parametrize("after", ["", "a-b/x", "a/b", "a/b/c", "a0", "zzz"])
def test_walking_a_disk_is_in_the_order_of_keys(tmp_path, after):
    names = ["a-b/x", "a/b/c", "a/b.txt", "a/b0", "a.txt", "a0", "b/c"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    found = [entry.name for entry in walk(LocalStore(tmp_path), after) if "loop" not in entry.name]
    assert found == sorted(name for name in names if name > after)
    assert len(list(walk(LocalStore(tmp_path)))) < 100


def test_files_that_are_steps_by_themselves_make_their_folder_a_run():
    folder = ROOT / "tests" / "fixtures" / "flax" / "adamw"
    (found,) = survey(MemoryStore(objects_of("jax/training", folder))).found
    assert found.path == "jax/training"


def test_folders_of_checkpoints_that_nobody_recognises_are_named():
    step = {f"run/global_step10/{path.name}": path.read_bytes() for path in (HEALTHY / "global_step10").iterdir()}
    objects = step | {"logs/a.txt": b"x", "data/train.bin": b"\0\1", "other/step_5/model.pt": b"PK\3\4 of another kind"}
    objects |= {"run/global_step10/parts/model.pt": b"PK\3\4 inside a step"}
    found = survey(MemoryStore(objects))
    assert [run.path for run in found.found] == ["other", "run"]
    del objects["other/step_5/model.pt"]
    objects["other/step_5/mp_rank_00_optim_states.pt"] = b"PK\3\4"
    found = survey(MemoryStore(objects))
    assert [run.path for run in found.found] == ["run"]
    assert found.unrecognised == {
        "other/step_5": "no format recognises its files, mp_rank_00_optim_states.pt for example"
    }
