"""What a hostile pickle may cost: memory is counted from above before it is taken, time does not explode."""

import io
import pickle
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile

import pytest

from auditor.adapters.adapter import Folder
from auditor.adapters.deepspeed import pipeline_files as deepspeed_pipeline_files
from auditor.containers.damage import DamagedError, LimitError, UnsupportedError
from auditor.containers.pickle_machine import Limits, MemoryLimitError, PickleMachine
from auditor.containers.pickle_scan import PickleScan
from auditor.containers.torch_zip import RecordBudget, read_torch_file
from auditor.model.catalog import FileState
from auditor.storage.memory import MemoryStore
from tests.paths import ROOT

MIB = 1 << 20
MOST_RSS = 300 * MIB
"""Bytes that reading any one pickle may take in all, the interpreter included."""


def number(index: int) -> bytes:
    return struct.pack("<I", index)


THING = b"cno\nthing\nq\x000("
EMOJI = "\U0001f600".encode()
LIST = b"(" + b"".join(b"J" + number(1000 + i) for i in range(20_000)) + b"l\x940"
PAIRS = b"(" + b"".join(b"J" + number(1000 + i) + b"N\x86" for i in range(10_000)) + b"l\x940"
TEXT = b"X" + number(100_000) + b"a" * 100_000 + b"\x940"
AGAIN = b"h\x01h\x00\x85R"

BOMBS = {
    "sets": (b"(", lambda i: b"\x8f", b"t."),
    "sets, memoized": (b"(", lambda i: b"\x8f\x94", b"t."),
    "sets of one": (b"(", lambda i: b"\x8f(K\x01\x90", b"l."),
    "sets of six": (b"(", lambda i: b"\x8f(K\x01K\x02K\x03K\x04K\x05K\x06\x90", b"l."),
    "frozen sets": (b"(", lambda i: b"(K\x01K\x02K\x03K\x04K\x05\x91", b"l."),
    "lists": (b"(", lambda i: b"]", b"l."),
    "lists of one": (b"(", lambda i: b"]Na", b"l."),
    "lists of five": (b"(", lambda i: b"](NNNNNe", b"l."),
    "dictionaries": (b"(", lambda i: b"}", b"l."),
    "dictionaries of one": (b"(", lambda i: b"}K\x01Ns", b"l."),
    "dictionaries of six": (b"(", lambda i: b"}(K\x01NK\x02NK\x03NK\x04NK\x05NK\x06Nu", b"l."),
    "DICT": (b"(", lambda i: b"(K\x01Nd", b"l."),
    "tuples": (b"(", lambda i: b"N\x85N\x86NN\x87", b"l."),
    "tuples of five": (b"(", lambda i: b"(NNNNNt", b"l."),
    "places on the stack": (b"(", lambda i: b"N", b"t."),
    "integers": (b"(", lambda i: b"J" + number(1000 + i), b"l."),
    "long integers": (b"(", lambda i: b"\x8a\xff" + b"\x7f" * 255, b"l."),
    "decimal integers": (b"(", lambda i: b"I%d\n" % (10**20 + i), b"l."),
    "floats": (b"(", lambda i: b"G" + struct.pack(">d", i + 0.5), b"l."),
    "dictionary of integers": (b"}(", lambda i: b"J" + number(1000 + i) + b"N", b"u."),
    "dictionary, one by one": (b"}", lambda i: b"J" + number(1000 + i) + b"Ns", b"."),
    "set of integers": (b"\x8f(", lambda i: b"J" + number(1000 + i), b"\x90."),
    "frozen set of integers": (b"(", lambda i: b"J" + number(1000 + i), b"\x91."),
    "memo": (b"N", lambda i: b"\x94", b"."),
    "memo, fetched": (b"N", lambda i: b"\x94j" + number(i) + b"0", b"."),
    "memo with holes": (b"N", lambda i: b"r" + number(4 * i + 7), b"."),
    "memo with holes, fetched": (b"N", lambda i: b"r" + number(4 * i + 7) + b"j" + number(4 * i + 7) + b"0", b"."),
    "REDUCE": (THING, lambda i: b"h\x00)R", b"l."),
    "NEWOBJ and BUILD": (THING, lambda i: b"h\x00)\x81}b", b"l."),
    "OBJ": (THING, lambda i: b"(h\x00o", b"l."),
    "INST": (b"(", lambda i: b"(ia\nb\n", b"l."),
    "objects with an item": (THING, lambda i: b"h\x00)RNa", b"l."),
    "objects with a pair": (THING, lambda i: b"h\x00)RNNs", b"l."),
    "globals": (b"(", lambda i: b"ca\nb\n", b"l."),
    "globals, called": (b"(", lambda i: b"ca\n%08x\n)R" % i, b"l."),
    "globals with long names, called": (b"(", lambda i: b"c" + b"m" * 4000 + b"\n%08x\n)R" % i, b"l."),
    "text": (b"(", lambda i: b"\x8c\x04%04x" % i, b"l."),
    "wide text": (b"(", lambda i: b"\x8c\xfa" + b"a" * 246 + EMOJI, b"l."),
    "long wide text": (b"(", lambda i: b"X" + number(10_000) + b"a" * 9_996 + EMOJI, b"l."),
    "lines of wide text": (b"(", lambda i: b"V" + b"a" * 30 + b"\\U0001f600\n", b"l."),
    "bytes": (b"(", lambda i: b"C\x02ab", b"l."),
    "arrays of bytes": (b"(", lambda i: b"\x96" + bytes(8), b"l."),
    "a list many times": (b"](", lambda i: b"]2", b"e."),
    "set(list)": (LIST + b"cbuiltins\nset\n\x940(", lambda i: AGAIN, b"l."),
    "Size(list)": (LIST + b"ctorch\nSize\n\x940(", lambda i: AGAIN, b"l."),
    "OrderedDict(pairs)": (PAIRS + b"ccollections\nOrderedDict\n\x940(", lambda i: AGAIN, b"l."),
    "encode(text)": (TEXT + b"c_codecs\nencode\n\x940(", lambda i: AGAIN, b"l."),
    "set(list) in a subclass": (
        LIST + b"ctorch._tensor\n_rebuild_from_type_v2\n\x940cbuiltins\nset\n\x940ctorch\nTensor\n\x940(",
        lambda i: b"h\x01(h\x02h\x03h\x00\x85NtR", b"l.",
    ),
    "OrderedDict()": (b"ccollections\nOrderedDict\n\x940(", lambda i: b"h\x00)R", b"l."),
    "complex()": (b"cbuiltins\ncomplex\n\x940(", lambda i: b"h\x00K\x01\x85R", b"l."),
}  # fmt: skip
"""Beginning, what is repeated, end."""


