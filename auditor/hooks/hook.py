"""The hook of a training job: a witness before a step is saved, an audit once it is there.

A failure of the auditor never stops training unless that is asked for: it is logged and the job goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from auditor.committed import NAME, described
from auditor.containers.witness_file import encode_part
from auditor.errors import AuditorError
from auditor.hooks.launch import absolute, launch_of_job
from auditor.hooks.log import LOG
from auditor.hooks.recording import Recorder
from auditor.storage.writer import FolderWriter
from auditor.witnesses import FOLDER, part_name

if TYPE_CHECKING:
    from auditor.hooks.exchange import Exchange

OnViolation = Literal["log", "callback", "raise"]


@dataclass(frozen=True, slots=True)
class Witnessed:
    """What was left of one step."""

    step: int
    file: str
    num_pieces: int
    num_bytes: int
    """Of the file."""
    seconds: float
    """That training waited for it."""


class Witnesses:
    """Leaves this rank's part of the witness beside each step.

    ``rank, num_ranks``: of this process among all that save together. ``launch``: equal in all of them and another
    after a restart; told by the launcher's environment where it isn't given. ``exchange``: by which parts also reach
    rank 0, where ranks write to disks of their own.
    """

    def __init__(
        self, rank: int, num_ranks: int, launch: str | None = None, exchange: Exchange | None = None
    ) -> None:  # fmt: skip
        self.rank, self.num_ranks, self.exchange = rank, num_ranks, exchange
        self.launch = launch_of_job() if launch is None else launch
        self._attempts: dict[str, int] = {}

    def leave(self, step: int, path: str, recorder: Recorder, begun: float) -> Witnessed:
        """Write the part of the step that is saved to ``path``, whole or not at all.

        Raises:
            WriteError: the disk is full, or read-only.
        """
        run, name = split(path)
        attempt = self._attempts[path] = self._attempts.get(path, -1) + 1
        part = recorder.part(step, launch=self.launch, attempt=attempt, taken=time.time())
        content = encode_part(part)
        writer = FolderWriter(f"{run}/{FOLDER}")
        writer.make()
        file = f"{name}/{part_name(self.rank)}"
        writer.write(file, content)
        if self.exchange is not None and self.rank:
            self.exchange.hand_over(step, name, attempt, self.rank, content)
        return Witnessed(step, f"{run}/{FOLDER}/{file}", len(part.pieces), len(content), time.perf_counter() - begun)

    def committed(self, step: int, path: str) -> None:
        """On rank 0, write what the others handed over, and by what the step is known after copying.

        Raises:
            WriteError: the disk is full, or read-only. StorageError: a file of the step can't be read.
        """
        run, name = split(path)
        if self.rank or path not in self._attempts:
            return
        writer = FolderWriter(f"{run}/{FOLDER}")
        if self.exchange is not None:
            for rank, content in self.exchange.collected(step, name, self._attempts[path], self.num_ranks):
                writer.write(f"{name}/{part_name(rank)}", content)
        writer.write(f"{name}/{NAME}", described(run, name, step))


def split(path: str) -> tuple[str, str]:
    """The run's folder and the step's name in it, of the path to which a step is saved."""
    run, _, name = absolute(path).rpartition("/")
    return run or "/", name


_FAILURES = (
    AuditorError, OSError, ValueError, TypeError, RuntimeError, LookupError, MemoryError, AttributeError,
    AssertionError, ArithmeticError, ImportError, EOFError,
)  # fmt: skip
"""Everything but what is meant to stop the process."""


@contextmanager
def survived(what: str, *, raising: bool) -> Iterator[None]:
    """Whatever goes wrong in here is logged, and goes no further unless that is asked for."""
    try:
        yield
    except _FAILURES as error:
        if raising:
            raise
        LOG.warning("%s failed, training goes on: %s: %s", what, type(error).__name__, error)
