"""Records as plain JSON and back: frozen dataclasses, enumerations, tuples, mappings.

Fields that have their default are left out, so that a later version may add fields; fields that are not known are
passed over. What is read back is checked against the types that the records declare.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from auditor.containers.damage import DamagedError
from auditor.model.dtype import DTYPES, DType
from auditor.model.mesh import Coordinate


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it. Equal values give equal texts: sets are sorted, mappings keep their order.

    Raises:
        TypeError: it is of a kind that no record holds.
    """
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Coordinate):
        # A text instead of lists in lists: there is one for every place that is named.
        return ",".join(f"{axis}={index}" for axis, index in value.indices)
    if isinstance(value, DType):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return {
            item.name: plain(getattr(value, item.name))
            for item in _fields(type(value))
            if not _is_default(item, getattr(value, item.name))
        }
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(map(plain, value))
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} is kept in no record")


def revived(kind: Any, value: Any) -> Any:
    """What :func:`plain` made of a value of type ``kind``.

    Raises:
        DamagedError: the text does not fit the type.
    """
    found = _revived(kind, value)
    if found is _NO:
        raise DamagedError(f"{str(value)[:80]!r} is no {getattr(kind, '__name__', kind)}")
    return found


_NO = object()


def _revived(kind: Any, value: Any) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        others = [item for item in get_args(kind) if item is not type(None)]
        return None if value is None else revived(others[0], value)
    if origin is not None:
        return _revived_several(origin, get_args(kind), value)
    if kind is Coordinate:
        return _coordinate(value)
    if kind is DType:
        return DTYPES.get(value, _NO) if isinstance(value, str) else _NO
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind.__members__.get(value, _NO) if isinstance(value, str) else _NO
    if is_dataclass(kind):
        return _record(kind, value)
    if kind is float:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else _NO
    if kind in (str, int, bool):
        return value if type(value) is kind else _NO
    raise TypeError(f"{kind} is kept in no record")


def _revived_several(origin: Any, inner: tuple[Any, ...], value: Any) -> Any:
    if issubclass(origin, Mapping):
        if not isinstance(value, dict):
            return _NO
        numbered = inner[0] is int
        if numbered and not all(key.isascii() and key.isdigit() and len(key) < 16 for key in value):
            return _NO
        return {int(key) if numbered else key: revived(inner[1], item) for key, item in value.items()}
    if not isinstance(value, list):
        return _NO
    if origin is frozenset:
        return frozenset(revived(inner[0], item) for item in value)
    if len(inner) == 1 or inner[1] is ...:
        return tuple(revived(inner[0], item) for item in value)
    if len(inner) != len(value):
        return _NO
    return tuple(revived(one, item) for one, item in zip(inner, value, strict=True))


def _record(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        return _NO
    hints = _hints(kind)
    found = {}
    for item in _fields(kind):
        if item.name in value:
            found[item.name] = revived(hints[item.name], value[item.name])
        elif item.default is MISSING and item.default_factory is MISSING:
            raise DamagedError(f"a {kind.__name__} lacks its {item.name}")
    return kind(**found)


def _coordinate(value: Any) -> Any:
    if not isinstance(value, str):
        return _NO
    indices = {}
    for part in filter(None, value.split(",")):
        axis, equals, index = part.partition("=")
        if not (equals and index.isascii() and index.isdigit() and len(index) < 16):
            return _NO
        indices[axis] = int(index)
    return Coordinate(tuple(indices.items()))


def _key(key: object) -> str:
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    if isinstance(key, str):
        return key
    raise TypeError(f"{type(key).__name__} is no key of a record")


@lru_cache(maxsize=64)
def _fields(kind: Any) -> Sequence[Field[Any]]:
    return tuple(item for item in fields(kind) if item.init)


@lru_cache(maxsize=64)
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_default(item: Field[Any], value: object) -> bool:
    if item.default is not MISSING:
        return bool(type(value) is type(item.default) and value == item.default)
    return item.default_factory is not MISSING and bool(value == item.default_factory())