def bomb(name: str, num: int) -> bytes:
    begin, unit, end = BOMBS[name]
    return begin + b"".join(map(unit, range(num))) + end


def saved(pickled: bytes) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("file/data.pkl", pickled)
    return target.getvalue()


def machine(**limits) -> PickleMachine:
    from auditor.containers.torch_zip import _Tensors

    tensors = _Tensors("file", {})
    return PickleMachine(tensors.builders(), tensors.storage, Limits(**limits))


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_memory_is_counted_from_above(name):
    data = bomb(name, 20 if "(" in name and not name.endswith("()") else 3000)
    reader = machine()
    tracemalloc.start()
    try:
        value = reader.load(data)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert value is not False
    assert taken + len(data) <= reader.num_memory + 32_768, f"counted {reader.num_memory - len(data)}, taken {taken}"


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_memory_limit_is_kept_and_what_is_below_it_loads(name):
    data = bomb(name, 2000)
    reader = machine()
    try:
        reader.load(data)
    except LimitError:
        return
    assert machine(num_memory=reader.num_memory).load(data) is not False
    with pytest.raises(MemoryLimitError):
        machine(num_memory=reader.num_memory - 1).load(data)


CHILD = """
import resource, sys
from auditor.containers.damage import DamagedError
from auditor.storage.local import LocalStore
from auditor.containers.torch_zip import read_torch_file
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
with LocalStore(sys.argv[1]).open("bomb.pt") as handle:
    try:
        held = read_torch_file(handle)
        print("loads")
    except DamagedError as error:
        print(error)
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


def largest(name: str) -> bytes:
    """The largest pickle of its kind that is not given up."""
    needed = [PickleScan(bomb(name, num), Limits()).run().num_memory for num in (1000, 3000)]
    fixed, unit = (3 * needed[0] - needed[1]) / 2, (needed[1] - needed[0]) / 2000
    return bomb(name, int(min((Limits().num_memory - fixed) / unit, Limits().num_bytes / len(bomb(name, 1)))) - 100)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["sets, memoized", "frozen sets", "dictionary of integers", "wide text", "set(list)"])
def test_worst_pickles_stay_below_300_mib(tmp_path, name):
    (tmp_path / "bomb.pt").write_bytes(saved(bomb(name, 5000) if "(" in name else largest(name)))
    arguments = [sys.executable, "-c", CHILD, str(tmp_path), str(MOST_RSS + 100 * MIB)]
    outcome, peak = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert outcome == "loads" or "bytes of memory" in outcome
    assert int(peak) << 10 < MOST_RSS


def test_honest_pickles_are_not_given_up():
    torch = pytest.importorskip("torch")
    target = io.BytesIO()
    torch.save({f"model.layers.{i}.mlp.dense.weight": torch.zeros(2, 2) for i in range(2000)}, target)
    with MemoryStore({"file.pt": target.getvalue()}).open("file.pt") as handle:
        assert len(read_torch_file(handle, limits=Limits(num_memory=2000 * 2500)).tree) == 2000


# The memo


def test_memo_keeps_only_what_is_fetched():
    shared = ["shared"]
    reader = machine()
    reader.load(pickle.dumps([[f"text {i}"] for i in range(500)] + [shared, shared], 4))
    kept = [entry for entry in reader.memo if entry is not None]
    assert len(reader.memo) > 1000
    assert kept == [shared]


@pytest.mark.parametrize(
    "data",
    [
        b"(K\x01q\x00K\x02q\x05K\x03\x94h\x05h\x02t.",
        b"(K\x01r\x07\0\0\0K\x02\x94K\x03\x94h\x01h\x02h\x07t.",
        b"(K\x01q\x01K\x02q\x00K\x03q\x01h\x01h\x00t.",
        b"(K\x01q\x02K\x02\x94K\x03\x94h\x01h\x02t.",
        b"(K\x01q\x00h\x00K\x02q\x00h\x00t.",
        b"(K\x01p12\nK\x02\x94g12\nh\x01t.",
    ],
)
def test_memo_with_holes_and_repeats_is_that_of_pickle(data):
    assert machine().load(data) == pickle.loads(data)


# Marks


@pytest.mark.parametrize(
    "data",
    [b"N(N\x86.", b"N(\x85.", b"N(NR.", b"(.", b"N(2.", b"N(\x94.", b"N(q\x00.", b"]N(a.", b"](b.", b"(e.", b"](Ne(.",
     b"N(NNs.", b"(o.", b"0.", b"N(00.", b"1.", b"N(\x93.", b"((e."],
)  # fmt: skip
def test_nothing_reaches_below_a_mark(data):
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(data)
    with pytest.raises(DamagedError):
        machine().load(data)


def test_pop_takes_a_mark():
    data = b"K\x01(0."
    assert machine().load(data) == pickle.loads(data) == 1


# Nesting


@pytest.mark.parametrize(
    ("begin", "unit", "end"),
    [(b")", b"\x85", b""), (b"N", b"N\x86", b""), (b"", b"]", b"a"), (b"", b"(", b"t"), (b"", b"](", b"e"),
     (b"", b"}N", b"s"), (b"", b"cno\nthing\n)R}N", b"sb")],
    ids=["TUPLE1", "TUPLE2", "APPEND", "TUPLE", "APPENDS", "SETITEM", "BUILD"],
)  # fmt: skip
def test_nesting_limit(begin, unit, end):
    def nested(depth: int) -> bytes:
        return begin + unit * depth + (b"N" if end in (b"a", b"s", b"sb") else b"") + end * depth + b"."

    machine(num_nesting=100).load(nested(40))
    machine().load(nested(2000))
    with pytest.raises(LimitError, match="nested more than 100 deep"):
        machine(num_nesting=100).load(nested(101))


def test_long_flat_containers_are_not_nested():
    for value in ([[i] for i in range(5000)], {i: (i,) for i in range(5000)}, tuple([i] for i in range(5000))):
        for protocol in range(5):
            assert machine(num_nesting=4).load(pickle.dumps(value, protocol)) == value


# Keys


PRIME = (1 << 61) - 1


def colliding(then: bytes) -> bytes:
    """Whole numbers that all have the hash 0, each with instructions after it."""
    return b"".join(b"\x8a\x0b" + (i * PRIME).to_bytes(11, "little") + then for i in range(1, 50_000))


@pytest.mark.parametrize(
    "data",
    [
        b"}(" + colliding(b"N") + b"u.",
        b"}" + colliding(b"Ns") + b".",
        b"(" + colliding(b"") + b"\x91.",
        b"\x8f(" + colliding(b"") + b"\x90.",
        b"ccollections\nOrderedDict\n(" + colliding(b"N\x86") + b"l\x85R.",
        b"cbuiltins\nset\n(" + colliding(b"") + b"l\x85R.",
    ],
    ids=["SETITEMS", "SETITEM", "FROZENSET", "ADDITEMS", "OrderedDict", "set"],
)
def test_keys_with_one_hash_are_given_up(data):
    begin = time.process_time()
    with pytest.raises(LimitError, match="keys with one hash"):
        machine().load(data)
    assert time.process_time() - begin < 5


def test_large_honest_keys_are_kept():
    value = {(1 << 64) + i: i for i in range(1000)} | {("name", i): i for i in range(1000)}
    assert machine().load(pickle.dumps(value)) == value


def test_frozen_sets_that_take_exponential_time_to_compare_are_given_up():
    def tower(base: int) -> bytes:
        def put(index: int) -> bytes:
            return b"q" + bytes([base + index]) + b"0"

        both = b"h" + bytes([base]) + b"h" + bytes([base + 1])
        steps = b"".join(
            b"(" + both + b"\x91" + put(2) + b"(" + both + bytes([0x4B, level + 2]) + b"\x91" + put(1)
            + b"h" + bytes([base + 2]) + put(0)
            for level in range(40)
        )  # fmt: skip
        return b"(K\x00\x91" + put(0) + b"(K\x01\x91" + put(1) + steps

    with pytest.raises(LimitError, match="nested"):
        machine().load(tower(0) + tower(10) + b"(h\x00h\x0a\x91.")


# Several files


def test_files_that_come_later_find_no_room_and_are_not_damaged():
    content = saved(bomb("dictionaries", 20_000))
    budget = RecordBudget(3 * MIB)
    with MemoryStore({"file.pt": content}).open("file.pt") as handle:
        assert read_torch_file(handle, budget).tree
        assert read_torch_file(handle, budget).tree
        for _ in range(3):
            with pytest.raises(UnsupportedError, match="left it"):
                read_torch_file(handle, budget)
        assert read_torch_file(handle).tree


def test_small_files_always_find_room():
    budget = RecordBudget(0)
    with MemoryStore({"file.pt": saved(pickle.dumps(["text"] * 1000))}).open("file.pt") as handle:
        for _ in range(100):
            read_torch_file(handle, budget)


def test_bombs_in_one_step_share_a_budget(monkeypatch):
    monkeypatch.setattr(deepspeed_pipeline_files, "RecordBudget", lambda: RecordBudget(8 * MIB))
    content = saved(bomb("dictionaries", 20_000))
    names = [f"layer_{layer:02d}-model_00-model_states.pt" for layer in range(16)]
    store = MemoryStore(dict.fromkeys(names, content))
    files = deepspeed_pipeline_files.read_step_files(store, Folder.read(store, ""))
    states = [files.layers[layer, 0].state for layer in range(16)]
    num_read = states.count(FileState.PRESENT)
    assert 4 <= num_read <= 8
    assert states == [FileState.PRESENT] * num_read + [FileState.UNREADABLE] * (16 - num_read)
