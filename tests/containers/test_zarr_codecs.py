"""Zarr's codecs, shards, orders and byte orders, as zarr-python writes them; through the adapter that meets them."""

import json

import numpy as np
import pytest
import zarr
from numcodecs import LZ4, Blosc, Zlib, blosc
from zarr import codecs

from auditor.adapters.adapter import Folder, Options
from auditor.adapters.levanter import Levanter
from auditor.audit import audit
from auditor.containers import layers, zarr_codecs
from auditor.containers.damage import DamagedError
from auditor.containers.zarr_array import node_of
from auditor.containers.zarr_v2 import array_of
from auditor.model.encoding import BLOSC
from auditor.model.encoding import LZ4 as LZ4_CODEC
from auditor.model.region import whole
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.view.assemble import read_box
from tests import ocdbt_writer

VALUES = np.random.default_rng(0).standard_normal((37, 21)).astype(np.float32)
WRITTEN = {
    "shards of several chunks": {"chunks": (5, 7), "shards": (20, 14)},
    "shards without a compressor": {"chunks": (5, 7), "shards": (20, 14), "compressors": None},
    "index at the start": {"chunks": (5, 7), "shards": {"shape": (20, 14), "index_location": "start"}},
    "blosc": {"chunks": (10, 21), "compressors": codecs.BloscCodec()},
    "blosc of zstd, bits shuffled": {"compressors": codecs.BloscCodec(cname="zstd", shuffle="bitshuffle")},
    "zstd with a checksum": {"chunks": (10, 21), "compressors": [codecs.ZstdCodec(), codecs.Crc32cCodec()]},
    "a checksum alone": {"chunks": (10, 21), "compressors": [codecs.Crc32cCodec()]},
    "transposed": {"chunks": (10, 5), "filters": [codecs.TransposeCodec(order=(1, 0))]},
    "big-endian": {"chunks": (10, 5), "serializer": codecs.BytesCodec(endian="big")},
    "v2 blosc": {"chunks": (10, 5), "compressors": Blosc(), "zarr_format": 2},
    "v2 blosclz": {"chunks": (10, 5), "compressors": Blosc(cname="blosclz"), "zarr_format": 2},
    "v2 lz4": {"chunks": (10, 5), "compressors": LZ4(), "zarr_format": 2},
    "v2 zlib": {"chunks": (10, 5), "compressors": Zlib(), "zarr_format": 2},
    "v2 in Fortran's order": {"chunks": (10, 5), "compressors": Blosc(), "zarr_format": 2, "order": "F"},
    "v2 big-endian": {"chunks": (10, 5), "compressors": None, "zarr_format": 2, "dtype": ">f4"},
    "v2 big-endian, compressed": {"chunks": (10, 5), "compressors": Zlib(), "zarr_format": 2, "dtype": ">f4"},
}


def step(path, **how):
    """One step of one array; its files."""
    values = how.pop("values", VALUES)
    array = zarr.create_array(
        path / "step-1/model/w", **{"shape": values.shape, "dtype": values.dtype, "zarr_format": 3, **how}
    )
    array[...] = values
    (path / "step-1/metadata.json").write_text('{"step": 1, "is_temporary": false}')
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def catalog_of(store):
    folder, adapter = Folder.read(store, "step-1"), Levanter()
    return adapter.read(store, folder, adapter.recognise(store, folder), Options())


def audited(objects):
    (run,) = audit(MemoryStore(objects), Settings(level=Level.VALUES, settle_seconds=0.0)).runs
    return run


@pytest.mark.parametrize("name", WRITTEN)
def test_what_zarr_writes_is_read(name, tmp_path):
    store = MemoryStore(step(tmp_path, **WRITTEN[name]))
    catalog = catalog_of(store)
    np.testing.assert_array_equal(read_box(store, catalog, 0, 0, whole(VALUES.shape)), VALUES)
    (tensor,) = catalog.tensors
    assert tensor.undetermined == "how it lay on the mesh is recorded nowhere"


