"""The files of a checkpoint by megatron-core's ``dist_checkpointing``, and what they record of the run.

    iter_<NNNNNNN>/common.pt            what is not sharded: arguments, iteration, parameter groups; rank 0, first
    iter_<NNNNNNN>/.metadata            which part of which tensor lies where, as torch.distributed.checkpoint writes it
    iter_<NNNNNNN>/__<rank>_<n>.distcp
    iter_<NNNNNNN>/metadata.json        which backend wrote it; written last, by rank 0: it commits the save
    <step>/weights/…, <step>/context/…  NeMo 2: the same in a folder of its own

Source: megatron-core 0.16 ``dist_checkpointing/serialization.py`` (save), ``core.py``, ``strategies/common.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from auditor.adapters.adapter import MAX_RANKS, Folder
from auditor.adapters.dcp.files import DATA, METADATA
from auditor.adapters.megatron_legacy.files import Degrees, recorded_degrees
from auditor.adapters.megatron_names import megatron_args
from auditor.adapters.step_file import StepFile
from auditor.containers.zarr_v2 import DOCUMENT
from auditor.storage.store import ObjectMissingError, StorageError, Store, base_name

COMMON, CONFIG = "common.pt", "metadata.json"
_WEIGHTS, _CONTEXT = "weights", "context"
_LOOKED_INTO = 16
"""Folders of a step that are opened to see whether they are arrays."""
_STEP_FOLDER = re.compile(r"iter_(\d{1,15})", re.A)
_STEP_IN_NAME = re.compile(r"(?:.*[-_.])?step=(\d{1,15})(?:[-_.].*)?", re.A)


def holds_step(folder: Folder) -> bool:
    """Whether files of this format lie in ``folder``; the marker may be lacking, or anything else but two of them."""
    data = METADATA in folder.files or any(DATA.fullmatch(name) for name in folder.files)
    return (COMMON in folder.files) + (CONFIG in folder.files) + data > 1


def is_of_arrays(store: Store, folder: Folder) -> bool:
    """Whether a step's files are of the older backend: no index, no data file, but a folder that is a Zarr array."""
    if METADATA in folder.files or any(DATA.fullmatch(name) for name in folder.files):
        return False
    looked_into = islice(folder.folders.values(), _LOOKED_INTO)
    try:
        return any(DOCUMENT in Folder.read(store, entry.name).files for entry in looked_into)
    except StorageError:
        return False


def inner(store: Store, folder: Folder) -> Folder | None:
    """The folder of a step in which the files lie: itself, or NeMo's ``weights`` in it."""
    if holds_step(folder) or _only_begun(store, folder):
        return folder
    if CONFIG in folder.files and (not folder.folders or is_of_arrays(store, folder)):
        return folder
    if _WEIGHTS in folder.folders and _CONTEXT in folder.folders:
        below = Folder.read(store, folder.folders[_WEIGHTS].name)
        return below if holds_step(below) else None
    return None


def _only_begun(store: Store, folder: Folder) -> bool:
    """Whether a save got no further than its first file, or than its arrays."""
    named = {*folder.files} == {COMMON} and _STEP_FOLDER.fullmatch(base_name(folder.path)) is not None
    return named and (not folder.folders or is_of_arrays(store, folder))


def is_weights_of_nemo(store: Store, folder: Folder) -> bool:
    """Whether a folder is the part of a step that the folder above it is."""
    above, _, name = folder.path.rpartition("/")
    if not folder.path or name != _WEIGHTS:
        return False
    try:
        return _CONTEXT in Folder.read(store, above).folders
    except ObjectMissingError:
        return False


def number_in(name: str) -> int | None:
    """The step that a folder's name tells, as Megatron-LM or NeMo name it."""
    found = _STEP_FOLDER.fullmatch(base_name(name)) or _STEP_IN_NAME.fullmatch(base_name(name))
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Recorded:
    """What ``common.pt`` says."""

    file: StepFile
    args: Mapping[str, object]
    degrees: Degrees | None
    """The mesh; None where it isn't recorded, or not one that can be."""

    @classmethod
    def of(cls, file: StepFile) -> Recorded:
        """Read what matters from an opened ``common.pt``."""
        degrees = recorded_degrees(file)
        if degrees is not None and (degrees.num_ranks > MAX_RANKS or degrees.dp % degrees.ep):
            degrees = None
        return cls(file, megatron_args(file), degrees)

    @property
    def fused(self) -> bool:
        """Whether the model's own names of norms are those that they are stored by."""
        return self.args.get("transformer_impl") != "local"

    @property
    def tied(self) -> bool:
        """Whether input and output share one embedding."""
        return self.args.get("untie_embeddings_and_output_weights") is False

    @property
    def step(self) -> int | None:
        """The step that it records."""
        for key in ("iteration", "global_step"):
            value: Any = self.file.tree.get(key)
            if type(value) is int and 0 <= value < 1 << 53:
                return value
        return None
