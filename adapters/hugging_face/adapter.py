"""Hugging Face folders: what ``save_pretrained`` and the Trainer write, one file of weights or several with an index.

A folder stores every tensor once, whole, so there is no mesh. Buffers can't be told from parameters. Names are those
of the files. What the model must hold is told by ``config.json`` for the architectures that are known.
Source: huggingface/transformers ``modeling_utils.py``, ``trainer.py`` (5.24); huggingface/peft for adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer, folder_name
from auditor.adapters.file_steps import Holds, are_of_module, matched, step_of_file, steps_of_files
from auditor.adapters.hugging_face.catalog import HuggingFaceReading
from auditor.adapters.hugging_face.components import components_in
from auditor.adapters.hugging_face.files import ADAPTER_KINDS, MODEL_KINDS, kind_of_only, open_json, open_weights
from auditor.adapters.hugging_face.sets import WeightSet, find_set
from auditor.adapters.hugging_face.trainer_files import SCHEDULE, TRAINER_STATE
from auditor.adapters.step_file import StepFile
from auditor.adapters.step_names import step_name
from auditor.model.catalog import Catalog
from auditor.storage.store import Store, base_name

_OWN_NAME = re.compile(r"checkpoint-(\d{1,15})", re.A)
_DEEPSPEED = re.compile(r".*_(?:model|optim)_states\.pt")
_DEEPSPEED_FOLDER = re.compile(r"global_step\d+", re.A)


class HuggingFace:
    """The adapter."""

    name = "hugging-face"
    looks_for = "model.safetensors, pytorch_model.bin or adapter_model.*, or several such files with an index of them"

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """By the names of the weights, and by what their index or first file says."""
        foreign = _foreign(store, folder)
        if foreign:
            return Declined(foreign, 0.4)
        sets = (find_set(store, folder, kind) for kind in (*MODEL_KINDS, *ADAPTER_KINDS))
        weights = next(filter(None, sets), None)
        if weights is None and (held := components_in(store, folder)) is not None:
            match = _matched(store, folder, f"weights of {', '.join(held.sets)}")
            return replace(match, holds=tuple(held.sets))
        only = None if folder.alone else kind_of_only(folder)
        if weights is None and only and step_name(folder_name(store, folder), strict=True):
            weights = find_set(store, folder, only)
        if weights is None:
            near = 0.3 if "config.json" in folder.files else 0.0
            return Declined(
                "it holds no model.safetensors, pytorch_model.bin or adapter_model.*, nor parts of one", near
            )
        return _matched(store, folder, _evidence(store, folder, weights))

    def step_files(self, store: Store, folder: Folder) -> Iterator[Sequence[Folder]]:
        """Safetensors files with names of a script's own: by series, and by themselves."""
        yield from steps_of_files(folder, (".safetensors",), partial(_holds, store))

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """None: nothing names the step to resume from, the Trainer takes the highest number."""
        return None

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one folder."""
        return HuggingFaceReading(store, folder, options).catalog(match.step, self.name)


def _holds(store: Store, folder: Folder) -> Holds | None:
    content = open_weights(store, folder, "", MODEL_KINDS[0]).content
    return None if content is None else Holds.MODEL if are_of_module(content.arrays) else Holds.OTHER


def _foreign(store: Store, folder: Folder) -> str:
    """Why the folder is another framework's although it holds such names; empty where it isn't."""
    if ".metadata" in folder.files:
        return "it holds .metadata, as distributed checkpoints do"
    places = [folder]
    places += [
        Folder.read(store, sub.name) for name, sub in folder.folders.items() if _DEEPSPEED_FOLDER.fullmatch(name)
    ]
    for place in places:
        states = [name for name in place.files if _DEEPSPEED.fullmatch(name)]
        if states:
            where = f"{base_name(place.path)}/" if place is not folder else ""
            return f"its state is DeepSpeed's: it holds {where}{states[0]}"
    return ""


def _evidence(store: Store, folder: Folder, weights: WeightSet) -> str:
    """What in the folder's content says that it is of this format."""
    index = weights.index
    if index is not None and index.weight_map:
        return f"{index.opened.name} names {len(weights.names)} files"
    for name in weights.names:
        if name in folder.files:
            opened = open_weights(store, folder, name, weights.kind)
            if opened.content is not None:
                return f"{name} holds {len(opened.content.arrays)} tensors"
    return f"{next(iter(weights.names), weights.kind.index)} by name, nothing of it could be read"


def _matched(store: Store, folder: Folder, what: str) -> Match:
    """The step: as the Trainer recorded it, else as the folder's name has it."""
    name = folder_name(store, folder)
    if TRAINER_STATE in folder.files:
        state = open_json(store, folder, TRAINER_STATE).content or {}
        step = state.get("global_step")
        if type(step) is int and 0 <= step < 1 << 53:
            match = _OWN_NAME.fullmatch(name)
            named = int(match[1]) if match else None
            if named not in (None, step) and SCHEDULE in folder.files:
                schedule = StepFile.read(store, folder, SCHEDULE)
                if schedule.tree.get("last_epoch") == named:
                    # Two of three: the file is another step's.
                    told = f"{SCHEDULE} was stepped {named} times, as often as the folder's name tells"
                    return Match(named, f"{what}; {told}", named)
            return Match(step, f"{what}; {TRAINER_STATE} records global_step={step}", named)
    number = step_of_file(store, folder) if folder.alone else step_name(name, strict=True)
    return matched(number, None, what, unread=False)
