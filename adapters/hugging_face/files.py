"""The files of a Hugging Face folder: which of them hold the weights, and what each says without reading weights.

    model.safetensors                                             one file
    model-<i>-of-<n>.safetensors, model.safetensors.index.json    several; the index maps names to files
    pytorch_model.bin, pytorch_model-<i>-of-<n>.bin, …index.json  the same as torch files
    pytorch_model_fsdp.bin                                        accelerate's, of a model that FSDP gathered
    adapter_model.safetensors, adapter_model.bin                  low-rank adapters, alone or beside the model

A loader takes the first of these that is there, in this order; the other kind beside it is legal and not looked at.
Source: huggingface/transformers ``modeling_utils.py`` (``_get_resolved_checkpoint_files``, ``save_pretrained``);
huggingface/accelerate ``utils/fsdp_utils.py`` (``save_fsdp_model``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from auditor.adapters.adapter import Folder
from auditor.adapters.other_tensors import inner_tensors, is_tensor, kind_of
from auditor.adapters.step_file import Opened
from auditor.adapters.step_names import is_part
from auditor.containers.damage import DamagedError
from auditor.containers.json_document import read_json
from auditor.containers.pickle_machine import Opaque
from auditor.containers.safetensors_file import SafetensorsFile, read_safetensors
from auditor.containers.torch_zip import StoredTensor, TorchFile, read_torch_file
from auditor.model.dtype import DType
from auditor.storage.store import Handle, Store


def open_json(store: Store, folder: Folder, name: str) -> Opened[Mapping[str, Any]]:
    """Open a file that holds one JSON dictionary. Its readers let the last of repeated keys win, and so does this."""

    def read(handle: Handle) -> Mapping[str, Any]:
        content = read_json(handle, unique_keys=False)
        if not isinstance(content, dict):
            raise DamagedError("it holds JSON, but no dictionary")
        return content

    return Opened.open(store, folder, name, read)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One tensor of a file."""

    dtype: DType | None
    """None: a dtype that is not known here; such a tensor is known by name alone."""
    shape: tuple[int, ...]
    offset: int
    """First byte of the first element in the file."""
    num_bytes: int
    """Of its elements; -1 where that is not known."""
    strides: tuple[int, ...] | None = None
    """Elements; None is C order."""
    storage: object = None
    """Tensors of one file with the same storage share memory; None shares with nobody."""
    unread: str = ""
    """Why its elements can't be read, where they can't."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What one file of weights holds."""

    arrays: Mapping[str, StoredArray] = field(default_factory=dict)
    opaque: Mapping[str, int] = field(default_factory=dict)
    """Objects and dtypes that are not known, with their number."""
    container: str = "safetensors"


def _of_safetensors(content: SafetensorsFile) -> Weights:
    arrays, opaque = {}, Counter[str]()
    for name, record in content.records.items():
        # Elements that share a byte have no kernels yet.
        known = record.dtype if record.dtype and record.dtype.bits >= 8 else None
        unread = "" if known else f"safetensors dtype {record.dtype_name[:64]}"
        arrays[name] = StoredArray(known, record.shape, record.begin, record.end - record.begin, unread=unread)
        if known is None:
            opaque[f"safetensors dtype {record.dtype_name}"] += 1
    return Weights(arrays, opaque)


def of_tensor(tensor: StoredTensor) -> StoredArray:
    """A tensor of a torch file."""
    num_bytes = tensor.dtype.num_bytes(tensor.num_elements)
    return StoredArray(tensor.dtype, tensor.shape, tensor.offset, num_bytes, tensor.strides, tensor.storage)


def _of_torch(content: TorchFile) -> Weights:
    tree = content.tree if isinstance(content.tree, dict) else {}
    arrays: dict[str, StoredArray] = {}
    for name, value in tree.items():
        if isinstance(name, str) and isinstance(value, StoredTensor):
            arrays[name] = of_tensor(value)
        elif isinstance(name, str) and isinstance(value, Opaque):
            inside = inner_tensors(value) if is_tensor(value) else {}
            made_of = f"it is made of {', '.join([*inside][:4])}, which are judged alone" if inside else kind_of(value)
            arrays[name] = StoredArray(None, (), 0, -1, unread=made_of)
            arrays |= {f"{name}.{key}": of_tensor(tensor) for key, tensor in inside.items()}
    return Weights(arrays, content.opaque, content.container)


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to name the files of a set of weights."""

    stem: str
    suffix: str
    container: str

    @property
    def part(self) -> str:
        """The folder of the component that it is of; empty where the model is all there is."""
        return self.stem.rpartition("/")[0]

    @property
    def single(self) -> str:
        """The name where there is one file."""
        return f"{self.stem}.{self.suffix}"

    @property
    def index(self) -> str:
        """The name of the index of several."""
        return f"{self.single}.index.json"

    def place(self, name: str) -> tuple[int, int] | None:
        """Number and count in the name of one file of several; None for other files."""
        found = re.fullmatch(rf"{re.escape(self.stem)}-(\d{{1,6}})-of-(\d{{1,6}})\.{self.suffix}", name, re.ASCII)
        return (int(found[1]), int(found[2])) if found else None


MODEL_KINDS = (
    Kind("model", "safetensors", "safetensors"), Kind("pytorch_model", "bin", "torch-zip"),
    Kind("pytorch_model_fsdp", "bin", "torch-zip"),
)  # fmt: skip
ADAPTER_KINDS = (Kind("adapter_model", "safetensors", "safetensors"), Kind("adapter_model", "bin", "torch-zip"))


def component_kinds(part: str) -> tuple[Kind, ...]:
    """What the weights of a component of diffusers or transformers, in a folder of its own, may be called."""
    stems = "diffusion_pytorch_model", "model", "pytorch_model"
    kinds = [Kind(f"{part}/{stem}", "safetensors", "safetensors") for stem in stems[:2]]
    return (*kinds, *(Kind(f"{part}/{stem}", "bin", "torch-zip") for stem in (stems[0], stems[2])))


def kind_alone(name: str) -> Kind | None:
    """The kind of a file that is looked at by itself, by its name."""
    for kind in (*ADAPTER_KINDS, *MODEL_KINDS):
        if name == kind.single or kind.place(name):
            return kind
    return MODEL_KINDS[0] if name.endswith(f".{MODEL_KINDS[0].suffix}") else None


def open_safetensors(store: Store, folder: Folder, name: str) -> Opened[Weights]:
    """Open one safetensors file, whatever it is called."""
    return open_weights(store, folder, name, MODEL_KINDS[0])


def kind_of_only(folder: Folder) -> Kind | None:
    """The kind of a folder's one safetensors file, where a script has given it a name of its own."""
    names = [name for name in folder.files if name.endswith(".safetensors")]
    only = len(names) == 1 and kind_alone(names[0]) is MODEL_KINDS[0] and not is_part(names[0])
    return Kind(names[0].removesuffix(".safetensors"), "safetensors", "safetensors") if only else None


def open_weights(store: Store, folder: Folder, name: str, kind: Kind) -> Opened[Weights]:
    """Open one file of weights; what is wrong with it is in the result."""

    def read(handle: Handle) -> Weights:
        if kind.container == "torch-zip":
            return _of_torch(read_torch_file(handle))
        return _of_safetensors(read_safetensors(handle))

    def salvage(error: DamagedError) -> Weights | None:
        # Where only the data is cut, the header tells which tensors are lost.
        return _of_safetensors(error.content) if isinstance(error.content, SafetensorsFile) else None

    return Opened.open(store, folder, name, read, salvage)
