"""Flax's msgpack files taken apart and put together again by the msgpack package, as `flax.serialization` does."""

import msgpack
import numpy as np

_NUMPY = {"bfloat16": np.uint16}


class Bits(np.ndarray):
    """The bits of an array whose dtype numpy lacks, and its name."""

    name = ""


def _array(payload):
    shape, dtype, content = msgpack.unpackb(payload, raw=False)
    if dtype in _NUMPY or not hasattr(np, dtype):
        found = np.frombuffer(content, _NUMPY.get(dtype, np.uint8)).reshape(shape).view(Bits)
        found.name = dtype
        return found
    return np.frombuffer(content, dtype).reshape(shape)


def unpack(content):
    """The tree of a file."""
    return msgpack.unpackb(content, ext_hook=lambda code, data: _array(data) if code in (1, 3) else code, raw=False)


def record(shape, dtype, content):
    """An array, whatever is said of it."""
    return msgpack.ExtType(1, msgpack.packb((list(shape), dtype, content)))


def pack(tree):
    """The file of a tree."""

    def default(value):
        if isinstance(value, Bits):
            return record(value.shape, value.name, value.tobytes())
        return record(value.shape, value.dtype.name, value.tobytes())

    return msgpack.packb(tree, default=default, strict_types=True)


def leaves(tree, path=()):
    """Paths and arrays."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        elif isinstance(value, np.ndarray):
            yield (*path, key), value
