"""An audit that is killed while it writes the ledger: run again, the ledger is that of an undisturbed one."""

import subprocess
import sys

from tests.paths import ROOT


def test_killed_at_many_points_the_ledger_is_the_same(tmp_path):
    command = [sys.executable, "-m", "tests.ledger.kill", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[2]) >= 20, done.stdout
