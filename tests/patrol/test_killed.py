"""A patrol that is killed again and again leaves the ledger, and tells the findings, of one that was not disturbed.

``AUDITOR_TEST_KILLS=40 pytest tests/patrol/test_killed.py``: so many seeds instead of one, for disk and bucket each.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from auditor.storage.roots import store_at
from auditor.storage.store import read_bytes
from auditor.storage.walking import walk
from tests import s3
from tests.paths import HEALTHY, ROOT, RUN

SEEDS = range(int(os.environ.get("AUDITOR_TEST_KILLS", "1")))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("killed") / "bucket"
    for source, name, step in ((RUN, "team/drifted", 50), (HEALTHY, "healthy", 10)):
        shutil.copytree(source / f"global_step{step}", root / name / f"global_step{step}")
        (root / name / "latest").write_text(f"global_step{step}")
    return root


@pytest.fixture(params=["disk", "bucket"])
def place(request, runs, tmp_path, monkeypatch):
    """Where the runs are, and where ledgers may be made."""
    if request.param == "disk":
        return str(runs), str(tmp_path)
    s3.use(monkeypatch)
    bucket = s3.new_bucket()
    s3.upload(runs, f"s3://{bucket}/ckpt")
    return f"s3://{bucket}/ckpt", f"s3://{bucket}/audit"


def objects(ledger):
    """Every object of a ledger but drafts and how far a round has come."""
    store = store_at(ledger)
    found = {}
    for entry in walk(store):
        if entry.name.endswith(".partial"):
            continue
        with store.open(entry.name) as handle:
            found[entry.name] = read_bytes(handle, 0, entry.num_bytes)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_random_until_done(place, seed):
    root, ledger = place
    command = [sys.executable, "-W", "ignore", "-m", "tests.patrol.killed_job", root, ledger, str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert said["num_killed"] >= 1, "nothing was disturbed"
    assert said["last"]["findings"] == said["whole"]["findings"]
    assert said["last"]["exit_codes"] == said["whole"]["exit_codes"]
    assert said["whole"]["exit_codes"][0] == 1
    whole = objects(f"{ledger}/whole")
    assert any(name.startswith("patrol/runs/") for name in whole)
    assert objects(f"{ledger}/killed") == whole
