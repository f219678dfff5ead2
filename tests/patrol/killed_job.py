"""Patrols one after the other, each killed at a random place, until one gets through.

    python -m tests.patrol.killed_job ROOT LEDGER SEED

A process of its own, because it forks: a client of an object store does not survive that. Places to die at are right
before, right after and, on disk, in the middle of everything that is written. Between two of them nothing of a round
comes into storage, so that no other place tells more. Written to standard output, as JSON, are what a round says that
is not disturbed, how many were killed, and what the last round says.
"""

import json
import os
import random
import signal
import sys
import threading
import time

from auditor.patrol.command import round_of
from auditor.patrol.rounds import Choices
from auditor.settings import Level, Settings
from auditor.storage.writer import Draft, FolderWriter


class Places:
    """Counts places at which a patrol may die, and dies at one of them."""

    def __init__(self, fatal):
        self.fatal, self.passed = fatal, 0

    def here(self):
        if threading.current_thread() is not threading.main_thread():
            # The lock is renewed as time passes, by a thread of its own: how often, no two rounds have in common.
            return
        self.passed += 1
        if self.passed == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner, name):
        """Make ``owner.name`` a place before and one after."""
        action = getattr(owner, name)

        def act(*arguments, **choices):
            self.here()
            found = action(*arguments, **choices)
            self.here()
            return found

        setattr(owner, name, act)


def patrol(root, ledger, fatal):
    """One round, which dies at place ``fatal``; 0: at none. What it says, and the places that it passed."""
    places = Places(fatal)
    if "://" in ledger:
        from auditor.storage.object_writer import ObjectWriter

        owners = {ObjectWriter: ("write", "create", "remove")}
    else:
        # A draft without its content, without its name, with its name and still with its draft.
        owners = {Draft: ("append", "publish", "publish_new"), FolderWriter: ("remove",)}
    for owner, names in owners.items():
        for name in names:
            places.around(owner, name)
    # A lock that its dead owner held must be taken over soon.
    settings = Settings(level=Level.VALUES, ledger=ledger, kernels="numpy", threads=1)
    result = round_of(root, settings, Choices(lock_seconds=0.3), lambda run: None, lambda path, num_bytes: None)
    findings = {run.path: run.findings for run in result.runs}
    return {"findings": findings, "exit_codes": [int(code) for code in result.exit_codes], "places": places.passed}


def in_a_child(root, ledger, fatal=0):
    """What :func:`patrol` says; None where it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(writing, "w") as pipe:
                pipe.write(json.dumps(patrol(root, ledger, fatal)))
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said) if said else None


def main(root, ledger, seed):
    whole = in_a_child(root, f"{ledger}/whole")
    draw, num_killed = random.Random(seed), 0
    while (last := in_a_child(root, f"{ledger}/killed", draw.randint(1, whole["places"]))) is None:
        num_killed += 1
        time.sleep(0.35)
    json.dump({"whole": whole, "num_killed": num_killed, "last": last}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]))
