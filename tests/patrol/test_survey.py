"""What lies below a prefix: found from one listing, in little memory, gone on with where it stopped."""

import tracemalloc

import pytest

from auditor.patrol.survey import SAVE_EVERY, Survey
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.storage.store import Entry, ObjectMissingError
from auditor.storage.walking import walk
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


def survey(store, **known):
    return Survey(store, **known).run()


def test_many_keys_take_no_more_memory_than_few():
    peaks = []
    for num_keys in (10_000, 100_000):
        tracemalloc.start()
        found = survey(Many(num_keys))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found.num_keys == num_keys
        assert found.found == []
    # Only the folders of `data` are held besides: one entry each.
    assert peaks[1] < peaks[0] + 100_000


def test_a_survey_goes_on_where_it_stopped():
    objects = {f"x{number:02d}/{path.name}": path.read_bytes() for number in range(3)
               for path in (HEALTHY / "global_step10").iterdir()}  # fmt: skip
    objects |= {f"x{number:02d}/run/global_step10/{path.name}": path.read_bytes() for number in range(3)
                for path in (HEALTHY / "global_step10").iterdir()}  # fmt: skip
    whole = survey(MemoryStore(objects))
    assert {found.path for found in whole.found} == {""}, "the steps lie right below the prefix"


class Saved(Exception):
    pass


def test_a_survey_that_was_killed_is_gone_on_with():
    class Runs(Many):
        def walk(self, after=""):
            for number in range(self.num_keys):
                name = f"{number // 1000:06d}/{number % 1000:03d}.tar"
                if name > after:
                    self.yielded += 1
                    yield Entry(name, False, 1, "x", 1.0)

    kept = {}

    def save(found):
        kept.update(after=found.after, num_keys=found.num_keys, found=list(found.found))
        raise Saved

    store = Runs(3 * SAVE_EVERY)
    with pytest.raises(Saved):
        Survey(store).run(save)
    assert kept["num_keys"] >= SAVE_EVERY
    before = store.yielded
    rest = Survey(store, **kept).run()
    assert rest.num_keys == 3 * SAVE_EVERY
    assert store.yielded <= 3 * SAVE_EVERY + 1 + (before - kept["num_keys"])


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
