"""Checkpoints by megatron-core's ``dist_checkpointing`` (``--ckpt-format torch_dist``), of Megatron-LM and NeMo 2.

A step is written by ``torch.distributed.checkpoint`` in Megatron's own dialect: layers are stacked, the optimizer's
state lies under its parameters' names, what isn't sharded is in ``common.pt``, and ``metadata.json`` commits the save.
Of replicas one is written. Steps by the older ``zarr`` backend have an array for each tensor in the place of the index.
"""

from __future__ import annotations

from collections.abc import Iterator

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer, folder_name
from auditor.adapters.hugging_face.files import open_json
from auditor.adapters.megatron_dist.catalog import BACKEND, MegatronDistReading
from auditor.adapters.megatron_dist.files import (
    COMMON,
    CONFIG,
    Recorded,
    inner,
    is_of_arrays,
    is_weights_of_nemo,
    number_in,
)
from auditor.adapters.megatron_dist.zarr_backend import ZARR
from auditor.adapters.megatron_legacy.adapter import MegatronLegacy
from auditor.adapters.step_file import StepFile
from auditor.adapters.zarr_tree.files import files_below
from auditor.model.catalog import Catalog
from auditor.storage.store import Entry, Store

_ARCHIVE = ".nemo"


class MegatronDist:
    """The adapter."""

    name = "megatron-dist"
    looks_for = "metadata.json with sharded_backend, common.pt and .metadata; NeMo's folder with these in weights/"

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """By the names of its files, and by what ``metadata.json`` says of the backend.

        The step is the folder's number where Megatron or NeMo gave the name: a single stale ``common.pt`` must not
        decide. Else what that file records.
        """
        archive = next((name for name in folder.files if name.endswith(_ARCHIVE)), None)
        if archive is not None and not folder.folders:
            return Declined(f"{archive} is a tar archive, which is not read: unpack it (tar -xf {archive})", 0.9)
        if folder.alone:
            return Declined("it is one file of several that make up a step", 0.2)
        files = inner(store, folder)
        if files is None:
            return Declined("it does not hold two of metadata.json, common.pt and .metadata")
        if is_weights_of_nemo(store, folder):
            return Declined("it is a part of the checkpoint in the folder above it", 0.3)
        config = open_json(store, files, CONFIG)
        backend = (config.content or {}).get("sharded_backend")
        if backend is None and config.content is not None:
            return Declined(f"its {CONFIG} names no sharded_backend", 0.5)
        if backend is None and config.content is None and COMMON not in files.files:
            return Declined(f"its {CONFIG} can't be read, and there is no {COMMON}", 0.6)
        beside = "Zarr arrays" if is_of_arrays(store, files) else ".metadata"
        says = f"{CONFIG} says sharded_backend {str(backend)[:64]}" if backend else f"{COMMON} beside {beside}"
        if backend not in (None, BACKEND, ZARR):
            says += ", which is not read"
        named = number_in(folder_name(store, folder))
        if named is not None:
            return Match(named, f"{says}; its step is the folder's number")
        step = Recorded.of(StepFile.read(store, files, COMMON)).step
        told = f"{COMMON} records step {step}" if step else "nothing tells a step"
        return Match(step or 0, f"{says}; {told}", apart=not step)

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """Megatron's tracker, the same in all its formats."""
        return MegatronLegacy().pointer(store, folder)

    def files(self, store: Store, folder: Folder) -> Iterator[Entry]:
        """Every file of a step."""
        files = inner(store, folder)
        if files is None or files is not folder:
            yield from folder.files.values()
        if files is not None:
            yield from files_below(store, files) if is_of_arrays(store, files) else files.files.values()

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one step."""
        files = inner(store, folder) or folder
        return MegatronDistReading(store, folder, files, options).catalog(match.step, self.name)
