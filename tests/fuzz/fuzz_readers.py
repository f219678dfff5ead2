"""Coverage-guided fuzzing of the readers of files from strangers.

    pip install atheris
    python tests/fuzz/fuzz_readers.py KIND [-max_total_time=600] [CORPUS]

KIND: zip, pickle, torch, safetensors, dcp, ocdbt, zarr, chunk, msgpack or npz.

A reader may return, or raise DamagedError, LimitError or UnsupportedError; anything else is a crash. Seeds are made
from the committed fixtures. Inputs that crashed once are kept in ``crashes/`` and replayed by
``test_fuzz_regressions.py``.
"""

import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

READERS = ("zip", "pickle", "torch", "safetensors", "dcp", "ocdbt", "zarr", "chunk", "msgpack", "npz")
HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent / "fixtures"
sys.path.insert(0, str(HERE.parent.parent))


def read(kind: str, data: bytes) -> None:
    """Give ``data`` to one reader; returns whatever is allowed to happen."""
    from auditor.containers.damage import DamagedError, UnsupportedError
    from auditor.containers.torch_zip import read_torch_file
    from auditor.containers.zip_directory import read_directory
    from auditor.storage.memory import MemoryStore

    try:
        if kind == "pickle":
            read_pickle(data)
            return
        if kind in ("ocdbt", "zarr", "chunk"):
            {"ocdbt": read_ocdbt, "zarr": read_zarr, "chunk": read_chunk}[kind](data)
            return
        with MemoryStore({"f": data}).open("f") as handle:
            if kind == "zip":
                read_directory(handle)
            elif kind == "torch":
                read_torch_file(handle)
            elif kind in ("msgpack", "npz"):
                read_state(kind, handle)
            elif kind == "dcp":
                from auditor.containers.dcp_metadata import read_dcp_metadata

                read_dcp_metadata(handle)
            else:
                from auditor.containers.safetensors_file import read_safetensors

                read_safetensors(handle)
    except (DamagedError, UnsupportedError):
        pass


def read_state(kind: str, handle: Any) -> None:
    """Read a state; what its arrays are must be told whatever they are called."""
    from auditor.adapters.jax_state import stored
    from auditor.adapters.optax.tree import Leaf, OptaxTree
    from auditor.containers.flax_msgpack import read_flax
    from auditor.containers.npz_file import read_npz

    content = read_flax(handle) if kind == "msgpack" else read_npz(handle)
    leaves, _ = stored("f", (), content.leaves())
    for leaf in leaves:
        assert all(0 <= one.offset <= one.offset + one.num_bytes <= handle.entry.num_bytes for one in leaf.stretches)
    OptaxTree([Leaf(leaf.path, leaf.dtype, leaf.shape) for leaf in leaves])


def read_pickle(data: bytes) -> None:
    """Read a pickle; what the first pass let through must not surprise the second."""
    from auditor.containers.damage import DamagedError
    from auditor.containers.pickle_machine import Limits, PickleMachine

    machine = PickleMachine({}, lambda persistent: persistent, Limits(num_opcodes=200_000))
    try:
        machine.load(data)
    except DamagedError as error:
        if machine.num_memory and isinstance(error.__cause__, (IndexError, KeyError, struct.error)):
            raise AssertionError(f"the passes disagree: {error}") from error
        raise


def read_ocdbt(data: bytes) -> None:
    """Read a database whose first bytes say what the rest is: a manifest's body, a node's, a whole manifest.

    Checksums are made to fit, or nothing behind them would be reached.
    """
    from auditor.containers.ocdbt import read_database
    from auditor.storage.memory import MemoryStore
    from auditor.storage.store import ObjectMissingError
    from tests import ocdbt_writer as writer

    kind, height, body = data[:1], data[1:2], data[2:]
    node = writer.envelope(writer.BTREE, body)
    root = (height[0] % 4 if height else 0, 0, 0, len(node), 1)
    manifest = writer.manifest([root], ["d/n"])
    if kind < b"\x40":
        manifest = writer.envelope(writer.MANIFEST, body)
    elif kind < b"\x60":
        manifest = body
    try:
        found = read_database(MemoryStore({"manifest.ocdbt": manifest, "d/n": node}), "")
    except ObjectMissingError:
        return
    for value in found.values.values():
        assert not value.place.file.startswith(("/", ".."))
        assert "/../" not in value.place.file


def read_zarr(data: bytes) -> None:
    """Read documents of Zarr, and those that Orbax writes."""
    from auditor.adapters.orbax.metadata import read_shardings, read_step_metadata, read_tree, read_written
    from auditor.containers.json_document import parse_json
    from auditor.containers.zarr_array import node_of
    from auditor.containers.zarr_v2 import array_of
    from auditor.storage.memory import MemoryStore

    kind, text = data[:1], data[1:]
    if kind < b"\x80":
        (node_of if kind < b"\x40" else array_of)(parse_json(text))
        return
    readers = (read_tree, read_shardings, read_written, read_step_metadata)
    with MemoryStore({"f": text}).open("f") as handle:
        readers[kind[0] % len(readers)](handle)


