"""What hostile inputs are made with: zip files that lie, pickles by opcode, real checkpoints with one thing changed."""

import io
import json
import os
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.paths import ROOT, TP4

FIXTURES = ROOT / "tests" / "fixtures"
HUGGING_FACE, PER_RANK = FIXTURES / "hugging_face", FIXTURES / "torch_per_rank" / "healthy" / "step_6"
MEGATRON = FIXTURES / "megatron_legacy" / "tp2"
BIN, SAFETENSORS = "pytorch_model.bin", "model.safetensors"
LAYER, MODEL = "layer_03-model_01-model_states.pt", "mp_rank_01_model_states.pt"
DAY = 86_400


@dataclass(frozen=True)
class Input:
    """A folder made to do harm, and what must come of it."""

    name: str
    lie: str
    """What is wrong with it."""
    poses_as: str
    """The format whose reader it is meant for."""
    build: Callable[[Path], object]
    """Writes it into an empty folder."""
    code: int
    """The exit code that it must have."""
    says: str = ""
    """What must be in the output: a finding's id, or part of a message."""
    file: str = ""
    """The file that must be named; empty where it is not one file's fault."""
    command: str = "check"
    paths: tuple[str, ...] = ("",)
    """What the command is given, below the folder."""
    options: tuple[str, ...] = ()
    unprivileged: bool = False
    """Read by a user to whom file modes apply."""
    settled: bool = True
    """Dated a day back."""
    interfere: tuple[object, ...] = ()
    """Glob of files, what happens to one of them, at its how-many-th opening."""


# Real checkpoints to be spoilt


def copied(source: Path, folder: Path) -> Path:
    return shutil.copytree(source, folder, dirs_exist_ok=True)


def torch_folder(folder: Path) -> Path:
    """A Hugging Face model in one torch file; the file."""
    return copied(HUGGING_FACE / "gpt2_torch", folder) / BIN


def safetensors_folder(folder: Path) -> Path:
    """A Hugging Face model in one safetensors file; the file."""
    return copied(HUGGING_FACE / "qwen2", folder) / SAFETENSORS


def pipeline_step(folder: Path) -> Path:
    """A DeepSpeed run of one step; the step's folder."""
    shutil.copy(TP4 / "latest", folder)
    return copied(TP4 / "global_step6", folder / "global_step6")


def megatron_step(folder: Path) -> Path:
    """A Megatron-LM run of one step; the step's folder."""
    shutil.copy(MEGATRON / "latest_checkpointed_iteration.txt", folder)
    return copied(MEGATRON / "iter_0000004", folder / "iter_0000004")


def rank_step(folder: Path) -> Path:
    """One step of a file a rank; its folder."""
    return copied(PER_RANK, folder / "step_6")


def settle(folder: Path) -> None:
    """Date everything a day back, so that nothing counts as being written."""
    for place, folders, files in os.walk(os.fsencode(folder)):
        for name in (*folders, *files, b"."):
            path = place + b"/" + name
            status = os.lstat(path)
            os.utime(path, (status.st_atime - DAY, status.st_mtime - DAY), follow_symlinks=False)


# Zip files


@dataclass(frozen=True)
class Part:
    """A member, and what its records say of it."""

    name: bytes
    data: bytes = b""
    method: int = 0
    flags: int = 0
    size: int | None = None
    """Said to be unpacked; packed is said to be ``packed``, else the same."""
    packed: int | None = None
    header: int | None = None
    local_name: bytes | None = None
    extra: bytes = b""

    def local(self) -> bytes:
        name = self.name if self.local_name is None else self.local_name
        said = min(len(self.data), 0xFFFFFFFF)
        head = struct.pack("<4s5H3I2H", b"PK\3\4", 20, self.flags, self.method, 0, 0, 0, said, said, len(name), 0)
        return head + name + self.data

    def central(self, at: int) -> bytes:
        size = len(self.data) if self.size is None else self.size
        packed = size if self.packed is None else self.packed
        at = at if self.header is None else self.header
        return struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 20, 20, self.flags, self.method, 0, 0, 0, packed, size, len(self.name),
            len(self.extra), 0, 0, 0, 0, at,
        ) + self.name + self.extra  # fmt: skip


