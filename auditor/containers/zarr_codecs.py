"""What lies between the elements of a Zarr chunk and its bytes: which codecs are undone here, and why others aren't.

    v3   transpose, bytes, one of zstd, gzip, zlib, blosc, lz4, then crc32c; or sharding_indexed over these
    v2   no compressor or one of zstd, gzip, zlib, blosc, lz4; order C or F; no filters

Sources: the Zarr v3 codec specifications (blosc, bytes, crc32c, gzip, sharding_indexed, transpose, zstd) and numcodecs'
codecs under its own prefix; the Zarr v2 specification.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from auditor.containers.damage import DamagedError
from auditor.containers.layers import MAX_WHOLE_BYTES, has_numcodecs
from auditor.model.dtype import DType, Kind
from auditor.model.encoding import BLOSC, CRC32C, GZIP, LZ4, PLAIN, SHARD, SWAPPED, ZSTD

_COMPRESSORS = {"zstd": ZSTD, "gzip": GZIP, "zlib": GZIP, "blosc": BLOSC, "lz4": LZ4}


@dataclass(frozen=True, slots=True)
class Codecs:
    """How the chunks of an array are stored."""

    codec: str = PLAIN
    """What a chunk's bytes are under, as :mod:`auditor.model.encoding` calls it; of a shard's inner chunks theirs."""
    unsupported: str = ""
    """Why it isn't read; empty where it is."""
    order: tuple[int, ...] = ()
    """Dims from the slowest to the fastest; empty: as they are."""
    inner_shape: tuple[int, ...] | None = None
    """Of the chunks in a shard, where the shard's index must be read to know where they are."""
    index_first: bool = False
    """Whether the index is at the beginning of the shard."""
    index_checksum: bool = False
    """Whether its CRC-32C follows it."""


def read_codecs(stated: Any, chunk_shape: tuple[int, ...], dtype: DType | None) -> Codecs:
    """The codecs of a v3 array of ``dtype``.

    Raises:
        DamagedError: no codecs are stated.
    """
    if not isinstance(stated, list) or not stated:
        raise DamagedError("it has no codecs")
    (name, configuration), *others = map(named, stated)
    if name != "sharding_indexed":
        return _plain(stated, chunk_shape, dtype)
    if others:
        return Codecs(unsupported="several codecs")
    inner = counts(configuration.get("chunk_shape"))
    if inner is None or len(inner) != len(chunk_shape) or 0 in inner:
        return Codecs(unsupported="codec sharding_indexed without the shape of its chunks")
    if any(outer % one for outer, one in zip(chunk_shape, inner, strict=True)):
        return Codecs(unsupported="codec sharding_indexed with chunks that don't fill their shard")
    found = _plain(configuration.get("codecs"), inner, dtype)
    index = configuration.get("index_codecs")
    called = [named(codec) for codec in index] if isinstance(index, list) else []
    plain = bool(called) and called[0][0] == "bytes" and called[0][1].get("endian", "little") == "little"
    location = configuration.get("index_location", "end")
    if not plain or [name for name, _ in called[1:]] not in ([], ["crc32c"]) or location not in ("start", "end"):
        return Codecs(unsupported="codec sharding_indexed with an index of another form")
    if inner == chunk_shape and location == "end" and len(called) == 2:
        return replace(found, codec=f"{SHARD}/{found.codec}")
    return replace(found, inner_shape=inner, index_first=location == "start", index_checksum=len(called) == 2)


def _plain(stated: Any, chunk_shape: tuple[int, ...], dtype: DType | None) -> Codecs:
    if not isinstance(stated, list) or not stated:
        raise DamagedError("it has no codecs")
    (name, configuration), *others = map(named, stated)
    order: tuple[int, ...] = ()
    if name == "transpose":
        order = counts(configuration.get("order")) or ()
        if sorted(order) != list(range(len(chunk_shape))) or not others:
            return Codecs(unsupported="codec transpose")
        (name, configuration), *others = others
    if name != "bytes":
        return Codecs(unsupported=f"codec {name[:40] or 'of no name'}")
    found = _stored([name for name, _ in others], math.prod(chunk_shape), dtype)
    found = replace(found, order=order if order != tuple(range(len(order))) else ())
    return swapped(found, dtype) if configuration.get("endian", "little") == "big" else found


def _stored(names: Sequence[str], num_elements: int, dtype: DType | None) -> Codecs:
    """Codecs of bytes, as they were done."""
    layers = [CRC32C] if names and names[-1] == "crc32c" else []
    inner = [name.removeprefix("numcodecs.") for name in names[: len(names) - len(layers)]]
    if len(inner) > 1:
        return Codecs(unsupported="several codecs")
    codec, unsupported = _compressor(inner[0], num_elements, dtype) if inner else (PLAIN, "")
    return Codecs("/".join(filter(None, [*layers, codec])), unsupported)


def read_compressor(stated: Any, filters: Any, num_elements: int, dtype: DType | None) -> Codecs:
    """The same for a v2 array, whose chunks have so many elements."""
    if filters:
        return Codecs(unsupported="filters")
    if stated is None:
        return Codecs()
    name = stated.get("id") if isinstance(stated, dict) else None
    return Codecs(*_compressor(name if isinstance(name, str) else "", num_elements, dtype))


def swapped(codecs: Codecs, dtype: DType | None) -> Codecs:
    """The same with big-endian elements."""
    width = dtype.bits // (16 if dtype.kind is Kind.COMPLEX else 8) if dtype else 0
    if width <= 1:
        return codecs
    return replace(codecs, codec="/".join(filter(None, [codecs.codec, SWAPPED[width]])))


def _compressor(name: str, num_elements: int, dtype: DType | None) -> tuple[str, str]:
    codec = _COMPRESSORS.get(name)
    if codec is None:
        return PLAIN, f"codec {name[:40] or 'of no name'}"
    return codec, _why_not(codec, dtype.num_bytes(num_elements) if dtype else 0)


def _why_not(codec: str, num_bytes: int) -> str:
    """Why a chunk of so many bytes can't be read here; empty where it can."""
    if codec not in (BLOSC, LZ4):
        return ""
    if not has_numcodecs():
        return f"codec {codec} without its library (pip install numcodecs)"
    return f"codec {codec} with chunks of {num_bytes} bytes" if num_bytes > MAX_WHOLE_BYTES else ""


def named(stated: Any) -> tuple[str, Mapping[str, Any]]:
    """Name and configuration of an extension point; a name alone is allowed."""
    if isinstance(stated, str):
        return stated, {}
    if not isinstance(stated, dict) or not isinstance(stated.get("name"), str):
        return "", {}
    configuration = stated.get("configuration", {})
    return stated["name"], configuration if isinstance(configuration, dict) else {}


def counts(value: Any) -> tuple[int, ...] | None:
    """A list of counts; None where it is no such list."""
    # Not isinstance: true and false are integers too.
    good = isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
    return tuple(value) if good else None
