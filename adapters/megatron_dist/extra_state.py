"""The scales of FP8 that a step holds as objects: one ``_extra_state`` for each layer's matrix products."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.dcp.sources import Source, coordinate_of
from auditor.containers.damage import DamagedError, UnsupportedError
from auditor.containers.extra_state import LOADER, ExtraState, Numbers, read_extra_state
from auditor.containers.pickle_machine import Global, Opaque
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import FP8_AMAX, FP8_SCALE, Scalar
from auditor.storage.store import StorageError, Store, base_name, read_bytes

MAX_BYTES = 16 << 20
"""Of one serialised state."""
MAX_STATES = 1 << 16
"""Of one step that are read."""
_EXTRA = re.compile(r"(?P<owner>.+)\._extra_state\d{0,6}(?:/shard_(?P<place>[\d.]{1,40})_[\d.]{1,40})?", re.A | re.S)


def record_scales(builder: CatalogBuilder, store: Store, source: Source) -> Counter[str]:
    """Add a scalar for each scale and history; what is in a form that is not known here is counted."""
    unknown: Counter[str] = Counter()
    known = [(key, found) for key in source.index.objects if (found := _EXTRA.fullmatch(key)) and key in source.rows]
    for key, found in known[:MAX_STATES]:
        row = source.rows[key][0]
        held = source.contents.values.get(row)
        held = held[0] if isinstance(held, list) and len(held) == 1 else held
        if held is None:
            continue
        try:
            state = _state(store, source, row, held)
        except (DamagedError, UnsupportedError):
            unknown["an _extra_state in a form that is not known"] += 1
            continue
        if state is not None:
            owner = f"{found['owner']}._extra_state" + (f"[{found['place']}]" if found["place"] else "")
            _add(builder, source, row, owner, state)
    return unknown


def _state(store: Store, source: Source, row: int, held: object) -> ExtraState | None:
    """What one object holds; None where there is nothing to know of it."""
    if isinstance(held, Opaque) and held.maker == Global("_io", "BytesIO"):
        content = held.state[0] if isinstance(held.state, tuple) and held.state else None
        if isinstance(content, bytes) and len(content) <= MAX_BYTES:
            return read_extra_state(content) if content else None
    if isinstance(held, StoredTensor) and held.dtype.name == "uint8" and held.contiguous:
        if not held.num_elements:
            return None
        if held.num_elements <= MAX_BYTES and not source.index.item_transform[row]:
            return read_extra_state(_bytes_of(store, source, row, held))
    raise UnsupportedError("neither bytes nor a tensor of bytes")


def _bytes_of(store: Store, source: Source, row: int, held: StoredTensor) -> bytes:
    """The elements of a tensor of bytes, whose offset counts from its item's beginning."""
    try:
        with store.open(source.file_of(row)) as handle:
            return read_bytes(handle, source.index.item_offset[row] + held.offset, held.num_elements)
    except StorageError as error:
        raise UnsupportedError(str(error)) from error


def _add(builder: CatalogBuilder, source: Source, row: int, owner: str, state: ExtraState) -> None:
    file = source.file_of(row)
    # Transformer Engine runs what lies in it: what an ordinary unpickler would call counts as the file's.
    builder.add_opaque(builder.file_id(file), {name: n for name, n in state.opaque.items() if name != LOADER})
    for name, numbers in state.numbers.items():
        if len(numbers):
            kind, value = (FP8_SCALE, _smallest(numbers)) if name.startswith("scale") else (FP8_AMAX, _largest(numbers))
            builder.scalars.append(Scalar(kind, value, file, coordinate_of(base_name(file)), f"{owner}.{name}"))


def _smallest(numbers: Numbers) -> float:
    """What is worst of a scale: no finite number, else the smallest."""
    odd = numbers[~np.isfinite(numbers)]
    return float(odd[0] if len(odd) else numbers.min())


def _largest(numbers: Numbers) -> float:
    """What is worst of a history of largest values: no finite number, else one below 0, else the largest."""
    odd = numbers[~np.isfinite(numbers)]
    return float(odd[0] if len(odd) else numbers.min() if numbers.min() < 0 else numbers.max())
