"""JAX's serialized tree definition: which path leads to each leaf. A flatbuffer, read by our own bounded reader.

    table PyTreeDef { kind: byte; children: [PyTreeDef]; children_names: [string]; custom_name: string;
                      custom_auxdata: [ubyte]; }

Kinds: leaf, none, tuple, list, dict, custom. Keys of a dict are the names of its children; a named tuple is a custom
node whose auxiliary data are its fields as JSON (``jax.export.register_namedtuple_serialization``); of other custom
nodes the children are numbered. Sources: jax ``_src/export/serialization.py`` and the flatbuffers binary format.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import NamedTuple

from auditor.containers.damage import DamagedError, LimitError

MAX_DEPTH = 64
MAX_NODES = 1 << 18
"""Of one tree; the children of a node may be shared, so that few bytes can stand for many."""
MAX_NAME_BYTES = 4096
_KIND, _CHILDREN, _NAMES, _AUXILIARY = 0, 1, 2, 4
_LEAF, _NONE, _TUPLE, _LIST, _DICT, _CUSTOM = range(6)

Path = tuple[str, ...]


class _Node(NamedTuple):
    at: int
    path: Path


def leaves_of(raw: bytes) -> Iterator[Path]:
    """The paths of a tree's leaves in JAX's order.

    Raises:
        DamagedError: it is no such tree.
        LimitError: it asks for more than an honest one needs.
    """
    table = _Tables(raw)
    waiting, count = [_Node(table.follow(0), ())], 0
    while waiting:
        node = waiting.pop()
        count += 1
        if count > MAX_NODES or len(node.path) > MAX_DEPTH:
            raise LimitError("its tree is larger or deeper than any honest one")
        kind = table.byte(node.at, _KIND)
        if kind in (_LEAF, _NONE):
            if kind == _LEAF:
                yield node.path
            continue
        if not _TUPLE <= kind <= _CUSTOM:
            raise DamagedError(f"its tree has a node of kind {kind}")
        children = table.vector(node.at, _CHILDREN)
        if count + len(waiting) + len(children) > MAX_NODES:
            raise LimitError("its tree is larger or deeper than any honest one")
        names = _names(table, node.at, kind, len(children))
        waiting += [_Node(at, (*node.path, name)) for at, name in zip(reversed(children), reversed(names), strict=True)]


def _names(table: _Tables, node: int, kind: int, count: int) -> list[str]:
    """What the children of a node are called."""
    numbered = [str(number) for number in range(count)]
    if kind == _DICT:
        names = [table.text(at) for at in table.vector(node, _NAMES)]
        if len(names) != count or len(set(names)) != count:
            raise DamagedError("its tree has a dictionary whose keys don't fit its values")
        return names
    if kind != _CUSTOM:
        return numbered
    try:
        fields = json.loads(table.content(node, _AUXILIARY) or b"null")
    except (ValueError, RecursionError):
        return numbered
    known = isinstance(fields, list) and all(isinstance(field, str) for field in fields)
    return fields if known and len(set(fields)) == len(fields) == count else numbered


class _Tables:
    """A flatbuffer. Every position is held against its length before it is followed."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def number(self, form: str, at: int) -> int:
        """The number at a position."""
        if at < 0 or at + struct.calcsize(form) > len(self.raw):
            raise DamagedError("its tree refers to what lies outside it")
        return int(struct.unpack_from(form, self.raw, at)[0])

    def follow(self, at: int) -> int:
        """The position to which the offset at another leads: always further on."""
        return at + self.number("<I", at)

    def field(self, table: int, field: int) -> int:
        """Where a table has a field; 0 where it hasn't."""
        fields = table - self.number("<i", table)
        size, at = self.number("<H", fields), 4 + 2 * field
        offset = self.number("<H", fields + at) if at + 2 <= size else 0
        return table + offset if offset else 0

    def byte(self, table: int, field: int) -> int:
        """A field of one byte; 0 where it is left out."""
        at = self.field(table, field)
        return self.number("<b", at) if at else 0

    def vector(self, table: int, field: int) -> list[int]:
        """The positions to which the entries of a vector lead."""
        at = self.field(table, field)
        if not at:
            return []
        first = self.follow(at)
        count = self.number("<I", first)
        if count > (len(self.raw) - first) // 4:
            raise DamagedError(f"its tree states {count} entries, more than its bytes can hold")
        return [self.follow(first + 4 + 4 * number) for number in range(count)]

    def content(self, table: int, field: int) -> bytes:
        """A field that is a vector of bytes."""
        at = self.field(table, field)
        return self._bytes(self.follow(at)) if at else b""

    def text(self, at: int) -> str:
        """The string at a position."""
        return self._bytes(at).decode("utf-8", "backslashreplace")

    def _bytes(self, at: int) -> bytes:
        count = self.number("<I", at)
        if count > MAX_NAME_BYTES or at + 4 + count > len(self.raw):
            raise DamagedError("a name in its tree is longer than any honest one")
        return self.raw[at + 4 : at + 4 + count]
