"""Files whose format is abused: zip files, pickles, safetensors, JSON. Each lies in an otherwise real checkpoint."""

import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.hostile.making import (
    BIN,
    SAFETENSORS,
    Input,
    Part,
    called,
    entry,
    packed,
    parts_of,
    safetensors_folder,
    shape_of,
    state,
    tensor,
    text,
    torch_file,
    torch_folder,
    whole,
    with_part,
    with_pickle,
    zip64,
    zipped,
)

HUGE, BEYOND = 1 << 62, (1 << 63) - 1
SPARSE = 41 << 30
"""Bytes of a file as it lies on disk in a run of BLOOM's size."""


# Zip files


def zip_input(name: str, lie: str, change: Callable[[Path], object], code: int = 1, says: str = "INT002") -> Input:
    return Input(
        f"zip: {name}", lie, "torch zip", lambda folder: change(torch_folder(folder)), code, says, BIN if code else ""
    )


def rezipped(**lies: object) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(zipped(parts_of(path), **lies))


def storage(**lies: object) -> Callable[[Path], object]:
    """One storage's records changed."""
    return lambda path: with_part(path, "/data/0", lambda part: replace(part, **lies))


def added(*parts: Part) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(zipped([*parts_of(path), *parts]))


def deflated(num_bytes: int) -> Callable[[Path], object]:
    def change(part: Part) -> Part:
        squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
        data = b"".join(squeeze.compress(bytes(1 << 20)) for _ in range(num_bytes >> 20)) + squeeze.flush()
        return replace(part, data=data, method=8, size=num_bytes, packed=len(data))

    return lambda path: with_part(path, "/data.pkl", change)


def overlapping(path: Path) -> None:
    first, *rest = parts_of(path)
    # The second member's records lie inside the first's data, as in bombs that use bytes many times.
    inner = Part(b"pytorch_model/inner", bytes(10))
    outer = replace(first, data=first.data + inner.local())
    at = len(outer.local()) - len(inner.local())
    path.write_bytes(zipped([outer, *rest, replace(inner, header=at)]))


def with_zip64(**lies: int) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        parts = parts_of(path)
        start, length = sum(len(part.local()) for part in parts), sum(len(part.central(0)) for part in parts)
        true = {"count": len(parts), "length": length, "start": start, "at": start + length}
        path.write_bytes(
            zipped(parts, count=0xFFFF, start=0xFFFFFFFF, length=0xFFFFFFFF, tail=zip64(**{**true, **lies}))
        )

    return change


def wide(number: int, size: int = 0xFFFFFFFF) -> Callable[[Path], object]:
    """Sizes left to a zip64 field that says ``number``."""
    return storage(size=size, extra=struct.pack("<2H2Q", 1, 16, number, number))


def sparse_torch(folder: Path) -> None:
    """A torch file with one whole tensor of 41 GB, all of it a hole."""
    path = torch_folder(folder)
    count = SPARSE // 4
    pickled = Part(b"pytorch_model/data.pkl", state(("wte.weight", tensor((count,), count=count))))
    hole = Part(b"pytorch_model/data/0", size=0xFFFFFFFF, extra=struct.pack("<2H2Q", 1, 16, SPARSE, SPARSE))
    with path.open("wb") as file:
        head = pickled.local() + hole.local()
        file.write(head)
        start = file.seek(len(head) + SPARSE)
        listed = pickled.central(0) + hole.central(len(pickled.local()))
        end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2, 2, len(listed), 0xFFFFFFFF, 0)
        file.write(listed + zip64(2, len(listed), start, start + len(listed)) + end)


