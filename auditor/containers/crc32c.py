"""CRC-32C, the checksum of OCDBT's nodes and of Zarr's shard indexes; the library is loaded at first use."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def crc32c(content: bytes) -> int:
    """CRC-32C (Castagnoli) of ``content``."""
    return _value()(content)


@cache
def _value() -> Callable[[bytes], int]:
    # Comes with zarr. A table in Python would take a second for ten megabytes of nodes.
    from google_crc32c import value

    checksum: Callable[[bytes], int] = value
    return checksum
