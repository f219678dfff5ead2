"""Torch files of the form before 1.6, as torch still writes them."""

import io
import pickle
import struct

import pytest

from auditor.audit import audit
from auditor.containers.damage import DamagedError, LimitError, UnsupportedError
from auditor.containers.pickle_machine import Limits
from auditor.containers.torch_legacy import MAGIC
from auditor.containers.torch_zip import read_torch_file
from auditor.model.finding import Outcome
from auditor.settings import Level, Settings
from auditor.storage.memory import MemoryStore
from tests.rewriting import DDP


def legacy(content):
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def read(content, limits=None):
    with MemoryStore({"a.pt": content}).open("a.pt") as handle:
        return read_torch_file(handle, limits=limits) if limits else read_torch_file(handle)


def pickled(*values):
    return b"".join(pickle.dumps(value, 2) for value in values)


def forged(protocol=1001, system=None, saved=b"}.", keys=(), rest=b""):
    head = MAGIC + pickled(protocol, {"little_endian": True} if system is None else system)
    return head + b"\x80\x02" + saved + pickled(list(keys)) + rest


def raw(content, stored):
    width = stored.dtype.bits // 8
    return content[stored.offset : stored.offset + width * stored.num_elements]


def test_tensors_are_where_torch_put_them():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    weight = torch.randn(300, 70)
    tensors = {
        "a": weight, "tied": weight, "view": weight[5:], "half": torch.randn(7).bfloat16(), "none": torch.zeros(0, 3),
        "count": torch.tensor(3), "complex": torch.randn(4, dtype=torch.complex64),
        "eight": torch.randn(6).to(torch.float8_e4m3fn),
    }  # fmt: skip
    content = legacy({"model": tensors, "step": 3, **{f"note{n}": "x" * 900 for n in range(200)}})
    file = read(content)
    assert file.container == "torch-legacy"
    assert file.tree["step"] == 3
    for name, tensor in tensors.items():
        stored = file.tree["model"][name]
        assert stored.shape == tuple(tensor.shape), name
        wanted = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert raw(content, stored) == wanted, name
    assert file.tree["model"]["tied"].storage == file.tree["model"]["a"].storage


def test_a_run_of_such_files_is_audited_as_any_other():
    torch = pytest.importorskip("torch")
    objects = {
        path.relative_to(DDP).as_posix(): legacy(torch.load(path, weights_only=False)) for path in DDP.rglob("*.pt")
    }
    (run,) = audit(MemoryStore(objects), Settings(level=Level.FULL), now=1e11).runs
    assert not run.findings
    assert run.counts("REP001")[Outcome.HOLDS] > 0
    assert run.counts("INT010")[Outcome.HOLDS] == 0
    name = "step_6/rank_1.pt"
    cut = {**objects, name: objects[name][:-40]}
    (run,) = audit(MemoryStore(cut), Settings(), now=1e11).runs
    assert {place.file for finding in run.findings for place in finding.locations} == {name}
    assert run.last_good.step == 4


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_damaged(share):
    torch = pytest.importorskip("torch")
    content = legacy({"a": torch.randn(100, 10)})
    with pytest.raises(DamagedError):
        read(content[: int(len(content) * share)])


_STORAGE = b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x00kX\x03\x00\x00\x00cpuK\x02NtQ"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (forged(protocol=1), DamagedError),
        (forged(system={"little_endian": False}), UnsupportedError),
        (forged(system=3), DamagedError),
        (forged(keys=["k"]), DamagedError),
        (forged(saved=_STORAGE[1:] + b".", keys=["k"], rest=struct.pack("<q", 1 << 60)), DamagedError),
        (forged(saved=_STORAGE[1:] + b".", keys=["k"], rest=struct.pack("<q", -1)), DamagedError),
        (forged(saved=_STORAGE[1:] + b".", keys=["k"]), DamagedError),
        (forged(keys=[1, 2]), DamagedError),
        (MAGIC + b"\x80\x02" + b"(" * 100, DamagedError),
    ],
)  # fmt: skip
def test_lies_are_damage(content, error):
    with pytest.raises(error):
        read(content)


def test_endless_pickles_are_bounded():
    with pytest.raises(LimitError):
        read(MAGIC + b"\x80\x02" + b"N0" * 400_000, Limits(num_bytes=1 << 18))
