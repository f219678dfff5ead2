"""The register of all invariants."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from auditor.invariants import (
    cast,
    configuration,
    coverage,
    integrity,
    integrity_kept,
    integrity_runs,
    integrity_states,
    metadata,
    motion,
    motion_copies,
    motion_records,
    motion_sizes,
    motion_steps,
    numerics,
    optimizer,
    optimizer_records,
    optimizer_twins,
    optimizer_values,
    outliers,
    random_states,
    reference,
    replica,
    scales,
    schedule,
    security,
    stripes,
    tying,
    witnessed,
)
from auditor.invariants.invariant import FAMILIES, Invariant

_MODULES = (
    integrity, integrity_runs, integrity_states, integrity_kept, coverage, metadata, replica, stripes, cast, optimizer,
    optimizer_records, optimizer_values, optimizer_twins, numerics, outliers, scales, motion, motion_copies,
    motion_records, motion_sizes, motion_steps, tying, reference, security, configuration, witnessed, schedule,
    random_states,
)  # fmt: skip


@lru_cache(maxsize=1)
def invariants() -> tuple[Invariant, ...]:
    """All invariants in order of precedence."""
    found = [item for module in _MODULES for item in module.INVARIANTS]
    return tuple(sorted(found, key=lambda invariant: invariant.rank))


def find(wanted: str) -> Invariant | None:
    """The invariant with this id or name, in any case of letters."""
    return next((item for item in invariants() if wanted.upper() in (item.id, item.name.upper())), None)


def select(chosen: Sequence[str], ignored: Sequence[str]) -> tuple[Invariant, ...]:
    """Invariants named by ``chosen`` (all, if empty) less those named by ``ignored``; names are ids or families.

    Raises:
        LookupError: a name is neither.
    """
    known = {item.id for item in invariants()} | set(FAMILIES)
    for name in (*chosen, *ignored):
        if name.upper() not in known:
            raise LookupError(f"{name} is neither an invariant nor a family; `auditor invariants` lists them")

    def named(item: Invariant, names: Sequence[str]) -> bool:
        return any(name.upper() in (item.id, item.family) for name in names)

    return tuple(item for item in invariants() if (not chosen or named(item, chosen)) and not named(item, ignored))
