"""Who does the units of a pass: all of them here, or one share in each of several processes whose results are joined.

Every process makes the same plan and does every n-th unit of it; nothing is coordinated. What it measured is kept in a
file of its own. Joining makes every step's plan once more and takes the results from the files, so the report is the
one that a single process would have made. A plan that differs (files were saved again, other choices) is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from auditor.errors import UsageError
from auditor.model.observation import BUCKETS, OBSERVED
from auditor.observe.kernels import SEAM, TALLY
from auditor.observe.plan import Unit
from auditor.observe.unit import Worker
from auditor.observe.unit_result import UnitResult
from auditor.storage.store import StorageError, Store, read_bytes

MAGIC = b"auditor share 3\n"
NAME = re.compile(r"share-(\d{1,6})-of-(\d{1,6})")


class Runner(Protocol):
    """Does the units of one step's pass."""

    def run(self, step: str, worker: Worker, units: Sequence[Unit]) -> Iterable[UnitResult]:
        """The results, parallel to ``units``. ``step``: the path of the step's folder."""


@dataclass(frozen=True, slots=True)
class Everything:
    """All units, by an executor."""

    executor: Executor

    def run(self, step: str, worker: Worker, units: Sequence[Unit]) -> Iterable[UnitResult]:
        """The results, parallel to ``units``."""
        return self.executor.map(worker, units)


@dataclass(slots=True)
class Share:
    """Every ``of``-th unit, beginning with unit ``number - 1``; what they measured is kept."""

    executor: Executor
    number: int
    of: int
    steps: list[dict[str, Any]] = field(default_factory=list)
    arrays: list[bytes] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the share's file."""
        return f"share-{self.number}-of-{self.of}"

    def run(self, step: str, worker: Worker, units: Sequence[Unit]) -> Iterator[UnitResult]:
        """The results of the share's own units; nothing for all others."""
        own = self.executor.map(worker, units[self.number - 1 :: self.of])
        kept: list[dict[str, Any]] = []
        for at, unit in enumerate(units):
            if at % self.of != self.number - 1:
                yield UnitResult.empty(unit)
                continue
            result = next(own)
            kept.append({
                "unit": at, "num_rows": len(result.observed), "num_tallies": len(result.tallies),
                "num_bytes_read": result.num_bytes_read, "num_bytes_reread": result.num_bytes_reread,
                "failures": result.failures, "broken": [*result.broken.items()], "changed": sorted(result.changed),
                "num_sketches": len(result.sketches), "num_seams": len(result.seams),
            })  # fmt: skip
            columns = result.observed, result.tallies, result.sketches, result.seams
            self.arrays += [column.tobytes() for column in columns]
            yield result
        self.steps.append({"path": step, "plan": fingerprint(units), "units": kept})

    def content(self) -> bytes:
        """The share as a file.

        Magic, BLAKE2b of what follows (16 bytes), length of the header (8 bytes, little-endian), header (JSON), then
        rows and tallies of every unit.
        """
        header = {"number": self.number, "of": self.of, "layout": _LAYOUT, "steps": self.steps}
        text = json.dumps(header).encode()
        rest = b"".join([len(text).to_bytes(8, "little"), text, *self.arrays])
        return MAGIC + _digest(rest) + rest


