"""Saves that stand by themselves and look like steps of one run: their numbers are in the folders above them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from auditor.reports import RunReport

_NUMBER = re.compile(r"\d+", re.A)


def look_alike(runs: Sequence[RunReport]) -> Iterator[str]:
    """A sentence for each set of such saves (``step_5/hf``, ``step_10/hf``), which are compared with none other.

    Whether they are of one run nobody recorded: a script may number members of an ensemble so as well.
    """
    alike: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for run in runs:
        if len(run.steps) == 1 and run.order:
            path, step_format = run.steps[0].state.path, run.steps[0].state.format
            above, _, name = path.rpartition("/")
            *_, last = [None, *_NUMBER.finditer(above, above.rfind("/") + 1)]
            if last is not None and not _NUMBER.search(name):
                pattern = f"{above[: last.start()]}#{above[last.end() :]}/{name}"
                alike.setdefault((pattern, step_format), []).append((int(last[0][:15]), path))
    for (pattern, _), found in alike.items():
        if len(found) > 1:
            first, (number, path) = min(found)[1], max(found)
            yield (
                f"{first} … {path}: {len(found)} runs whose folders are numbered above ({pattern}). If they are steps "
                f"of one run, link each into one folder under its number (step_{number} -> {path}) and check that: "
                f"here none is compared with another"
            )
