"""Items of torch.distributed.checkpoint: whole torch files one after another."""

import io
import math
import random
import zipfile

import pytest

from auditor.containers.checksums import verify_items, verify_zip
from auditor.containers.damage import DamagedError
from auditor.containers.dcp_items import Found, Item, Window, items_from_the_end, read_items
from auditor.containers.pickle_machine import PickleMachine
from auditor.containers.torch_plain import plain_tensor
from auditor.storage.memory import MemoryStore
from auditor.storage.store import ShortReadError
from auditor.testing.recording import RecordingStore
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "dcp"
FILE = FIXTURES / "fsdp2_2" / "step-4" / "__1_0.distcp"


def saved(torch, *values):
    found = []
    for value in values:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        found.append(buffer.getvalue())
    return found


def laid_out(contents, weights):
    items, at = [], 0
    for content, num_bytes in zip(contents, weights, strict=True):
        items.append(Item(at, len(content), num_bytes))
        at += len(content)
    return items


def test_items_and_their_values():
    torch = pytest.importorskip("torch")
    tensors = [torch.arange(float(n)).reshape(shape) for n, shape in ((6, (2, 3)), (1, ()), (20, (20,)), (0, (0, 2)))]
    contents = saved(torch, {"lr": 0.5}, *tensors, 7)
    items = laid_out(contents, [0, 24, 0, 80, 0, 0])
    store = RecordingStore({"data": b"".join(contents)})
    with store.open("data") as handle:
        first, *found, last = read_items(handle, items)
    assert (first.content, last.content) == ({"lr": 0.5}, 7)
    assert [one.number for one in found] == [None, 0.0, None, None]
    for one, tensor in zip(found, tensors, strict=True):
        assert one.content.shape == tuple(tensor.shape)
        raw = store.objects["data"][one.content.offset : one.content.offset + 4 * tensor.numel()]
        assert raw == tensor.numpy().tobytes()


def test_weights_are_not_read_and_neighbours_are_read_at_once():
    torch = pytest.importorskip("torch")
    contents = saved(torch, *[torch.full((1000,), float(n)) for n in range(50)])
    items = laid_out(contents, [4000] * 50)
    store = RecordingStore({"data": b"".join(contents)})
    with store.open("data") as handle:
        found = list(read_items(handle, items))
    for one in found:
        low, high = one.content.offset, one.content.offset + 4000
        assert not [r for r in store.ranges if r[1] < high and low < r[2]]
    # The first item shows how the others are laid out: from then on a read an item.
    assert len(store.ranges) < 50 + 30


def test_layouts_that_differ_within_a_file_are_read_all_the_same():
    torch = pytest.importorskip("torch")
    values = [torch.ones(3), torch.ones(2, 2, 2, 2, 2, 2, 2), torch.ones(70, 3).T, torch.ones(5).bfloat16()]
    contents = saved(torch, *values)
    items = laid_out(contents, [value.numel() * value.element_size() for value in values])
    with MemoryStore({"data": b"".join(contents)}).open("data") as handle:
        found = [one.content for one in read_items(handle, items)]
    assert [one.shape for one in found] == [tuple(value.shape) for value in values]
    assert [one.strides for one in found] == [value.stride() for value in values]
    assert [one.dtype.name for one in found] == ["float32", "float32", "float32", "bfloat16"]


def test_damage_to_one_item_is_its_own():
    torch = pytest.importorskip("torch")
    contents = saved(torch, torch.ones(3), torch.ones(3), torch.ones(3))
    items = laid_out(contents, [12, 12, 12])
    whole = bytearray(b"".join(contents))
    whole[items[1].offset : items[1].offset + 200] = bytes(200)
    with MemoryStore({"data": bytes(whole)}).open("data") as handle:
        found = list(read_items(handle, items))
    assert [type(one) for one in found] == [Found, DamagedError, Found]


