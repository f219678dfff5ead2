"""Steps that hold several models, each in a folder of its own, as training scripts of diffusers leave them.

    checkpoint-<N>/unet/diffusion_pytorch_model.safetensors, unet_ema/…, optimizer.bin, random_states_<R>.pkl

``<name>_ema`` beside ``<name>`` is a moving average of its weights. Tensors are called by component and name.
Source: huggingface/diffusers ``training_utils.py`` (``EMAModel.save_pretrained``),
``examples/text_to_image/train_text_to_image.py`` (save_model_hook); by these sources, no such script was run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from auditor.adapters.adapter import Folder
from auditor.adapters.hugging_face.files import component_kinds
from auditor.adapters.hugging_face.sets import WeightSet, find_set
from auditor.model.catalog import Role
from auditor.storage.store import Entry, Store

MAX_COMPONENTS = 32
_SAVED_TOGETHER = re.compile(r"optimizer(?:_\d{1,3})?\.bin|random_states_\d{1,6}\.pkl|model_index\.json")
"""What accelerate's ``save_state`` or a pipeline's ``save_pretrained`` leaves beside the components."""
_AVERAGE = "_ema"


@dataclass(frozen=True, slots=True)
class Components:
    """The models of one step."""

    folder: Folder
    """The step's, with what lies in the components' folders among its files."""
    sets: Mapping[str, WeightSet]
    """By component."""

    def called(self, part: str, name: str) -> tuple[Role, str]:
        """The role and the name in the step of what a component calls ``name``."""
        of = part.removesuffix(_AVERAGE)
        if of != part and of in self.sets:
            return Role.EMA, f"{of}.{name}"
        return Role.PARAMETER, f"{part}.{name}" if part else name


def components_in(store: Store, folder: Folder) -> Components | None:
    """The components in the folders of a folder that one save wrote; None where it holds none.

    Raises:
        StorageError: storage failed.
    """
    if folder.alone or not any(map(_SAVED_TOGETHER.fullmatch, folder.files)):
        return None
    files: dict[str, Entry] = dict(folder.files)
    sets: dict[str, WeightSet] = {}
    for part, entry in [*sorted(folder.folders.items())][:MAX_COMPONENTS]:
        inside = Folder.read(store, entry.name)
        joined = Folder(folder.path, {f"{part}/{name}": found for name, found in inside.files.items()}, {})
        held = next((found for kind in component_kinds(part) if (found := find_set(store, joined, kind))), None)
        if held is not None:
            files |= joined.files
            sets[part] = held
    return Components(Folder(folder.path, files, folder.folders), sets) if sets else None
