"""Kills audits while they write a ledger: ``python -m tests.ledger.kill FOLDER``. It forks, so it is a process."""

import hashlib
import os
import signal
import sys
from pathlib import Path

import auditor.storage.writer as writer_module
from auditor.audit import audit
from auditor.ledger.folder import open_ledger
from auditor.settings import Level, Settings, StepChoice
from auditor.storage.local import LocalStore
from tests.paths import TP4

CALLS = ("open", "pwrite", "link", "replace", "mkdir", "unlink")
NUM_POINTS = 24


class Counting:
    """``os``, whose calls that change something are counted; before or after one of them the process dies."""

    def __init__(self, fatal=None, after=False):
        self.count, self.fatal, self.after = 0, fatal, after

    def __getattr__(self, name):
        found = getattr(os, name)
        return self.counted(found) if name in CALLS else found

    def counted(self, call):
        def wrapped(*arguments, **more):
            self.count += 1
            if self.count == self.fatal and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*arguments, **more)
            finally:
                # Also where the call fails, as the removal of a draft that isn't there does.
                if self.count == self.fatal:
                    os.kill(os.getpid(), signal.SIGKILL)

        return wrapped


def write(folder):
    audit(LocalStore(TP4), Settings(level=Level.REPLICAS, steps=STEPS, threads=1), ledger=open_ledger(str(folder)))


def forked(work):
    """How a child that does ``work`` ended."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def tree(folder):
    """Every committed record and the groups above; drafts and what was not committed are not there for readers."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith(".partial")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def killed(folder, fatal, after):
    def work():
        writer_module.os = Counting(fatal, after)
        write(folder)

    assert os.WIFSIGNALED(forked(work)), f"call {fatal} was not reached"


def main(root):
    undisturbed = root / "undisturbed"
    counter = Counting()
    writer_module.os = counter
    write(undisturbed)
    writer_module.os = os
    wanted = tree(undisturbed)
    points = sorted({1, 2, 3, counter.count - 1, *range(5, counter.count, max(1, counter.count // NUM_POINTS))})
    for fatal in points:
        folder = root / f"killed-{fatal}"
        killed(folder, fatal, after=fatal % 2 == 1)
        before = open_ledger(str(folder))
        names = before.names("tp4") if before.exists() else []
        assert all(before.damage(name) == "" for name in names), f"a record of call {fatal} is there and damaged"
        assert forked(lambda folder=folder: write(folder)) == 0
        assert tree(folder) == wanted, f"killed at call {fatal}, the ledger is another one"
        for draft in folder.rglob("*.partial"):
            # Of what was in place already: nothing is written of a record that is whole.
            there = draft.with_name(draft.name.removeprefix(".").removesuffix(".partial"))
            assert draft.read_bytes() == there.read_bytes(), f"killed at call {fatal}, a draft stays"
    sys.stdout.write(f"killed at {len(points)} of {counter.count} calls\n")


STEPS = StepChoice("latest")

if __name__ == "__main__":
    main(Path(sys.argv[1]))