def test_items_are_found_from_the_end():
    with MemoryStore({"data": FILE.read_bytes()}).open("data") as handle:
        windows = list(items_from_the_end(handle))
        assert windows[-1].start == 0
        assert sum(window.num_bytes for window in windows) == handle.entry.num_bytes
        assert len(windows) == 83
        verified = verify_items(handle)
        assert (verified.bad, verified.num_without) == ((), 0)
        assert verified.num_good == sum(verify_zip(window).num_good for window in windows)
    for cut in (1, 50, 1000):
        with MemoryStore({"data": FILE.read_bytes()[:-cut]}).open("data") as handle, pytest.raises(DamagedError):
            list(items_from_the_end(handle))
    with MemoryStore({"data": b"x" * 500 + FILE.read_bytes()}).open("data") as handle, pytest.raises(DamagedError):
        list(items_from_the_end(handle))


def test_a_window_does_not_reach_beyond_itself():
    with MemoryStore({"data": bytes(range(100))}).open("data") as handle:
        window = Window(handle, 10, 5)
        buffer = bytearray(5)
        window.read_into(0, memoryview(buffer))
        assert buffer == bytes(range(10, 15))
        for at in (-1, 1):
            with pytest.raises(ShortReadError):
                window.read_into(at, memoryview(bytearray(5)))


# The pickle of a plain tensor, recognised as a whole


def pickled(torch, tensor):
    content = io.BytesIO()
    torch.save(tensor, content)
    return zipfile.ZipFile(content).read("archive/data.pkl")


SHAPES = [
    (),
    (1,),
    (300,),
    (70000,),
    (2, 3),
    (300, 2),
    (2, 3, 4),
    (1, 2, 3, 4),
    (2, 1, 2, 1, 2, 1),
    (113, 113),
    (116, 2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_plain_tensor_is_what_the_machine_makes_of_it(shape):
    torch = pytest.importorskip("torch")
    for tensor in (
        torch.zeros(shape),
        torch.zeros(shape, dtype=torch.bfloat16),
        torch.zeros(shape).T if len(shape) == 2 else torch.zeros(1),
    ):
        data = pickled(torch, tensor)
        found = plain_tensor(data)
        assert found is not None
        calls = []
        machine = PickleMachine(
            {"torch._utils._rebuild_tensor_v2": calls.append, "collections.OrderedDict": dict}, lambda pid: pid
        )
        machine.load(data)
        ((pid, offset, size, strides, _, _),) = calls
        assert (found.storage_class, found.key, found.num_elements) == (pid[1].name, pid[2], pid[4])
        assert (found.offset, found.shape, found.strides) == (offset, size, strides)
        assert math.prod(found.shape) == found.num_elements


def test_what_is_no_plain_tensor_is_left_to_the_machine():
    torch = pytest.importorskip("torch")
    good = pickled(torch, torch.zeros(2, 3))
    assert plain_tensor(good)
    for value in (
        {"a": torch.zeros(2)},
        [torch.zeros(2)],
        torch.zeros(2).to(torch.float8_e5m2),
        3,
        torch.nn.Parameter(torch.zeros(2)),
    ):
        assert plain_tensor(pickled(torch, value)) is None
    for changed in (good[:-1], good + b".", good.replace(b"OrderedDict", b"OrderedDicu"), good.replace(b"cpu", b"xpu")):
        assert plain_tensor(changed) is None


def test_items_of_one_form_are_read_as_they_are_by_themselves():
    torch = pytest.importorskip("torch")
    contents = saved(torch, *[torch.full((3, 2), float(n)) for n in range(3)], torch.ones(2, 3))
    items = laid_out(contents, [24] * 4)
    whole, source = b"".join(contents), random.Random(2)
    for _ in range(150):
        changed = bytearray(whole)
        changed[source.randrange(items[1].offset, len(changed))] ^= 1 << source.randrange(8)
        with MemoryStore({"data": bytes(changed)}).open("data") as handle:
            together = list(read_items(handle, items))
            apart = [next(read_items(handle, [item])) for item in items]
        assert list(map(told, together)) == list(map(told, apart))


def told(found):
    return str(found.content if isinstance(found, Found) else found)
