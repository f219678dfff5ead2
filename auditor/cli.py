"""The command line. The only place that prints and exits; everything heavy is imported when a command runs."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from auditor import __version__
from auditor.errors import AuditorError, LockedError, NothingToAuditError, UsageError

from auditor.cli_options import (  # isort: skip
    AllOfIt, Baseline, Bisect, BudgetBytes, BudgetSeconds, Calibrate, CandidatePath, ComputeDtype, Config, Exact,
    FailOn, Format, Ignore, JUnit, Kernels, LearningRate, LedgerPath, LevelName, Lines, MapName, MaxBytes, Only,
    PatrolLedger, PatrolRoot, Power, Prometheus, Propose, ReferencePath, Rename, Reread, Resume, RunPath, RunPaths,
    RunsOf, Scheduler, Select, Settle, ShardOf, Shards, Steps, Strict, StrictBuffers, Tensors, Threads, Tokens, Verbose,
    Webhook, Without, example, folder_of_shares, json_is_wanted, parse_path, parse_share, text_or_json,
)  # fmt: skip

if TYPE_CHECKING:
    from auditor.reports import Report
    from auditor.settings import Settings
    from auditor.storage.store import Store

USAGE, INCOMPLETE, NOTHING, INTERNAL, CHANGED, LOCKED, INTERRUPTED = 2, 3, 4, 5, 6, 11, 130
"""Exit codes of :class:`auditor.verdict.ExitCode` that are needed before it can be imported."""

TURN_SECONDS = 5e-4
"""How long the interpreter lets one thread run while another waits. Ten times shorter than usual: a block is read and
measured within the usual 5 ms, and would then wait as long again for whoever reads headers meanwhile."""

app = typer.Typer(
    add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Tells from saved checkpoints alone whether a distributed training run is still sound.",
    epilog=f"{example('check /ckpt/run')}\n\nExit codes: 0 holds · 1 violated · 2 usage · 3 incomplete · "
           "4 nothing to audit · 5 internal error · 6 changed while read · 11 locked · 130 interrupted",
)  # fmt: skip


@app.command(epilog=example("check /ckpt/run --ledger /audits/run.ledger"))
def check(
    paths: RunPaths, steps: Steps = None, level: LevelName = None, select: Select = None, ignore: Ignore = None,
    tensors: Tensors = None, fail_on: FailOn = None, strict: Strict = None, strict_buffers: StrictBuffers = None,
    settle: Settle = None, config: Config = None, threads: Threads = None, baseline: Baseline = None,
    format: Format = "text", kernels: Kernels = None, scheduler: Scheduler = None, max_bytes: MaxBytes = None,
    shard_of: ShardOf = None, shards: Shards = None, ledger: LedgerPath = None, bisect: Bisect = None,
    verbose: Verbose = False,
) -> None:  # fmt: skip
    """Audit checkpoints: what holds, what doesn't, since when, where, and which step to go back to."""
    from auditor.verdict import exit_code

    text_or_json(format)
    settings = _settings(
        config, steps=steps, level=level, select=select, ignore=ignore, tensors=tensors, fail_on=fail_on,
        strict=strict, strict_buffers=strict_buffers, settle=settle, threads=threads, baseline=baseline,
        kernels=kernels, scheduler=scheduler, max_bytes_per_second=max_bytes, ledger=ledger, bisect=bisect,
    )  # fmt: skip
    if shard_of is not None:
        _measure_share(paths, settings, shard_of, shards)
        return
    report = _audit(paths, settings, shards)
    if format == "json":
        from auditor.report.json_report import to_json

        print(to_json(report))
    else:
        _print_text(report, verbose)
    raise typer.Exit(int(exit_code(report)))


@app.command(epilog=example("compare /ckpt/run/step_100 /ckpt/converted"))
def compare(
    reference: ReferencePath, candidate: CandidatePath, steps: Steps = None,
    only: Only = None, ignore: Without = None, rename: Rename = None,
    map: MapName = "auto", exact: Exact = False, resume: Resume = False,
    calibrate: Calibrate = None, compute_dtype: ComputeDtype = "", tokens: Tokens = 0,
    learning_rate: LearningRate = None, power: Power = False, propose: Propose = False, fail_on: FailOn = None,
    strict: Strict = None, config: Config = None, threads: Threads = None,
    kernels: Kernels = None, max_bytes: MaxBytes = None, format: Format = "text",
    verbose: Verbose = False,
) -> None:  # fmt: skip
    """Hold a checkpoint, run or ledger against a reference, in any formats: equal, rounding, or different (exit 1).

    See docs/compare.md.
    """
    from auditor.comparison.command import choices_of
    from auditor.comparison.comparing import compare as compare_sides
    from auditor.comparison.comparing import proposals
    from auditor.comparison.verdict import exit_code
    from auditor.report.compare_text import compare_lines, proposed_lines

    text_or_json(format)
    settings = _settings(
        config, steps=steps, fail_on=fail_on, strict=strict, threads=threads, kernels=kernels,
        max_bytes_per_second=max_bytes,
    )  # fmt: skip
    choices = choices_of(
        settings, only=only or (), ignore=ignore or (), rename=rename or (), map=map, exact=exact, resume=resume,
        calibrate=calibrate or (), compute=compute_dtype, tokens=tokens, learning_rate=learning_rate, power=power,
    )  # fmt: skip
    with _progress() as progress:
        if propose:
            _print_lines(proposed_lines(proposals(reference, candidate, settings, choices, progress=progress)))
            return
        found = compare_sides(reference, candidate, settings, choices, progress=progress)
    if format == "json":
        from auditor.report.compare_json import to_json

        print(to_json(found, settings))
    else:
        _print_lines(compare_lines(found, settings, verbose=verbose))
    raise typer.Exit(int(exit_code(found, settings)))


