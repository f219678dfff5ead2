"""What became of a step since it was audited, and to which branch of the run it belongs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from auditor.ledger.record import StepAccount, StepRecord, below_root, catalog_digest
from auditor.model.catalog import Catalog, FileState, Role, Scalar
from auditor.model.observation import Observations, Read
from auditor.model.run import Change, ChangeKind

Lineage = tuple[tuple[int, int], ...]
"""Branch and the first step saved in it, from the beginning of the run to the step in question."""
BEGINNING: Lineage = ((0, 0),)


def change_since(before: StepRecord, catalog: Catalog, observations: Observations) -> Change | None:
    """How a step differs from what was audited under its number; None where it holds the same."""
    old = {file.name: file for file in before.account.files if file.state is FileState.PRESENT}
    new = {catalog.within(file.name): file for file in catalog.files if file.state is FileState.PRESENT}
    kept = {name for name in old.keys() & new.keys() if old[name].identity == new[name].identity != ""}
    written = sorted(old.keys() & new.keys() - kept)
    same, other = _compared(before, catalog, observations, written)
    if written and not other and not old.keys() - new.keys() and _equal_contents(before, catalog, observations):
        return None
    changed = tuple(name for name in written if name in other)
    rewritten = tuple(name for name in written if name not in other and name not in same)
    lost = tuple(sorted(old.keys() - new.keys()))
    if not (changed or rewritten or lost):
        return None
    kind = ChangeKind.PARTLY if kept else ChangeKind.ANEW

    def told(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(below_root(name, catalog.path) for name in names)

    return Change(kind, told(changed), told(rewritten), told(lost), len(kept))


def _compared(
    before: StepRecord, catalog: Catalog, observations: Observations, names: Iterable[str]
) -> tuple[set[str], set[str]]:  # fmt: skip
    """Of these files, those that hold the same as then, and those that hold something else."""
    same, other = set[str](), set[str]()
    account = before.account
    sizes = {file.name: file.num_bytes for file in account.files}
    numbers = {catalog.within(file.name): number for number, file in enumerate(catalog.files)}
    parallel = account.catalog == catalog_digest(catalog)
    scalars = {name: _scalars(account.scalars, name) for name in names}
    for name in names:
        number = numbers[name]
        rows = np.flatnonzero(catalog.pieces.file == number)
        weights = len(rows) > 0 or any(file.weights for file in account.files if file.name == name)
        if not weights:
            continue
        now = [scalar for scalar in catalog.scalars if scalar.file == catalog.files[number].name]
        if not parallel or sizes[name] != catalog.files[number].num_bytes or _values(now) != scalars[name]:
            other.add(name)
            continue
        one, two = before.pieces[rows], observations.pieces[rows]
        both = (one["read"] == Read.DONE) & (two["read"] == Read.DONE)
        if any((one[lane][both] != two[lane][both]).any() for lane in ("lane0", "lane1")):
            other.add(name)
        elif both[_readable(catalog)[rows]].all():
            same.add(name)
    return same, other


def _scalars(scalars: Iterable[Scalar], name: str) -> list[tuple[str, str, str]]:
    return _values([scalar for scalar in scalars if scalar.file == name])


def _values(scalars: Iterable[Scalar]) -> list[tuple[str, str, str]]:
    return sorted((scalar.name, scalar.tensor, repr(scalar.value)) for scalar in scalars)


def _equal_contents(before: StepRecord, catalog: Catalog, observations: Observations) -> bool:
    """Whether all that was read both times is the same, piece by piece: files that were only copied or touched."""
    if before.account.catalog != catalog_digest(catalog):
        return False
    one, two = before.pieces, observations.pieces
    both = (one["read"] == Read.DONE) & (two["read"] == Read.DONE)
    if not both.any() or not both[_readable(catalog)].all():
        return False
    return all((one[lane][both] == two[lane][both]).all() for lane in ("lane0", "lane1"))


def _readable(catalog: Catalog) -> NDArray[np.bool_]:
    """Which pieces a pass at level ``values`` reads: no padding, nothing packed."""
    told = [what.role is not Role.PADDING and not what.dtype.packed for what in catalog.tensors]
    return np.array(told or [True])[catalog.pieces.tensor]


def continued(previous: Lineage, step: int, modified: float, known: Iterable[StepAccount], *, anew: bool) -> Lineage:
    """The branch of a step that was not audited before, or that was saved again (``anew``).

    It is that of the step before, unless the run was set back: then the ledger has a save of this step, or a later
    step saved earlier, on that branch.
    """
    accounts = list(known)
    here = previous[-1][0]
    on_branch = [account for account in accounts if account.lineage and account.lineage[-1][0] == here]
    set_back = any(
        (account.step == step and anew) or (account.step > step and account.said.state.modified < modified)
        for account in on_branch
    )
    if not set_back:
        return previous
    newest = max((branch for account in accounts for branch, _ in account.lineage), default=here)
    return (*previous, (newest + 1, step))


def is_on(lineage: Lineage, account: StepAccount) -> bool:
    """Whether a step is on the way to the end of a lineage."""
    if not account.lineage:
        return False
    branch = account.lineage[-1][0]
    for place, (number, _) in enumerate(lineage):
        if number == branch:
            following = lineage[place + 1][1] if place + 1 < len(lineage) else None
            return following is None or account.step < following
    return False
