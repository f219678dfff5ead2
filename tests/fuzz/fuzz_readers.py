"""Coverage-guided fuzzing of the readers of files from strangers.

    pip install atheris
    python tests/fuzz/fuzz_readers.py KIND [-max_total_time=600] [CORPUS]

KIND: zip, pickle, torch, safetensors, dcp, ocdbt, zarr, chunk, shard, tree, msgpack, npz, names or set.

A reader may return, or raise DamagedError, LimitError or UnsupportedError; anything else is a crash. Seeds are made
from the committed fixtures. Inputs that crashed once are kept in ``crashes/`` and replayed by
``test_fuzz_regressions.py``.
"""

import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

READERS = ("zip", "pickle", "torch", "safetensors", "dcp", "ocdbt", "zarr", "chunk", "shard", "tree", "msgpack", "npz",
           "names", "set")  # fmt: skip
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
        if kind in OF_JAX or kind in OF_SERIES:
            (OF_JAX | OF_SERIES)[kind](data)
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
    from auditor.adapters.orbax.legacy import read_legacy
    from auditor.containers.flax_msgpack import read_flax
    from auditor.containers.npz_file import read_npz

    content = read_flax(handle) if kind == "msgpack" else read_npz(handle)
    size = content.encoding.size if content.encoding is not None else handle.entry.num_bytes
    leaves, _ = stored("f", (), content.leaves())
    for leaf in leaves:
        assert all(0 <= one.offset <= one.offset + one.num_bytes <= size for one in leaf.stretches)
    if kind == "msgpack":
        read_legacy(handle)
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
    from auditor.model.encoding import BLOSC, CRC32C, DEFLATE, GZIP, LZ4, PLAIN, SHARD, SWAPPED, ZSTD, one_chunk
    from auditor.storage.memory import MemoryStore
    from auditor.storage.store import ShortReadError, UndecodableError, read_bytes

    codecs = (PLAIN, ZSTD, GZIP, f"{SHARD}/", f"{SHARD}/{ZSTD}", BLOSC, LZ4, DEFLATE, f"{CRC32C}/{ZSTD}", SWAPPED[8])
    size, stored = int.from_bytes(data[1:4], "little") % (3 << 20), data[4:]
    file = File("f", encoding=one_chunk(size, codecs[data[0] % len(codecs)] if data else PLAIN, len(stored)))
    try:
        with open_file(MemoryStore({"f": stored}), file) as handle:
            assert len(read_bytes(handle, 0, size)) == size
    except (ShortReadError, UndecodableError):
        pass


def read_shard(data: bytes) -> None:
    """Find the chunks of a shard of four."""
    from auditor.containers.zarr_array import ZarrArray
    from auditor.containers.zarr_codecs import Codecs
    from auditor.containers.zarr_shards import Entries, chunks_in_shard
    from auditor.storage.memory import MemoryStore

    first, checksum = (bool(data[0] & bit) if data else False for bit in (1, 2))
    how = Codecs("", inner_shape=(2, 2), index_first=first, index_checksum=checksum)
    array = ZarrArray({}, (7, 3), (2, 2), "float32", how=how, shard_shape=(4, 4))
    with MemoryStore({"f": data[1:]}).open("f") as handle:
        found = chunks_in_shard(handle, 0, len(data) - 1, array, (1, 0), Entries())
    for number, offset, length in zip(found.number.tolist(), found.offset.tolist(), found.length.tolist(), strict=True):
        assert 0 <= offset < offset + length < len(data)
        assert array.position_of(number) in {(2, 0), (2, 1), (3, 0), (3, 1)}


def read_treedef(data: bytes) -> None:
    """Read JAX's tree definition."""
    from auditor.containers.jax_treedef import leaves_of

    assert all(len(path) <= 64 for path in leaves_of(data))


OF_JAX = {"ocdbt": read_ocdbt, "zarr": read_zarr, "chunk": read_chunk, "shard": read_shard, "tree": read_treedef}
"""Readers that take bytes in a form of their own."""


