"""JSON from strangers: whole, bounded, and with a key that is given twice refused where readers would disagree on it.

``NaN`` and ``Infinity`` are read: no JSON, but Python's writers put them into training logs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import accumulate
from typing import Any

from auditor.containers.damage import CutShortError, DamagedError, LimitError
from auditor.storage.store import Handle, ShortReadError, read_bytes

MAX_JSON_BYTES = 64 << 20
"""A document may be this long: the index of a million tensors, the log of a million steps."""

MAX_DEPTH = 64
"""Lists within lists; the deepest honest document (a trainer's state) has five."""

_STRING, _BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"'), re.compile(rb"[\[\]{}]")
_MIN_BYTES_PER_BRACKET = 8
_FREE_BRACKETS = 1 << 12
"""A list or dictionary takes two bytes of text and sixty of memory. Honest documents have one in eight at most."""


def parse_json(raw: bytes, *, unique_keys: bool = True) -> Any:
    """The value of a JSON text.

    Raises:
        DamagedError: it is not UTF-8, not JSON, or (with ``unique_keys``) gives a key twice.
        LimitError: it is nested too deeply, or consists of little but brackets.
    """
    if raw.count(b"[") + raw.count(b"{") > len(raw) // _MIN_BYTES_PER_BRACKET + _FREE_BRACKETS:
        raise LimitError("its JSON holds more lists than any honest one")
    if _depth(raw) > MAX_DEPTH:
        raise LimitError("its JSON is nested too deeply")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique if unique_keys else None)
    except UnicodeDecodeError as error:
        raise DamagedError(f"its JSON is not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise LimitError("its JSON is nested too deeply") from error
    except ValueError as error:
        raise DamagedError(f"its JSON is broken: {error}") from error


def _depth(raw: bytes) -> int:
    """How deep lists and dictionaries are nested. Interpreters differ in the depth at which they give up."""
    brackets = _BRACKET.findall(_STRING.sub(b"", raw))
    return max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)


def read_json(handle: Handle, *, unique_keys: bool = True) -> Any:
    """The value of a file that is one JSON text.

    Raises:
        DamagedError: as :func:`parse_json`, or the file is empty.
        LimitError: it is longer than :data:`MAX_JSON_BYTES`.
        StorageError: storage failed.
    """
    size = handle.entry.num_bytes
    if size == 0:
        raise CutShortError("the file is empty")
    if size > MAX_JSON_BYTES:
        raise LimitError(f"it has {size} bytes, at most {MAX_JSON_BYTES} are read")
    try:
        raw = read_bytes(handle, 0, size)
    except ShortReadError as error:
        raise CutShortError(f"the file ends before its listed size ({error})") from error
    return parse_json(raw, unique_keys=unique_keys)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise DamagedError(f"its JSON gives {twice[:200]!r} twice")
    return found
