"""DeepSpeed's partitions in memory are those that land in its files. Needs deepspeed."""

import socket
import subprocess
import sys

import pytest

from auditor.audit import audit
from auditor.model.finding import Outcome
from auditor.storage.local import LocalStore
from tests.faults import poke
from tests.paths import ROOT

pytest.importorskip("deepspeed")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_masters_and_moments_land_as_they_were_held(tmp_path, stage):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-m", "tests.hooks.deepspeed_job", str(tmp_path / "run"), str(stage)]
    ranks = [
        subprocess.Popen([*command, rank, port], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        for rank in "01"
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors.decode()[-3000:]
    (run,) = audit(LocalStore(tmp_path / "run")).runs
    assert [f for f in run.findings if f.severity.name == "ERROR"] == []
    for step in run.steps:
        # Six parameters: masters and both moments, and below stage 3 the parameters too.
        assert step.judgements["INT014"].num_holds == (18 if stage == 3 else 24)
        assert step.judgements["INT014"].outcome is Outcome.HOLDS
        if stage < 3:
            assert step.judgements["REP001"].num_holds >= 6
    poke(tmp_path / "run", 2, "0.weight", "second_moment", flip=1)
    (run,) = audit(LocalStore(tmp_path / "run")).runs
    assert [(x.step, x.tensor, x.role.value) for f in run.findings if f.id == "INT014" for x in f.locations] == [
        (2, "0.weight", "second_moment")
    ]