@dataclass(frozen=True, slots=True)
class Joined:
    """Results that shares left in their files."""

    location: str
    steps: Mapping[str, tuple[str, Mapping[int, UnitResult]]]
    """Path of the step's folder to its plan's fingerprint and the units' results."""

    @classmethod
    def of(cls, store: Store) -> Joined:
        """All shares in a folder.

        Raises:
            UsageError: one is missing, is no share, or they are of several audits.
            StorageError: the folder can't be read.
        """
        names = {int(match[1]): entry.name for entry in store.list("") if (match := NAME.fullmatch(entry.name))}
        counts = {int(match[2]) for name in names.values() if (match := NAME.fullmatch(name))}
        if len(counts) != 1:
            raise UsageError(f"{store.location}: holds shares of {len(counts)} audits, 1 is wanted")
        (count,) = counts
        if missing := [number for number in range(1, count + 1) if number not in names]:
            raise UsageError(f"{store.location}: share {missing[0]} of {count} is missing")
        steps: dict[str, tuple[str, dict[int, UnitResult]]] = {}
        for _, name in sorted(names.items()):
            for path, plan, results in _read(store, name):
                known, found = steps.setdefault(path, (plan, {}))
                if known != plan:
                    raise UsageError(f"{store.location}/{name}: is of another audit, or {path} changed between shares")
                found.update(results)
        return cls(store.location, steps)

    def run(self, step: str, worker: Worker, units: Sequence[Unit]) -> Iterator[UnitResult]:
        """The results, parallel to ``units``.

        Raises:
            UsageError: the shares are of another plan.
        """
        plan, found = self.steps.get(step, ("", {}))
        if plan != fingerprint(units) or len(found) != len(units):
            raise UsageError(f"{self.location}: its shares are of other files or choices than this audit of {step}")
        for at, unit in enumerate(units):
            done = found[at]
            told = len(done.observed), len(done.tallies), len(done.sketches), len(done.seams)
            if told != (len(unit.rows), len(unit.tallies), len(unit.sketches), len(unit.seams)):
                raise UsageError(f"{self.location}: a share says something else of {step} than its plan")
            yield done


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


_LAYOUT = [str(OBSERVED.descr), str(TALLY.descr), str(SEAM.descr)]


def _read(store: Store, name: str) -> Iterator[tuple[str, str, dict[int, UnitResult]]]:
    """Path, plan and results of every step in one share's file."""
    place = f"{store.location}/{name}"
    try:
        with store.open(name) as handle:
            content = read_bytes(handle, 0, handle.entry.num_bytes)
    except StorageError as error:
        raise UsageError(f"{place}: {error}") from error
    rest = content[len(MAGIC) + 16 :]
    length = int.from_bytes(rest[:8], "little")
    try:
        if content[: -len(rest) or None] != MAGIC + _digest(rest):
            raise ValueError("no share, or damaged")
        header = json.loads(rest[8 : 8 + length])
        if header["layout"] != _LAYOUT:
            raise ValueError("written by another version")
        cursor = _Cursor(rest, 8 + length)
        for step in header["steps"]:
            yield step["path"], step["plan"], {unit["unit"]: _result(unit, cursor) for unit in step["units"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{place}: can't be read as a share ({error})") from error


@dataclass(slots=True)
class _Cursor:
    content: bytes
    at: int

    def rows(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        found = np.frombuffer(self.content, dtype, count, self.at)
        self.at += found.nbytes
        return found


def _result(unit: Mapping[str, Any], cursor: _Cursor) -> UnitResult:
    return UnitResult(
        cursor.rows(OBSERVED, int(unit["num_rows"])), cursor.rows(TALLY, int(unit["num_tallies"])),
        int(unit["num_bytes_read"]), int(unit["num_bytes_reread"]), dict(unit["failures"]),
        {int(row): str(text) for row, text in unit["broken"]}, set(unit["changed"]),
        cursor.rows(np.dtype("<f8"), int(unit["num_sketches"]) * BUCKETS).reshape(-1, BUCKETS),
        cursor.rows(SEAM, int(unit["num_seams"])),
    )  # fmt: skip


def fingerprint(units: Sequence[Unit]) -> str:
    """What two plans have in common only if they read the same bytes of the same files for the same purpose."""
    found = hashlib.sha256()
    for unit in units:
        files = [(file.name, file.num_bytes, file.identity) for file in unit.files]
        compared = unit.tallies, unit.pairings, unit.seams, unit.joints
        found.update(repr((files, unit.dtypes, unit.cells, *compared, unit.sketches)).encode())
        table = unit.table
        columns = (table.row, table.dtype, table.offset, table.length, table.start) if table else ()
        for column in (unit.rows, *columns):
            found.update(np.ascontiguousarray(column, np.int64).tobytes())
    return found.hexdigest()
