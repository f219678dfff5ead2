"""What `last-good` says beside the one path: why newer steps are not good, and what the answer rests on."""

from __future__ import annotations

from collections.abc import Iterator

from auditor.reports import RunReport
from auditor.settings import Settings

MAX_REJECTED = 5


def last_good_lines(run: RunReport, settings: Settings) -> Iterator[str]:
    """Lines for standard error."""
    good = run.last_good
    if good is None:
        yield f"no step is good among the {len(run.steps)} looked at"
    for step, reason in run.rejected[:MAX_REJECTED]:
        yield f"not step {step}: {reason}"
    if len(run.rejected) > MAX_REJECTED:
        yield f"and {len(run.rejected) - MAX_REJECTED} more"
    unjudged = run.unjudged()
    if good is not None and unjudged:
        yield f"not judged: {', '.join(unjudged)}"
    if good is not None and settings.tensors:
        yield f"only tensors {settings.tensors} were looked at"
    mine = next((step for step in run.steps if good is not None and step.state == good), None)
    for identifier, judged in sorted(mine.judgements.items()) if mine else ():
        for reason, names in sorted(judged.undetermined.items()):
            yield f"undetermined: {identifier}, {len(names)} subjects: {reason}"
    for finding in run.findings:
        for interval in finding.intervals:
            if good is not None and interval.first_bad < good.step:
                healed = f"good again at {interval.healed}" if interval.healed is not None else "not good again"
                span = f"steps {interval.first_bad} to {interval.last_bad}"
                yield f"before it: {finding.id} {finding.message}, {span}, {healed}"
