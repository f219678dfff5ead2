"""`--bisect` on a real run: few steps, the same onset, and said what it can't know."""

from auditor.report.text_report import text_lines
from tests.ledger.test_recall import read, report
from tests.ledger.test_since import intervals
from tests.paths import HEALTHY, RUN


def test_the_onset_in_few_steps():
    scan, few = report(RUN, None), report(RUN, None, bisect=True)
    assert read(few) < 0.7 * read(scan)
    (found,) = intervals(few)
    # It healed at 90 and came back at 110: that is what it can't know, and says so.
    assert found == [(40, 50, 120, None)]
    text = "\n".join(text_lines(few))
    assert "of 12 steps were looked at" in text
    assert "Not seen are faults that healed before" in text


def test_a_sound_newest_step_needs_one_look():
    found = report(HEALTHY, None, bisect=True)
    assert [step.state.step for step in found.runs[0].steps] == [120]
    assert found.runs[0].last_good.step == 120
