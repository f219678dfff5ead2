"""Moving averages of the weights in a file of their own beside them: ``ema.pt``, ``pytorch_model_ema.bin``.

A state dict, alone or under one of the usual keys, or the bare list ``shadow_params`` in the order of the model's
parameters. Each is held to its parameter where names or order say which that is.
Source: huggingface/diffusers ``training_utils.py`` (``EMAModel.state_dict``); the names are those of scripts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from auditor.adapters.adapter import Folder
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.hugging_face.files import StoredArray, Weights, of_tensor, open_safetensors
from auditor.adapters.hugging_face.trainer_files import Listings
from auditor.adapters.step_file import Opened, StepFile
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Role
from auditor.model.mesh import EVERYWHERE
from auditor.model.region import whole
from auditor.storage.store import Store, join

AVERAGES = (
    "ema", "model_ema", "ema_model", "ema_state_dict", "state_dict_ema", "ema_model_state_dict", "shadow", "state_dict",
    "model", "module",
)  # fmt: skip
"""Under which a file of averages keeps their state dict."""
_NAME = re.compile(r"(?:[a-z]{1,16}[-_.]){0,2}ema(?:[-_.][a-z0-9]{1,16}){0,3}\.(?:pt|pth|bin|safetensors)")
_OWN = re.compile(r"custom_checkpoint_\d{1,3}\.pkl")
"""What accelerate saves of objects that a script registered: an average among others."""
_PREFIXES = ("", "module.", "model.", "ema_model.", "ema.", "shadow.", "online_model.")
"""What wrappers put before the names of the model's own."""
_ORDER = 1 << 40


def add_averages(builder: CatalogBuilder, store: Store, folder: Folder, listings: Listings) -> set[str]:
    """Put the averages into the Catalog, as replicas of nothing; the names of the files that hold some."""
    if folder.alone:
        return set()
    taken = {name for name in folder.files if _NAME.fullmatch(name) or _registered(store, folder, name)}
    for name in sorted(taken):
        arrays, ordered = _read(builder, store, folder, name)
        names = _in_order(ordered, listings) if ordered else _by_name(arrays, listings)
        for key, array in (arrays or {f"shadow_params.{at}": array for at, array in enumerate(ordered)}).items():
            _add(builder, join(folder.path, name), key, names.get(key, ""), array, listings)
    return taken


def _registered(store: Store, folder: Folder, name: str) -> bool:
    """Whether it is an average that a script registered with accelerate."""
    return bool(_OWN.fullmatch(name)) and "shadow_params" in StepFile.read(store, folder, name).tree


def _read(
    builder: CatalogBuilder, store: Store, folder: Folder, name: str
) -> tuple[Mapping[str, StoredArray], Sequence[StoredArray]]:
    """A file's averages by their keys, or in their order."""
    if name.endswith(".safetensors"):
        opened: Opened[Weights] = open_safetensors(store, folder, name)
        builder.file(opened.as_file(folder.path, "safetensors", EVERYWHERE))
        return (opened.content.arrays if opened.content else {}), ()
    file = StepFile.read(store, folder, name)
    builder.file(file.as_rank_file(folder.path, EVERYWHERE))
    listed = file.tree.get("shadow_params")
    if isinstance(listed, list):
        return {}, [of_tensor(tensor) for tensor in listed if isinstance(tensor, StoredTensor)]
    inside = next((file.tree[key] for key in AVERAGES if isinstance(file.tree.get(key), dict)), file.tree)
    return _state_dict(inside), ()


def _state_dict(tree: Mapping[Any, Any]) -> dict[str, StoredArray]:
    return {
        key: of_tensor(value) for key, value in tree.items() if isinstance(key, str) and isinstance(value, StoredTensor)
    }


def _by_name(arrays: Mapping[str, StoredArray], listings: Listings) -> dict[str, str]:
    """Keys to parameters: with the prefix under which most are some parameter of the same shape."""

    def under(prefix: str) -> dict[str, str]:
        named = {key: key.removeprefix(prefix) for key in arrays if key.startswith(prefix)}
        return {key: name for key, name in named.items() if listings.shapes.get(name) == arrays[key].shape}

    return max(map(under, _PREFIXES), key=len)


def _in_order(arrays: Sequence[StoredArray], listings: Listings) -> dict[str, str]:
    """Positions to parameters, where every known order that fits says the same."""
    shapes = [array.shape for array in arrays]
    fitting = {tuple(order) for order in listings.orders if [*order.values()] == shapes}
    names = fitting.pop() if len(fitting) == 1 else ()
    return {f"shadow_params.{at}": name for at, name in enumerate(names)}


def _add(builder: CatalogBuilder, file: str, key: str, name: str, array: StoredArray, listings: Listings) -> None:
    if array.dtype is None:
        return
    reason = "" if name else "which parameter it is an average of is not known"
    order = (listings.positions or {}).get(name, _ORDER)
    tensor = builder.tensor(name or key, Role.EMA, array.dtype, array.shape, order, undetermined=reason)
    number = builder.file_id(file)
    builder.piece(tensor, number, array.offset, whole(array.shape), EVERYWHERE, key=key, strides=array.strides)
