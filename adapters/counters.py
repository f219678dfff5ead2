"""Counters and settings that torch keeps as tensors of one element: metadata, read together with one opening a file."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from auditor.containers.torch_zip import StoredTensor, read_number
from auditor.storage.store import StorageError, Store

MAX_COUNTERS = 1024
"""Numbers of one file that are read; each is a request of its own where they lie apart, as torch puts them."""
MAX_VALUE = float(1 << 53)
"""What is beyond it counts nothing."""

Key = TypeVar("Key", bound=Hashable)


def read_numbers(store: Store, name: str, tensors: Mapping[Key, StoredTensor]) -> dict[Key, float]:
    """The values of one-element tensors of one file, in the order given; what storage doesn't give is left out.

    Of more than :data:`MAX_COUNTERS` as many are read, evenly spread.
    """
    single = {key: tensor for key, tensor in tensors.items() if tensor.num_elements == 1}
    every = -(-len(single) // MAX_COUNTERS) or 1
    found: dict[Key, float] = {}
    if not single:
        return found
    try:
        with store.open(name) as handle:
            for key, tensor in [*single.items()][::every]:
                value = read_number(handle, tensor)
                if value is not None and abs(value) < MAX_VALUE:
                    found[key] = value
    except StorageError:
        pass
    return found
