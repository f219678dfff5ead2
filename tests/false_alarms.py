"""Findings over short real trainings, of which all are false: ``python -m tests.false_alarms [SEEDS [FOLDER]]``.

Each seed is trained by every optimizer and schedule of ``tests/invariants/test_motion_steps.py``. ``FOLDER``: runs made
elsewhere as well: by optax (``tests/fixtures/optax_run/write.py SEEDS FOLDER``), whose settings are stated, or by the
Trainer (``tests/fixtures/hugging_face/write_trainings.py FOLDER``).
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from auditor.audit import audit
from auditor.model.finding import Outcome
from auditor.storage.local import LocalStore
from tests.invariants.test_motion_steps import HEALTHY
from tests.invariants.test_optax_runs import STATED, audited


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
        sys.stderr.write(f"seed {seed}: {alarms} false alarms over {trained} trainings so far\n")
    sys.stdout.write(f"{alarms} false alarms over {trained} trainings from {seeds} seeds\n")
    return alarms


def of_others(folder):
    runs = sorted(Path(folder).iterdir())
    alarms = 0
    for path in runs:
        trainers = any(path.glob("checkpoint-*/trainer_state.json"))
        found = audited(path) if trainers else audited(path, STATED)
        assert trainers or found.counts("MOT010")[Outcome.HOLDS]
        assert found.last_good
        alarms += len(found.findings)
        for finding in found.findings:
            sys.stdout.write(f"{path.name}: {finding.id} {finding.message}\n")
    sys.stdout.write(f"{alarms} false alarms over {len(runs)} trainings by others\n")
    return alarms


if __name__ == "__main__":
    found = main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
    sys.exit(bool(found + sum(map(of_others, sys.argv[2:]))))
