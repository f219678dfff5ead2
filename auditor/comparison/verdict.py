"""From a comparison to one word and one exit code."""

from __future__ import annotations

from auditor.comparison.outcome import DIFFERENT, PROVED, Comparison, Standing, StepComparison
from auditor.comparison.records import BETAS, OPTIMIZER
from auditor.comparison.together import FOLLOWS
from auditor.model.catalog import Role
from auditor.settings import Settings
from auditor.verdict import ExitCode, ordered


def exit_codes(found: Comparison, settings: Settings) -> list[ExitCode]:
    """All codes that apply, first the one that wins."""
    codes = {ExitCode.HOLDS}
    rows = [row for step in found.steps for row in step.rows]
    if any(found.fails(step, settings.fail_on) for step in found.steps):
        codes.add(ExitCode.VIOLATED)
    open_ones = [row for row in rows if row.standing is Standing.UNDETERMINED]
    if settings.strict and open_ones:
        codes.add(ExitCode.VIOLATED)
    if _unread(found) or (rows and len(open_ones) == len(rows)) or any(map(undecided, found.steps)):
        codes.add(ExitCode.INCOMPLETE)
    if any(step.changed for step in found.steps):
        codes.add(ExitCode.CHANGED)
    if not any(row.standing in (*PROVED, Standing.ROUNDING, Standing.SUSPICIOUS) or row.amount for row in rows):
        # Nothing was held against anything: a script must not take that for equal.
        codes.add(ExitCode.VIOLATED if any(row.standing in DIFFERENT for row in rows) else ExitCode.NOTHING)
    return ordered(codes)


def _unread(found: Comparison) -> bool:
    """Whether something that was asked for could not be done: files that can't be read, reruns that are none."""
    return bool(
        any(step.failures or step.uncompared for step in found.steps) or found.unrecognised or found.uncalibrated
    )


def undecided(step: StepComparison) -> bool:
    """Whether it is not known how far something differs, or of no weight (moment, buffer) that does what that means.

    Step by step: a step in which rounding explains a weight says nothing of what came into a later one.
    """
    if any(row.standing is Standing.UNDETERMINED and row.amount is None for row in step.rows):
        return True
    kinds = (Role.PARAMETER, Role.MASTER), (Role.FIRST_MOMENT, Role.SECOND_MOMENT, Role.MOMENT), (Role.BUFFER,)
    # What follows a bias that normalisation takes out again is explained by it.
    differ = [row for row in step.rows if row.amount is not None and row.standing not in PROVED
              and row.detail != FOLLOWS]  # fmt: skip
    sorts = ([row.standing for row in differ if row.pair.role in kind] for kind in kinds)
    return any(sort and all(standing is Standing.UNDETERMINED for standing in sort) for sort in sorts)


def exit_code(found: Comparison, settings: Settings) -> ExitCode:
    """The code of the comparison."""
    return exit_codes(found, settings)[0]


def verdict(found: Comparison, settings: Settings) -> str:
    """One phrase: equal, agrees up to rounding (and what of it is doubtful), differs, undetermined, incomplete."""
    codes = exit_codes(found, settings)
    rows = [row for step in found.steps for row in step.rows]
    if ExitCode.VIOLATED in codes and any(found.fails(step, settings.fail_on) for step in found.steps):
        return "differs"
    if _unread(found) or ExitCode.CHANGED in codes:
        return "incomplete"
    if ExitCode.INCOMPLETE in codes:
        return "undetermined"
    told = [row.standing for row in rows if row.standing not in (Standing.UNDETERMINED, *DIFFERENT)]
    if not told:
        return "undetermined"
    word = "equal" if all(standing in PROVED for standing in told) else "agrees up to rounding"
    word += " but for the dtype" if word == "equal" and Standing.CAST in told else ""
    word += ", some of it suspicious" if Standing.SUSPICIOUS in told else ""
    settings_differ = any(
        text.partition(" ")[0] in (*OPTIMIZER, BETAS) for step in found.steps for text in step.recorded
    )
    word += ", recorded otherwise" if settings_differ else ""
    word += ", but for warnings" if any(row.standing in DIFFERENT for row in rows) else ""
    return f"{word}, undetermined in part" if any(row.standing is Standing.UNDETERMINED for row in rows) else word
