"""What lies between the elements of a Zarr chunk and its bytes: which codecs are undone here, and why others aren't.

    v3   bytes, then zstd or gzip; or sharding_indexed with one such chunk a shard, its index at the end under crc32c
    v2   no compressor, or zstd, gzip, zlib; no filters

Sources: the Zarr v3 codec specifications (bytes, gzip, zstd, sharding_indexed); the Zarr v2 specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from auditor.containers.compression import has_zstd
from auditor.containers.damage import DamagedError
from auditor.model.encoding import GZIP, PLAIN, SHARD, ZSTD

_COMPRESSORS = {"zstd": ZSTD, "gzip": GZIP, "zlib": GZIP}
NO_ZSTD = "codec zstd without its library (pip install 'ckpt-auditor[orbax]')"


def read_codecs(stated: Any, chunk_shape: tuple[int, ...]) -> tuple[str, str]:
    """The codec of a v3 array's chunks, and why it isn't read; the latter is empty where it is.

    Raises:
        DamagedError: no codecs are stated.
    """
    if not isinstance(stated, list) or not stated:
        raise DamagedError("it has no codecs")
    (name, configuration), *others = map(named, stated)
    if name != "sharding_indexed":
        return _plain(stated)
    if others:
        return PLAIN, "several codecs"
    if counts(configuration.get("chunk_shape")) != chunk_shape:
        return PLAIN, "codec sharding_indexed with several chunks a shard"
    index = configuration.get("index_codecs")
    known = isinstance(index, list) and [named(codec)[0] for codec in index] == ["bytes", "crc32c"]
    if not known or configuration.get("index_location", "end") != "end":
        return PLAIN, "codec sharding_indexed with an index of another form"
    codec, unsupported = _plain(configuration.get("codecs"))
    return f"{SHARD}/{codec}", unsupported


def _plain(stated: Any) -> tuple[str, str]:
    if not isinstance(stated, list) or not stated:
        raise DamagedError("it has no codecs")
    (name, configuration), *others = map(named, stated)
    if name != "bytes":
        return PLAIN, f"codec {name[:40] or 'of no name'}"
    if configuration.get("endian", "little") != "little":
        return PLAIN, "codec bytes, big-endian"
    if not others:
        return PLAIN, ""
    return _compressor(others[0][0]) if len(others) == 1 else (PLAIN, "several codecs")


def read_compressor(stated: Any, filters: Any) -> tuple[str, str]:
    """The same for a v2 array."""
    if filters:
        return PLAIN, "filters"
    if stated is None:
        return PLAIN, ""
    name = stated.get("id") if isinstance(stated, dict) else None
    return _compressor(name if isinstance(name, str) else "")


def _compressor(name: str) -> tuple[str, str]:
    codec = _COMPRESSORS.get(name)
    if codec is None:
        return PLAIN, f"codec {name[:40] or 'of no name'}"
    return codec, NO_ZSTD if codec == ZSTD and not has_zstd() else ""


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