def test_healthy_shards_are_silent(tmp_path):
    run = audited(step(tmp_path, **WRITTEN["shards of several chunks"]))
    assert not run.findings
    assert run.last_good.step == 1
    assert not any(step.failures for step in run.steps)


def with_zeros(path):
    values = VALUES.copy()
    values[5:10, 7:14] = 0
    return step(path, values=values, **WRITTEN["shards of several chunks"])


def test_a_chunk_that_levanter_leaves_out_is_zeros_or_lost(tmp_path):
    """JAX's serialization leaves out chunks of zeros in Zarr v3; nobody can tell those from lost ones."""
    run = audited(with_zeros(tmp_path))
    assert not run.findings
    (failure,) = run.steps[0].failures
    assert "zeros, which its writer leaves out, or is lost" in str(failure)
    assert run.last_good is None


@pytest.mark.parametrize("shards", [None, (40, 40)])
def test_many_chunks_that_levanter_leaves_out_are_one_unreadable_array(tmp_path, shards):
    """Moments of an embedding after few steps: no gap in the tensor, and not a line for each."""
    values = np.zeros((40, 40), np.float32)
    values[0, 0] = 1
    run = audited(step(tmp_path, values=values, chunks=(2, 2), shards=shards, compressors=None))
    assert not run.findings
    (failure,) = run.steps[0].failures
    assert "399 chunks are not stored" in failure


def test_documents_of_groups_above_arrays_are_passed_over(tmp_path):
    """As zarr-python writes them into every folder down to an array."""
    objects = step(tmp_path, **WRITTEN["transposed"])
    group = b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'
    objects |= {"step-1/zarr.json": group, "step-1/model/zarr.json": group}
    assert [tensor.name for tensor in catalog_of(MemoryStore(objects)).tensors] == ["w"]
    assert not audited(objects).findings


def test_a_link_that_leads_back_ends(tmp_path):
    step(tmp_path, **WRITTEN["transposed"])
    (tmp_path / "step-1/model/x-back").symlink_to("../..")
    (tmp_path / "step-1/model/x-here").symlink_to(".")
    assert [tensor.name for tensor in catalog_of(LocalStore(tmp_path)).tensors] == ["w"]


def test_a_chunk_that_a_shard_lacks_is_missing_and_never_zeros(tmp_path):
    """Orbax stores chunks of zeros."""
    values = {name.replace("step-1/model/w", "1/params.w"): raw for name, raw in with_zeros(tmp_path).items()}
    (finding,) = audited({**values, "1/_METADATA": metadata(use_ocdbt=False), "1/commit_success.txt": b""}).findings
    assert finding.id == "INT001"
    assert [location.file for location in finding.locations] == ["1/params.w/c/0/0[1,1]"]
    assert "COV001" in finding.consequences


def metadata(*, use_ocdbt):
    row = {"key_metadata": [{"key": "params"}, {"key": "w"}], "value_metadata": {"value_type": "np.ndarray"}}
    return json.dumps({"tree_metadata": {"a": row}, "use_ocdbt": use_ocdbt}).encode()


@pytest.mark.parametrize(
    ("change", "finding_id", "told"),
    [
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "INT002", "checksum"),
        (lambda raw: raw[-100:], "INT002", "too short for its index"),
        (lambda raw: b"\xff" * 8 + raw[8:], "INT015", "frame"),
    ],
)
def test_a_shard_that_is_damaged_is_named(tmp_path, change, finding_id, told):
    objects = step(tmp_path, **WRITTEN["shards of several chunks"])
    name = "step-1/model/w/c/0/0"
    (finding,) = audited({**objects, name: change(objects[name])}).findings
    assert finding.id == finding_id
    assert told in finding.message
    assert {location.file for location in finding.locations} == {name}