ZIPS = [
    zip_input("healthy twin", "nothing: written anew by the writer of this corpus", rezipped(), 0, "holds"),
    zip_input("healthy zip64 twin", "nothing: a true zip64 end record", with_zip64(), 0, "holds"),
    zip_input("count", "number of entries", rezipped(count=7)),
    zip_input("directory beyond file", "offset of the directory", rezipped(start=0x7FFFFFFF)),
    zip_input("directory of 4 GiB", "length of the directory", rezipped(length=0xFFFFFFF0)),
    zip_input("comment", "length of the comment", rezipped(said_comment=500)),
    zip_input(
        "end record in comment",
        "a second end record in the comment of the first",
        rezipped(comment=struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0, 0, 0, 0, 0)),
    ),
    zip_input(
        "bytes before it",
        "all offsets, by bytes put before it",
        lambda path: path.write_bytes(b"#!/bin/sh\n" + path.read_bytes()),
    ),
    zip_input("empty archive", "that it is a checkpoint", lambda path: path.write_bytes(zipped([]))),
    zip_input("end record alone cut", "its own end", lambda path: path.write_bytes(zipped([])[:-1])),
    zip_input("bomb of 256 MiB", "a compressed pickle of zeros", deflated(1 << 28)),
    zip_input("compressed size differs", "packed and unpacked size of a stored member", storage(packed=1)),
    zip_input("encrypted", "a member is encrypted", storage(flags=1)),
    zip_input(
        "duplicate member",
        "which of two members of a name counts",
        lambda path: added(replace(parts_of(path)[0], data=b"\x80\x02}."))(path),
    ),
    zip_input("overlapping members", "two members share bytes", overlapping),
    zip_input(
        "all entries one member",
        "every entry points to the first member",
        lambda path: path.write_bytes(zipped(replace(part, header=0) for part in parts_of(path))),
    ),
    zip_input("header beyond file", "where a member begins", storage(header=0x7FFFFFFF)),
    zip_input("member beyond file", "a member's size", storage(size=0x7FFFFFFF)),
    zip_input(
        "member shorter than its tensor",
        "a member's size",
        lambda path: with_part(path, "/data/0", lambda part: replace(part, data=part.data[:4])),
    ),
    zip_input("local name", "the name in the member itself", storage(local_name=b"pytorch_model/data/1")),
    zip_input("zip64 size of 2^63", "a member's size, in a zip64 field", wide(1 << 63)),
    zip_input("zip64 field missing", "that sizes are in a zip64 field", storage(size=0xFFFFFFFF)),
    zip_input("zip64 directory of 2^62", "length of the directory, in a zip64 record", with_zip64(length=HUGE)),
    zip_input("zip64 count of 2^63", "number of entries, in a zip64 record", with_zip64(count=BEYOND)),
    zip_input("zip64 start of 2^63", "offset of the directory, in a zip64 record", with_zip64(start=BEYOND)),
    zip_input("zip64 locator", "where the zip64 record is", with_zip64(at=HUGE)),
    zip_input(
        "name leads out", "a member called ../../../etc/passwd", added(Part(b"../../../etc/passwd", b"x")), 0, "holds"
    ),
    zip_input(
        "name with escapes",
        "a member's name acts on terminals, and another is called the same",
        added(*[Part(b"a\x1b[2J\x1b]0;owned\x07\r\n")] * 2),
    ),
    zip_input("name that is no UTF-8", "a member's name, twice", added(*[Part(b"a\xff\xfe\xc3")] * 2)),
    zip_input("name of 65,535 bytes", "a member's name, twice", added(*[Part(b"n" * 65535)] * 2)),
    zip_input(
        "no pickle",
        "that it holds a pickle",
        lambda path: path.write_bytes(zipped(part for part in parts_of(path) if b"pkl" not in part.name)),
    ),
    zip_input(
        "60,000 members",
        "how many members a file has",
        added(*(Part(f"pytorch_model/data/x{number}".encode()) for number in range(60_000))),
        0,
        "holds",
    ),
    zip_input("zeros", "41 GB of nothing", lambda path: (path.write_bytes(b""), sparse(path))),
    Input(
        "zip: 41 GB whole",
        "nothing: a whole file of 41 GB, sparse",
        "torch zip",
        sparse_torch,
        1,
        "COV003",
        "",
        options=("--level", "headers"),
    ),
]