def zipped(
    parts: Iterable[Part], *, prefix: bytes = b"", count: int | None = None, start: int | None = None,
    length: int | None = None, tail: bytes = b"", comment: bytes = b"", said_comment: int | None = None,
) -> bytes:  # fmt: skip
    """A zip file; ``tail`` stands between directory and end record (zip64 records)."""
    body, directory = io.BytesIO(), io.BytesIO()
    body.write(prefix)
    number = 0
    for part in parts:
        number += 1
        directory.write(part.central(body.tell()))
        body.write(part.local())
    at, listed = body.tell(), directory.getvalue()
    count, start = number if count is None else count, at if start is None else start
    length, said = len(listed) if length is None else length, len(comment) if said_comment is None else said_comment
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count & 0xFFFF, count & 0xFFFF, length, start, said)
    return body.getvalue() + listed + tail + end + comment


def zip64(count: int, length: int, start: int, at: int) -> bytes:
    """A zip64 end record and its locator, which says that the record is at byte ``at``."""
    record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, start)
    return record + struct.pack("<4sIQI", b"PK\6\7", 0, at, 1)


def parts_of(path: Path) -> list[Part]:
    """The members of a real file."""
    with zipfile.ZipFile(path) as file:
        return [Part(item.filename.encode(), file.read(item)) for item in file.infolist()]


def with_part(path: Path, suffix: str, change: Callable[[Part], Part]) -> None:
    """Write a file anew with one member changed."""
    path.write_bytes(zipped(change(part) if part.name.endswith(suffix.encode()) else part for part in parts_of(path)))


def with_pickle(path: Path, pickle: bytes) -> None:
    """Write a torch file anew with another pickle."""
    with_part(path, "/data.pkl", lambda part: replace(part, data=pickle))


def with_number(path: Path, **numbers: int) -> None:
    """Write a torch file anew with other numbers under keys of its pickle."""

    def change(part: Part) -> Part:
        data = part.data
        for key, value in numbers.items():
            pattern = rb"(X.\0\0\0" + key.encode() + rb"(?:q.|r....))(?:K.|M..|J....)"
            data, num_found = re.subn(pattern, lambda found, value=value: found[1] + whole(value), data, flags=re.S)
            assert num_found == 1, key
        return replace(part, data=data)

    with_part(path, "/data.pkl", change)


# Pickles


def whole(value: int) -> bytes:
    """Opcode for a whole number of any size."""
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw if len(raw) < 256 else b"\x8b" + struct.pack("<i", len(raw)) + raw


def text(value: str) -> bytes:
    """Opcode for a string."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def called(name: str, *arguments: bytes) -> bytes:
    """Opcodes that call a global."""
    module, _, attribute = name.rpartition(".")
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n(" + b"".join(arguments) + b"tR"


def shape_of(extents: Iterable[int]) -> bytes:
    return b"(" + b"".join(map(whole, extents)) + b"t"


def tensor(
    shape: Iterable[int] = (2,), strides: Iterable[int] = (1,), *, key: str = "0", offset: int = 0, count: int = 4,
    kind: str = "FloatStorage",
) -> bytes:  # fmt: skip
    """Opcodes of a tensor in storage ``key``."""
    storage = b"(" + text("storage") + b"ctorch\n" + kind.encode() + b"\n" + text(key) + text("cpu") + whole(count)
    return called(
        "torch._utils._rebuild_tensor_v2", storage + b"tQ", whole(offset), shape_of(shape), shape_of(strides), b"\x89",
        called("collections.OrderedDict"),
    )  # fmt: skip


def state(*items: tuple[str, bytes]) -> bytes:
    """A pickled dictionary."""
    return b"\x80\x02}(" + b"".join(text(key) + value for key, value in items) + b"u."


def torch_file(pickle: bytes, storages: dict[str, bytes] | None = None) -> bytes:
    """A torch file with a pickle and storages."""
    held = {"0": bytes(16)} if storages is None else storages
    members = [Part(b"pytorch_model/data.pkl", pickle), Part(b"pytorch_model/byteorder", b"little")]
    return zipped([*members, *(Part(f"pytorch_model/data/{key}".encode(), data) for key, data in held.items())])


# Safetensors


def packed(header: bytes | dict, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(shape: Iterable[int] = (2,), begin: int = 0, end: int = 8, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def edited(path: Path, change: Callable[[dict], object]) -> None:
    """Change a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
