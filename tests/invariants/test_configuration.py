"""AUX001: a waiver that ran out is itself a finding, about no step, and changes no verdict by itself."""

import json
from datetime import UTC, date, datetime

import jsonschema
import pytest

from auditor.audit import audit
from auditor.configuration import read_baseline
from auditor.model.finding import Outcome, Severity
from auditor.model.waiver import Waiver
from auditor.report.json_report import to_json
from auditor.report.text_report import text_lines
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.verdict import ExitCode, exit_code, verdict
from tests.paths import ROOT, TP4

DAY = date(2026, 3, 1)
WAIVER = Waiver("REP001", "resynchronised at 20448", "*layernorm*", until=DAY)


def audited(day, *waivers, **choices):
    now = datetime(day.year, day.month, day.day, 23, 59, tzinfo=UTC).timestamp()
    settings = Settings(level=Level.HEADERS, waivers=waivers, **choices)
    return audit(LocalStore(TP4), settings, now=now)


def test_a_waiver_that_ran_out_is_a_warning_about_no_step():
    report = audited(date(2026, 3, 2), WAIVER)
    (run,) = report.runs
    (finding,) = run.findings
    assert (finding.id, finding.severity, finding.locations, finding.intervals) == ("AUX001", Severity.WARNING, (), ())
    assert finding.message == (
        "the waiver of REP001 on *layernorm* ran out on 2026-03-01; its reason was: resynchronised at 20448"
    )
    assert run.counts("AUX001")[Outcome.VIOLATED] == 1
    assert (exit_code(report), verdict(run, report.settings), run.last_good.step) == (ExitCode.HOLDS, "holds", 6)


def test_on_its_last_day_it_still_counts():
    for waiver in (WAIVER, Waiver("REP001", "for ever")):
        report = audited(DAY, waiver)
        assert report.runs[0].findings == []
        assert report.runs[0].counts("AUX001")[Outcome.HOLDS] == 1
    assert sum(audited(DAY).runs[0].counts("AUX001").values()) == 0


def test_each_waiver_is_a_finding_of_its_own():
    other = Waiver("OPT001", "first run", until=date(2025, 1, 1))
    found = audited(date(2026, 3, 2), WAIVER, other, Waiver("NUM001", "for ever")).runs[0].findings
    assert [finding.message.split(" ran out")[0] for finding in found] == [
        "the waiver of REP001 on *layernorm*", "the waiver of OPT001",
    ]  # fmt: skip


def test_it_fails_where_warnings_fail_and_makes_no_step_bad():
    report = audited(date(2026, 3, 2), WAIVER, fail_on=Severity.WARNING)
    assert exit_code(report) is ExitCode.VIOLATED
    assert report.runs[0].last_good.step == 6


def test_it_can_be_ignored_but_not_waived():
    assert audited(date(2026, 3, 2), WAIVER, ignore=("AUX001",)).runs[0].findings == []
    (finding,) = audited(date(2026, 3, 2), WAIVER, Waiver("AUX001", "I know")).runs[0].findings
    assert not finding.waived


def test_reports_show_it(tmp_path):
    report = audited(date(2026, 3, 2), WAIVER)
    text = "\n".join(text_lines(report))
    assert "AUX001 waiver-expired[/]  warning\n  the waiver of REP001 on *layernorm* ran out" in text
    assert "AUX001" not in audited(DAY, ignore=("AUX001",)).runs[0].unjudged()
    document = json.loads(to_json(report))
    jsonschema.validate(document, json.loads((ROOT / "auditor/report/report.schema.json").read_text()))
    assert document["coverage"]["by_invariant"]["AUX001"]["violated"] == 1
    (finding,) = document["findings"]
    assert (finding["id"], finding["intervals"], finding["locations"]) == ("AUX001", [], [])


@pytest.mark.parametrize(("known", "accepted"), [(WAIVER, True), (Waiver("REP001", "another", until=DAY), False)])
def test_a_baseline_that_has_it_accepts_it(tmp_path, known, accepted):
    path = tmp_path / "report.json"
    path.write_text(to_json(audited(date(2026, 3, 2), known)))
    report = audited(date(2026, 3, 2), WAIVER, fail_on=Severity.WARNING, baseline=read_baseline(path))
    assert report.runs[0].findings[0].in_baseline is accepted
    assert exit_code(report) is (ExitCode.HOLDS if accepted else ExitCode.VIOLATED)
