"""DeepSpeed's universal checkpoints: every parameter's state whole, in files of its own, for resuming on any mesh.

    <tag>/zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt     {param: tensor, cat_dim: …}; from stage 3 flat, alone
                           step.pt                                 the count of its steps, where the source kept one
    <tag>/zero/optimizer_state.pt                                  what optimizers keep besides
    <tag>/mp_rank_*_model_states.pt or zero_pp_rank_*              copied from the source

What must be there follows from ``param_shapes`` of the model files.
Source: DeepSpeed ``checkpoint/ds_to_universal.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer, folder_name
from auditor.adapters.deepspeed.files import MODEL
from auditor.adapters.deepspeed.records import step_in, step_pointer
from auditor.adapters.deepspeed.universal_catalog import STATE, UniversalReading
from auditor.adapters.step_file import StepFile
from auditor.model.catalog import Catalog
from auditor.storage.store import Entry, StorageError, Store, base_name, join

_STEP_FOLDER = re.compile(r"(?:.*\D)?(\d{1,15})\D*")
_OWN_NAME = re.compile(r"global_step(\d{1,15})(?:_universal)?")
_MAX_LOOKED = 8
"""Folders of parameters that are looked into to recognise a step."""


class DeepSpeedUniversal:
    """The adapter."""

    name = "deepspeed-universal"
    looks_for = "zero/<parameter>/fp32.pt beside *_model_states.pt that records global_steps"

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """By the files of some parameters, and by what a model file records."""
        if "zero" not in folder.folders:
            return Declined("it has no folder zero")
        inside = Folder.read(store, join(folder.path, "zero"))
        if not any(self._is_state(store, entry.name) for entry in [*inside.folders.values()][:_MAX_LOOKED]):
            return Declined("no folder in zero holds fp32.pt", 0.3)
        number = _STEP_FOLDER.fullmatch(folder_name(store, folder))
        for name in folder.files:
            if MODEL.fullmatch(name):
                step = step_in(StepFile.read(store, folder, name))
                if step is not None:
                    named = _OWN_NAME.fullmatch(folder_name(store, folder))
                    reason = f"{len(inside.folders)} parameters in zero; {name} records global_steps={step}"
                    return Match(step, reason, int(named[1]) if named else None, ("zero",))
        if number is None:
            return Declined("zero holds states of parameters, but nothing tells the step", 0.8)
        return Match(int(number[1]), f"{len(inside.folders)} parameters in zero", None, ("zero",))

    @staticmethod
    def _is_state(store: Store, path: str) -> bool:
        return any(base_name(entry.name) in STATE for entry in store.list(path) if not entry.is_folder)

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """``latest_universal``: the name of a step folder."""
        return step_pointer(store, folder, "latest_universal")

    def files(self, store: Store, folder: Folder) -> Iterator[Entry]:
        """Every file of a step, those of the parameters included."""
        yield from folder.files.values()
        try:
            inside = Folder.read(store, join(folder.path, "zero"))
            yield from inside.files.values()
            for entry in inside.folders.values():
                yield from (found for found in store.list(entry.name) if not found.is_folder)
        except StorageError:
            return

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one step."""
        return UniversalReading(store, folder, options).catalog(match.step, self.name)
