"""JUnit XML, as continuous integration shows it: a suite a run, a case a finding."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from xml.sax.saxutils import quoteattr

from auditor.patrol.outcome import RunOutcome, Status


def to_junit(runs: Sequence[RunOutcome]) -> str:
    """A ``testsuites`` document.

    A finding is a failure; one that is waived or known is skipped; a run that could not be read is an error, one that
    was not reached is skipped. A run without findings is one case that passes.
    """
    suites = "".join(map(_suite, sorted(runs, key=lambda run: run.path)))
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites name="auditor">\n{suites}</testsuites>\n'


def _suite(run: RunOutcome) -> str:
    cases = [_case(run, finding) for finding in run.findings]
    if run.status is Status.REFUSED:
        cases.append(_element(run, "audit", "read", f"<error message={_quoted(run.detail)}/>"))
    elif run.status is Status.UNREACHED:
        cases.append(_element(run, "audit", "reached", '<skipped message="a budget ended before it"/>'))
    elif not cases:
        cases.append(_element(run, "audit", "no findings", ""))
    counts = {kind: sum(f"<{kind}" in case for case in cases) for kind in ("failure", "error", "skipped")}
    head = (
        f'tests="{len(cases)}" failures="{counts["failure"]}" errors="{counts["error"]}" skipped="{counts["skipped"]}"'
    )
    return f"  <testsuite name={_quoted(run.path or '.')} {head}>\n{''.join(cases)}  </testsuite>\n"


def _case(run: RunOutcome, finding: dict[str, object]) -> str:
    kind = "skipped" if finding["waived"] or finding["in_baseline"] else "failure"
    shade = f" type={_quoted(str(finding['severity']))}" if kind == "failure" else ""
    body = f"<{kind} message={_quoted(str(finding['message']))}{shade}/>"
    return _element(run, str(finding["id"])[:3], f"{finding['id']} {finding['name']} {finding['key']}", body)


def _element(run: RunOutcome, family: str, name: str, body: str) -> str:
    return f"    <testcase classname={_quoted(family)} name={_quoted(name)}>{body}</testcase>\n"


def _quoted(text: str) -> str:
    """An attribute; XML has no way to write most control characters."""
    return quoteattr("".join(c if unicodedata.category(c)[0] != "C" else "\ufffd" for c in text))
