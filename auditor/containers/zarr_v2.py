"""Zarr v2 arrays, as TensorStore writes them: ``.zarray`` beside the chunks ``0.1`` (``0`` for an array without dims).

TensorStore's dtypes that numpy lacks have their plain names (``bfloat16``). Sources: the Zarr v2 specification;
TensorStore, ``driver/zarr``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from auditor.containers.damage import DamagedError
from auditor.containers.zarr_array import MAX_DIMS, ZarrArray, checked
from auditor.containers.zarr_codecs import counts, read_compressor, swapped
from auditor.model.dtype import APART

DOCUMENT = ".zarray"
_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}


def array_of(document: Any) -> ZarrArray:
    """The array that a ``.zarray`` describes.

    Raises:
        DamagedError: it is no such document, or contradicts itself.
        LimitError: it asks for more than an honest one needs.
    """
    if not isinstance(document, dict) or document.get("zarr_format") != 2:
        raise DamagedError("it is no document of a Zarr v2 array")
    shape, chunk_shape = counts(document.get("shape")), counts(document.get("chunks"))
    if shape is None or len(shape) > MAX_DIMS:
        raise DamagedError("it has no shape")
    chunk_shape = checked(shape, chunk_shape)
    separator = document.get("dimension_separator", ".")
    if separator not in ("/", "."):
        raise DamagedError("the separator of its chunk keys is neither / nor .")
    stated = document.get("dtype")
    if not isinstance(stated, str) or not stated or len(stated) > 64:
        raise DamagedError("it has no data type")
    name = data_type(stated)
    dtype = APART.get(name)
    how = read_compressor(document.get("compressor"), document.get("filters"), math.prod(chunk_shape), dtype)
    if document.get("order", "C") != "C":
        how = replace(how, order=tuple(reversed(range(len(shape)))))
    if stated.startswith(">"):
        how = swapped(how, dtype)
    return ZarrArray({}, shape, chunk_shape, name, "", separator, how.unsupported, how)


def data_type(stated: str) -> str:
    """A dtype's name, from numpy's short form where it is one.

    >>> data_type("<f4"), data_type("|b1"), data_type("bfloat16")
    ('float32', 'bool', 'bfloat16')
    """
    if stated[1:] == "b1":
        return "bool"
    kind, size = stated[1:2], stated[2:]
    short = stated[0] in "<>|" and kind in _KINDS and size.isascii() and size.isdigit() and len(size) < 3
    return f"{_KINDS[kind]}{8 * int(size)}" if short else stated
