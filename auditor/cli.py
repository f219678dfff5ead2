"""The command line. The only place that prints and exits; everything heavy is imported when a command runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from auditor import __version__
from auditor.errors import AuditorError, NothingToAuditError, UsageError

if TYPE_CHECKING:
    from auditor.audit import Report
    from auditor.settings import Settings

USAGE, INCOMPLETE, NOTHING, INTERNAL, INTERRUPTED = 2, 3, 4, 5, 130
"""Exit codes of :class:`auditor.verdict.ExitCode` that are needed before it can be imported."""

app = typer.Typer(
    add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Tells from saved checkpoints alone whether a distributed training run is still sound.",
    epilog="Exit codes: 0 holds · 1 violated · 2 usage · 3 incomplete · 4 nothing to audit · 5 internal error · "
           "6 changed while read · 11 locked · 130 interrupted",
)  # fmt: skip

RunPaths = Annotated[
    list[Path],
    typer.Argument(metavar="PATH...", help="A run, one step, a folder of runs; or several roots of one run."),
]
RunPath = Annotated[Path, typer.Argument(metavar="PATH", help="A run, one step of it, or a folder of runs.")]
Steps = Annotated[str | None, typer.Option(metavar="300|100:500|latest", help="Steps, inclusive ranges, comma lists.")]
LevelName = Annotated[str | None, typer.Option(metavar="names|headers|replicas|values|full", help="How much to read.")]
Select = Annotated[list[str] | None, typer.Option(metavar="ID", help="Only these invariants or families.")]
Ignore = Annotated[list[str] | None, typer.Option(metavar="ID", help="Not these invariants or families.")]
Tensors = Annotated[str | None, typer.Option(metavar="GLOB", help="Only tensors whose name matches.")]
FailOn = Annotated[str | None, typer.Option(metavar="error|warning|note", help="Lowest severity that fails.")]
Strict = Annotated[bool | None, typer.Option("--strict", help="Undetermined fails as well.")]
StrictBuffers = Annotated[bool | None, typer.Option("--strict-buffers", help="Differing buffers are errors.")]
Settle = Annotated[str | None, typer.Option(metavar="10m", help="An unfinished newest step this young is in progress.")]
Config = Annotated[Path | None, typer.Option(metavar="FILE", help="Configuration instead of auditor.toml.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Reading threads.")]
Baseline = Annotated[Path | None, typer.Option(metavar="REPORT", help="Fail only on what this JSON report lacks.")]
Format = Annotated[str, typer.Option("--format", metavar="text|json", help="Report for people or for machines.")]


@app.command()
def check(
    paths: RunPaths, steps: Steps = None, level: LevelName = None, select: Select = None, ignore: Ignore = None,
    tensors: Tensors = None, fail_on: FailOn = None, strict: Strict = None, strict_buffers: StrictBuffers = None,
    settle: Settle = None, config: Config = None, threads: Threads = None, baseline: Baseline = None,
    format: Format = "text",
) -> None:  # fmt: skip
    """Audit checkpoints: what holds, what doesn't, since when, where, and which step to go back to."""
    from auditor.verdict import exit_code

    if format not in ("text", "json"):
        raise UsageError(f"--format {format}: neither text nor json")
    settings = _settings(
        config, steps=steps, level=level, select=select, ignore=ignore, tensors=tensors, fail_on=fail_on,
        strict=strict, strict_buffers=strict_buffers, settle=settle, threads=threads, baseline=baseline,
    )  # fmt: skip
    report = _audit(paths, settings)
    if format == "json":
        from auditor.report.json_report import to_json

        print(to_json(report))
    else:
        _print_text(report)
    raise typer.Exit(int(exit_code(report)))


@app.command("last-good")
def last_good(
    paths: RunPaths, steps: Steps = None, level: LevelName = None, select: Select = None, ignore: Ignore = None,
    fail_on: FailOn = None, strict: Strict = None, settle: Settle = None, config: Config = None,
    threads: Threads = None,
) -> None:  # fmt: skip
    """Print the path of the newest good step, for launch scripts. Exit 1 if no step is good, 4 if there is none."""
    settings = _settings(
        config, steps=steps, level=level, select=select, ignore=ignore, fail_on=fail_on, strict=strict, settle=settle,
        threads=threads,
    )  # fmt: skip
    report = _audit(paths, settings)
    if len(report.runs) > 1:
        raise UsageError(f"{report.location} holds {len(report.runs)} runs; name one of them")
    good = [(run, run.last_good) for run in report.runs if run.last_good]
    for run, state in good:
        for (identifier, reason), count in sorted(run.undetermined().items()):
            _say(f"undetermined: {identifier}, {count} subjects: {reason}")
        for finding in run.findings:
            for interval in finding.intervals:
                if interval.first_bad < state.step:
                    healed = f"healed at {interval.healed}" if interval.healed is not None else "not healed"
                    _say(f"before it: {finding.id} {finding.message}, steps {interval.first_bad} to "
                         f"{interval.last_bad}, {healed}")  # fmt: skip
    if not good:
        _say("no step is good")
        raise typer.Exit(1)
    state = good[0][1]
    print(paths[0] / state.path if state.path else paths[0])


