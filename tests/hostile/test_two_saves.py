"""Two saves read beside each other, one of which holds what no training writes: no traceback, no finding before it."""

import math
import shutil

import pytest

from auditor.audit import audit
from auditor.settings import Level, Settings
from auditor.storage.faulty import Faults, FaultyStore
from auditor.storage.local import LocalStore
from tests.invariants.test_motion import BLOCK, change, number_of
from tests.trainings import Training, torch

BAD = 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return Training(steps=10).run(tmp_path_factory.mktemp("two") / "run")


def moments(by):
    def changed(run):
        number = number_of(run, BLOCK)
        change(run, BAD, lambda content: content["optimizer"]["state"][number].update(by))

    return changed


def weight(value):
    return lambda run: change(run, BAD, lambda content: content["model"].update({BLOCK: value}))


def group(**settings):
    return lambda run: change(run, BAD, lambda content: content["optimizer"]["param_groups"][0].update(settings))


def full(value, dtype=None):
    return torch.full((12, 12), value, dtype=dtype)


CASES = {
    "a moment of another shape": moments({"exp_avg": torch.ones(3, 5)}),
    "a moment as large as a row": moments({"exp_avg_sq": torch.ones(12)}),
    "moments without elements": moments({"exp_avg": torch.ones(0), "exp_avg_sq": torch.ones(0)}),
    "moments that are single numbers": moments({"exp_avg": torch.ones(()), "exp_avg_sq": torch.ones(())}),
    "moments of 16 bits": moments({"exp_avg": full(0.1, torch.bfloat16), "exp_avg_sq": full(0.1, torch.float16)}),
    "moments of 64 bits": moments({"exp_avg": full(0.1, torch.float64), "exp_avg_sq": full(0.1, torch.float64)}),
    "moments that are integers": moments({"exp_avg": full(1, torch.int8), "exp_avg_sq": full(1, torch.int64)}),
    "moments that are complex": moments({"exp_avg": full(1j, torch.complex64)}),
    "moments that are no tensors": moments({"exp_avg": "text", "exp_avg_sq": None}),
    "moments all NaN": moments({"exp_avg": full(math.nan), "exp_avg_sq": full(math.nan)}),
    "moments all infinite": moments({"exp_avg": full(-math.inf), "exp_avg_sq": full(math.inf)}),
    "moments at the end of their range": moments({"exp_avg": full(3e38), "exp_avg_sq": full(1e-45)}),
    "a weight all NaN": weight(full(math.nan)),
    "a weight of another shape": weight(torch.ones(144)),
    "a weight of 16 bits": weight(full(1.0, torch.float16)),
    "steps that are no number": moments({"step": torch.tensor(math.nan)}),
    "steps beyond every number": moments({"step": torch.tensor(math.inf)}),
    "steps below zero": moments({"step": torch.tensor(-5.0)}),
    "betas above one": group(betas=(2.0, -1.0)),
    "betas at one": group(betas=(1.0, 1.0)),
    "betas that are no numbers": group(betas="fast"),
    "rates that are no numbers": group(lr=math.nan, eps=math.nan, weight_decay=math.inf),
    "rates beyond every number": group(lr=1e308, eps=0.0, weight_decay=1e308),
    "no group": lambda run: change(run, BAD, lambda content: content["optimizer"].update(param_groups=[])),
    "no state": lambda run: change(run, BAD, lambda content: content["optimizer"].update(state={})),
}  # fmt: skip


def judged(store, **settings):
    (found,) = audit(store, Settings(**settings)).runs
    assert [step.state.step for step in found.steps] == [2, 4, 6, 8, 10]
    for finding in found.findings:
        assert finding.message
        # What the next save is held against is doubted or the damaged one itself; what came before is sound.
        assert all(interval.first_bad >= BAD for interval in finding.intervals)
    return found


@pytest.mark.parametrize("name", CASES)
def test_findings_and_nothing_else(name, trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    CASES[name](run)
    judged(LocalStore(run))


def test_every_number_of_a_save_is_damaged(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    for damage in CASES.values():
        damage(run)
    assert judged(LocalStore(run)).findings


@pytest.mark.parametrize("num_bytes", [0, 100, 9000])
def test_a_file_that_shrinks_while_two_are_read(num_bytes, trained):
    faults = Faults(shrinking="*step_8/rank_1.pt", num_bytes_left=num_bytes)
    found = judged(FaultyStore(LocalStore(trained), faults), level=Level.FULL)
    assert found.findings or any(step.changed or step.failures for step in found.steps)