def test_a_bit_flip_shows_where_a_checksum_is_kept(tmp_path):
    objects = step(tmp_path, **WRITTEN["a checksum alone"])
    name = "step-1/model/w/c/1/0"
    raw = bytearray(objects[name])
    raw[99] ^= 1
    (finding,) = audited({**objects, name: bytes(raw)}).findings
    assert (finding.id, "CRC-32C" in finding.message) == ("INT015", True)


def test_shards_in_a_database(tmp_path):
    """In Orbax's databases, small ones inside the nodes and large ones in files."""
    objects = step(tmp_path, **WRITTEN["shards of several chunks"])
    values = {name.replace("step-1/model/w", "params.w"): raw for name, raw in objects.items() if "/w/" in name}
    item = {**ocdbt_writer.database(values), "_METADATA": metadata(use_ocdbt=True)}
    (run,) = audit(MemoryStore({f"1/{name}": raw for name, raw in item.items()}), Settings(settle_seconds=0.0)).runs
    assert not run.findings
    assert not any(step.failures for step in run.steps)
    assert run.steps[0].judgements["COV001"].num_holds == 1


# Liars


def packed(codec):
    content = VALUES.tobytes()
    return blosc.compress(content, b"lz4", 5) if codec == BLOSC else LZ4().encode(content)


@pytest.mark.parametrize("codec", [BLOSC, LZ4_CODEC])
def test_chunks_undone_at_once_are_what_their_array_says_or_damaged(codec):
    raw, size = packed(codec), VALUES.nbytes
    assert layers.unpacked(raw, codec, size) == VALUES.tobytes()
    draw = np.random.default_rng(1)
    lies = [raw[:n] for n in (0, 3, 5, 15, 16, 17, 40, len(raw) - 1)] + [raw + b"x", raw[:4] + b"\xff" * 12 + raw[16:]]
    for _ in range(200):
        lie = bytearray(raw)
        for at in draw.integers(0, 64 if draw.random() < 0.5 else len(raw), 3).tolist():
            lie[at] = int(draw.integers(0, 256))
        lies.append(bytes(lie))
    for lie in lies:
        try:
            assert len(layers.unpacked(lie, codec, size)) == size
        except DamagedError:
            continue


def test_large_chunks_of_such_codecs_are_said_to_be_unread():
    document = {
        "zarr_format": 2,
        "shape": [1 << 28],
        "chunks": [1 << 28],
        "dtype": "<f4",
        "compressor": {"id": "blosc"},
    }
    assert array_of(document).unsupported == "codec blosc with chunks of 1073741824 bytes"


def test_without_the_library_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setattr(zarr_codecs, "has_numcodecs", lambda: False)
    document = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f4", "compressor": {"id": "lz4"}}
    assert array_of(document).unsupported == "codec lz4 without its library (pip install numcodecs)"


PLAIN = {"name": "bytes", "configuration": {"endian": "little"}}


@pytest.mark.parametrize(
    ("configuration", "why"),
    [
        ({"chunk_shape": [3]}, "chunks that don't fill their shard"), ({"chunk_shape": [0]}, "without the shape"),
        ({"chunk_shape": [2], "codecs": [PLAIN], "index_codecs": ["gzip"]}, "an index of another form"),
        ({"chunk_shape": [2], "codecs": [PLAIN], "index_codecs": [PLAIN], "index_location": "middle"}, "another form"),
        ({"chunk_shape": [2], "codecs": [{"name": "sharding_indexed"}], "index_codecs": [PLAIN]}, "sharding_indexed"),
        ({"chunk_shape": [2], "codecs": [PLAIN, "zstd", "gzip"], "index_codecs": [PLAIN]}, "several codecs"),
    ],
)  # fmt: skip
def test_shards_of_other_forms_are_said_to_be_unread(configuration, why):
    document = {
        "zarr_format": 3, "node_type": "array", "shape": [8], "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}}, "chunk_key_encoding": "default",
        "codecs": [{"name": "sharding_indexed", "configuration": configuration}],
    }  # fmt: skip
    assert why in node_of(document).unsupported
