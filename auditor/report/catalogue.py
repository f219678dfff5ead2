"""The list of invariants and the page about one, from the registry."""

from __future__ import annotations

from collections.abc import Iterator

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.registry import invariants

_NEEDS = {
    Needs.NAMES: "reads names", Needs.HEADERS: "reads headers", Needs.WEIGHTS: "reads weights",
    Needs.CHECKSUMS: "reads everything, at level full",
}  # fmt: skip


def list_lines() -> Iterator[str]:
    """One line an invariant."""
    for item in invariants():
        first = item.statement.split(". ")[0].rstrip(".")
        yield f"{item.id}  {item.severity.name.lower():<7}  {item.name:<22}  {first}"


def page(item: Invariant) -> str:
    """Everything about one invariant, as Markdown."""
    causes = "\n".join(f"- {cause.text} ({cause.source})" for cause in item.likely_causes)
    likely = f"\n## Likely causes\n\n{causes}\n" if causes else ""
    return f"""# {item.id} {item.name}

{item.severity.name.lower()} · {_NEEDS[item.needs]}

{item.statement}

## Why it matters

{item.rationale}

## Example

    {item.example}
{likely}
## What it misses

{item.misses}

## Next

{item.hint}

Source: {item.source}
"""


def pages() -> str:
    """The pages of all invariants as one document, ``docs/invariants.md``."""
    head = "# Invariants\n\nMade from the registry; `auditor explain ID` prints one.\n\n"
    links = "".join(f"- [{item.id} {item.name}](#{item.id.lower()}-{item.name})\n" for item in invariants())
    return (
        head + links + "".join(f"\n{page(item).replace('# ', '## ').replace('### ', '#### ')}" for item in invariants())
    )
