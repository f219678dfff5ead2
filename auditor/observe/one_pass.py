"""The streaming pass: every wanted byte is read once into a reused buffer, all measures are taken while it is there.

A unit opens its files once, reads neighbouring small pieces together and large ones block by block. Memory is a few
buffers a worker, whatever the size of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from auditor.model.catalog import WITHHELD, Catalog, FileState, Role
from auditor.model.joint import Beside, Joint, JointResult
from auditor.model.observation import BUCKETS, Observations, Read, Sketches
from auditor.model.pairing import Pairing, PairResult
from auditor.observe.kernels import empty_rows, empty_seams, empty_tallies
from auditor.observe.plan import Plan, Unit, plan
from auditor.observe.shares import Runner
from auditor.observe.sketch import MAX_SKETCHES, slots
from auditor.observe.unit import Worker
from auditor.observe.unit_result import UnitResult
from auditor.storage.store import Store, num_readers

_UNREAD = {state: Read.FAILED if state in WITHHELD else Read.LOST for state in FileState}
_UNREAD[FileState.PRESENT] = Read.NOT_ASKED


def wanted_rows(catalog: Catalog, tensors: Iterable[int] | None = None) -> NDArray[np.int64]:
    """Pieces to read, of some or all tensors.

    Never padding (uninitialised memory in healthy runs) nor packed elements (no kernels yet).
    """
    chosen = range(len(catalog.tensors)) if tensors is None else tensors
    wanted = np.zeros(len(catalog.tensors), bool)
    wanted[
        [n for n in chosen if catalog.tensors[n].role is not Role.PADDING and not catalog.tensors[n].dtype.packed]
    ] = True
    return np.flatnonzero(wanted[catalog.pieces.tensor]) if len(catalog.pieces) else np.zeros(0, np.int64)


def observe(
    store: Store, catalog: Catalog, rows: NDArray[np.int64], runner: Runner,
    progress: Callable[[int], None] = lambda num_bytes: None, pairings: Sequence[Pairing] = (), kernels: str = "numpy",
    *, sketched: bool = False, beside: Beside | None = None,
) -> Observations:  # fmt: skip
    """Read the pieces ``rows`` once, measure them, and compare the ``pairings`` while they are read.

    ``progress`` is told the bytes of every unit that is done; ``kernels`` is a name that ``kernel_choice.choose``
    takes; ``sketched``: also make sketches; ``beside``: the save before, read in lock-step with this one. Failures of
    storage are in the result, not raised.
    """
    return begin(store, catalog, rows, runner, progress, pairings, kernels, sketched=sketched, beside=beside).finish()


def begin(
    store: Store, catalog: Catalog, rows: NDArray[np.int64], runner: Runner,
    progress: Callable[[int], None] = lambda num_bytes: None, pairings: Sequence[Pairing] = (), kernels: str = "numpy",
    *, sketched: bool = False, beside: Beside | None = None,
) -> Pass:  # fmt: skip
    """The same, without waiting: the units are with the runner, so that something else can be done meanwhile."""
    work = plan(catalog, rows, pairings, beside, slow=num_readers(store) > 1)
    gathered = _Gathered(catalog, rows, work)
    if sketched:
        tensor, replica, numbers = slots(catalog, rows)
        if len(tensor) <= MAX_SKETCHES:
            work = work.sketched(rows, numbers)
            gathered.sketches = Sketches(tensor, replica, np.zeros((len(tensor), BUCKETS)))
            gathered.sketch_of = dict(zip(rows.tolist(), numbers.tolist(), strict=True)) if work.copies else {}
    return Pass(work, gathered, runner.run(catalog.path, Worker(store, kernels), work.units), progress)


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass under way."""

    work: Plan
    gathered: _Gathered
    results: Iterable[UnitResult]
    progress: Callable[[int], None]

    def finish(self) -> Observations:
        """Wait for the units and put together what they found; once."""
        for unit, result in zip(self.work.units, self.results, strict=True):
            self.gathered.take(unit, result)
            if self.gathered.sketches is not None:
                self.gathered.sketches.values[list(unit.sketches)] += result.sketches
            self.progress(result.num_bytes_read)
        return self.gathered.observations()


