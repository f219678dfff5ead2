"""Steps of which the listing alone tells that they are what a ledger knows: of those nothing is opened.

What was said of them holds where the same is asked by the same choices, and where all saves before them are unchanged
or deleted as well: then they are judged by what they were judged by. So these are always the first steps of a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from auditor.adapters.adapter import TreeAdapter
from auditor.invariants.neighbours import History, Past
from auditor.ledger.keeper import Keeper, folder_of
from auditor.ledger.record import NUM_HISTORY, StepAccount, files_digest
from auditor.ledger.tree import RecordName
from auditor.listing import Listing
from auditor.model.catalog import Catalog, FileState
from auditor.model.run import PointerState
from auditor.reports import StepReport, step_from_ledger
from auditor.settings import Level
from auditor.sources import StepSource
from auditor.storage.store import Entry, join
from auditor.witnesses import witness_entries


@dataclass(frozen=True, slots=True)
class Known:
    """A step that is as the ledger knows it."""

    source: StepSource
    level: Level
    name: RecordName
    account: StepAccount
    """Told from the step's path."""

    @property
    def identity(self) -> str:
        """As :func:`~auditor.ledger.record.save_identity` of its Catalog."""
        return f"{self.account.step} {files_digest(self.account)}"

    def report(self) -> StepReport:
        """What is said of it."""
        return step_from_ledger(self.account)


@dataclass(slots=True)
class Listed:
    """Digests of what a listing says of steps."""

    listing: Listing
    pointers: Sequence[PointerState]

    def digest(self, source: StepSource) -> str:
        """Of the names and identities of a step's files, its witness among them; empty where some have no identity.

        What lies beside steps may belong to the one that a pointer names.
        """
        path = source.folder.path
        found = hashlib.blake2b(digest_size=16)
        found.update(repr(any(pointer.target == path for pointer in self.pointers)).encode())
        witnessed = witness_entries(self.listing, path)
        for entry in sorted((*self.listing.files(source), *witnessed), key=lambda entry: entry.name):
            if not entry.identity:
                return ""
            found.update(repr((entry.name.removeprefix(path), entry.num_bytes, entry.identity)).encode())
        return found.hexdigest()

    def digest_of_all(self, source: StepSource, catalog: Catalog, seen: Iterable[str]) -> tuple[str, tuple[str, ...]]:
        """The same; empty where more was looked at than is listed. And what was looked for beside it, and isn't there.

        ``seen``: what was looked at to read the Catalog.
        """
        known = {entry.name: entry for entry in self.listing.files(source)}
        listed = all(
            _is_same(known.get(file.name), file.num_bytes, file.identity)
            for file in catalog.files
            if file.state is not FileState.MISSING
        )
        beyond = sorted(name for name in seen if name not in known and self._is_beyond(source, name))
        return self.digest(source) if listed and self.lacks(source, beyond) else "", tuple(beyond)

    def lacks(self, source: StepSource, names: Sequence[str]) -> bool:
        """Whether none of these is there, all of which lie beside the step."""
        above = source.folder.path.rpartition("/")[0]
        if not names or any(name.rpartition("/")[0] != above for name in names):
            return not names
        there = self.listing.folder(above)
        return source.folder.path in there and there.isdisjoint(names)

    def _is_beyond(self, source: StepSource, name: str) -> bool:
        path = source.folder.path
        if name == path:
            return False
        if path and not name.startswith(f"{path}/"):
            # Which steps there are, and where pointers point, is known of every run.
            return name != path.rpartition("/")[0] and name not in {pointer.file for pointer in self.pointers}
        deep = name.removeprefix(f"{path}/" if path else "").count("/") > 1
        return deep and not isinstance(source.adapter, TreeAdapter)


def _is_same(entry: Entry | None, num_bytes: int, identity: str) -> bool:
    return entry is not None and identity != "" and (entry.num_bytes, entry.identity) == (num_bytes, identity)


def known_steps(
    keeper: Keeper, listed: Listed, steps: Iterable[tuple[StepSource, Level]], wanted: Mapping[Level, frozenset[str]],
    *, higher: bool,
) -> list[Known]:  # fmt: skip
    """The first of ``steps``, as far as they and all before them are unchanged and were asked the same.

    ``wanted``: level to the ids of invariants that speak at it; ``higher``: whether what was said at a higher level
    than that of the step is good as well.
    """
    found: list[Known] = []
    before: dict[str, str] = {}
    for source, level in steps:
        digest = listed.digest(source)
        known = digest and _known(keeper, listed, source, level, digest, before, wanted, higher=higher)
        if not known:
            break
        found.append(known)
        before[known.account.format] = known.identity
    return found


def _known(
    keeper: Keeper, listed: Listed, source: StepSource, level: Level, digest: str, before: Mapping[str, str],
    wanted: Mapping[Level, frozenset[str]], *, higher: bool,
) -> Known | None:  # fmt: skip
    folder = folder_of(keeper.location, source.folder.path)
    for name, account in sorted(keeper.accounts.items(), key=lambda item: keeper.rank(item[1]), reverse=True):
        said = account.said
        if (name.step, account.folder, said.listing) != (source.match.step, folder, digest):
            continue
        at = Level.__members__.get(said.level, Level.NAMES)
        if at != level and not (higher and at > level):
            continue
        whole = wanted[at] <= said.judgements.keys() and files_digest(account) == name.identity
        same = whole and keeper.holds(said, before.get(account.format, ""))
        above = source.folder.path.rpartition("/")[0]
        if same and listed.lacks(source, [join(above, name) for name in said.absent]):
            judgements = {key: said.judgements[key] for key in sorted(wanted[at])}
            account = replace(account, said=replace(said, judgements=judgements))
            return Known(source, at, name, keeper.told(account, source.folder.path))
    return None


def kept_history(catalog: Catalog, history: History) -> NDArray[np.float64]:
    """What a ledger keeps of the saves so far."""
    columns = [history.of(what.role, what.name).numbers() for what in catalog.tensors]
    return np.array(columns, np.float64).reshape(-1, NUM_HISTORY).T


def history_of(account: StepAccount, kept: NDArray[np.float64]) -> History:
    """What :func:`kept_history` made."""
    pasts = map(Past.of, kept.T.tolist())
    found = {(what.role, what.name): past for what, past in zip(account.tensors, pasts, strict=True)}
    return History({key: past for key, past in found.items() if past.num_saves})
