"""Where choices may be stated: flag, environment, configuration file, default, in this order."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from auditor.adapters.adapter import Options
from auditor.errors import UsageError
from auditor.invariants.registry import find, select
from auditor.model.finding import Severity
from auditor.model.mesh import AXIS_ORDER, Coordinate, Replicate, Shard
from auditor.model.name_map import NameRule
from auditor.model.waiver import Known, Waiver
from auditor.settings import Level, Settings, StepChoice
from auditor.stated_optimizer import stated_optimizer

NAMES = (
    "steps", "level", "select", "ignore", "tensors", "fail_on", "strict", "strict_buffers", "settle", "threads",
    "baseline", "kernels", "scheduler", "max_bytes_per_second", "ledger", "bisect",
)  # fmt: skip
"""Choices that flags, environment (``AUDITOR_…``) and files can state."""
TABLES = ("placement", "optimizer", "waive", "map")
"""What only files can state."""


def make_settings(flags: Mapping[str, Any], file: Path | None = None) -> Settings:
    """Settings from flags (None: not given), environment and configuration file.

    Raises:
        UsageError: an unknown name, or a value that doesn't parse; says where it was stated.
    """
    table, source = read_configuration(file)
    choices = _Choices(flags, table, source)
    for name in flags:
        if name not in NAMES:
            raise UsageError(f"{name}: no such choice; there are {', '.join(NAMES)}")
    selected, ignored = choices.listed("select"), choices.listed("ignore")
    try:
        if not select(selected, ignored) and select(selected, ()):
            raise UsageError("everything that was selected is ignored")
    except LookupError as error:
        raise UsageError(str(error)) from error
    baseline = choices.text("baseline", "")
    settings = Settings(
        StepChoice(choices.text("steps", "")), choices.member("level", Level, None), selected, ignored,
        choices.text("tensors", ""), choices.member("fail_on", Severity, Severity.ERROR), choices.truth("strict"),
        choices.truth("strict_buffers"), parse_seconds(choices.text("settle", "10m")), choices.count("threads"),
        replace(placement_options(table), optimizer=stated_optimizer(table)), waivers(table), name_map(table),
        read_baseline(Path(baseline)) if baseline else frozenset(),
        kernels=choices.word("kernels", ("auto", "numpy", "numba")), scheduler=choices.text("scheduler", ""),
        max_bytes_per_second=parse_bytes(choices.text("max_bytes_per_second", "0")), ledger=choices.text("ledger", ""),
        bisect=choices.truth("bisect"),
    )  # fmt: skip
    settings.steps.check()
    return replace(settings, origins=tuple(sorted(choices.origins)))


@dataclass(slots=True)
class _Choices:
    """Looks choices up in order, and remembers those that no flag stated."""

    flags: Mapping[str, Any]
    table: Mapping[str, Any]
    source: str
    origins: set[str] = field(default_factory=set)

    def value(self, name: str, default: Any) -> tuple[Any, str]:
        """The value and where it was stated."""
        if self.flags.get(name) is not None:
            return self.flags[name], f"--{name.replace('_', '-')}"
        variable = f"AUDITOR_{name.upper()}"
        if variable in os.environ:
            self.origins.add(f"{name.replace('_', '-')} from {variable}")
            return os.environ[variable], variable
        for key in (name, name.replace("_", "-")):
            if key in self.table:
                self.origins.add(f"{key} from {self.source}")
                return self.table[key], f"{self.source}: {key}"
        return default, ""

    def text(self, name: str, default: str) -> str:
        return str(self.value(name, default)[0])

    def word(self, name: str, known: Sequence[str]) -> str:
        """One of the ``known`` words; the first where nothing is stated."""
        found, origin = self.value(name, known[0])
        if str(found).lower() not in known:
            raise UsageError(f"{origin} {found}: none of {'|'.join(known)}")
        return str(found).lower()

    def listed(self, name: str) -> tuple[str, ...]:
        found, origin = self.value(name, ())
        if not isinstance(found, (str, list, tuple)):
            raise UsageError(f"{origin} {found}: no list of names")
        parts = found.split(",") if isinstance(found, str) else found
        return tuple(name.strip() for part in parts for name in str(part).split(",") if name.strip())

    def truth(self, name: str) -> bool:
        found, origin = self.value(name, False)
        known = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if str(found).lower() not in known:
            raise UsageError(f"{origin} {found}: neither true nor false")
        return known[str(found).lower()]

    def count(self, name: str) -> int:
        found, origin = self.value(name, 0)
        if not (str(found).isdecimal() and str(found).isascii()) or (origin and int(found) == 0):
            raise UsageError(f"{origin} {found}: no positive number")
        return int(found)

    def member(self, name: str, kind: Any, default: Any) -> Any:
        found, origin = self.value(name, None)
        if found is None or isinstance(found, kind):
            return default if found is None else found
        words = {member.name.lower(): member for member in kind}
        if str(found).lower() not in words:
            raise UsageError(f"{origin} {found}: none of {'|'.join(words)}")
        return words[str(found).lower()]


def read_configuration(path: Path | None) -> tuple[dict[str, Any], str]:
    """The configuration table and the file that it is from.

    That is ``path``, else ``auditor.toml`` or the ``[tool.auditor]`` of ``pyproject.toml`` in the working folder.

    Raises:
        UsageError: a file that was named isn't there, a file is no TOML, or it states something unknown.
    """
    candidates = [path] if path is not None else [Path("auditor.toml"), Path("pyproject.toml")]
    for candidate in candidates:
        if path is None and not candidate.is_file():
            continue
        table = _load(candidate)
        if candidate.name == "pyproject.toml" or (set(table) == {"tool"}):
            table = table.get("tool", {}).get("auditor", {})
        _refuse_unknown(table, str(candidate))
        return table, str(candidate)
    return {}, ""


def _refuse_unknown(table: object, source: str) -> None:
    if not isinstance(table, dict):
        raise UsageError(f"{source}: [tool.auditor] is no table")
    for key in table:
        if key.replace("-", "_") not in (*NAMES, *TABLES):
            raise UsageError(f"{source}: nothing is called {key}; there are {', '.join((*NAMES, *TABLES))}")


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{path}: the configuration can't be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error


def placement_options(configuration: Mapping[str, Any]) -> Options:
    """``[placement.<axis>]``: tensor globs to ``"replicate"`` or ``"shard:<dim>"``.

    Raises:
        UsageError: another value.
    """
    table = configuration.get("placement", {})
    if not isinstance(table, dict) or not all(isinstance(rules, dict) for rules in table.values()):
        raise UsageError("[placement] holds one table a mesh axis, such as [placement.tp]")
    unknown = sorted(axis for axis in table if axis not in AXIS_ORDER)
    if unknown:
        raise UsageError(f"[placement.{unknown[0]}]: no axis is called so; there are {', '.join(AXIS_ORDER)}")
    return Options({axis: [(glob, _placement(axis, glob, how)) for glob, how in rules.items()]
                    for axis, rules in table.items()})  # fmt: skip


def _placement(axis: str, glob: str, how: object) -> Shard | Replicate:
    text = str(how).lower()
    if text == "replicate":
        return Replicate()
    if text.startswith("shard:") and text.removeprefix("shard:").isdecimal() and text.isascii():
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


def parse_bytes(text: str) -> float:
    """Bytes from ``500000``, ``200M``, ``1.5GiB``; K, M and G are 1024, 1024² and 1024³.

    Raises:
        UsageError: anything else.
    """
    short = text.upper().removesuffix("B").removesuffix("I")
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(short[-1:], 0)
    try:
        found = float(short[:-1]) * unit if unit else float(short)
    except ValueError as error:
        raise UsageError(f"{text!r} is no number of bytes: write 500000, 200M or 1.5G") from error
    if not 0 <= found < float("inf"):
        raise UsageError(f"{text!r} is no number of bytes: write 500000, 200M or 1.5G")
    return found


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


_MAP_KEYS = frozenset({"from", "to", "transpose", "stack", "split", "sizes", "groups", "unstack", "within"})


def name_map(configuration: Mapping[str, Any]) -> tuple[NameRule, ...]:
    """``[[map]]``: ``from`` and ``to``, and how a tensor is moved: the fields of :class:`NameRule`.

    Raises:
        UsageError: an unknown key, or a rule that can't be followed.
    """
    tables = configuration.get("map", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError("name maps are written as [[map]] tables")
    return tuple(map(_rule, tables))


def _rule(table: Mapping[str, Any]) -> NameRule:
    source, to = str(table.get("from", "")), table.get("to", "")
    targets = tuple(map(str, to)) if isinstance(to, list) else (str(to),)
    order = table.get("transpose", False)
    numbers = [table.get(key, 0) for key in ("stack", "split", "groups", "unstack", "within")] + list(
        table.get("sizes", ())
    )
    numbers += order if isinstance(order, list) else []
    unknown = sorted(table.keys() - _MAP_KEYS)
    if unknown or not all(type(number) is int and 0 <= number < 1 << 48 for number in numbers):
        what = f"unknown key {unknown[0]}" if unknown else "dims and sizes are whole numbers"
        raise UsageError(f"[[map]] {source}: {what}")
    rule = NameRule(
        source, targets, (tuple(order) if isinstance(order, list) else ()) if order else None,
        table.get("stack"), table.get("split", 0), tuple(table.get("sizes", ())), table.get("groups", 1),
        table.get("unstack"), table.get("within", 1),
    )  # fmt: skip
    if flaw := rule.flaw():
        raise UsageError(f"[[map]] {source}: {flaw}")
    return rule


def _waiver(table: Mapping[str, Any]) -> Waiver:
    unknown = sorted(table.keys() - _WAIVER_KEYS)
    identifier = str(table.get("id", ""))
    if unknown or not table.get("reason") or (item := find(identifier)) is None:
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
    return Waiver(item.id, str(table["reason"]), str(table.get("tensor", "*")), first, last, day)


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
        ) | {(f["id"], f["message"]) for run in runs for f in run["findings"] if not f["locations"]}
    except OSError as error:
        raise UsageError(f"--baseline {path}: it can't be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"--baseline {path}: no report of `auditor check --format json` ({error})") from error
