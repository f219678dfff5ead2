"""Witnesses made to do harm: they lie beside a healthy step, which must be judged as if they were not there."""

import json
import os
import struct
import zlib

from tests.hostile.making import Input, copied
from tests.paths import ROOT

HEALTHY = ROOT / "samples" / "hsdp_hidden_drift" / "healthy"
PART = "rank-00000.witness"
COLUMNS = {"tensor": ("name", "role", "dtype", "num_dims", "shape"), "box": ("num_dims", "bounds"), "piece": (
    "tensor", "place", "start", "stop", "lane0", "lane1", "num_nan", "num_infinite", "num_zero", "minimum", "maximum",
    "sum_squares",
)}  # fmt: skip


def step(folder):
    """One healthy step with its witness; the file of rank 0."""
    copied(HEALTHY / "step-10", folder / "step-10")
    return copied(HEALTHY / ".auditor" / "witness" / "step-10", folder / ".auditor" / "witness" / "step-10") / PART


def columns(path, *, metadata=(), names=b"[]", **counts):
    """A part whose columns are so many zeros of a byte each, in a sparse file."""
    said = {"auditor.witness": "1", "step": "10", "rank": "0", "num_ranks": "4", "launch": "", "attempt": "0",
            "taken": "1", "dtypes": '["float32"]', "places": '[{"rank": 0}]', "scalars": "{}"}  # fmt: skip
    header, at, packed = {"__metadata__": said | dict(metadata)}, 0, zlib.compress(names, 9)
    sizes = {f"{group}.{name}": counts.get(group, 0) for group, found in COLUMNS.items() for name in found}
    sizes |= {"tensor.shape": counts.get("extents", 0), "box.bounds": 0, "names": len(packed)}
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
        file.seek(-len(packed), os.SEEK_END)
        file.write(packed)


def with_header(path, **changes):
    """Write a part anew with other metadata."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] |= changes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def alone(path, **changes):
    """The only part, with other metadata."""
    with_header(path, **changes)
    for other in path.parent.glob("*.witness"):
        if other != path:
            other.unlink()


def numbers(path):
    columns(path, metadata={"scalars": json.dumps(dict.fromkeys(map(str, range(600_000)), 0))})


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def loop(path):
    path.unlink()
    path.symlink_to(path.name)


def huge(path):
    os.truncate(path, 1 << 40)


def crowd(path):
    """Two-letter names: fifty bytes of memory for five of text, which are packed to nothing."""
    columns(path, names=b"[" + b'"ab",' * 6_000_000 + b'"ab"]')


LIES = {
    "ranks without end": lambda path: with_header(path, num_ranks=str(10**17)),
    "sixty million tensors": lambda path: columns(path, names=b'["a"]', tensor=60_000_000),
    "extents without end": lambda path: columns(path, names=b'["a"]', tensor=1, extents=200_000_000),
    "twenty million pieces": lambda path: columns(path, names=b'["a"]', tensor=1, piece=20_000_000),
    "a hundred million boxes": lambda path: columns(path, box=100_000_000),
    "names by the million": crowd,
    "places by the million": lambda path: columns(path, metadata={"places": f"[{'{},' * 1_000_000}{{}}]"}),
    "numbers by the million": numbers,
    "a terabyte": huge,
    "a pipe": pipe,
    "a link to itself": loop,
    "empty": lambda path: path.write_bytes(b""),
}


def _input(name, spoil, says=PART, file=PART):
    return Input(f"witness: {name}", name, "witness", lambda folder: spoil(step(folder)), 0, says, file)


def a_million_pieces(path):
    """Within what is read; dated ahead, so that it is the others that are left out."""
    columns(path, metadata={"taken": "9e9"}, names=b'["a"]', tensor=200_000, piece=1_000_000)


WITNESSES = (
    *(_input(name, spoil) for name, spoil in LIES.items()),
    _input("ten million ranks", lambda path: alone(path, num_ranks=str(10**7)), "9999999 of 10000000 ranks left", ""),
    _input("a million pieces", a_million_pieces, "of another launch of the job than the newest", "rank-00001"),
)
