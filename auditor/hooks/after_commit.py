"""The audit of a step once it is durable: on one rank, beside training, within bounds.

thread    in this process, one step after the other (the default)
process   `auditor check` in a process of its own, which is ended when its time is spent
wait      in this thread, before the call returns
none      not here: `auditor check` or a patrol does it
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from auditor.audit import audit
from auditor.configuration import make_settings
from auditor.errors import AuditorError
from auditor.hooks.hook import OnViolation, split, survived
from auditor.hooks.log import LOG
from auditor.report.json_report import document
from auditor.storage.local import LocalStore
from auditor.storage.store import ObjectMissingError

Mode = Literal["thread", "process", "wait", "none"]
_ACCEPTED = (0, 1, 3)


class ViolationError(AuditorError):
    """A step violates an invariant, and the job asked to be stopped by that. ``report`` is the JSON report."""

    def __init__(self, message: str, report: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.report = report


class _SpentError(AuditorError):
    """The audit took longer than it may."""


@dataclass
class AfterCommit:
    """Audits steps after their commit. Made on the rank that audits, usually rank 0.

    ``choices``: options of `auditor check` by name, such as ``{"level": "replicas"}``. ``seconds``: how long one audit
    may take; 0: as long as it needs. ``log``: told ``({name: number}, step)`` after every audit. ``on_violation``:
    `log` writes a warning; `callback` also calls ``callback(report)`` with the JSON report; `raise` raises
    :class:`ViolationError`, from the next call of the hook where the audit runs beside training. ``pending``: steps
    that may wait; further ones are left to a later audit and counted.
    """

    mode: Mode = "thread"
    on_violation: OnViolation = "log"
    callback: Callable[[Mapping[str, Any]], None] | None = None
    log: Callable[[Mapping[str, float], int], None] | None = None
    choices: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    pending: int = 2
    raising: bool = False
    num_left: int = 0
    """Steps that were not audited here: too many waited, time was spent, or they were gone."""

    def __post_init__(self) -> None:
        self._queue: queue.Queue[tuple[int, str] | None] = queue.Queue(self.pending)
        self._violation: ViolationError | None = None
        self._worker: threading.Thread | None = None

    def committed(self, step: int, path: str) -> None:
        """Tell that the step saved to ``path`` is durable.

        Raises:
            ViolationError: an audited step violates an invariant, with ``on_violation="raise"``.
        """
        self.check()
        if self.mode == "none":
            return
        if self.mode == "wait":
            self._audit(step, path)
            self.check()
            return
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="auditor", daemon=True)
            self._worker.start()
        try:
            self._queue.put_nowait((step, path))
        except queue.Full:
            self.num_left += 1
            LOG.warning("step %d is not audited here: %d steps wait already", step, self.pending)

    def check(self) -> None:
        """Raise what an audit beside training found, if that is asked for."""
        found, self._violation = self._violation, None
        if found is not None:
            raise found

    def close(self, seconds: float = 600.0) -> None:
        """Wait for the audits under way, at most so long.

        Raises:
            ViolationError: as :meth:`committed`.
        """
        if self._worker is not None:
            self._queue.put(None, timeout=seconds)
            self._worker.join(seconds)
            self._worker = None
        self.check()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            self._audit(*item)

    def _audit(self, step: int, path: str) -> None:
        begun = time.monotonic()
        with survived(f"the audit of step {step}", raising=self.raising and self.mode == "wait"):
            report = self._report(step, path)
            if report is None:
                self.num_left += 1
                return
            self._tell(step, report, time.monotonic() - begun)

    def _report(self, step: int, path: str) -> dict[str, Any] | None:
        """The JSON report of the step; None where it could not be audited."""
        run, name = split(path)
        try:
            report = self._by_process(step, run) if self.mode == "process" else self._here(step, run)
        except _SpentError:
            LOG.warning("the audit of step %d was ended after %g seconds", step, self.seconds)
            return None
        except AuditorError:
            if self._is_gone(run, name):
                return None
            raise
        # Retention may have deleted files while they were read: what they lack then is no damage.
        return None if report is None or self._is_gone(run, name) else report

    @staticmethod
    def _is_gone(run: str, name: str) -> bool:
        try:
            LocalStore(run).stat(name)
        except ObjectMissingError:
            LOG.info("%s/%s was deleted before its audit was done", run, name)
            return True
        return False

    def _here(self, step: int, run: str) -> dict[str, Any]:
        begun = time.monotonic()

        def progress(path: str, num_bytes: int) -> None:
            if self.seconds and time.monotonic() - begun > self.seconds:
                raise _SpentError

        settings = make_settings({"threads": 2, **self.choices, "steps": str(step)})
        return document(audit(LocalStore(run), settings, progress=progress))

    def _by_process(self, step: int, run: str) -> dict[str, Any] | None:
        options = [
            text for key, value in self.choices.items()
            for text in (f"--{key.replace('_', '-')}", *([] if value is True else [str(value)]))
        ]  # fmt: skip
        command = [
            sys.executable,
            "-m",
            "auditor.cli",
            "check",
            run,
            "--steps",
            str(step),
            "--format",
            "json",
            *options,
        ]
        try:
            done = subprocess.run(command, capture_output=True, timeout=self.seconds or None, check=False)
        except subprocess.TimeoutExpired as error:
            raise _SpentError from error
        if done.returncode not in _ACCEPTED:
            LOG.warning("the audit of step %d ended with exit code %d: %s", step, done.returncode,
                        done.stderr.decode("utf-8", "replace")[-400:])  # fmt: skip
            return None
        found = json.loads(done.stdout)
        return dict(found)

    def _tell(self, step: int, report: Mapping[str, Any], seconds: float) -> None:
        runs = report.get("runs", [report])
        findings = [finding for run in runs for finding in run["findings"]]
        errors = [finding for finding in findings if finding["severity"] == "error" and not finding["waived"]]
        if self.log is not None:
            numbers = {
                "auditor/findings": len(findings), "auditor/errors": len(errors), "auditor/seconds": seconds,
                "auditor/bytes_read": sum(run["coverage"]["num_bytes_read"] for run in runs),
                "auditor/undetermined": sum(item["num_subjects"] for run in runs for item in run["undetermined"]),
                "auditor/steps_left": self.num_left,
            }  # fmt: skip
            self.log(numbers, step)
        if not errors:
            return
        message = f"step {step}: " + "; ".join(f"{finding['id']} {finding['message']}" for finding in errors[:4])
        LOG.warning("%s", message)
        if self.callback is not None and self.on_violation == "callback":
            self.callback(report)
        if self.on_violation == "raise":
            self._violation = ViolationError(message, report)
