"""What Transformer Engine keeps of a module beside its weights: the scales of FP8 and the largest values seen.

A module's ``_extra_state`` is a dictionary with tensors ``scale_fwd``, ``scale_inv_fwd``, ``amax_history_fwd`` and the
same for ``bwd``, serialised once more before it is saved: up to Transformer Engine 1 by ``torch.save`` into a
``BytesIO``, since then by ``pickle`` into a tensor of bytes. There each storage is a file by ``torch.save`` in its
older form, in a call of ``torch.storage._load_from_bytes``. None of it is called here. Source: TransformerEngine
``pytorch/module/base.py`` (get_extra_state); torch ``torch/storage.py`` (TypedStorage.__reduce__).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.containers.damage import DamagedError, UnsupportedError
from auditor.containers.encoded import InMemory
from auditor.containers.pickle_machine import Builder, PickleMachine
from auditor.containers.torch_legacy import MAGIC
from auditor.containers.torch_zip import Storage, StoredTensor, read_torch_file
from auditor.model.dtype import DType
from auditor.storage.store import Entry

Numbers = NDArray[np.float64]
MAX_NUMBERS = 1 << 20
"""Of one tensor; a history has a thousand for each of a few matrix products."""
LOADER = "torch.storage._load_from_bytes"
_WANTED = re.compile(r"(?:scale|scale_inv|amax_history)_(?:fwd|bwd|hybrid)", re.A)
_DTYPES = {"float32": "<f4", "float16": "<f2", "float64": "<f8"}


@dataclass(frozen=True, slots=True)
class ExtraState:
    """What one serialised state holds."""

    numbers: Mapping[str, Numbers]
    """Name to the elements of each scale and history."""
    opaque: Mapping[str, int]
    """Objects of unknown classes, by name."""


@dataclass(frozen=True, slots=True)
class _Pickled:
    """A tensor in a pickle that holds its storage as a file."""

    storage: object
    offset: object
    shape: object


def read_extra_state(content: bytes) -> ExtraState | None:
    """What a serialised state holds; None where it is that of a module without FP8.

    Raises:
        DamagedError: it is broken.
        UnsupportedError: it is in a form that is not known.
    """
    if content[:4] == b"PK\x03\x04" or content[: len(MAGIC)] == MAGIC:
        found = read_torch_file(InMemory(Entry("", False, len(content)), memoryview(content)))
        tree, opaque = found.tree, dict(found.opaque)
    else:
        machine = PickleMachine(_BUILDERS)
        tree, opaque = machine.load(content), dict(machine.opaque)
    if tree is None:
        return None
    if not isinstance(tree, dict):
        raise UnsupportedError("it is no dictionary")
    wanted = {key: value for key, value in tree.items() if isinstance(key, str) and _WANTED.fullmatch(key)}
    return ExtraState({key: _numbers(value, content) for key, value in wanted.items()}, opaque)


def _numbers(value: object, content: bytes) -> Numbers:
    if isinstance(value, StoredTensor) and value.contiguous:
        return _elements(content, value.offset, value.num_elements, value.dtype)
    if not isinstance(value, _Pickled) or not isinstance(value.storage, bytes) or not isinstance(value.offset, int):
        raise UnsupportedError("a scale in it is no tensor")
    storage = read_torch_file(InMemory(Entry("", False, len(value.storage)), memoryview(value.storage))).tree
    if not isinstance(storage, Storage) or storage.dtype is None:
        raise UnsupportedError("a scale in it has a storage of another form")
    shape = value.shape if isinstance(value.shape, tuple) else ()
    count = math.prod(n for n in shape if isinstance(n, int))
    width = storage.dtype.bits // 8
    # The one storage of such a file is its end, its length before it.
    start = len(value.storage) - storage.num_elements * width
    stated = struct.unpack_from("<q", value.storage, start - 8)[0] if start >= 8 else -1
    if stated != storage.num_elements or not 0 <= value.offset <= stated - count:
        raise DamagedError("a storage in it is shorter than it says")
    return _elements(value.storage, start + value.offset * width, count, storage.dtype)


def _elements(content: bytes, offset: int, count: int, dtype: DType) -> Numbers:
    if dtype.name not in _DTYPES or not 0 <= count <= MAX_NUMBERS:
        raise UnsupportedError(f"a scale in it is {count} numbers of {dtype.name}")
    if offset + dtype.num_bytes(count) > len(content):
        raise DamagedError("it ends before its numbers do")
    return np.frombuffer(content, _DTYPES[dtype.name], count, offset).astype(np.float64)


def _saved(arguments: tuple[Any, ...]) -> object:
    return arguments[0] if arguments else None


def _tensor(arguments: tuple[Any, ...]) -> object:
    return _Pickled(*arguments[:3]) if len(arguments) >= 3 else None


_BUILDERS: Mapping[str, Builder] = {
    LOADER: _saved, "torch._utils._rebuild_tensor_v2": _tensor, "collections.OrderedDict": lambda arguments: {},
    "torch.Size": lambda arguments: arguments[0] if arguments else (),
}  # fmt: skip