def read_chunk(data: bytes) -> None:
    """Read a chunk of a stated size under a codec."""
    from auditor.containers.encoded import open_file
    from auditor.model.catalog import File
    from auditor.model.encoding import GZIP, PLAIN, SHARD, ZSTD, one_chunk
    from auditor.storage.memory import MemoryStore
    from auditor.storage.store import ShortReadError, UndecodableError, read_bytes

    codecs = (PLAIN, ZSTD, GZIP, f"{SHARD}/", f"{SHARD}/{ZSTD}")
    size, stored = int.from_bytes(data[1:4], "little") % (3 << 20), data[4:]
    file = File("f", encoding=one_chunk(size, codecs[data[0] % len(codecs)] if data else PLAIN, len(stored)))
    try:
        with open_file(MemoryStore({"f": stored}), file) as handle:
            assert len(read_bytes(handle, 0, size)) == size
    except (ShortReadError, UndecodableError):
        pass


def seeds_of_orbax(kind: str) -> list[bytes]:
    """What Orbax wrote, in the forms that the readers above take."""
    from tests import ocdbt_writer as writer

    folder = FIXTURES / "orbax"
    if kind == "ocdbt":
        leaf = writer.leaf({"a/.zarray": b"{}", "a/0": (0, 3, 4), "b": b"x"}, ["d/values", "d/others"])
        inner = writer.inner({"a": (0, 0, 60, 1), "b": (0, 60, 60, 0)}, ["d/n"])
        manifests = [path.read_bytes() for path in sorted(folder.rglob("manifest.ocdbt"))[:8]]
        # A manifest's envelope is 14 bytes before its body and 4 behind it.
        return [b"\xff\0" + leaf, b"\xff\1" + inner, *(b"\x10\0" + raw[14:-4] for raw in manifests),
                *(b"\x50\0" + raw for raw in manifests)]  # fmt: skip
    if kind == "zarr":
        names = {".zarray": b"\x50", "zarr.json": b"\0", "_METADATA": b"\x80", "_sharding": b"\x81",
                 "process_0": b"\x82", "_CHECKPOINT_METADATA": b"\x83"}  # fmt: skip
        return [names[path.name] + path.read_bytes() for path in sorted(folder.rglob("*")) if path.name in names][::7]
    chunks = [path.read_bytes() for path in sorted(folder.glob("files_*/*/params.*/**/*")) if path.is_file()]
    return [bytes([codec]) + (64).to_bytes(3, "little") + raw for raw in chunks[::3] for codec in range(5)]


def seeds(kind: str) -> list[bytes]:
    """Small real inputs to begin with."""
    import pickle
    import zipfile

    if kind in ("ocdbt", "zarr", "chunk"):
        return seeds_of_orbax(kind)
    if kind == "safetensors":
        return [path.read_bytes()[:4096] for path in sorted(FIXTURES.rglob("*.safetensors"))]
    if kind == "msgpack":
        files = [*FIXTURES.glob("flax/*/*6*"), *FIXTURES.glob("flax/*/state.msgpack")]
        return [path.read_bytes() for path in sorted(files) if path.is_file()]
    if kind == "npz":
        return [path.read_bytes() for path in sorted(FIXTURES.glob("flax/npz/*/*.npz"))]
    if kind == "dcp":
        return [path.read_bytes() for path in sorted(FIXTURES.rglob(".metadata"))]
    files = sorted(FIXTURES.rglob("*.pt"), key=lambda path: path.stat().st_size)[:12]
    if kind in ("zip", "torch"):
        return [path.read_bytes() for path in files]
    plain = [pickle.dumps({"a": [1, 2.5, "x", b"y", None, True, (1, 2), {3}]}, protocol) for protocol in range(6)]
    for path in files:
        with zipfile.ZipFile(path) as archive:
            plain += [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]
    return plain


def main() -> None:
    import atheris

    kind = sys.argv.pop(1)
    assert kind in READERS, __doc__
    corpus = Path(tempfile.mkdtemp())
    (HERE / "crashes").mkdir(exist_ok=True)
    for number, seed in enumerate(seeds(kind)):
        (corpus / f"seed{number}").write_bytes(seed)
    with atheris.instrument_imports(include=["auditor.containers", "auditor.storage", "auditor.adapters"]):
        read(kind, b"")
    atheris.Setup([*sys.argv, str(corpus), f"-artifact_prefix={HERE}/crashes/{kind}-"], lambda data: read(kind, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