def sparse(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(SPARSE)


# Pickles


def pickle_input(
    name: str, lie: str, pickle: bytes | Callable[[], bytes], code: int = 1, says: str = "INT002"
) -> Input:
    def build(folder: Path) -> None:
        torch_folder(folder).write_bytes(torch_file(pickle if isinstance(pickle, bytes) else pickle()))

    return Input(f"pickle: {name}", lie, "torch zip", build, code, says, BIN)


def calling(name: str, *arguments: bytes) -> bytes:
    return state(("wte.weight", called(name, *arguments)))


def laughs(depth: int) -> bytes:
    """Tuples of the same tuple twice: 2^depth elements when walked."""
    doubled = b"".join(
        b"h" + bytes([level]) + b"h" + bytes([level]) + b"\x86q" + bytes([level + 1]) for level in range(depth)
    )
    return b"\x80\x02)q\0" + doubled


PAYLOAD = text("touch /tmp/owned-by-a-checkpoint")
FLOOD = 6_000_000

PICKLES = [
    *(
        pickle_input(f"calls {name}", f"a tensor is what {name} returns", calling(name, *arguments), 1, "SEC001")
        for name, arguments in {
            "os.system": (PAYLOAD,),
            "posix.system": (PAYLOAD,),
            "nt.system": (PAYLOAD,),
            "builtins.eval": (text("1/0"),),
            "builtins.exec": (text("1/0"),),
            "builtins.__import__": (text("os"),),
            "builtins.getattr": (text("a"), text("b")),
            "importlib.import_module": (text("antigravity"),),
            "subprocess.Popen": (PAYLOAD,),
            "runpy.run_path": (text("/etc/passwd"),),
            "pickle.loads": (text(""),),
            "torch.load": (text("/etc/passwd"),),
            "torch.hub.load": (text("a/b"), text("c")),
            "webbrowser.open": (text("file:///"),),
            "socket.create_connection": (text("localhost"),),
        }.items()
    ),
    pickle_input(
        "os.system by protocol 0", "INST instead of REDUCE", b"(S'touch /tmp/owned'\nios\nsystem\n.", 1, "SEC001"
    ),
    pickle_input(
        "os.system by STACK_GLOBAL",
        "a name put together on the stack",
        b"\x80\x04}\x8c\x01k\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85Rs.",
        1,
        "SEC001",
    ),
    pickle_input(
        "os.system by NEWOBJ_EX",
        "a class that is a function",
        b"\x80\x04}\x8c\x01k\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85}\x92s.",
        1,
        "SEC001",
    ),
    pickle_input(
        "os.system by BUILD",
        "state whose setter runs",
        state(("a", b"cos\nsystem\n)\x81}" + text("__setstate__") + b"cos\nsystem\nsb")),
        1,
        "SEC001",
    ),
    pickle_input("extension code", "a class by number", b"\x80\x02\x82\x01."),
    pickle_input("list a million deep", "nesting", b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b"."),
    pickle_input("dict a million deep", "nesting", b"\x80\x02" + b"}N" * 1_000_000 + b"}" + b"s" * 1_000_000 + b"."),
    pickle_input("tuple a million deep", "nesting", b"\x80\x02N" + b"\x85" * 1_000_000 + b"."),
    pickle_input("key a million deep", "nesting of a key", b"\x80\x02}N" + b"\x85" * 1_000_000 + b"Ns."),
    pickle_input(
        "contains itself",
        "a recursive dictionary and list",
        b"\x80\x02}q\0(X\1\0\0\0ah\0X\1\0\0\0b]q\1h\1au.",
        says="COV002",
    ),
    pickle_input("memo index 2^32", "size of the memo", b"\x80\x02}r\xff\xff\xff\xff.", says="COV002"),
    pickle_input("memo index of text, 10^18", "size of the memo", b"}p1000000000000000000\n.", says="COV002"),
    pickle_input("string of 2^63 bytes", "length of a string", b"\x80\x04\x8d" + struct.pack("<Q", 1 << 63) + b"a."),
    pickle_input("bytearray of 2^40 bytes", "length of bytes", b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"."),
    pickle_input("frame of 2^63 bytes", "length of a frame", b"\x80\x04\x95" + struct.pack("<Q", 1 << 63) + b"}."),
    pickle_input("number of 2 GiB", "length of a number", b"\x80\x02\x8b\xff\xff\xff\x7f."),
    pickle_input("number of negative length", "length of a number", b"\x80\x02\x8b\xff\xff\xff\xff."),
    pickle_input("number of 10^7 digits", "a number whose parsing is quadratic", b"I" + b"9" * 10_000_000 + b"\n."),
    pickle_input("2^100 elements by sharing", "size of a value", laughs(100) + b".", says="COV002"),
    pickle_input("2^100 elements as a key", "time to hash a value", laughs(100)[:2] + b"}" + laughs(100)[2:] + b"Ns."),
    pickle_input(
        "2^100 elements as a shape",
        "size of a shape",
        laughs(100) + state(("w", called("torch.Size", b"hd")))[2:],
        says="COV002",
    ),
    pickle_input("stack flood", "places on the stack", b"\x80\x02" + b"N" * FLOOD + b"."),
    pickle_input("mark flood", "marks on the stack", b"\x80\x02" + b"(" * FLOOD + b"."),
    pickle_input("list flood", "memory for empty lists", b"\x80\x02](" + b"]" * FLOOD + b"e."),
    pickle_input("stack underflow", "what is on the stack", b"\x80\x02aaaa."),
    pickle_input("no end", "that it ends", b"\x80\x02}"),
    pickle_input("unknown opcode", "its protocol", b"\x80\x02\xff."),
    pickle_input("protocol 255", "its protocol", b"\x80\xff}."),
    pickle_input(
        "lone surrogate in name",
        "a name that can't be printed",
        state(("a\ud800", tensor()), ("os", called("os.system", PAYLOAD))),
        1,
        "SEC001",
    ),
    pickle_input("name of 10 MB", "length of a name", lambda: state(("n" * 10_000_000, tensor())), 1, "COV003"),
    pickle_input("2^62 elements", "a tensor's shape", state(("w", tensor((HUGE,))))),
    pickle_input(
        "shape whose product is 2^64", "elements beyond 64 bits", state(("w", tensor((1 << 32, 1 << 32), (1 << 32, 1))))
    ),
    pickle_input(
        "shape whose product is 2^64 by repetition",
        "a view that repeats",
        state(("w", tensor((1 << 32, 1 << 32), (0, 0)))),
    ),
    pickle_input("shape with a number of 2 kbit", "an extent", state(("w", tensor((1 << 2000,))))),
    pickle_input("negative extent", "a tensor's shape", state(("w", tensor((-2,))))),
    pickle_input("negative stride", "a tensor's strides", state(("w", tensor((2,), (-1,))))),
    pickle_input("negative offset", "where a tensor begins", state(("w", tensor(offset=-1)))),
    pickle_input("offset beyond storage", "where a tensor begins", state(("w", tensor(offset=1 << 50)))),
    pickle_input("storage of 2^63", "a storage's size", state(("w", tensor(count=1 << 63)))),
    pickle_input("storage that is not there", "a storage's name", state(("w", tensor(key="7")))),
    pickle_input(
        "storage that leads out",
        "a storage called ../../../etc/passwd",
        state(("w", tensor(key="../../../etc/passwd"))),
    ),
    pickle_input("1,000 dims", "a tensor's dims", state(("w", tensor((1,) * 1000, (1,) * 1000)))),
    pickle_input(
        "shape that is a dictionary", "a tensor's shape", state(("w", tensor().replace(shape_of((2,)), b"}", 1)))
    ),
    pickle_input("no dictionary", "that it holds a model", b"\x80\x02" + whole(7) + b".", 1, "COV"),
    pickle_input(
        "20,000 tensors in one storage",
        "number of tensors",
        lambda: state(*((f"t{number}", tensor()) for number in range(20_000))),
        1,
        "COV003",
    ),
    Input(
        "pickle: many bombs in one step",
        "twelve deep, shared and calling pickles in one step",
        "torch zip",
        lambda folder: many_bombs(folder),
        1,
        "INT002",
        "layer_",
    ),
]


def many_bombs(folder: Path) -> None:
    from tests.hostile.making import pipeline_step

    bombs = [
        b"\x80\x02N" + b"\x85" * 1_000_000 + b".",
        laughs(100) + b".",
        b"\x80\x02}r\xff\xff\xff\xff.",
        calling("os.system", PAYLOAD),
    ]
    for number, path in enumerate(sorted(pipeline_step(folder).glob("layer_*"))[:12]):
        with_pickle(path, bombs[number % len(bombs)])


# Safetensors and JSON


def tensors_input(
    name: str, lie: str, content: bytes | Callable[[], bytes], code: int = 1, says: str = "INT002"
) -> Input:
    def build(folder: Path) -> None:
        safetensors_folder(folder).write_bytes(content if isinstance(content, bytes) else content())

    return Input(f"safetensors: {name}", lie, "safetensors", build, code, says, SAFETENSORS)


def one(**stated: object) -> bytes:
    return packed({"w": {**entry(), **stated}}, bytes(8))


def sparse_safetensors(folder: Path) -> None:
    path = safetensors_folder(folder)
    path.write_bytes(packed({"w": entry((SPARSE // 4,), 0, SPARSE)}))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + SPARSE)


SAFE = [
    tensors_input("header of 2^64", "length of the header", packed(b"{}", length=(1 << 64) - 1)),
    tensors_input("header longer than file", "length of the header", packed(b"{}", length=1000)),
    Input(
        "safetensors: header of 40 GB",
        "length of the header, in a sparse file",
        "safetensors",
        lambda folder: (lambda path: (path.write_bytes(packed(b"{}", length=40 << 30)), sparse(path)))(
            safetensors_folder(folder)
        ),
        1,
        "INT002",
        SAFETENSORS,
    ),
    tensors_input(
        "header of 90 MB of spaces", "length of the header", lambda: packed(b"{" + b" " * 90_000_000 + b"}"), 1, "COV"
    ),
    tensors_input("empty header", "that it has one", packed(b"")),
    tensors_input("header is a list", "its header", packed(b"[]")),
    tensors_input("a million lists deep", "nesting", packed(b'{"w":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}")),
    tensors_input("nesting hidden by strings", "nesting", packed(b'{"\\"[' + b'":{"a' * 300_000)),
    tensors_input(
        "name given twice",
        "which of two entries of a name counts",
        packed(
            b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            bytes(8),
        ),
    ),
    tensors_input("overlapping ranges", "two tensors share bytes", packed({"a": entry(), "b": entry()}, bytes(8))),
    tensors_input("gap", "bytes that belong to no tensor", packed({"a": entry(begin=8, end=16)}, bytes(16))),
    tensors_input("range backwards", "a tensor's range", one(data_offsets=[8, 0])),
    tensors_input("negative range", "a tensor's range", one(data_offsets=[-8, 0])),
    tensors_input("range beyond file", "a tensor's range", one(shape=[1 << 38], data_offsets=[0, 1 << 40])),
    tensors_input("range of fractions", "a tensor's range", one(data_offsets=[0.0, 8.0])),
    tensors_input(
        "range of 10^400",
        "a tensor's range",
        packed(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,1' + b"0" * 400 + b"]}}", bytes(8)),
    ),
    tensors_input(
        "number of 100,000 digits",
        "an extent",
        packed(b'{"w":{"dtype":"F32","shape":[' + b"9" * 100_000 + b'],"data_offsets":[0,8]}}', bytes(8)),
    ),
    tensors_input("2^62 elements", "a shape", one(shape=[HUGE])),
    tensors_input("product of 2^64", "a shape", one(shape=[1 << 32, 1 << 32])),
    tensors_input("no elements of 2^61 columns", "a shape", one(shape=[0, HUGE >> 1], data_offsets=[0, 0])),
    tensors_input("negative extent", "a shape", one(shape=[-2])),
    tensors_input("extent is true", "a shape", one(shape=[True, 2])),
    tensors_input("1,000 dims", "a shape", one(shape=[1] * 1000)),
    tensors_input("unknown dtype", "a dtype", one(dtype="F13"), 1, "COV"),
    tensors_input("dtype of 1 MB", "a dtype", one(dtype="F" * 1_000_000)),
    tensors_input(
        "metadata of numbers", "its metadata", packed({"__metadata__": {"format": 7}, "w": entry()}, bytes(8))
    ),
    tensors_input("bytes after the end", "its end", packed({"w": entry()}, bytes(80))),
    tensors_input("header in UTF-16", "its encoding", packed("{}".encode("utf-16"))),
    tensors_input(
        "LFS pointer", "that it was downloaded", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    ),
    tensors_input(
        "name with escapes",
        "a name that acts on terminals",
        packed({"w\x1b[2J\x1b]0;owned\x07\r\n\u202e\x9b": entry()}, bytes(8)),
        1,
        "COV",
    ),
    tensors_input(
        "name that is a lone surrogate",
        "a name that can't be printed",
        packed(b'{"w\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        1,
        "COV",
    ),
    tensors_input(
        "name with a zero byte and ../", "a name as a path", packed({"../../w\0": entry()}, bytes(8)), 1, "COV"
    ),
    tensors_input("name of 10 MB", "length of a name", lambda: packed({"n" * 10_000_000: entry()}, bytes(8))),
    tensors_input(
        "20,000 empty tensors",
        "number of tensors",
        lambda: packed({f"t{n}": entry((0,), 0, 0) for n in range(20_000)}),
        1,
        "COV",
    ),
    Input(
        "safetensors: zeros",
        "41 GB of nothing",
        "safetensors",
        lambda folder: sparse(safetensors_folder(folder)),
        1,
        "INT002",
        SAFETENSORS,
    ),
    Input(
        "safetensors: 41 GB whole",
        "nothing: a whole file of 41 GB, sparse",
        "safetensors",
        sparse_safetensors,
        1,
        "COV003",
        "",
        options=("--level", "headers"),
    ),
]

CONTAINERS = (*ZIPS, *PICKLES, *SAFE)
