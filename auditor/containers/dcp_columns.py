"""What an index of ``torch.distributed.checkpoint`` says, as columns: a million chunks, no object for each."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from auditor.model.dtype import DType


@dataclass(frozen=True, slots=True)
class Described:
    """One tensor of the state dict."""

    name: str
    dtype: DType | None
    """None: one that is not known here."""
    dtype_name: str
    shape: tuple[int, ...]
    chunks: tuple[int, int]
    """Half-open range of rows of the chunk columns."""


@dataclass(slots=True)
class DcpMetadata:
    """What one ``.metadata`` says."""

    tensors: dict[str, Described] = field(default_factory=dict)
    objects: dict[str, None] = field(default_factory=dict)
    """Names of what is no tensor, in order."""
    paths: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Name to the path of keys in the nested state dict, where that is recorded."""
    home: str = ""
    """Where it was written to."""
    save_id: str = ""
    """The number that its writer drew for the save; empty before torch 2.3."""
    opaque: Mapping[str, int] = field(default_factory=dict)
    chunk_at: array[int] = field(default_factory=lambda: array("q"))
    """Position in ``pool``: offsets, then sizes, of as many dims as the tensor has."""
    names: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    transforms: list[tuple[str, ...]] = field(default_factory=lambda: [()])
    item_name: array[int] = field(default_factory=lambda: array("i"))
    """Columns of what is stored: position in ``names`` …"""
    item_at: array[int] = field(default_factory=lambda: array("q"))
    """… position in ``pool`` of the chunk's offsets, -1 for what is no tensor …"""
    item_dims: array[int] = field(default_factory=lambda: array("b"))
    item_file: array[int] = field(default_factory=lambda: array("i"))
    item_chunk: array[int] = field(default_factory=lambda: array("q"))
    """… row of the chunk columns that describes it, -1 where none does …"""
    item_offset: array[int] = field(default_factory=lambda: array("q"))
    item_length: array[int] = field(default_factory=lambda: array("q"))
    item_transform: array[int] = field(default_factory=lambda: array("b"))
    """… position in ``transforms``."""
    pool: array[int] = field(default_factory=lambda: array("q"))

    @property
    def num_items(self) -> int:
        """Rows of the item columns."""
        return len(self.item_name)

    def chunk(self, row: int, dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of the chunk in a row of the chunk columns."""
        at = self.chunk_at[row]
        numbers = self.pool[at : at + 2 * dims].tolist()
        return tuple(numbers[:dims]), tuple(numbers[dims:])

    def corner(self, row: int) -> tuple[int, ...] | None:
        """The chunk's offsets of an item; None for what is no tensor."""
        at = self.item_at[row]
        return None if at < 0 else tuple(self.pool[at : at + self.item_dims[row]])


def match_chunks(found: DcpMetadata) -> None:
    """Find the chunk of every item: that of its tensor which begins where the item says."""
    found.item_chunk = array("q", [-1]) * found.num_items
    rows: dict[int, list[int]] = {}
    for row, name in enumerate(found.item_name):
        rows.setdefault(name, []).append(row)
    for name, own in rows.items():
        tensor = found.tensors.get(found.names[name])
        if tensor is None:
            continue
        chunks = {found.chunk(row, len(tensor.shape))[0]: row for row in range(*tensor.chunks)}
        for row in own:
            corner = found.corner(row)
            if corner is not None:
                found.item_chunk[row] = chunks.get(corner, -1)