@app.command("last-good", epilog=example("last-good /ckpt/run"))
def last_good(
    paths: RunPaths, steps: Steps = None, level: LevelName = None, select: Select = None, ignore: Ignore = None,
    fail_on: FailOn = None, strict: Strict = None, settle: Settle = None, config: Config = None,
    threads: Threads = None, baseline: Baseline = None,
) -> None:  # fmt: skip
    """Print the path of one run's newest good step, for launch scripts. Exit 1 if no step is good, 4 if there is none.

    Good: committed, whole, tiled, and without a finding at or above --fail-on, of its own or of an earlier step that is
    not known to be over. Why newer steps are not good, and what was not judged, is said on standard error.
    """
    settings = _settings(
        config, steps=steps, level=level, select=select, ignore=ignore, fail_on=fail_on, strict=strict, settle=settle,
        threads=threads, baseline=baseline,
    )  # fmt: skip
    from auditor.report.last_good_report import last_good_lines, run_of
    from auditor.storage.roots import below

    run = run_of(_audit(paths, settings))
    for line in last_good_lines(run, settings):
        _say(line)
    if run.last_good is None:
        raise typer.Exit(1)
    print(below(paths[0], run.last_good.path))


@app.command(epilog=example("inspect /ckpt/run --steps 300"))
def inspect(
    path: RunPath, steps: Steps = None, config: Config = None, all_of_it: AllOfIt = False, format: Format = "text",
) -> None:  # fmt: skip
    """Show mesh, tensors, pieces and files of the newest (or chosen) step, without reading weights."""
    from auditor.report.inspection import inspect_lines, inspect_object

    text_or_json(format)
    settings = _settings(config, steps=steps or "latest")
    store = _store([path])
    if format == "json":
        import json

        print(json.dumps(inspect_object(store, settings), indent=2))
        return
    _print_lines(inspect_lines(store, settings, all_of_it=all_of_it))


@app.command(epilog=example("export /ckpt/run /scratch/run.zarr --steps latest"))
def export(
    run: RunPath,
    target: Annotated[str, typer.Argument(metavar="OUT.zarr", parser=parse_path, help="New, empty, or an export.")],
    steps: Steps = None, tensors: Tensors = None, config: Config = None, threads: Threads = None,
) -> None:  # fmt: skip
    """Write a run as a Zarr store on local disk, whatever layout it was saved in; verified by digest.

    Run again, it goes on where it was stopped; what is whole is never written again, other steps are added. Exit 3 if
    some of the source could not be read, 6 if it changed meanwhile.
    """
    from auditor.exporting import export as export_run
    from auditor.report.export_report import last_lines, step_line
    from auditor.storage.roots import is_url

    if is_url(target):
        raise UsageError(f"{target}: an export is written to local disk")
    settings = _settings(config, steps=steps, tensors=tensors, threads=threads)
    with _progress() as progress:
        result = export_run(
            _store([run]), target, settings, progress=progress, done=lambda at, step: _say(step_line(at, step))
        )
    for line in last_lines(result):
        _say(line)
    raise typer.Exit(CHANGED if result.changed else INCOMPLETE if result.incomplete else 0)


@app.command(epilog=example("patrol s3://bucket/runs --ledger s3://bucket/audits"))
def patrol(
    root: PatrolRoot, ledger: PatrolLedger, level: LevelName = None, select: Select = None, ignore: Ignore = None,
    fail_on: FailOn = None, strict: Strict = None, settle: Settle = None, config: Config = None,
    threads: Threads = None, max_bytes: MaxBytes = None, baseline: Baseline = None, budget_bytes: BudgetBytes = "0",
    budget_seconds: BudgetSeconds = "0", reread: Reread = "0", shard_of: RunsOf = "1/1", webhook: Webhook = "",
    junit: JUnit = None, prometheus: Prometheus = None, format: Lines = "text",
) -> None:  # fmt: skip
    """Audit every run below a prefix that changed since the last time, newest first; for cron. See docs/patrol.md."""
    from auditor.patrol.command import choices_of, printer, round_of, write_files

    choices = choices_of(budget_bytes, budget_seconds, reread, shard_of, webhook)
    settings = _settings(
        config, level=level, select=select, ignore=ignore, fail_on=fail_on, strict=strict, settle=settle,
        threads=threads, max_bytes_per_second=max_bytes, baseline=baseline, ledger=ledger,
    )  # fmt: skip
    told = printer(format, print)
    with _progress() as progress:
        result = round_of(root, settings, choices, told.run, progress)
    told.end(result)
    write_files(result, junit, prometheus)
    raise typer.Exit(int(result.exit_codes[0]))


@app.command(epilog=example("ledger show /audits/run.ledger"))
def ledger(
    action: Annotated[str, typer.Argument(metavar="show|verify|compact|export")],
    folder: Annotated[str, typer.Argument(metavar="LEDGER", help="What `check --ledger` wrote.")],
) -> None:
    """Show what a ledger keeps, verify it (exit 1: damaged), compact it, or list its files as sha256sum does."""
    from auditor.report.ledger_report import lines

    sound = True
    for line, good in lines(action, folder):
        print(line)
        sound = sound and good
    raise typer.Exit(0 if sound else 1)


@app.command("invariants", epilog=example("invariants"))
def list_invariants() -> None:
    """List every invariant: id, severity, name, statement."""
    from auditor.report.catalogue import list_lines

    for line in list_lines():
        print(line)


@app.command(epilog=example("explain REP001"))
def explain(identifier: Annotated[str, typer.Argument(metavar="ID", help="Such as REP001, or its name.")]) -> None:
    """Explain one invariant: statement, why it matters, an example, what it misses, sources."""
    from auditor.invariants.registry import find, invariants
    from auditor.report.catalogue import page

    item = find(identifier)
    if item is None:
        members = [one.id for one in invariants() if one.family == identifier.upper()]
        which = f"a family: explain one of {', '.join(members)}" if members else "no invariant"
        raise UsageError(f"{identifier} is {which}; `auditor invariants` lists them")
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
    from auditor.configuration import make_settings

    return make_settings(flags, config)


def _store(paths: Sequence[str]) -> Store:
    from auditor.storage.roots import open_store

    return open_store(paths)


def _audit(paths: Sequence[str], settings: Settings, shards: Path | None = None) -> Report:
    from auditor.audit import audit
    from auditor.ledger.folder import open_ledger
    from auditor.storage.local import LocalStore

    shared = LocalStore(folder_of_shares(shards)) if shards else None
    store = _store(paths)
    ledger = open_ledger(settings.ledger, store) if settings.ledger else None
    with _progress() as progress:
        return audit(store, settings, progress=progress, shares=shared, ledger=ledger)


def _measure_share(paths: Sequence[str], settings: Settings, text: str, folder: Path | None) -> None:
    from auditor.audit import audit_share

    number, of = parse_share(text)
    if folder is None:
        raise UsageError("--shard-of needs --shards FOLDER, where to write what was measured")
    with _progress() as progress:
        share = audit_share(_store(paths), settings, number, of, str(folder), progress=progress)
    units = sum(len(step["units"]) for step in share.steps)
    print(f"{folder / share.name}: {units} units of {len(share.steps)} steps measured, nothing judged yet")


def _progress() -> AbstractContextManager[Any]:
    from auditor.report.progress import progress

    return progress()


def _print_text(report: Report, verbose: bool) -> None:
    from auditor.report.text_report import text_lines

    _print_lines(text_lines(report, verbose=verbose))


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
    sys.setswitchinterval(TURN_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that can't show a character must not end the audit.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False)
    except NothingToAuditError as error:
        _fail(str(error), NOTHING)
    except UsageError as error:
        _fail(str(error), USAGE)
    except LockedError as error:
        _fail(str(error), LOCKED)
    except AuditorError as error:
        _fail(str(error), INCOMPLETE)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has left; a second failure at exit would only add noise.
        sys.stdout = None
        raise SystemExit(INCOMPLETE) from None
    except OSError as error:
        # Standard output may be what does not take it: no document then.
        _say(f"the report could not be written: {error}")
        raise SystemExit(INCOMPLETE) from None
    except Exception as error:  # the last place where a bug can be told from a finding
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # a usage error of the command line library
            error.show()
            _print_failure(getattr(error, "format_message", error.__str__)(), error.exit_code)
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
    _print_failure(message, code)
    raise SystemExit(code)


def _print_failure(message: str, code: int) -> None:
    """What reads the document must find one, also where there is no report."""
    if json_is_wanted(sys.argv[1:]):
        from auditor.report.json_report import failure

        print(failure(message, code))


if __name__ == "__main__":
    main()
