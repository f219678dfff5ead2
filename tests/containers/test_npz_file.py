"""npz files: arrays where numpy finds them, nothing unpickled, lies named."""

import io
import struct
import zipfile

import numpy as np
import pytest

from auditor.audit import audit
from auditor.containers.damage import DamagedError, LimitError, UnsupportedError
from auditor.containers.encoded import open_file
from auditor.containers.npz_file import read_npz
from auditor.model.catalog import File
from auditor.settings import Level, Settings
from auditor.storage.memory import MemoryStore
from auditor.storage.store import read_bytes


def saved(save=np.savez, **arrays):
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


def zipped(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def npy(header, content=b"", version=1):
    raw = header.encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(raw)) + raw + content


def described(descr="'<f4'", shape="(2,)", fortran="False"):
    return "{'descr': %s, 'fortran_order': %s, 'shape': %s, }\n" % (descr, fortran, shape)  # noqa: UP031


def read(content):
    with MemoryStore({"f": content}).open("f") as handle:
        return read_npz(handle)


def test_arrays_lie_where_numpy_finds_them():
    arrays = {
        "f": np.arange(6, dtype="f4").reshape(2, 3), "b": np.array([True, False]), "s": np.float64(2),
        "i": np.arange(3), "c": np.ones((2, 2), "c8"), "e": np.zeros((0, 4), "f2"), "v": np.zeros(3, "V2"),
    }  # fmt: skip
    content, found = saved(**arrays), read(saved(**arrays)).arrays
    assert {name: array.dtype.name for name, array in found.items()} == {
        "f": "float32", "b": "bool", "s": "float64", "i": "int64", "c": "complex64", "e": "float16", "v": "bfloat16"
    }  # fmt: skip
    for name, array in arrays.items():
        (stretch,) = found[name].stretches
        assert content[stretch.offset : stretch.offset + stretch.num_bytes] == np.asarray(array).tobytes()
        assert found[name].shape == np.shape(array)


def test_names_are_paths():
    ones = np.ones(2)
    assert [path for path, _ in read(saved(**{"a/b": ones, "c.d": ones})).leaves()] == [("a", "b"), ("c.d",)]
    assert [path for path, _ in read(saved(**{"a.b": ones, "c": ones})).leaves()] == [("a", "b"), ("c",)]


def test_fortrans_order_is_read_as_it_is():
    values = np.arange(12, dtype="f4").reshape(3, 4)
    runs = [audit(MemoryStore({"x/state_1.npz": saved(params=order(values))}), Settings(level=Level.VALUES)).runs[0]
            for order in (np.ascontiguousarray, np.asfortranarray)]  # fmt: skip
    assert [run.findings for run in runs] == [[], []]
    assert [run.coverage.num_bytes_read for run in runs] == [48, 48]


def test_objects_are_counted_and_not_unpickled():
    found = read(saved(o=np.array([print, 1], object), w=np.ones(2)))
    assert [*found.arrays] == ["w"]
    assert found.opaque == {"numpy array of objects": 1}


WEIGHTS = {"params/w": np.arange(3000, dtype="f4").reshape(50, 60), "params/b": np.arange(5, dtype="f2")}


def test_compressed_arrays_are_read():
    """Offsets are those of the content, decoded while it is read; the CRC-32 of members is held against it."""
    content = saved(np.savez_compressed, **WEIGHTS)
    found, store = read(content), MemoryStore({"f": content})
    with open_file(store, File("f", encoding=found.encoding)) as handle:
        for name, array in WEIGHTS.items():
            (stretch,) = found.arrays[name].stretches
            assert read_bytes(handle, stretch.offset, stretch.num_bytes) == array.tobytes()
    plain, packed = (audited({"step_3/s.npz": saved(save, **WEIGHTS)}) for save in (np.savez, np.savez_compressed))
    assert [run.findings for run in (plain, packed)] == [[], []]
    assert [run.steps[0].judgements["INT010"].num_holds for run in (plain, packed)] == [1, 1]


def audited(objects):
    (run,) = audit(MemoryStore(objects), Settings(level=Level.FULL, settle_seconds=0.0)).runs
    return run


def test_a_flipped_bit_in_a_compressed_array():
    content = bytearray(saved(np.savez_compressed, **WEIGHTS))
    content[2000] ^= 1
    (finding,) = audited({"step_3/s.npz": bytes(content)}).findings
    assert finding.id in ("INT010", "INT015")
    assert {location.file for location in finding.locations} == {"step_3/s.npz"}


def test_a_member_that_expands_beyond_what_it_says():
    """268 MB of zeros in 260 kB, said to be a matrix of 12 kB; and 12 kB said to be a terabyte."""
    small, large = npy(described(shape="(3000,)"), bytes(12000)), npy(described(shape="(3000,)"), bytes(1 << 28))
    for content, stated in ((large, len(small)), (small, 1 << 31)):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("params/w.npy", content)
        raw = file.getvalue()
        at = raw.rindex(b"PK\x01\x02") + 24
        lie = raw[:at] + struct.pack("<I", stated) + raw[at + 4 :]
        (finding,) = audited({"step_3/s.npz": lie}).findings
        assert finding.id in ("INT002", "INT015")


def test_other_byte_orders_and_texts_have_no_known_dtype():
    assert [array.dtype for array in read(saved(w=np.ones(2, ">f4"), t=np.array(["ab"]))).arrays.values()] == [
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("member", "error", "says"),
    [
        (b"", DamagedError, "does not begin"),
        (b"\x93NUMPY\x01\0\xff\xff", DamagedError, "does not begin"),
        (npy(described())[:-1] + b"x", UnsupportedError, "not one of a plain array"),
        (b"\x93NUMPY\x01\0\xff\xff" + bytes(20), DamagedError, "said to have 65535 bytes"),
        (npy(described(), b"\0" * 7), DamagedError, "needs 8"),
        (npy(described(shape="(3,)"), b"\0" * 8), DamagedError, "needs 12"),
        (npy(described(shape="(1099511627776, 1099511627776)")), LimitError, "beyond any tensor's"),
        (npy(described(shape="(" + "9" * 400 + ",)")), LimitError, "beyond any tensor's"),
        (npy(described(shape="(-2,)"), b"\0" * 8), UnsupportedError, "plain array"),
        (npy(described(descr="[('a', '<f4')]"), b"\0" * 8), UnsupportedError, "plain array"),
        (npy("__import__('os').system('touch /tmp/owned')\n"), UnsupportedError, "plain array"),
        (npy(described(), b"\0" * 8, version=9), DamagedError, "does not begin"),
    ],
)
def test_lies_are_named(member, error, says):
    with pytest.raises(error, match=says):
        read(zipped(w=member))


def test_cut_anywhere_it_is_damaged():
    content = saved(w=np.arange(50.0), v=np.ones(3))
    for cut in range(0, len(content), 7):
        with pytest.raises(DamagedError):
            read(content[:cut])
