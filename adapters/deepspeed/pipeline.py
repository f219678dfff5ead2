"""DeepSpeed pipeline checkpoints; with Megatron's layers, the layout in which BLOOM-176B was saved.

Layer files hold the weights of one pipeline layer and tensor-parallel rank. The fp32 masters and both moments lie in
zero files, as flat partitions over data-parallel ranks whose order is ``param_shapes`` of the mp_rank files; without
ZeRO in the mp_rank files. Tensors are called by their optimizer-side names, ``3.input_layernorm.weight``.
Sources: DeepSpeed ``runtime/bf16_optimizer.py``, ``runtime/pipe/module.py``; Megatron-DeepSpeed ``GPTModelPipe``.
"""

from __future__ import annotations

import re

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer, folder_name
from auditor.adapters.deepspeed.pipeline_catalog import PipelineReading
from auditor.adapters.deepspeed.pipeline_files import LAYER, MODEL, ZERO
from auditor.adapters.deepspeed.records import step_pointer
from auditor.adapters.step_file import StepFile
from auditor.model.catalog import Catalog
from auditor.storage.store import Store, base_name

_STEP_FOLDER = re.compile(r"(?:.*\D)?(\d+)")
_OWN_NAME = re.compile(r"global_step(\d{1,15})")
"""What DeepSpeed calls a step; people may call it anything (``save_checkpoint(tag=…)``)."""


class DeepSpeedPipeline:
    """The adapter."""

    name = "deepspeed-pipeline"
    looks_for = (
        "layer_*-model_states.pt beside mp_rank_*_model_states.pt, which records global_steps and holds no module"
    )

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """By the two kinds of files, and by what an mp_rank file records."""
        models = [name for name in folder.files if MODEL.fullmatch(name)]
        layers = [name for name in folder.files if LAYER.fullmatch(name)]
        zeros = [name for name in folder.files if ZERO.fullmatch(name)]
        if "zero" in folder.folders and not zeros:
            return Declined("its optimizer state lies in zero/: a universal checkpoint", 0.6)
        if not models and not layers:
            return Declined("no file is called mp_rank_*_model_states.pt or layer_*", 0.3 if zeros else 0.0)
        number = _STEP_FOLDER.fullmatch(base_name(folder.path))
        for name in models:
            file = StepFile.read(store, folder, name)
            steps = file.tree.get("global_steps")
            holds_module = file.tree.get("module") is not None
            if not layers and (folder.alone or holds_module or "param_shapes" not in file.tree):
                return Declined(f"there is no layer_*-model_states.pt beside {name}, or it holds a module itself", 0.5)
            if "param_shapes" in file.tree and isinstance(steps, int) and 0 <= steps < 1 << 53:
                reason = f"{len(layers)} layer files; {name} records param_shapes and global_steps={steps}"
                named = _OWN_NAME.fullmatch(folder_name(store, folder))
                return Match(steps, reason, int(named[1]) if named else None)
        if not layers:
            return Declined(f"{len(models)} mp_rank files but no layer_*-model_states.pt", 0.5)
        if number is None:
            return Declined("its files are named as they should, but none tells the step", 0.8)
        return Match(int(number[1]), f"{len(layers)} layer files by name; no mp_rank file could be read")

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """``latest``: the name of a step folder, without newline."""
        return step_pointer(store, folder, "latest")

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one step."""
        return PipelineReading(store, folder, options).catalog(match.step, self.name)
