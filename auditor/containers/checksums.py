"""Held against the data: the checksums that a container stores itself, or that a cache names a file by."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from auditor.containers.compression import ZstdStream
from auditor.containers.damage import DamagedError
from auditor.containers.dcp_items import Window, items_from_the_end
from auditor.containers.encoded import DecodedHandle
from auditor.containers.layers import Stored
from auditor.containers.zip_directory import Member, read_directory
from auditor.model.encoding import DEFLATE, PLAIN, ZSTD, Encoding, one_chunk
from auditor.storage.store import Handle, UndecodableError

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Verified:
    """What the checksums of one file say."""

    num_good: int
    bad: tuple[str, ...]
    """Members whose bytes don't fit their checksum."""
    num_without: int
    """Members that store none."""
    num_bytes_read: int


def verify_zip(handle: Handle) -> Verified:
    """CRC-32 of every member of a zip file. torch.load does not look at them, so rotten bits load in silence.

    A stored 0 means that the writer computed none (``torch.serialization.set_crc32_options(False)``).

    Raises:
        DamagedError, StorageError: as reading the directory and the data.
    """
    return _verified(handle, read_directory(handle))


def verify_npz(handle: Handle) -> Verified:
    """As :func:`verify_zip`, of a file whose members may be compressed."""
    return _verified(handle, read_directory(handle, deflated=True))


def _verified(handle: Handle, members: Mapping[str, Member]) -> Verified:
    good, without, num_bytes = 0, 0, 0
    bad = []
    for member in members.values():
        if member.crc32 == 0 and member.num_bytes:
            without += 1
            continue
        crc = _crc32_of(handle, member)
        num_bytes += member.num_stored
        good += crc == member.crc32
        bad += [member.name] if crc != member.crc32 else []
    return Verified(good, tuple(bad), without, num_bytes)


def _crc32_of(handle: Handle, member: Member) -> int:
    """The CRC-32 of a member's data; -1 where they don't come out of their compression."""
    if member.num_deflated >= 0:
        codec, size = DEFLATE, member.num_bytes
        handle = DecodedHandle(handle, one_chunk(size, codec, member.num_deflated, member.offset))
    crc, start = 0, 0 if member.num_deflated >= 0 else member.offset
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for at in range(0, member.num_bytes, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, member.num_bytes - at)]
        try:
            handle.read_into(start + at, block)
        except UndecodableError:
            return -1
        crc = zlib.crc32(block, crc)
    return crc


def sha256_of(handle: Handle) -> str:
    """The SHA-256 of a whole file, hexadecimal.

    Raises:
        StorageError: as reading the data.
    """
    found, buffer = hashlib.sha256(), memoryview(bytearray(BLOCK_BYTES))
    for at in range(0, handle.entry.num_bytes, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, handle.entry.num_bytes - at)]
        handle.read_into(at, block)
        found.update(block)
    return found.hexdigest()


def verify_items(handle: Handle) -> Verified:
    """CRC-32 of every member of all the zip files that make up a data file of ``torch.distributed.checkpoint``.

    Raises:
        DamagedError, StorageError: as reading the directories and the data.
    """
    found = [(window.start, verify_zip(window)) for window in items_from_the_end(handle)]
    return _together(found[::-1])


def verify_compressed(handle: Handle, encoding: Encoding) -> Verified:
    """As :func:`verify_items`, of a file whose items are compressed.

    Raises:
        DamagedError, StorageError: as reading and decoding the items.
    """
    found: list[tuple[int, Verified]] = []
    for number in range(len(encoding)):
        offset, length = int(encoding.offset[number]), int(encoding.num_stored[number])
        item: Handle = Window(handle, offset, length)
        if encoding.codecs[int(encoding.codec[number])] != PLAIN:
            size = _decoded_size(item, int(encoding.num_bytes[number]))
            item = Window(DecodedHandle(item, one_chunk(size, ZSTD, length)), 0, size)
        found.append((offset, verify_zip(item)))
    return _together(found)


def _decoded_size(item: Handle, num_known: int) -> int:
    """How many bytes an item decodes to, of which so many were seen: a zip file ends soon after its tensor.

    Raises:
        DamagedError: to far more.
    """
    stream, size = ZstdStream(Stored(item, 0, item.entry.num_bytes), BLOCK_BYTES), 0
    while block := stream.read(BLOCK_BYTES):
        size += len(block)
        if size > num_known + BLOCK_BYTES:
            raise DamagedError(f"an item decodes to far more than the {num_known} bytes that its tensor needs")
    return size


def _together(items: Sequence[tuple[int, Verified]]) -> Verified:
    """What was found in all items, each with its first byte."""
    bad = tuple(f"{name} of the item at byte {start}" for start, one in items for name in one.bad)
    good, without, num_bytes = (
        sum(getattr(one, count) for _, one in items) for count in ("num_good", "num_without", "num_bytes_read")
    )
    return Verified(good, bad, without, num_bytes)


def verify_blob(handle: Handle) -> Verified:
    """SHA-256 of a file that is kept under that very name, behind a link: how a download cache of the Hub lies on disk.

    Source: huggingface_hub ``file_download.py``, ``blobs/<sha256>`` for large files.

    Raises:
        StorageError: as reading the data.
    """
    stated = handle.entry.link_name
    if not re.fullmatch(r"[0-9a-f]{64}", stated):
        return Verified(0, (), 1, 0)
    buffer = memoryview(bytearray(BLOCK_BYTES))
    digest, size = hashlib.sha256(), handle.entry.num_bytes
    for at in range(0, size, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, size - at)]
        handle.read_into(at, block)
        digest.update(block)
    good = digest.hexdigest() == stated
    return Verified(int(good), () if good else (f"the whole file, kept as blob {stated}",), 0, size)


VERIFIERS: dict[str, Callable[[Handle], Verified]] = {
    "torch-zip": verify_zip, "npz": verify_npz, "dcp": verify_items, "safetensors": verify_blob,
}  # fmt: skip
"""By container name, as the Catalog's files state it."""
