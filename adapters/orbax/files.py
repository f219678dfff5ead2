"""The folders of one Orbax checkpoint: which of them are items, what else lies there, and whether it was finished.

<step>/_CHECKPOINT_METADATA    by CheckpointManager since 0.7
<step>/<item>/…                one folder an item; a checkpointer alone writes an item where it is told to
<step>.orbax-checkpoint-tmp/   a save that was not finished; older versions append -<timestamp>
checkpoint_<step>.tmp-<time>/  the same by t5x
commit_success.txt             written last; older versions wrote it on object stores alone
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from auditor.adapters.adapter import Folder
from auditor.adapters.orbax.arrays import DOCUMENTS, PROCESS
from auditor.adapters.step_names import last_number
from auditor.containers.ocdbt import MANIFEST
from auditor.storage.store import ObjectMissingError, Store, join

STEP_METADATA, TREE, SHARDING, WRITTEN = "_CHECKPOINT_METADATA", "_METADATA", "_sharding", "array_metadatas"
MARKER, V1_MARKER, STRINGS, LEGACY = "commit_success.txt", "orbax.checkpoint", "_strings.json", "checkpoint"
TEMPORARY = ".orbax-checkpoint-tmp"
_MARKED = re.compile(r"(?P<name>.+?)(?:\.orbax-checkpoint-tmp.*|\.tmp-[0-9]{1,20})", re.A | re.S)
"""Names of what is being written: Orbax's and t5x's."""
KNOWN = frozenset(
    {STEP_METADATA, TREE, SHARDING, MARKER, V1_MARKER, STRINGS, LEGACY, MANIFEST, "descriptor", "metadata"}
)
"""Files that loaders look for."""
_LOOKED_INTO = 16
"""Folders of an item that are opened to see whether they are arrays."""


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a checkpoint."""

    name: str
    """Without what marks it as unfinished; empty for a checkpoint that is one item."""
    folder: Folder


def is_lock(name: str) -> bool:
    """Whether a file is what TensorStore writes to before it gives it its name, or locks it by."""
    return name.endswith(".__lock")


def without_mark(name: str) -> str:
    """A folder's name without what marks it as unfinished."""
    found = _MARKED.fullmatch(name)
    return found["name"] if found else name


def is_temporary(name: str) -> bool:
    """Whether a folder's name is that of one that is being written."""
    return without_mark(name) != name


def step_in(name: str) -> int | None:
    """The number at the end of a folder's name."""
    return last_number(without_mark(name))


def is_item(store: Store, folder: Folder) -> bool:
    """Whether a folder holds arrays as Orbax lays them out.

    Raises:
        StorageError: storage failed.
    """
    if TREE in folder.files or MANIFEST in folder.files:
        return True
    if any(name.startswith("ocdbt.process_") for name in folder.folders):
        return True
    if LEGACY not in folder.files and SHARDING not in folder.files:
        return False
    inner = list(folder.folders.values())[:_LOOKED_INTO]
    return any(not frozenset(DOCUMENTS).isdisjoint(Folder.read(store, entry.name).files) for entry in inner)


def items_of(store: Store, folder: Folder) -> list[Item]:
    """The items of a checkpoint, sorted by name; none where the folder is no checkpoint.

    Raises:
        StorageError: storage failed.
    """
    if is_item(store, folder):
        return [Item("", folder)]
    marked = is_marked(folder)
    found = []
    for name, entry in folder.folders.items():
        # Steps that a checkpointer wrote side by side are no items of one.
        if not marked and step_in(name) is not None:
            return []
        inner = Folder.read(store, entry.name)
        if not marked and is_marked(inner):
            return []
        if not PROCESS.fullmatch(name) and is_item(store, inner):
            found.append(Item(without_mark(name), inner))
    return found


def is_marked(folder: Folder) -> bool:
    """Whether a folder has a file that only checkpoints have, not their items."""
    return STEP_METADATA in folder.files or V1_MARKER in folder.files


def is_inner(store: Store, folder: Folder) -> bool:
    """Whether a folder is a part of the checkpoint in the folder above it.

    Raises:
        StorageError: storage failed.
    """
    above, _, name = folder.path.rpartition("/")
    if PROCESS.fullmatch(name):
        return True
    if not name or is_marked(folder) or (step_in(name) is not None and not above):
        return False
    if step_in(name) is not None:
        # A run may have thousands of steps: they are not all listed for each of them.
        return any(_is_there(store, join(above, marker)) for marker in (STEP_METADATA, V1_MARKER))
    return any(item.folder.path == folder.path for item in items_of(store, Folder.read(store, above)))


def finished_twin(store: Store, folder: Folder) -> bool:
    """Whether beside an unfinished checkpoint the finished one of its name is there."""
    return bool(folder.path) and _is_there(store, without_mark(folder.path))


def left_behind(store: Store, folder: Folder) -> str:
    """The path of what an earlier attempt at this checkpoint left; empty where nothing is there."""
    path = f"{folder.path}{TEMPORARY}"
    return path if folder.path and not is_temporary(folder.path) and _is_there(store, path) else ""


def _is_there(store: Store, path: str) -> bool:
    try:
        store.stat(path)
        return True
    except ObjectMissingError:
        return False
