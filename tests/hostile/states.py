"""Files that hold a state as a tree: msgpack that lies about lengths, npz that lies about shapes."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgpack
import numpy as np

from tests.flax_files import pack, record, unpack
from tests.hostile.making import FIXTURES, Input

STATE = FIXTURES / "flax" / "masters" / "step_6" / "state.msgpack"


def state(name: str, lie: str, content: Callable[[], bytes], code: int = 1, says: str = "INT002") -> Input:
    def build(folder: Path) -> None:
        (folder / "step_6").mkdir()
        (folder / "step_6" / "state.msgpack").write_bytes(content())

    return Input(f"msgpack: {name}", lie, "flax-msgpack", build, code, says)


def saying(shape: object, dtype: str = "float32", held: bytes = bytes(16)) -> Callable[[], bytes]:
    """A real state in which one array says something else of itself."""

    def content() -> bytes:
        tree = unpack(STATE.read_bytes())
        packed = msgpack.unpackb(pack(tree), raw=False, ext_hook=msgpack.ExtType)
        packed["params"]["head"]["kernel"] = record(shape, dtype, held)
        return bytes(msgpack.packb(packed))

    return content


def npz(name: str, lie: str, header: bytes, code: int, says: str = "") -> Input:
    def build(folder: Path) -> None:
        (folder / "step_6").mkdir()
        file = io.BytesIO()
        np.savez(file, **{"params/w": np.ones(4, np.float32)})
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("params/x.npy", b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header)
        (folder / "step_6" / "state.npz").write_bytes(file.getvalue())

    return Input(f"npz: {name}", lie, "npz", build, code, says)


MSGPACKS = [
    state("cut", "its end", lambda: STATE.read_bytes()[:9000]),
    state("empty", "that it holds anything", lambda: b""),
    state("two trees", "that there is one", lambda: STATE.read_bytes() * 2),
    state("four billion keys", "number of entries", lambda: b"\xdf\xff\xff\xff\xff\xa1a" + bytes(1000)),
    state("four billion bytes", "length of an array", lambda: b"\x81\xa1a\xc9\xff\xff\xff\xff\x01" + bytes(1000)),
    state("a million maps deep", "nesting", lambda: b"\x81\xa1a" * 1_000_000 + b"\x01"),
    state("ten million entries", "that anybody needs them", lambda: b"\xdd\x00\x98\x96\x80" + b"\x01" * 10_000_000),
    state("2^80 elements", "shape", saying((1 << 40, 1 << 40), held=b"")),
    state("negative extent", "shape", saying((-4, 1))),
    state("other length", "shape", saying((5,))),
    state("key twice", "which of the two it is", lambda: b"\x82\xa1a\x01\xa1a\x02"),
    state(
        "control characters",
        "names",
        lambda: pack({"params": {"\x1b[2J\u202e": np.ones(3, np.float32)}}),
        0,
        "flax-msgpack",
    ),
]
NPZS = [
    npz("code as header", "that it is a dictionary", b"__import__('os').system('touch /tmp/owned')", 4,
        "not one of a plain array"),
    npz("2^80 elements", "shape", b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 109951162777), }",
        1, "INT002"),
    npz("shape without bytes", "shape", b"{'descr': '<f4', 'fortran_order': False, 'shape': (9,), }", 1, "INT002"),
    npz("pickled objects", "dtype", b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\x80\x04.", 0),
]  # fmt: skip

STATES = (*MSGPACKS, *NPZS)
