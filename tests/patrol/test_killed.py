"""A patrol that is killed again and again leaves the ledger, and tells the findings, of one that was not disturbed."""

import json
import os
import random
import shutil
import signal
import time

import pytest

from auditor.patrol.command import round_of
from auditor.patrol.rounds import Choices
from auditor.settings import Level, Settings
from tests.paths import HEALTHY, RUN

SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    root = tmp_path_factory.mktemp("killed") / "bucket"
    for source, name, steps in ((RUN, "team/drifted", (40, 50, 60)), (HEALTHY, "healthy", (10, 20))):
        for step in steps:
            shutil.copytree(source / f"global_step{step}", root / name / f"global_step{step}")
        (root / name / "latest").write_text(f"global_step{steps[-1]}")
    return root


def patrol(bucket, ledger):
    settings = Settings(level=Level.VALUES, ledger=str(ledger), kernels="numpy", threads=1)
    # A lock that its dead owner held must be taken over soon.
    choices = Choices(lock_seconds=0.2)
    return round_of(str(bucket), settings, choices, lambda run: None, lambda path, num_bytes: None)


def in_a_child(bucket, ledger):
    """Its process; the exit code says that the round was done."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            patrol(bucket, ledger)
            code = 0
        finally:
            os._exit(code)
    return child


def records(ledger):
    """Every object of the ledger but what a patrol remembers, and no drafts."""
    return {
        path.relative_to(ledger).as_posix(): path.read_bytes()
        for path in ledger.rglob("*")
        if path.is_file() and not path.name.endswith(".partial") and path.relative_to(ledger).parts[0] != "patrol"
    }


def remembered(ledger):
    return {path.name: json.loads(path.read_text()) for path in (ledger / "patrol" / "runs").glob("*.json")}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_at_random_until_done(bucket, tmp_path, seed):
    undisturbed = patrol(bucket, tmp_path / "whole")
    begun = time.monotonic()
    patrol(bucket, tmp_path / "timed")
    length = time.monotonic() - begun
    random_numbers = random.Random(seed)
    ledger, num_killed = tmp_path / "ledger", 0
    for attempt in range(60):
        child = in_a_child(bucket, ledger)
        # The first are cut short for certain.
        until = time.monotonic() + random_numbers.uniform(0.02, (0.3 if attempt < 4 else 0.8) * length)
        while (status := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
            time.sleep(0.005)
        if status == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            num_killed += 1
        elif status[1] == 0:
            break
        time.sleep(0.25)
        if num_killed == 12:
            break
    assert num_killed >= 1, "nothing was disturbed"
    last = patrol(bucket, ledger)
    assert records(ledger) == records(tmp_path / "whole")
    assert remembered(ledger) == remembered(tmp_path / "whole")
    assert {run.path: run.findings for run in last.runs} == {run.path: run.findings for run in undisturbed.runs}
    assert last.exit_codes == undisturbed.exit_codes
