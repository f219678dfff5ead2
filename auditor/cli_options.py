"""What commands of the command line can be told, each once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from auditor.errors import UsageError


def example(arguments: str) -> str:
    """One call of a command, for the end of its help."""
    return f"Example: `auditor {arguments}`"


def parse_path(text: str) -> str:
    """A path that says something."""
    if not text:
        raise UsageError("an empty path: is the variable set?")
    return text


def text_or_json(format: str) -> None:
    """Refuse another format of a report.

    Raises:
        UsageError: it is neither.
    """
    if format not in ("text", "json"):
        raise UsageError(f"--format {format}: neither text nor json")


def json_is_wanted(arguments: Sequence[str]) -> bool:
    """Whether a command line that could not be carried out asks for JSON."""
    asked = [*pairwise(arguments), *(argument.split("=", 1) for argument in arguments)]
    stated = [value for name, *rest in asked if name == "--format" for value in rest]
    return (stated or [os.environ.get("AUDITOR_FORMAT", "")])[0] in ("json", "jsonl")


def folder_of_shares(folder: Path) -> Path:
    """A folder from which shares can be joined.

    Raises:
        UsageError: there is none.
    """
    if not folder.is_dir():
        raise UsageError(f"--shards {folder}: there is no such folder; --shard-of I/N measures a share and makes it")
    return folder


def parse_share(text: str) -> tuple[int, int]:
    """Number and count of ``3/8``.

    Raises:
        UsageError: it says something else.
    """
    number, slash, of = text.partition("/")
    if not (number.isdecimal() and slash and of.isdecimal()):
        raise UsageError(f"--shard-of {text}: write 3/8 for the third of eight")
    return int(number), int(of)


RunPaths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH...",
        parser=parse_path,
        help="A run, a step, a folder of runs, a file of weights; or several roots of a run. Also s3://, gs://, az://.",
    ),
]
RunPath = Annotated[
    str, typer.Argument(metavar="PATH", parser=parse_path, help="A run, one step of it, or a folder of runs.")
]
Steps = Annotated[str | None, typer.Option(metavar="300|100:500|latest", help="Steps, inclusive ranges, comma lists.")]
LevelName = Annotated[str | None, typer.Option(metavar="names|headers|replicas|values|full", help="How much to read.")]
Select = Annotated[list[str] | None, typer.Option(metavar="ID", help="Only these invariants or families.")]
Ignore = Annotated[list[str] | None, typer.Option(metavar="ID", help="Not these invariants or families.")]
Tensors = Annotated[str | None, typer.Option(metavar="GLOB", help="Only tensors whose name matches.")]
FailOn = Annotated[str | None, typer.Option(metavar="error|warning|note", help="Lowest severity that fails.")]
Strict = Annotated[bool | None, typer.Option("--strict", help="Undetermined fails as well.")]
StrictBuffers = Annotated[bool | None, typer.Option("--strict-buffers", help="Differing buffers are errors.")]
Settle = Annotated[str | None, typer.Option(metavar="10m", help="An unfinished newest step this young is in progress.")]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", envvar="AUDITOR_CONFIG", help="Configuration instead of auditor.toml.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="Reading threads.")]
Kernels = Annotated[str | None, typer.Option(metavar="auto|numpy|numba", help="What measures; all find the same.")]
Scheduler = Annotated[str | None, typer.Option(metavar="tcp://HOST:PORT", help="Work on a Dask cluster's workers.")]
MaxBytes = Annotated[
    str | None, typer.Option("--max-bytes-per-second", metavar="200M", help="Read no faster, a process.")
]
ShardOf = Annotated[
    str | None, typer.Option(metavar="I/N", help="Only measure every N-th part, for array jobs; needs --shards.")
]
Shards = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Where --shard-of writes; alone: join what is there.")
]
LedgerPath = Annotated[
    str | None, typer.Option("--ledger", metavar="FOLDER", help="Keep what was measured; unchanged steps aren't read.")
]
Bisect = Annotated[bool | None, typer.Option("--bisect", help="Look at few steps: halve between good and bad.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also list what holds and what is not applicable.")]
AllOfIt = Annotated[bool, typer.Option("--all", help="However many steps, tensors and files that are.")]
Baseline = Annotated[Path | None, typer.Option(metavar="REPORT", help="Fail only on what this JSON report lacks.")]
Format = Annotated[
    str,
    typer.Option("--format", metavar="text|json", envvar="AUDITOR_FORMAT", help="Report for people or for machines."),
]
ReferencePath = Annotated[
    str,
    typer.Argument(
        metavar="REFERENCE", parser=parse_path, help="What is trusted: a step, a run, or a ledger (LEDGER#RUN)."
    ),
]
CandidatePath = Annotated[str, typer.Argument(metavar="CANDIDATE", parser=parse_path, help="What is held against it.")]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="GLOB", help="Only tensors with such names.")]
Without = Annotated[list[str] | None, typer.Option("--ignore", metavar="GLOB", help="Not tensors with such names.")]
Rename = Annotated[
    list[str] | None,
    typer.Option(metavar="FROM=TO", help="What the candidate calls FROM is TO; {n}, {word} as in maps."),
]
MapName = Annotated[str, typer.Option("--map", metavar="auto|none|NAME", help="Built-in name map.")]
Exact = Annotated[bool, typer.Option("--exact", help="Rounding is a difference, too.")]
Resume = Annotated[bool, typer.Option("--resume", help="Save, load, save: all that is stored must be equal.")]
Calibrate = Annotated[
    list[str] | None, typer.Option(metavar="PATH", help="A rerun of the reference; its distance is the noise.")
]
ComputeDtype = Annotated[str, typer.Option(metavar="bfloat16", help="In which was computed; else as weights are kept.")]
Tokens = Annotated[int, typer.Option(min=0, help="Tokens a batch: the longest sum of a gradient.")]
LearningRate = Annotated[float | None, typer.Option(min=0, help="Where none is recorded.")]
Power = Annotated[bool, typer.Option("--power", help="Also the smallest planted errors that would have been found.")]
Propose = Annotated[bool, typer.Option("--propose", help=r"Print \[\[map]] tables for tensors without a counterpart.")]
PatrolRoot = Annotated[str, typer.Argument(metavar="URL", parser=parse_path, help="Where runs lie, at any depth.")]
PatrolLedger = Annotated[str, typer.Option("--ledger", metavar="URL", envvar="AUDITOR_LEDGER", help="Kept there.")]
BudgetBytes = Annotated[str, typer.Option(metavar="500G", help="Begin no step after so much was read.")]
BudgetSeconds = Annotated[str, typer.Option(metavar="50m", help="Begin no step after so long.")]
Reread = Annotated[str, typer.Option(metavar="2%", help="Read this share of the old steps again.")]
RunsOf = Annotated[str, typer.Option(metavar="I/N", help="Only a part of the runs.")]
Webhook = Annotated[str, typer.Option(envvar="AUDITOR_WEBHOOK", metavar="URL", help="Told what is new.")]
JUnit = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write JUnit XML.")]
Prometheus = Annotated[Path | None, typer.Option(metavar="FILE.prom", help="Also write metrics.")]
Lines = Annotated[str, typer.Option("--format", metavar="text|json|jsonl", help="What is printed.")]
