"""Whether files that torch saved hold the same, by the checksums stored in them: nothing of the content is read.

The name under which a file was saved is in all names of its members, so that equal content makes no equal files.
"""

from __future__ import annotations

from hashlib import blake2b

from auditor.containers.damage import DamagedError
from auditor.containers.zip_directory import Member, read_directory
from auditor.storage.store import StorageError, Store

_IDENTIFIER = "/.data/serialization_id"
Sums = tuple[tuple[str, int, int], ...]
"""Name below the file's own, size and CRC-32 of each member."""


def storage_sums(store: Store, name: str) -> Sums:
    """Those of a file's storages; empty where the writer stored none, or the file can't be read."""
    return tuple((m.name, m.num_bytes, m.crc32) for m in _members(store, name) if "/data/" in m.name)


def content_number(store: Store, name: str) -> float | None:
    """A number that files have in common which hold the same, storages and what is pickled: 48 bits of a digest."""
    sums = [
        (m.name.partition("/")[2], m.num_bytes, m.crc32)
        for m in _members(store, name)
        if not m.name.endswith(_IDENTIFIER)
    ]
    return float(int.from_bytes(blake2b(repr(sorted(sums)).encode(), digest_size=6).digest())) if sums else None


def _members(store: Store, name: str) -> list[Member]:
    try:
        with store.open(name) as handle:
            members = [*read_directory(handle).values()]
    except (DamagedError, StorageError):
        return []
    return members if any(member.crc32 for member in members if member.num_bytes) else []