class _Gathered:
    """What the units found, put together."""

    def __init__(self, catalog: Catalog, rows: NDArray[np.int64], work: Plan) -> None:
        self.catalog, self.work = catalog, work
        self.pieces = empty_rows(len(catalog.pieces))
        self.tallies, self.seams = empty_tallies(len(work.tallies)), empty_seams(len(work.seams))
        self.failures: dict[int, str] = {}
        self.broken: dict[int, str] = {}
        self.changed: set[str] = set()
        self.num_bytes_read = self.num_bytes_reread = 0
        self.sketches: Sketches | None = None
        self.sketch_of: dict[int, int] = {}
        self.number = {file.name: number for number, file in enumerate(catalog.files)}
        states = [file.state for file in catalog.files]
        outcome = np.array([int(_UNREAD[state]) for state in states] or [0], np.int8)
        self.pieces["read"][rows] = outcome[catalog.pieces.file[rows]]
        wanted = np.bincount(catalog.pieces.file[rows], minlength=len(states))
        for number, state in enumerate(states):
            if wanted[number] and state is not FileState.PRESENT:
                self.failures[number] = catalog.files[number].detail

    def take(self, unit: Unit, result: UnitResult) -> None:
        """Add what one unit measured."""
        rows = unit.rows
        mine, theirs = self.pieces[rows], result.observed
        for name in ("lane0", "lane1", "num_nan", "num_infinite", "num_zero", "sum_squares"):
            mine[name] += theirs[name]
        mine["minimum"] = np.minimum(mine["minimum"], theirs["minimum"])
        mine["maximum"] = np.maximum(mine["maximum"], theirs["maximum"])
        mine["bits_used"] |= theirs["bits_used"]
        # A piece that is cut over several units is as badly off as its worst part.
        mine["read"] = np.maximum(mine["read"], theirs["read"])
        self.pieces[rows] = mine
        for at, tally in zip(unit.tallies, result.tallies, strict=True):
            self.add_tally(self.tallies[at], tally)
        for at, seam in zip(unit.seams, result.seams, strict=True):
            self.add_tally(self.seams[at], seam)
            self.seams[at]["last"] = max(self.seams[at]["last"], seam["last"])
        for name, text in result.failures.items():
            self.failures.setdefault(self.number[name], text)
        self.broken |= {int(rows[row]): text for row, text in result.broken.items()}
        self.changed |= result.changed
        self.num_bytes_read += result.num_bytes_read
        self.num_bytes_reread += result.num_bytes_reread

    @staticmethod
    def add_tally(mine: np.void, theirs: np.void) -> None:
        for name in (name for name in mine.dtype.names or () if name.startswith("num_")):
            mine[name] += theirs[name]
        mine["largest"] = max(mine["largest"], theirs["largest"])
        if theirs["first"] >= 0:
            mine["first"] = theirs["first"] if mine["first"] < 0 else min(mine["first"], theirs["first"])

    def joints(self) -> dict[Joint, tuple[JointResult, ...]]:
        """Of every joint that was measured over the whole tensor, the results in its pieces."""
        found: dict[Joint, list[JointResult]] = {}
        for seam, total in zip(self.work.seams, self.seams.tolist(), strict=True):
            found.setdefault(seam.joint, []).append(JointResult(seam.row, *total))
        return {
            joint: tuple(results)
            for joint, results in found.items()
            if sum(one.num_compared for one in results) == self.catalog.tensors[joint.later[0]].num_elements
        }

    def observations(self) -> Observations:
        """The finished record."""
        work = self.work
        for row, source in work.copies:
            self.pieces[row] = self.pieces[source]
            if source in self.broken:
                self.broken[row] = self.broken[source]
        self.copy_sketches(work)
        unread = self.pieces["read"] != Read.DONE
        self.pieces["minimum"][unread] = self.pieces["maximum"][unread] = 0.0
        pairs: dict[Pairing, list[PairResult]] = {}
        for lineup, tally in zip(work.tallies, self.tallies, strict=True):
            compared = int(tally["num_compared"])
            pairs.setdefault(lineup.pairing, []).append(
                PairResult(
                    lineup.left, lineup.right, compared, int(tally["num_beyond"]), int(tally["num_one_ulp"]),
                    float(tally["largest"]), int(tally["first"]),
                    compared == self.catalog.tensors[lineup.pairing.left].num_elements,
                )
            )  # fmt: skip
        return Observations(
            self.pieces, self.failures, self.broken, tuple(sorted(self.changed)), pairs=pairs,
            num_bytes_read=self.num_bytes_read, num_bytes_reread=self.num_bytes_reread, sketches=self.sketches,
            joints=self.joints(),
        )  # fmt: skip

    def copy_sketches(self, work: Plan) -> None:
        """Give replicas that are the same bytes as another (tied tensors) its sketch; NaN to those that are in part."""
        if self.sketches is None:
            return
        values = self.sketches.values
        same = {row: self.sketch_of[source] for row, source in work.copies if self.sketch_of}
        sources: dict[int, set[int | None]] = {self.sketch_of[row]: set() for row in same}
        for row, number in self.sketch_of.items():
            if number in sources:
                sources[number].add(same.get(row))
        for number, found in sources.items():
            source = found.pop() if len(found) == 1 else None
            values[number] = values[source] if source is not None and source != number else np.nan
