"""What one unit of work measured, and what kept it from measuring more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from auditor.model.observation import BUCKETS, Read
from auditor.observe.kernels import empty_rows, empty_seams, empty_tallies
from auditor.observe.plan import Unit
from auditor.storage.store import ObjectChangedError, ObjectMissingError, ShortReadError, StorageError, UndecodableError

_DONE = int(Read.DONE)


@dataclass(slots=True)
class UnitResult:
    """What one unit measured."""

    observed: NDArray[np.void]
    """Parallel to the unit's rows."""
    tallies: NDArray[np.void]
    """Parallel to the unit's tallies."""
    num_bytes_read: int = 0
    num_bytes_reread: int = 0
    """Read for a comparison alone; their pieces are measured elsewhere."""
    failures: dict[str, str] = field(default_factory=dict)
    """File name to what storage said."""
    broken: dict[int, str] = field(default_factory=dict)
    """Row to what keeps it from being decoded."""
    changed: set[str] = field(default_factory=set)
    sketches: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, BUCKETS)))
    """Parallel to the unit's sketches."""
    seams: NDArray[np.void] = field(default_factory=lambda: empty_seams(0))
    """Parallel to the unit's seams."""

    @classmethod
    def empty(cls, unit: Unit) -> UnitResult:
        """Of a unit of which nothing was done yet."""
        sketches, seams = np.zeros((len(unit.sketches), BUCKETS)), empty_seams(len(unit.seams))
        return cls(empty_rows(len(unit.rows)), empty_tallies(len(unit.tallies)), sketches=sketches, seams=seams)

    def failed(self, rows: Sequence[int] | NDArray[np.int64], file: str, error: StorageError) -> None:
        """Note that ``rows`` could not be read from a file."""
        gone = isinstance(error, (ShortReadError, ObjectMissingError))
        state = Read.LOST if gone else Read.FAILED
        if isinstance(error, UndecodableError):
            state = Read.BROKEN
            self.broken |= dict.fromkeys(map(int, rows), str(error))
        else:
            self.failures.setdefault(file, str(error))
        read = self.observed["read"]
        read[rows] = np.maximum(read[rows], int(state))
        if isinstance(error, ObjectChangedError):
            self.changed.add(file)

    def done(self, rows: Sequence[int] | NDArray[np.int64]) -> None:
        """Note that what was wanted of ``rows`` here was read."""
        read = self.observed["read"]
        read[rows] = np.maximum(read[rows], _DONE)
