"""A pass done in shares and joined says what one process says."""

import json
import shutil
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from unittest import mock

import pytest

from auditor.audit import audit, audit_share
from auditor.errors import UsageError
from auditor.observe import plan
from auditor.report.json_report import to_json
from auditor.settings import Level, Settings, StepChoice
from auditor.storage.local import LocalStore
from tests.paths import SAMPLE

RUN = SAMPLE / "run"
SETTINGS = Settings(StepChoice("40:70"), level=Level.VALUES)


@pytest.fixture(autouse=True)
def small_units():
    with mock.patch.object(plan, "UNIT_BYTES", 20_000):
        yield


def report(settings=SETTINGS, run=RUN, **more):
    found = json.loads(to_json(audit(LocalStore(run), settings, **more)))
    assert found["findings"]
    return found


def take(folder, of, run=RUN, settings=SETTINGS, numbers=None):
    return [audit_share(LocalStore(run), settings, n, of, str(folder)) for n in numbers or range(1, of + 1)]


@pytest.mark.parametrize("of", [1, 3])
def test_joined_shares_make_the_same_report(tmp_path, of):
    shares = take(tmp_path, of)
    units = [sum(len(step["units"]) for step in share.steps) for share in shares]
    assert min(units) > 10
    assert max(units) - min(units) <= len(shares[0].steps)
    assert report(shares=LocalStore(tmp_path)) == report()


def test_joining_reads_no_weights_again(tmp_path):
    class Spy(LocalStore):
        opened = 0

        def open(self, name):
            Spy.opened += 1
            return super().open(name)

    take(tmp_path, 2)
    settings = Settings(StepChoice("40"), level=Level.VALUES)
    with pytest.raises(UsageError, match="other files or choices"):
        audit(LocalStore(RUN), Settings(StepChoice("40"), level=Level.REPLICAS), shares=LocalStore(tmp_path))
    audit(Spy(RUN), settings, shares=LocalStore(tmp_path))
    headers = Spy.opened
    Spy.opened = 0
    audit(Spy(RUN), Settings(StepChoice("40"), level=Level.HEADERS))
    assert headers == Spy.opened


def test_a_missing_share_is_named(tmp_path):
    take(tmp_path, 3, numbers=[1, 3])
    with pytest.raises(UsageError, match="share 2 of 3 is missing"):
        report(shares=LocalStore(tmp_path))


def test_shares_of_other_counts_are_not_joined(tmp_path):
    take(tmp_path, 2)
    take(tmp_path, 3, numbers=[3])
    with pytest.raises(UsageError, match="shares of 2 audits"):
        report(shares=LocalStore(tmp_path))


def test_a_file_saved_again_after_its_share_was_taken_is_refused(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    take(tmp_path / "shares", 2, run)
    file = next((run / "global_step60").glob("layer_*"))
    file.write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match="global_step60"):
        report(run=run, shares=LocalStore(tmp_path / "shares"))


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "other"])
def test_a_damaged_share_is_named(tmp_path, damage):
    take(tmp_path, 1)
    file = tmp_path / "share-1-of-1"
    content = file.read_bytes()
    file.write_bytes({
        "cut": content[:-1], "header": content[:30] + b"}" + content[31:], "empty": b"", "other": b"x" * 100,
    }[damage])  # fmt: skip
    with pytest.raises(UsageError, match="share-1-of-1"):
        report(shares=LocalStore(tmp_path))


def test_a_share_is_never_written_into_a_checkpoint(tmp_path):
    shutil.copytree(RUN / "global_step40", tmp_path / "run" / "global_step40")
    with pytest.raises(UsageError, match="choose another place"):
        take(tmp_path / "run" / "shares", 1, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["global_step40"]


@pytest.mark.parametrize(("number", "of"), [(0, 3), (4, 3)])
def test_there_is_no_such_share(tmp_path, number, of):
    with pytest.raises(UsageError, match=f"no share {number} of {of}"):
        audit_share(LocalStore(RUN), SETTINGS, number, of, str(tmp_path))


# Executors


@pytest.mark.parametrize("pool", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_the_report_does_not_depend_on_the_executor(pool):
    with pool(2) as executor:
        assert report(executor=executor) == report(Settings(StepChoice("40:70"), level=Level.VALUES, threads=1))
