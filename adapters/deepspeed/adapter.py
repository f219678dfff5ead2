"""Checkpoints of a plain DeepSpeed engine: no pipeline, ZeRO of any stage or none, in fp32, fp16 or bf16.

Weights lie in ``mp_rank_*_model_states.pt`` (in stage 3 in no file: only fp32 masters are), masters and moments in zero
files, as flat buffers whose order is ``param_shapes`` of the model files. Tensors are called as in the module.
Source: DeepSpeed ``runtime/engine.py``, ``utils/zero_to_fp32.py``.
"""

from __future__ import annotations

import re
from dataclasses import replace

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer, folder_name
from auditor.adapters.deepspeed.catalog import EngineReading
from auditor.adapters.deepspeed.files import MODEL, ZERO
from auditor.adapters.deepspeed.records import step_in, step_pointer
from auditor.adapters.deepspeed.wrapped import inner_folder, trainers_step
from auditor.adapters.step_file import StepFile
from auditor.model.catalog import Catalog
from auditor.storage.store import Store, base_name

_STEP_FOLDER = re.compile(r"(?:.*\D)?(\d{1,15})")
_OWN_NAME = re.compile(r"global_step(\d{1,15})")
"""What DeepSpeed calls a step; people may call it anything (``save_checkpoint(tag=…)``)."""
_TRAINERS_NAME = re.compile(r"checkpoint-(\d{1,15})")
_LAYER = re.compile(r"layer_\d+-.*model_states\.pt")
_MAX_TRIED = 16
"""Model files that are opened to recognise a step, of thousands."""


class DeepSpeed:
    """The adapter."""

    name = "deepspeed"
    looks_for = "mp_rank_*_model_states.pt or zero_pp_rank_*_model_states.pt that records global_steps and a module"

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """By the names of model files, and by what one of them records; of a trainer's folder, those inside it."""
        inner = inner_folder(store, folder)
        if inner is None:
            return self._recognise(store, folder)
        found = self._recognise(store, inner) if inner.files else None
        named = _TRAINERS_NAME.fullmatch(folder_name(store, folder))
        held = tuple(name for name in folder.folders if name == base_name(inner.path) or _OWN_NAME.fullmatch(name))
        if isinstance(found, Match):
            number = int(named[1]) if named else None
            # What the Trainer records and called the folder decides against the engine, whose file may be stale.
            step = number if number is not None and number == trainers_step(store, folder) else found.step
            return replace(found, step=step, named_step=number, holds=held)
        if inner.files or not named:
            return found or Declined(f"latest names {base_name(inner.path)}, which is not there", 0.7)
        return Match(int(named[1]), f"a Trainer's folder; latest names {base_name(inner.path)}, which is not there")

    def _recognise(self, store: Store, folder: Folder) -> Match | Declined:
        models = [name for name in folder.files if MODEL.fullmatch(name)]
        if "zero" in folder.folders and not any(ZERO.fullmatch(name) for name in folder.files):
            return Declined("its optimizer state lies in zero/: a universal checkpoint", 0.6)
        if any(_LAYER.fullmatch(name) for name in folder.files):
            return Declined("layer_* files: a pipeline's", 0.5)
        if not models:
            zeros = any(ZERO.fullmatch(name) for name in folder.files)
            return Declined("no file is called mp_rank_*_model_states.pt", 0.3 if zeros else 0.0)
        steps: list[int] = []
        odd = ""
        number = _STEP_FOLDER.fullmatch(base_name(folder.path))
        stated = int(number[1]) if number else None
        for name in models[:_MAX_TRIED]:
            file = StepFile.read(store, folder, name)
            step = step_in(file)
            if file.content and (step is None or file.tree.get("module") is None):
                odd = odd or name
                continue
            steps += [step] if step is not None else []
            # A stale file must not decide alone: the folder's number or another file has to agree.
            if step is not None and (step == stated or steps.count(step) > 1):
                return self._match(store, folder, step, name)
        if steps:
            return self._match(store, folder, steps[0], models[0])
        if odd:
            return Declined(f"{odd} records no global_steps, or holds no module", 0.6)
        if stated is None:
            return Declined("its files are named as they should, but none tells the step", 0.8)
        return Match(stated, f"{len(models)} model files by name; none could be read")

    @staticmethod
    def _match(store: Store, folder: Folder, step: int, name: str) -> Match:
        named = _OWN_NAME.fullmatch(folder_name(store, folder))
        return Match(step, f"{name} records global_steps={step} and a module", int(named[1]) if named else None)

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """``latest``: the name of a step folder, without newline."""
        return step_pointer(store, folder, "latest")

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one step."""
        inner = inner_folder(store, folder)
        outer = folder if inner else None
        return EngineReading(store, inner or folder, options, outer).catalog(match.step, self.name)
