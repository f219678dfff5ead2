"""Steps written as docs/zarr-layout.md has it, of any arrays and dtypes."""

import json

import numpy as np


def bfloat16(values):
    """The bits of the nearest bfloat16 numbers."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def write_step(folder, step, tensors, *, mesh=None, groups=(), scalars=()):
    """One step; ``tensors``: name to array, or (role, name) to array, or to array and what is said of it."""
    at = folder / "steps" / str(step)
    for order, (key, found) in enumerate(tensors.items()):
        role, name = key if isinstance(key, tuple) else ("parameter", key)
        values, said = found if isinstance(found, tuple) else (found, {})
        said = {"order": order, **said}
        if values.dtype == np.uint16:
            said["source_dtype"] = "bfloat16"
        write_array(at / "tensors" / role / name, values, said)
    write_group(at / "catalog", {"groups": list(groups), "scalars": list(scalars)})
    write_group(at, {"schema_version": 1, "step": step, "mesh": mesh or {}})
    return folder


def write_group(folder, said):
    folder.mkdir(parents=True, exist_ok=True)
    text = {"zarr_format": 3, "node_type": "group", "attributes": {"auditor": said}}
    (folder / "zarr.json").write_text(json.dumps(text))


def write_array(folder, values, said):
    chunk = folder / "c" / "/".join("0" * values.ndim)
    chunk.parent.mkdir(parents=True, exist_ok=True)
    chunk.write_bytes(values.tobytes())
    text = {
        "zarr_format": 3, "node_type": "array", "shape": values.shape, "data_type": values.dtype.name, "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": values.shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}], "attributes": {"auditor": said},
    }  # fmt: skip
    (folder / "zarr.json").write_text(json.dumps(text))
