"""Metrics in Prometheus' text format, for the textfile collector of its node exporter.

Labels are runs, severities and states: never tensors, of which there are thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from auditor.model.finding import Severity
from auditor.patrol.outcome import Patrolled, Status
from auditor.report.text_safety import visible

Sample = tuple[dict[str, str], float]


def to_prometheus(result: Patrolled, now: float) -> str:
    """The text of one round. ``now``: seconds since the epoch."""
    present = [run for run in result.runs if run.status is not Status.GONE]
    open_findings: list[Sample] = [
        ({"run": run.path or ".", "severity": severity.name.lower()}, float(sum(
            finding["severity"] == severity.name.lower() and not (finding["waived"] or finding["in_baseline"])
            for finding in run.findings
        )))
        for run in present for severity in Severity
    ]  # fmt: skip
    good = [({"run": run.path or "."}, float(run.last_good_step)) for run in present if run.last_good_step is not None]
    parts: list[tuple[str, str, list[Sample]]] = [
        ("patrol_timestamp_seconds", "When the last round ended.", [({}, now)]),
        ("patrol_duration_seconds", "How long it took.", [({}, result.seconds)]),
        ("patrol_exit_code", "Exit code of the last round.", [({}, float(result.exit_codes[0]))]),
        ("patrol_keys", "Keys listed.", [({}, float(result.num_keys))]),
        ("patrol_bytes_read", "Bytes of tensors read of what is new.", [({}, float(result.num_bytes_read))]),
        ("patrol_bytes_reread", "Bytes of tensors read again.", [({}, float(result.num_bytes_reread))]),
        ("patrol_runs", "Runs by what became of them.", [
            ({"status": status.value}, float(result.count(status))) for status in Status
        ]),
        ("patrol_refused", "Folders that could not be looked at.", [({}, float(len(result.refused)))]),
        ("findings", "Open findings.", open_findings),
        ("last_good_step", "Newest good step.", good),
    ]  # fmt: skip
    return "".join(f"{line}\n" for name, text, samples in parts for line in _metric(f"auditor_{name}", text, samples))


def _metric(name: str, text: str, samples: Iterable[Sample]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} gauge"
    for labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
        yield f"{name}{{{inside}}} {value:.17g}" if inside else f"{name} {value:.17g}"


def _escaped(text: str) -> str:
    return visible(text).replace("\\", "\\\\").replace('"', '\\"')
