"""Megatron-core's own save, at once and asynchronous, through the hook. Needs megatron-core."""

import os
import subprocess
import sys

import pytest

from auditor.audit import audit
from auditor.storage.local import LocalStore
from tests.faults import poke
from tests.paths import ROOT

pytest.importorskip("megatron.core")


def test_a_norm_that_drifts_on_one_rank_is_named(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.hooks.megatron_job", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = audit(LocalStore(tmp_path)).runs
    (finding,) = run.findings
    where = {(x.step, x.tensor, str(x.coordinate), x.ranks) for x in finding.locations}
    assert (finding.id, where) == ("REP001", {(4, "decoder.layers.1.input_layernorm.weight", "tp=1", (1,))})
    # Of two layers with gate and up: weights, masters and both moments.
    for step in run.steps:
        assert step.judgements["INT014"].num_holds == 4 * 15
    assert run.steps[0].judgements["REP001"].num_holds > 0
    poke(tmp_path, 4, "decoder.layers.0.mlp.linear_fc1.weight", "second_moment", flip=1)
    (run,) = audit(
        LocalStore(tmp_path),
    ).runs
    assert [(x.step, x.role.value) for f in run.findings if f.id == "INT014" for x in f.locations] == [
        (4, "second_moment")
    ]
