"""From the words of the command line to a round, and from its result to what is printed and written."""

from __future__ import annotations

import json
import posixpath
import time
from collections.abc import Callable
from dataclasses import dataclass

from auditor.configuration import parse_bytes, parse_seconds
from auditor.errors import UsageError
from auditor.ledger.folder import open_ledger
from auditor.patrol.notices import check_webhook
from auditor.patrol.outcome import Patrolled, RunOutcome
from auditor.patrol.rounds import Choices, patrol
from auditor.report.junit_report import to_junit
from auditor.report.metrics import to_prometheus
from auditor.report.patrol_report import finding_lines, patrol_object, run_lines, summary_lines
from auditor.settings import Settings
from auditor.storage.roots import store_at
from auditor.storage.writer import FolderWriter


def choices_of(budget_bytes: str, budget_seconds: str, reread: str, shard_of: str, webhook: str) -> Choices:
    """What a round does.

    Raises:
        UsageError: a word that doesn't parse.
    """
    number, slash, of = shard_of.partition("/")
    if not (number.isdecimal() and slash and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise UsageError(f"--shard-of {shard_of}: write 3/8 for the third of eight")
    if webhook:
        check_webhook(webhook)
    seconds = parse_seconds(budget_seconds)
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"--budget-seconds {budget_seconds}: no time")
    share = (int(number), int(of))
    return Choices(parse_bytes(budget_bytes), seconds, _share(reread), share, webhook)


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not (share == 0 or 0.0001 <= share <= 1):
        raise UsageError(f"--reread {text}: write 2% or 0.02, at least 0.01%")
    return share


def round_of(
    root: str, settings: Settings, choices: Choices, done: Callable[[RunOutcome], None],
    progress: Callable[[str, int], None],
) -> Patrolled:  # fmt: skip
    """One round.

    Raises:
        AuditorError: as :func:`auditor.patrol.rounds.patrol`; UsageError where the ledger lies in what is read.
    """
    if settings.steps.text or settings.tensors or settings.scheduler:
        raise UsageError("a patrol audits whole runs: steps, tensors and scheduler can't be chosen")
    ledger = open_ledger(settings.ledger, store_at(root))
    return patrol(root, ledger, settings, choices, done=done, progress=progress)


@dataclass(frozen=True, slots=True)
class Printer:
    """What is printed: while the round lasts, and at its end."""

    run: Callable[[RunOutcome], None]
    end: Callable[[Patrolled], None]


def printer(format: str, say: Callable[[str], None]) -> Printer:
    """``text`` and ``jsonl`` are printed run by run, ``json`` is one document at the end.

    Raises:
        UsageError: there is no such format.
    """

    def lines(outcome: RunOutcome) -> None:
        for line in run_lines(outcome):
            say(line)

    def findings(outcome: RunOutcome) -> None:
        for line in finding_lines(outcome):
            say(line)

    def summary(result: Patrolled) -> None:
        for line in summary_lines(result):
            say(line)

    def document(result: Patrolled) -> None:
        say(json.dumps(patrol_object(result), indent=2, ensure_ascii=True, allow_nan=False))

    known = {
        "text": Printer(lines, summary),
        "json": Printer(lambda outcome: None, document),
        "jsonl": Printer(findings, lambda result: None),
    }
    if format not in known:
        raise UsageError(f"--format {format}: none of {', '.join(known)}")
    return known[format]


def write_files(result: Patrolled, junit: object | None, prometheus: object | None) -> None:
    """The report files that were asked for; each appears whole or not at all.

    Raises:
        WriteError: one can't be written.
    """
    if junit is not None:
        _write(str(junit), to_junit(result.runs))
    if prometheus is not None:
        _write(str(prometheus), to_prometheus(result, time.time()))


def _write(path: str, text: str) -> None:
    folder, name = posixpath.split(path)
    writer = FolderWriter(folder or ".")
    writer.make()
    writer.write(name, text.encode("utf-8", "backslashreplace"))
