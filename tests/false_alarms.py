"""Findings over short real trainings, of which all are false: ``python -m tests.false_alarms [SEEDS]``.

Each seed is trained by every optimizer and schedule of ``tests/invariants/test_motion_steps.py``.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from auditor.audit import audit
from auditor.storage.local import LocalStore
from tests.invariants.test_motion_steps import HEALTHY


def main(seeds):
    alarms = trained = 0
    for seed in range(1000, 1000 + seeds):
        for name, training in HEALTHY.items():
            if training.steps > 12:
                continue
            with tempfile.TemporaryDirectory() as folder:
                (run,) = audit(LocalStore(replace(training, seed=seed).run(Path(folder)))).runs
            trained += 1
            alarms += len(run.findings)
            for finding in run.findings:
                sys.stdout.write(f"seed {seed}, {name}: {finding.id} {finding.message}\n")
    sys.stdout.write(f"{alarms} false alarms over {trained} trainings from {seeds} seeds\n")
    return alarms


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)))
