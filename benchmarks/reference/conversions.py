"""Conversions by others' converters, and errors planted into them: `python -m benchmarks.reference.conversions`.

Prints the tables of docs/compare.md. What was converted is committed (tests/fixtures/conversions, whose script says by
what); the errors are those of tests/comparison/conversions.py.
"""

import tempfile
from pathlib import Path

import auditor
from auditor.comparison.outcome import PROVED
from auditor.comparison.verdict import exit_code
from auditor.configuration import make_settings
from tests.comparison.conversions import CONVERSIONS, plant

SETTINGS = make_settings({})


def row(*values):
    print(f"| {' | '.join(map(str, values))} |", flush=True)


def header(*names):
    row(*names)
    row(*("---" for _ in names))


def healthy():
    header("conversion", "map", "tensors equal", "exit code")
    for conversion in CONVERSIONS:
        found = auditor.compare(
            str(conversion.source), str(conversion.converted), **{"exact": True, **conversion.choices}
        )
        used = found.maps[0].split()[1] if found.maps else "none"
        proved = sum(row.standing in PROVED for step in found.steps for row in step.rows)
        row(conversion.what, used, proved, int(exit_code(found, SETTINGS)))


def said(found, severity):
    """The first thing that the report says of the tensors that are told from the reference, and of all together."""
    first = found.failing(found.steps[0], severity)[0]
    causes = [cause.text for cause in (*found.steps[0].causes, first.cause) if cause is not None]
    text = f"{first.standing.value}: {first.detail}" if first.detail else first.standing.value
    return "; ".join((text, *causes[:1]))


def planted(folder):
    header("conversion", "error", "exit code", "said", "of", "place right")
    for number, (conversion, error) in enumerate((c, e) for c in CONVERSIONS for e in c.planted):
        found = auditor.compare(
            str(conversion.source), str(plant(conversion, error, folder / str(number))), **conversion.choices
        )
        names = sorted(one.pair.name for one in found.failing(found.steps[0], error.severity))
        what = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        right = "yes" if names == sorted(error.tensors) else "no"
        row(
            conversion.what.partition(",")[0],
            error.what,
            int(exit_code(found, SETTINGS)),
            said(found, error.severity),
            what,
            right,
        )


if __name__ == "__main__":
    healthy()
    print()
    with tempfile.TemporaryDirectory() as folder:
        planted(Path(folder))
