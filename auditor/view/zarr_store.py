"""The tree as a zarr-python store: read-only, one method that matters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

import zarr
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from auditor.view.nodes import Array, Group
from auditor.view.tree import keys, lookup

if TYPE_CHECKING:
    from zarr.core.buffer import Buffer, BufferPrototype


class ViewStore(Store):
    """Serves a tree of nodes. A chunk whose source is lost raises; it is never absent, so zarr never fills it."""

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, root: Group) -> None:
        super().__init__(read_only=True)
        self._root = root

    @property
    def supports_partial_writes(self) -> Any:
        """Never."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ViewStore) and self._root is other._root

    def __hash__(self) -> int:
        return id(self._root)

    def _content(self, key: str) -> bytes | None:
        found = lookup(self._root, key)
        if found is None:
            return None
        node, rest = found
        if rest == "zarr.json":
            return node.document()
        return node.chunk(rest) if isinstance(node, Array) and rest.split("/", 1)[0] == "c" else None

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """The content of one key, assembled now."""
        content = await asyncio.to_thread(self._content, key)
        return None if content is None else prototype.buffer.from_bytes(_part(content, byte_range))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Several ranges."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        """Whether the tree has the key; reads no weights."""
        found = lookup(self._root, key)
        if found is None:
            return False
        node, rest = found
        return rest == "zarr.json" or (isinstance(node, Array) and rest in set(node.chunk_keys()))

    async def list(self) -> AsyncIterator[str]:
        """Every key."""
        for key in keys(self._root, ""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Every key that begins with ``prefix``."""
        folder = prefix.rpartition("/")[0]
        found = lookup(self._root, folder)
        if found and not found[1]:
            for key in keys(found[0], f"{folder}/" if folder else ""):
                if key.startswith(prefix):
                    yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names directly below ``prefix``."""
        found = lookup(self._root, prefix)
        if not found or found[1]:
            return
        node = found[0]
        yield "zarr.json"
        for name in node.children() if isinstance(node, Group) else ("c",):
            yield name

    async def set(self, key: str, value: Buffer) -> None:
        """Refused: nothing opens a checkpoint for writing."""
        self._check_writable()

    async def set_partial_values(self, key_start_values: Any) -> None:
        """Refused."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Refused."""
        self._check_writable()


def _part(content: bytes, wanted: ByteRequest | None) -> bytes:
    if isinstance(wanted, RangeByteRequest):
        return content[wanted.start : wanted.end]
    if isinstance(wanted, OffsetByteRequest):
        return content[wanted.offset :]
    if isinstance(wanted, SuffixByteRequest):
        return content[-wanted.suffix :] if wanted.suffix else b""
    return content


def open_group(root: Group) -> zarr.Group:
    """The tree as a zarr-python group."""
    return zarr.open_group(ViewStore(root), mode="r")
