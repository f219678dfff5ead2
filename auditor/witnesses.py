"""Where witnesses lie, and how the parts of one step are read: ``.auditor/witness/<step's folder>/rank-*.witness``.

Beside the step and not in it: the step's folder may not exist yet when the witness is taken, and writers clear it,
refuse one that isn't empty, or take every folder in it for something of theirs.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace

from auditor.committed import is_as_committed
from auditor.containers.damage import DamagedError
from auditor.containers.witness_file import read_part
from auditor.discovery import OURS
from auditor.invariants.witnessed import STALE_SECONDS
from auditor.listing import Listing
from auditor.model.witness import Witness, WitnessedTensor, WitnessPart, usable
from auditor.storage.roots import above
from auditor.storage.store import Entry, ObjectMissingError, StorageError, Store, base_name, join

FOLDER = f"{OURS}/witness"
_PART = re.compile(r"rank-(\d{1,7})\.witness", re.A)
MAX_PIECES, MAX_TENSORS = 8_000_000, 1_000_000
"""Of all parts of a step, which are kept in memory together, 280 bytes a piece at most: 2.2 GiB. Tensors of one
description count once."""
MAX_PARTS = 200_000
"""Files that are looked at."""


def part_name(rank: int) -> str:
    """The file of one rank.

    >>> part_name(3)
    'rank-00003.witness'
    """
    return f"rank-{rank:05d}.witness"


def witness_folder(step_path: str) -> str:
    """Where the witness of the step in ``step_path`` (below the root) lies."""
    above, _, name = step_path.rpartition("/")
    return join(join(above, FOLDER), name)


def witness_of(store: Store, path: str, step: int, modified: float) -> Witness | None:
    """What the hook left of the step in ``path``; where that is the root itself, it lies beside the root.

    ``modified``: time of the step's newest file, seconds since the epoch, against which the witness's age is told,
    unless the step is known to be what was committed then (:mod:`auditor.committed`).
    """
    found = (store, path) if path else above(store)
    if found is None:
        return None
    store, path = found
    folder = witness_folder(path)
    witness = read_witness(store, folder, step, modified)
    late = witness is not None and witness.seconds_before > STALE_SECONDS
    if witness is not None and late and is_as_committed(store, folder, path):
        witness.seconds_before = 0.0
    return witness


def witness_entries(listing: Listing, path: str) -> list[Entry]:
    """What lies in the folder of the witness of the step in ``path``."""
    if not path:
        found = above(listing.store)
        listing, path = (Listing(found[0]), found[1]) if found else (listing, "")
    folder = witness_folder(path)
    if not path or folder not in listing.folder(folder.rpartition("/")[0]):
        return []
    with suppress(StorageError):
        return list(listing.store.list(folder))
    return []


def read_witness(store: Store, folder: str, step: int, modified: float = 0.0) -> Witness | None:
    """The witness of ``step`` in ``folder``; None where there is no part of one.

    A part that can't be read or is of something else is named in the result, never raised.
    """
    try:
        entries = sorted((entry for entry in store.list(folder) if _is_part(entry)), key=lambda entry: entry.name)
    except ObjectMissingError:
        return None
    except StorageError as error:
        return Witness([], {folder: str(error)})
    parts: list[WitnessPart] = []
    rejected: dict[str, str] = {}
    if len(entries) > MAX_PARTS:
        rejected[folder] = f"holds {len(entries)} parts, the first {MAX_PARTS} are read"
    num_pieces, tensors = 0, dict[WitnessedTensor, WitnessedTensor]()
    for entry in entries[:MAX_PARTS]:
        if num_pieces > MAX_PIECES or len(tensors) > MAX_TENSORS:
            rejected[entry.name] = f"the others have more than {MAX_PIECES} pieces, or {MAX_TENSORS} tensors"
            continue
        try:
            with store.open(entry.name) as handle:
                part = read_part(handle, entry.name)
        except (DamagedError, StorageError) as error:
            rejected[entry.name] = str(error)
            continue
        if part_name(part.rank) != base_name(entry.name):
            rejected[entry.name] = f"it is of rank {part.rank}"
            continue
        num_pieces += len(part.pieces)
        # Ranks describe the same tensors: one object for all.
        parts.append(replace(part, tensors=tuple(tensors.setdefault(tensor, tensor) for tensor in part.tensors)))
    kept, others = usable(parts, step)
    if not parts and not rejected:
        return None
    return Witness(kept, {**rejected, **others}, modified - max((part.taken for part in kept), default=modified))


def _is_part(entry: Entry) -> bool:
    return not entry.is_folder and _PART.fullmatch(base_name(entry.name)) is not None
