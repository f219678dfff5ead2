"""CRC-32C, the checksum of OCDBT's nodes and of Zarr's shard indexes; the library is loaded at first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache


def crc32c(content: bytes) -> int:
    """CRC-32C (Castagnoli) of ``content``."""
    return _extend()(0, content)


def crc32c_of(parts: Iterable[bytes]) -> int:
    """The same of content that comes in parts."""
    found, extend = 0, _extend()
    for part in parts:
        found = extend(found, part)
    return found


@cache
def _extend() -> Callable[[int, bytes], int]:
    # Comes with zarr. A table in Python would take a second for ten megabytes of nodes.
    from google_crc32c import extend

    checksum: Callable[[int, bytes], int] = extend
    return checksum
