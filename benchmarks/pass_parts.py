"""The pass over a run's weights with kernels that do only a part of the work: what each part costs by difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from auditor.adapters.adapter import Options
from auditor.discovery import discover
from auditor.invariants.registry import invariants
from auditor.model.catalog import Catalog
from auditor.model.dtype import DType
from auditor.model.joint import Joint
from auditor.model.observation import OBSERVED
from auditor.model.pairing import Pairing
from auditor.observe import numpy_kernels, unit
from auditor.observe.kernel_choice import choose
from auditor.observe.kernels import Bytes, Kernels, Rows, Runs, Side, Stream
from auditor.observe.one_pass import observe, wanted_rows
from auditor.observe.plan import plan
from auditor.observe.shares import Everything
from auditor.storage.store import Store

PARTS = ("plan", "read", "digest", "statistics", "joint")
"""What is done of the work; each includes those before it. ``read``: every byte, in the order in which it is measured,
two files in lock-step where their tensors are compared."""


@dataclass(frozen=True, slots=True)
class Some:
    """Kernels that measure, compare, or do neither."""

    inner: Kernels
    measures: bool
    compares: bool
    name: str = "some"
    sweeps: bool = True

    def measure(self, buffer: Bytes, dtype: DType, runs: Runs, totals: NDArray[np.void]) -> None:
        if self.measures:
            self.inner.measure(buffer, dtype, runs, totals)

    def compare(
        self, pairing: Pairing, left: Side, right: Side, length: NDArray[np.int64], start: NDArray[np.int64],
        tally: NDArray[np.void],
    ) -> None:  # fmt: skip
        if self.compares:
            self.inner.compare(pairing, left, right, length, start, tally)

    def sweep(
        self, streams: Sequence[Stream], pairs: Sequence[tuple[Pairing, int, int, NDArray[np.void]]], rows: Rows,
        totals: NDArray[np.void], joints: Sequence[tuple[Joint, Sequence[int], NDArray[np.void]]] = (),
    ) -> int:  # fmt: skip
        if not self.measures:
            streams = [replace(stream, row=-1) for stream in streams]
        return self.inner.sweep(streams, pairs if self.compares else (), rows, totals, joints)


@dataclass(frozen=True, slots=True)
class Pass:
    """One step's pass, as `check --level values` makes it."""

    store: Store
    catalog: Catalog
    rows: NDArray[np.int64]
    pairings: tuple[Pairing, ...]

    def run(self, threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            # Which kernels are named here does not matter: they are replaced where they are used.
            observe(self.store, self.catalog, self.rows, Everything(pool), pairings=self.pairings, kernels="numpy")


def passes(store: Store) -> list[Pass]:
    """Of all steps below the store's root."""
    found = []
    for source in (step for run in discover(store) for step in run.steps):
        catalog = source.adapter.read(store, source.folder, source.match, Options())
        pairings = tuple(p for item in invariants() if item.pairings for p in item.pairings(catalog))
        found.append(Pass(store, catalog, wanted_rows(catalog), pairings))
    return found


def actions(store: Store, kernels: str, threads: int) -> dict[str, Callable[[], None]]:
    """One action a part, over all steps."""
    work = passes(store)

    def plans() -> None:
        for one in work:
            plan(one.catalog, one.rows, one.pairings)

    def do(part: str) -> Callable[[], None]:
        def run() -> None:
            with only(part, kernels):
                for one in work:
                    one.run(threads)

        return run

    return {part: plans if part == "plan" else do(part) for part in PARTS}


@contextmanager
def only(part: str, kernels: str) -> Iterator[None]:
    """While it lasts, units of work are done with kernels that stop after ``part``."""
    chosen = Some(choose(0, kernels), part in ("digest", "statistics", "joint"), part == "joint")
    with ExitStack() as stack:
        stack.enter_context(patch.object(unit, "choose", lambda *_: chosen))
        if part == "digest":
            (_digests_of_numba if kernels == "numba" else _digests_of_numpy)(stack)
        yield


def _digests_of_numpy(stack: ExitStack) -> None:
    nothing = patch.object(numpy_kernels, "statistics_of_rows", lambda rows, dtype: np.zeros(len(rows), OBSERVED))
    stack.enter_context(nothing)


def _digests_of_numba(stack: ExitStack) -> None:
    """The compiled loops do everything at once; forms that are opaque at every width leave the statistics out."""
    from auditor.observe import compiled_kernels, compiled_loops, compiled_vectors

    forms = (*compiled_vectors.FORMS, *(compiled_vectors.Form(width, "opaque") for width in (2, 4, 8)))
    first = len(compiled_vectors.FORMS)
    numbers = {1: 0, 2: first, 4: first + 1, 8: first + 2}
    for module in (compiled_vectors, compiled_loops, compiled_kernels):
        stack.enter_context(patch.object(module, "FORMS", forms))
    by_width = lambda dtype: numbers[np.dtype(dtype.carrier).itemsize]  # noqa: E731
    stack.enter_context(patch.object(compiled_kernels, "_form", by_width))