def read_names(data: bytes) -> None:
    """Sort files of any names into steps; no file may get lost, or be in two."""
    from auditor.adapters.adapter import Folder
    from auditor.adapters.file_sets import joined
    from auditor.adapters.file_steps import Holds, file_series
    from auditor.adapters.step_names import last_number
    from auditor.adapters.torch_per_rank.files import step_in_rank_name
    from auditor.storage.store import Entry

    named = data.decode("utf-8", "surrogateescape").replace("/", "").split("\0")
    names = {f"{name[:80]}.pt": Entry(f"{name[:80]}.pt", False, 1) for name in named[:40]}
    for name in names:
        step_in_rank_name(name)
        assert (last_number(name.removesuffix(".pt")) or 0) < 10**15
    holds = {name: (*Holds, None)[len(name) % 4] for name in names}
    found = [*file_series(Folder("", names, {}), (".pt",), lambda one: holds[one.path])]
    steps = [step for run in joined([one for one in found if one.numbered]) for step in run]
    held = [entry.name for step in steps for entry in step.files.values()]
    models = [entry.name for one in found if one.numbered and one.holds is Holds.MODEL for entry in one.entries]
    assert len(held) == len({*held})
    assert {*models} <= {*held} <= {*names}


def read_set(data: bytes) -> None:
    """Read a model's file and its optimizer's that were saved together; the first two bytes cut them apart."""
    from auditor.adapters.adapter import Declined, Folder, Options
    from auditor.adapters.torch_file import TorchFiles
    from auditor.storage.memory import MemoryStore

    cut = 2 + int.from_bytes(data[:2], "little")
    store = MemoryStore({"ckpt_1.pt": data[2:cut], "optim_1.pt": data[cut:]})
    folder = Folder.of_files([store.stat("ckpt_1.pt"), store.stat("optim_1.pt")])
    match = TorchFiles().recognise(store, folder)
    if not isinstance(match, Declined):
        catalog = TorchFiles().read(store, folder, match, Options())
        assert {file.name for file in catalog.files} == {"ckpt_1.pt", "optim_1.pt"}


OF_SERIES = {"names": read_names, "set": read_set}
"""What tells which files of a folder are steps together."""


def seeds_of_series(kind: str) -> list[bytes]:
    """Names that scripts give, and a pair of files."""
    if kind == "names":
        return [b"ckpt_10\0optim_10\0ckpt_20\0optim_20\0G_1\0D_1\0rank_0\0epoch=1-step=3\0seed1_step_2\0m_0.5"]
    model, optimizer = (
        (FIXTURES / "torch_file/apart" / f"{name}_6.pt").read_bytes() for name in ("model", "optimizer")
    )
    return [len(model).to_bytes(2, "little") + model + optimizer]


def seeds_of_jax(kind: str) -> list[bytes]:
    """Small shards by zarr, a Blosc and an LZ4 chunk, and the tree that JAX wrote."""
    import base64
    import json

    import numpy as np
    import zarr
    from numcodecs import LZ4, Blosc

    if kind == "tree":
        documents = [json.loads(path.read_text()) for path in FIXTURES.rglob("pytreedef.json")]
        return [base64.b64decode(document["__jax_pytreedef_repr"]) for document in documents]
    values = np.arange(16, dtype=np.float32)
    if kind == "shard":
        store = zarr.storage.MemoryStore()
        for at, place in enumerate(("end", "start")):
            zarr.create_array(store, name=f"a{at}", data=values.reshape(4, 4), chunks=(2, 2),
                              shards={"shape": (4, 4), "index_location": place})  # fmt: skip
        shards = [store._store_dict[f"a{at}/c/0/0"].to_bytes() for at in (0, 1)]
        return [bytes([2 + at]) + raw for at, raw in enumerate(shards)]
    packed = {5: Blosc().encode(values), 6: LZ4().encode(values)}
    return [bytes([codec]) + (64).to_bytes(3, "little") + bytes(raw) for codec, raw in packed.items()]


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

    if kind in ("shard", "tree"):
        return seeds_of_jax(kind)
    if kind in OF_SERIES:
        return seeds_of_series(kind)
    if kind in ("ocdbt", "zarr", "chunk"):
        return [*seeds_of_orbax(kind), *(seeds_of_jax(kind) if kind == "chunk" else ())]
    if kind == "safetensors":
        return [path.read_bytes()[:4096] for path in sorted(FIXTURES.rglob("*.safetensors"))]
    if kind == "msgpack":
        files = [*FIXTURES.glob("flax/*/*6*"), *FIXTURES.glob("flax/*/state.msgpack")]
        return [path.read_bytes() for path in sorted(files) if path.is_file()]
    if kind == "npz":
        return [path.read_bytes() for path in sorted(FIXTURES.glob("flax/*/*/*.npz"))][2:]
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