@app.command()
def inspect(path: RunPath, steps: Steps = None, config: Config = None, format: Format = "text") -> None:
    """Show mesh, tensors, pieces and files of the newest (or chosen) step, without reading weights."""
    from auditor.report.inspection import inspect_lines, inspect_object

    if format not in ("text", "json"):
        raise UsageError(f"--format {format}: neither text nor json")
    settings = _settings(config, steps=steps or "latest")
    store = _store([path])
    if format == "json":
        import json

        print(json.dumps(inspect_object(store, settings), indent=2))
        return
    _print_lines(inspect_lines(store, settings))


@app.command("invariants")
def list_invariants() -> None:
    """List every invariant: id, severity, name, statement."""
    from auditor.report.catalogue import list_lines

    for line in list_lines():
        print(line)


@app.command()
def explain(identifier: Annotated[str, typer.Argument(metavar="ID", help="Such as REP001.")]) -> None:
    """Explain one invariant: statement, why it matters, an example, what it misses, sources."""
    from auditor.invariants.registry import find
    from auditor.report.catalogue import page

    item = find(identifier)
    if item is None:
        raise UsageError(f"{identifier} is no invariant; `auditor invariants` lists them")
    print(page(item), end="")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"auditor {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _settings(config: Path | None, **flags: Any) -> Settings:
    """Choices from flags, environment and configuration, parsed."""
    from auditor.configuration import (
        parse_seconds,
        placement_options,
        read_baseline,
        read_configuration,
        stated,
        waivers,
    )
    from auditor.model.finding import Severity
    from auditor.settings import Level, Settings, StepChoice

    table = read_configuration(config)

    def value(name: str, default: Any = None) -> Any:
        return stated(name, flags.get(name), table, default)

    def listed(name: str) -> tuple[str, ...]:
        found = value(name, ())
        parts = found.split(",") if isinstance(found, str) else found
        return tuple(name.strip() for part in parts for name in str(part).split(","))

    def named(name: str, kind: Any, default: Any) -> Any:
        text = value(name)
        if text is None:
            return default
        try:
            return kind[str(text).upper()]
        except KeyError:
            words = "|".join(member.name.lower() for member in kind)
            raise UsageError(f"--{name.replace('_', '-')} {text}: none of {words}") from None

    return Settings(
        StepChoice(str(value("steps", ""))), named("level", Level, None), listed("select"), listed("ignore"),
        str(value("tensors", "")), named("fail_on", Severity, Severity.ERROR), _truth(value("strict", False)),
        _truth(value("strict_buffers", False)), parse_seconds(str(value("settle", "10m"))),
        int(value("threads", 0)), placement_options(table), waivers(table),
        read_baseline(Path(value("baseline"))) if value("baseline") else frozenset(),
    )  # fmt: skip


def _truth(value: object) -> bool:
    return str(value).lower() in ("1", "true", "yes", "on")


def _store(paths: Sequence[Path]) -> Any:
    from auditor.storage.local import LocalStore
    from auditor.storage.store import ObjectMissingError
    from auditor.storage.union import UnionStore

    stores = [LocalStore(path) for path in paths]
    for store in stores:
        try:
            entry = store.stat("")
        except ObjectMissingError as error:
            raise UsageError(str(error)) from error
        if not entry.is_folder:
            raise NothingToAuditError(f"{store.location}: a single file; name the folder that it is part of")
    return UnionStore(stores) if len(stores) > 1 else stores[0]


def _audit(paths: Sequence[Path], settings: Settings) -> Report:
    from auditor.audit import audit

    store = _store(paths)
    with _progress() as progress:
        return audit(store, settings, progress=progress)


@contextmanager
def _progress() -> Iterator[Any]:
    """Progress on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda path, num_bytes: None
        return
    from rich.console import Console

    from auditor.report.text_report import safe, size

    total = [0]
    with Console(stderr=True).status("reading") as status:

        def show(path: str, num_bytes: int) -> None:
            total[0] += num_bytes
            status.update(f"{safe(path)} · {size(total[0])} read")

        yield show


def _print_text(report: Report) -> None:
    from auditor.report.text_report import text_lines

    _print_lines(text_lines(report))


def _print_lines(lines: Iterator[str]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, emoji=False)
    for line in lines:
        console.print(line)


def _say(text: str) -> None:
    from auditor.report.text_safety import visible

    print(visible(text), file=sys.stderr)


def main() -> None:
    """Run a command; every way out has its exit code."""
    try:
        code = app(standalone_mode=False)
    except NothingToAuditError as error:
        _fail(str(error), NOTHING)
    except UsageError as error:
        _fail(str(error), USAGE)
    except AuditorError as error:
        _fail(str(error), INCOMPLETE)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has left; a second failure at exit would only add noise.
        sys.stdout = None
        raise SystemExit(INCOMPLETE) from None
    except Exception as error:  # the last place where a bug can be told from a finding
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # a usage error of the command line library
            error.show()
            raise SystemExit(error.exit_code) from None
        _fail(f"internal error: {type(error).__name__}: {error}. Set AUDITOR_TRACEBACK=1 to see where", INTERNAL)
    raise SystemExit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    import os

    if code == INTERNAL and os.environ.get("AUDITOR_TRACEBACK"):
        import traceback

        traceback.print_exc()
    for line in message.splitlines():
        _say(line)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
