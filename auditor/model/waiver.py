"""What a user knows and accepts: findings that stay visible but don't fail an audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from fnmatch import fnmatchcase

from auditor.model.finding import Finding, Location


@dataclass(frozen=True, slots=True)
class Waiver:
    """One ``[[waive]]`` table of the configuration."""

    id: str
    reason: str
    tensor: str = "*"
    """Glob over tensor names; for findings about files, over file names."""
    first_step: int = 0
    last_step: int = 1 << 62
    """Inclusive."""
    until: date | None = None
    """The last day on which it counts."""

    def expired(self, today: date) -> bool:
        """Whether it no longer counts."""
        return self.until is not None and today > self.until

    def covers(self, finding: Finding, location: Location) -> bool:
        """Whether it accepts the finding at this place."""
        what = location.tensor or location.file
        return (
            finding.id == self.id
            and self.first_step <= location.step <= self.last_step
            and fnmatchcase(what, self.tensor)
        )


def apply_waivers(findings: Sequence[Finding], waivers: Sequence[Waiver], today: date) -> list[Finding]:
    """``findings`` with those marked that waivers cover at every place. One uncovered place, and it fails as before.

    Findings about no step have no place, and can't be waived.
    """
    active = [waiver for waiver in waivers if not waiver.expired(today)]
    return [
        replace(finding, waived=bool(active and finding.locations) and all(
            any(waiver.covers(finding, location) for waiver in active) for location in finding.locations
        ))
        for finding in findings
    ]  # fmt: skip


Known = frozenset[tuple[object, ...]]
"""What an earlier report said, as :func:`places` of its findings; (id, message) of those about no step."""


def places(identifier: str, location: Location) -> tuple[object, ...]:
    """What makes a finding at one place the same in two reports."""
    role = location.role.value if location.role else None
    return identifier, location.step, location.tensor or None, role, location.coordinate.indices, location.file or None


def _places_of(finding: Finding) -> list[tuple[object, ...]]:
    """All places of a finding; of one about no step, what it says instead."""
    return [places(finding.id, location) for location in finding.locations] or [(finding.id, finding.message)]


def apply_baseline(findings: Sequence[Finding], known: Known) -> list[Finding]:
    """``findings`` with those marked that an earlier report holds at every place."""
    return [replace(finding, in_baseline=all(place in known for place in _places_of(finding))) for finding in findings]
