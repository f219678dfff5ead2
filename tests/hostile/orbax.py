"""Orbax checkpoints that lie: databases whose nodes lead elsewhere, chunks that expand, documents that overstate."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import zstandard

from tests import ocdbt_writer as writer
from tests.hostile.making import FIXTURES, Input, copied

ORBAX = FIXTURES / "orbax"
ARRAY = {
    "chunks": [4], "compressor": {"id": "zstd", "level": 1}, "dimension_separator": ".", "dtype": "<f4",
    "fill_value": None, "filters": None, "order": "C", "shape": [8], "zarr_format": 2,
}  # fmt: skip
GIB = 1 << 30


def plain(name: str, change: Callable[[Path], object]) -> Callable[[Path], object]:
    """A layout with a file a chunk, in which one thing is changed."""

    def build(folder: Path) -> None:
        change(copied(ORBAX / name, folder) / "checkpoint_3")

    return build


def written(objects: dict[str, bytes], names=("w",)) -> Callable[[Path], object]:
    """An item made by hand around these objects of a database."""

    def build(folder: Path) -> None:
        item = folder / "5" / "default"
        rows = {
            f"('params', '{name}')": {
                "key_metadata": [{"key": "params", "key_type": 2}, {"key": name, "key_type": 2}],
                "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
            }
            for name in names
        }
        tree = json.dumps({"tree_metadata": rows, "use_ocdbt": True, "use_zarr3": False}).encode()
        marks = {"commit_success.txt": b"", "../commit_success.txt": b"", "../_CHECKPOINT_METADATA": b"{}"}
        for name, content in {**objects, "_METADATA": tree, **marks}.items():
            (item / name).parent.mkdir(parents=True, exist_ok=True)
            (item / name).write_bytes(content)

    return build


def stored(values: dict[str, object], data: bytes = b"", **array) -> dict[str, bytes]:
    """A database of one array, ``params.w``."""
    document = json.dumps({**ARRAY, **array}).encode()
    return writer.database({"params.w/.zarray": document, **{f"params.w/{key}": v for key, v in values.items()}}, data)


def one_node(body: bytes, height: int = 0, **lies: object) -> dict[str, bytes]:
    node = writer.envelope(writer.BTREE, body, **lies)
    return {"manifest.ocdbt": writer.manifest([(height, 0, 0, len(node), 1)], ["d/node"]), "d/node": node}


def orbax(name: str, lie: str, build: Callable[[Path], object], code: int = 1, says: str = "INT002", file: str = ""):
    return Input(f"orbax: {name}", lie, "orbax", build, code, says, file)


def bomb() -> bytes:
    return zstandard.compress(bytes(GIB))


def in_place(pattern: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def do(folder: Path) -> None:
        path = next(iter(sorted(folder.glob(pattern))))
        path.write_bytes(change(path.read_bytes()))

    return do


def document(pattern: str, **changes: object) -> Callable[[Path], object]:
    return in_place(pattern, lambda raw: json.dumps({**json.loads(raw), **changes}).encode())


def deep(text: str) -> bytes:
    return (text * 100_000).encode()


def everyones_child() -> dict[str, bytes]:
    leaf = writer.envelope(writer.BTREE, writer.leaf({"x": b"v"}))
    children = {f"k{at:06}": (0, 0, len(leaf), 0) for at in range(20_000)}
    top = writer.envelope(writer.BTREE, writer.inner(children, ["d/leaf"]))
    return {"manifest.ocdbt": writer.manifest([(1, 0, 0, len(top), 1)], ["d/top"]), "d/top": top, "d/leaf": leaf}


def names(count: int, shared: int) -> bytes:
    """A leaf whose names share so many bytes with the one before, put together without making them."""
    rests = b"a" * shared + b"".join(b"%08d" % at for at in range(count))
    return b"".join([
        b"\0", writer.file_table([]), writer.varint(count), writer.varints([shared] * (count - 1)),
        writer.varints([shared + 8]), b"\x08" * (count - 1), rests, bytes(2 * count),
    ])  # fmt: skip


def itself() -> dict[str, bytes]:
    body = writer.inner({"a": (0, 0, 70, 0)}, ["d/node"])
    size = len(writer.envelope(writer.BTREE, body))
    return one_node(writer.inner({"a": (0, 0, size, 0)}, ["d/node"]), 1)


def petabytes(count: int) -> Callable[[Path], object]:
    """So many arrays of 2^51 bytes, each in a chunk of 20: together more than 64 bits count."""
    names = [f"w{at}" for at in range(count)]
    lie = json.dumps({**ARRAY, "shape": [1 << 47], "chunks": [1 << 47], "dtype": "<c16"}).encode()
    values = {f"params.{name}/.zarray": lie for name in names}
    values |= {f"params.{name}/0": (0, 20 * at, 20) for at, name in enumerate(names)}
    return written(writer.database(values, bytes(20 * count)), names)


def many_chunks(count: int, checksum: bool = True) -> Callable[[Path], object]:
    """A shard of ``count`` chunks in a sparse file: an index of nothing but zeros."""

    def change(folder: Path) -> None:
        plain = [{"name": "bytes", "configuration": {"endian": "little"}}]
        index = {"chunk_shape": [1], "codecs": plain, "index_codecs": [*plain, {"name": "crc32c"}]}
        document("params.bias/zarr.json", shape=[count],
                 chunk_grid={"name": "regular", "configuration": {"chunk_shape": [count]}},
                 codecs=[{"name": "sharding_indexed", "configuration": index}])(folder)  # fmt: skip
        shutil.rmtree(folder / "params.bias/c")
        (folder / "params.bias/c").mkdir()
        found = google_crc32c.value(bytes(16 * count)) ^ (not checksum)
        with (folder / "params.bias/c/0").open("wb") as file:
            file.truncate(16 * count)
            file.seek(16 * count)
            file.write(found.to_bytes(4, "little"))

    return change


GOOD = zstandard.compress(bytes(16))

ORBAX_INPUTS = (
    orbax("a node below itself", "a tree", written(itself()), file="d/node"),
    orbax("a leaf that is 20,000 nodes' child", "a tree", written(everyones_child()), file="d/leaf"),
    orbax("a node beyond its file", "an offset", written({
        "manifest.ocdbt": writer.manifest([(0, 0, 1 << 60, 100, 1)], ["d/node"]), "d/node": b"x"}), file="d/node"),
    orbax("a node of an exabyte", "a length", written({
        "manifest.ocdbt": writer.manifest([(0, 0, 0, 1 << 60, 1)], ["d/node"]), "d/node": b"x"}), file="d/node"),
    orbax("a root 255 nodes high", "a height", written(one_node(writer.leaf({"a": b""}), 255)),
          file="manifest.ocdbt"),
    orbax("a file outside", "a name as a path", written(one_node(writer.leaf(
        {"params.w/0": (0, 0, 9)}, ["../../../../../../etc/passwd"]))), file="d/node"),
    orbax("a root outside", "a name as a path", written({
        "manifest.ocdbt": writer.manifest([(0, 0, 0, 9, 1)], ["/etc/passwd"])}), file="manifest.ocdbt"),
    orbax("a checksum that does not fit", "a checksum", written(one_node(writer.leaf({"a": b""}), checksum=7)),
          file="d/node"),
    orbax("a node that expands to a gigabyte", "its size", written(one_node(
        bytes(GIB), compressed=True)), file="d/node"),
    orbax("2^60 entries", "a count", written(one_node(b"\0\0" + writer.varint(1 << 60))), file="d/node"),
    orbax("2^60 files", "a count", written(one_node(b"\0" + writer.varint(1 << 60))), file="d/node"),
    orbax("names of six gigabytes in 1 kB", "memory", written(one_node(names(100_000, 65_000), compressed=True)),
          says="more names than any honest", file="manifest.ocdbt"),
    orbax("three million names", "memory", written(one_node(names(3_000_000, 0), compressed=True)),
          says="lists 3000000 names", file="manifest.ocdbt"),
    orbax("numbered manifests", "that it is read", written({"manifest.ocdbt": writer.manifest([], [], kind=1)}), 3,
          "numbered manifests", "manifest.ocdbt"),
    orbax("no versions", "nothing", written({"manifest.ocdbt": writer.manifest([], [])}), 1, "COV003", "_METADATA"),
    orbax("a chunk that expands to a gigabyte", "its size", written(stored({"0": bomb(), "1": GOOD})), 1, "INT015"),
    orbax("a chunk that is none", "its codec", written(stored({"0": b"\0" * 9, "1": GOOD})), 1, "INT015"),
    orbax("chunks of a terabyte in 20 bytes", "a shape",
          written(stored({"0": GOOD, "1": GOOD}, shape=[1 << 39], chunks=[1 << 38]))),
    orbax("arrays that 64 bits can't count together", "a shape", petabytes(4200), says="bytes together",
          file="d/values"),
    orbax("10^15 chunks", "a shape", written(stored({"0": GOOD}, shape=[4 * 10**13])), 1, "COV001"),
    orbax("a shape beyond any", "a shape", written(stored({"0": GOOD}, shape=[1 << 61, 1 << 61], chunks=[4, 4]))),
    orbax("1,000 dims", "a shape", written(stored({"0": GOOD}, shape=[1] * 1000, chunks=[1] * 1000))),
    orbax("values over each other", "offsets", written(stored(
        {"0": (0, 0, len(GOOD)), "1": (0, 1, len(GOOD) - 1)}, GOOD)), file="d/values"),
    orbax("values beyond their file", "offsets", written(stored({"0": (0, 1 << 50, 9), "1": GOOD}, GOOD)),
          file="d/values"),
    orbax("name with escapes", "a name that acts on terminals", written(stored({"0": GOOD, "1": GOOD}),
          ("w", "a\x1b[2J\x07\u202e")), 1, "COV003"),
    orbax("a tree of brackets", "nesting", plain("files_zarr2", in_place("_METADATA", lambda raw: deep("["))),
          file="_METADATA"),
    orbax("a tree of empty lists", "memory", plain("files_zarr2", in_place(
        "_METADATA", lambda raw: b"[" + b",".join([b"[]"] * 3_000_000) + b"]")), file="_METADATA"),
    orbax("a mesh of 2^40", "a mesh", plain("files_zarr2", in_place(
        "_sharding", lambda raw: raw.replace(b"[2, 4]", b"[1099511627776, 4]"))), 0,
          "recorded nowhere"),
    orbax("chunks that are a folder", "their kind", plain("files_zarr2", lambda folder: (
        (folder / "params.kernel/3.0").unlink(), (folder / "params.kernel/3.0").mkdir())), 1, "INT001"),
    orbax("another compressor", "a codec", plain("files_zarr2", document(
        "params.kernel/.zarray", compressor={"id": "bz2"})), 3, "codec bz2 is not read", "params.kernel"),
    orbax("a compressor that it is not under", "a codec", plain("files_zarr2", document(
        "params.kernel/.zarray", compressor={"id": "blosc"})), 1, "INT015"),
    orbax("an index of 2^63", "a shard's index", plain("files_zarr3", in_place(
        "params.kernel/c/0/0", lambda raw: raw[:-20] + b"\xff" * 20)), 1, "INT015", "params.kernel/c/0/0"),
    orbax("a million chunks of no bytes", "a shard's index", plain("files_zarr3", many_chunks(1 << 20)), 1, "INT002",
          "params.bias/c/0"),
    orbax("a million chunks by a wrong checksum", "a shard's index", plain("files_zarr3", many_chunks(1 << 20, False)),
          1, "INT002", "params.bias/c/0"),
    orbax("four million chunks of no bytes", "a shard's index", plain("files_zarr3", many_chunks(1 << 22)), 1,
          "at most 1048576 are read", "params.bias/c/0"),
)  # fmt: skip
