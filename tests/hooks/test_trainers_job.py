"""The hook in the trainers of others, on two ranks: a replica that drifted is named, whoever writes the files."""

import os
import subprocess
import sys

import pytest

from auditor.audit import audit
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.roots import open_store
from tests.paths import ROOT
from tests.s3 import free_port

pytest.importorskip("torch")

TRAINERS = {
    "trainer": ("transformers", "model.embed_tokens.weight"), "accelerate": ("accelerate", "0.weight"),
    "lightning": ("lightning", "layer.weight"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRAINERS)
def test_a_replica_that_drifted_between_two_saves(tmp_path, name):
    package, tensor = TRAINERS[name]
    pytest.importorskip(package)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
               str(free_port()), "-m", "tests.hooks.trainers_job", name, str(tmp_path / "run")]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # Lightning's files, of any names, are each named by itself.
    places = [tmp_path / "run" / f"step={step}.ckpt" for step in (1, 2)] if name == "lightning" else [tmp_path / "run"]
    stores = [open_store([str(place)]) if place.is_file() else LocalStore(place) for place in places]
    reports = [audit(store, Settings(level=Level.VALUES, select=("REP", "INT014"))) for store in stores]
    runs = [run for report in reports for run in report.runs]
    found = {(f.id, x.step, x.tensor, x.role.value, str(x.coordinate))
             for run in runs for f in run.findings for x in f.locations}  # fmt: skip
    assert found & {("REP001", 2, tensor, "parameter", f"rank={rank}") for rank in (0, 1)}
    assert {(identifier, step) for identifier, step, *_ in found} == {("REP001", 2)}
    steps = [step for run in runs for step in run.steps]
    assert all(step.judgements["INT014"].num_holds > 0 for step in steps)
    assert steps[0].judgements["REP001"].num_holds > 0
