"""Runs a job of several real ranks as a process of its own."""

import os
import subprocess
import sys

from tests.paths import ROOT


def run_job(name, folder):
    """What ``python -m tests.hooks.<name> FOLDER`` printed, and what it said beside."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.hooks.{name}", str(folder)], cwd=ROOT, capture_output=True,
        text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr
