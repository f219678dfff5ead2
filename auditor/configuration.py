"""Where choices may be stated: flag, environment, configuration file, default, in this order."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from auditor.adapters.adapter import Options
from auditor.errors import UsageError
from auditor.invariants.registry import find
from auditor.model.mesh import Coordinate, Replicate, Shard
from auditor.model.waiver import Known, Waiver


def read_configuration(path: Path | None) -> dict[str, Any]:
    """The configuration table: of ``path``, else of ``auditor.toml`` or ``[tool.auditor]`` in the working folder.

    Raises:
        UsageError: a file that was named isn't there, or a file is no TOML.
    """
    if path is not None:
        return _load(path)
    if Path("auditor.toml").is_file():
        return _load(Path("auditor.toml"))
    if Path("pyproject.toml").is_file():
        table = _load(Path("pyproject.toml")).get("tool", {}).get("auditor", {})
        return table if isinstance(table, dict) else {}
    return {}


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error


def stated(name: str, flag: Any, configuration: Mapping[str, Any], default: Any) -> Any:
    """The value of one choice: flag, else environment ``AUDITOR_NAME``, else configuration, else default."""
    if flag is not None:
        return flag
    environment = os.environ.get(f"AUDITOR_{name.upper()}")
    if environment is not None:
        return environment
    return configuration.get(name, configuration.get(name.replace("_", "-"), default))


def placement_options(configuration: Mapping[str, Any]) -> Options:
    """``[placement.<axis>]``: tensor globs to ``"replicate"`` or ``"shard:<dim>"``.

    Raises:
        UsageError: another value.
    """
    table = configuration.get("placement", {})
    if not isinstance(table, dict) or not all(isinstance(rules, dict) for rules in table.values()):
        raise UsageError("[placement] holds one table a mesh axis, such as [placement.tp]")
    return Options({axis: [(glob, _placement(axis, glob, how)) for glob, how in rules.items()]
                    for axis, rules in table.items()})  # fmt: skip


def _placement(axis: str, glob: str, how: object) -> Shard | Replicate:
    text = str(how).lower()
    if text == "replicate":
        return Replicate()
    if text.startswith("shard:") and text.removeprefix("shard:").isdigit():
        return Shard(int(text.removeprefix("shard:")))
    raise UsageError(f'[placement.{axis}] "{glob}" = "{how}": neither "replicate" nor "shard:<dim>"')


def parse_seconds(text: str) -> float:
    """Seconds from ``90``, ``90s``, ``10m``, ``2h``.

    Raises:
        UsageError: anything else.
    """
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        return float(text[:-1]) * unit if unit else float(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is no time: write 90s, 10m or 2h") from error


_WAIVER_KEYS = {"id", "tensor", "steps", "until", "reason"}


def waivers(configuration: Mapping[str, Any]) -> tuple[Waiver, ...]:
    """``[[waive]]``: ``id`` and ``reason``, and optionally ``tensor``, ``steps`` (``300`` or ``100:500``), ``until``.

    Raises:
        UsageError: an unknown invariant or key, no reason, or values that don't parse.
    """
    tables = configuration.get("waive", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError("waivers are written as [[waive]] tables")
    return tuple(map(_waiver, tables))


def _waiver(table: Mapping[str, Any]) -> Waiver:
    unknown = sorted(table.keys() - _WAIVER_KEYS)
    identifier = str(table.get("id", ""))
    if unknown or not table.get("reason") or find(identifier) is None:
        what = f"unknown key {unknown[0]}" if unknown else "it needs the id of an invariant and a reason"
        raise UsageError(f"[[waive]] {identifier}: {what}")
    low, colon, high = str(table.get("steps", "0:")).partition(":")
    until = table.get("until")
    try:
        first = int(low or 0)
        last = (int(high) if high else 1 << 62) if colon else first
        day = until if isinstance(until, date) or until is None else date.fromisoformat(str(until))
    except ValueError as error:
        raise UsageError(f"[[waive]] {identifier}: {error}") from error
    return Waiver(identifier.upper(), str(table["reason"]), str(table.get("tensor", "*")), first, last, day)


def read_baseline(path: Path) -> Known:
    """The findings of an earlier ``--format json`` report.

    Raises:
        UsageError: the file is not there or no such report.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        runs = document.get("runs", [document])
        return frozenset(
            (finding["id"], x["step"], x["tensor"], x["role"], Coordinate.of(**x["coordinate"]).indices, x["file"])
            for run in runs
            for finding in run["findings"]
            for x in finding["locations"]
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"--baseline {path}: no report of `auditor check --format json` ({error})") from error
