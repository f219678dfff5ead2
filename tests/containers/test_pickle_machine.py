"""The inert pickle machine: the values of real pickles, nothing imported or called, and bounds on what lies cost."""

import io
import math
import pickle
import pickletools
import sys
import tracemalloc
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from auditor.containers.damage import DamagedError, LimitError
from auditor.containers.pickle_machine import Global, Limits, Opaque, PickleMachine
from auditor.containers.torch_zip import Storage, read_torch_file
from auditor.storage.memory import MemoryStore

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed_pipeline"

BUILDERS = {"_codecs.encode": lambda arguments: arguments[0].encode(arguments[1])} | {
    f"{module}.{kind.__name__}": lambda arguments, kind=kind: kind(*arguments)
    for module in ("builtins", "__builtin__")
    for kind in (bytes, bytearray, set, frozenset)
}
"""What the older protocols say bytes and sets with; protocols 4 and 5 have instructions of their own."""

KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
PLAIN = st.recursive(
    KEYS | st.floats() | st.integers(-(1 << 2000), 1 << 2000) | st.binary(min_size=250, max_size=300)
    | st.text(st.characters(codec=None), max_size=10) | st.text(min_size=250, max_size=300),
    lambda inner: st.lists(inner, max_size=5) | st.lists(inner, max_size=5).map(tuple) | st.sets(KEYS, max_size=5)
    | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)  # fmt: skip


def load(data: bytes, **options) -> object:
    return PickleMachine(BUILDERS, **options).load(data)


def assert_same(one: object, other: object) -> None:
    """Equal values of equal types; NaN is NaN and -0.0 is not 0.0."""
    assert type(one) is type(other)
    if isinstance(one, float):
        assert (
            math.isnan(other) if math.isnan(one) else (one, math.copysign(1, one)) == (other, math.copysign(1, other))
        )
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_same(value, other[key])
    else:
        assert one == other


# Values


@pytest.mark.parametrize("protocol", range(6))
def test_values_equal_those_of_pickle(protocol):
    @given(PLAIN)
    @settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
    def check(value):
        assert_same(load(pickle.dumps(value, protocol)), value)

    check()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value",
    [
        0, -1, 255, 256, 65535, 65536, (1 << 31) - 1, -(1 << 31), 1 << 31, 1 << 63, -(1 << 2039), 1 << 2040,
        math.nan, math.inf, -math.inf, -0.0, 5e-324, "", "\0\n\\u", "é\u2028\U0001f600", "\ud800", "x" * 70_000,
        b"", b"\x00\xff", b"y" * 70_000, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], list(range(3000)), {},
        {i: str(i) for i in range(3000)}, set(), {1, 2}, frozenset(), frozenset({(1, frozenset({2}))}), True, False,
        None, bytearray(b"abc"),
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_corner_values_equal_those_of_pickle(value, protocol):
    assert_same(load(pickle.dumps(value, protocol)), value)


@pytest.mark.parametrize("protocol", range(6))
def test_one_object_under_two_names_stays_one(protocol):
    shared = [1]
    one, other, around = load(pickle.dumps((shared, shared, [shared] * 300), protocol))
    assert one is other
    assert around[299] is one


@pytest.mark.parametrize("protocol", range(6))
def test_object_that_holds_itself(protocol):
    ring = {}
    ring["me"] = [ring]
    loaded = load(pickle.dumps(ring, protocol))
    assert loaded["me"][0] is loaded


def test_instructions_that_pickle_no_longer_writes():
    assert load(b"I01\n.") is True
    assert load(b"I00\n.") is False
    assert load(b"L-12L\n.") == -12
    assert load(b"S'abc'\n.") == load(b"U\x03abc.") == load(b"T\x03\0\0\0abc.") == "abc"
    assert load(b"(I1\nI2\nd.") == {1: 2}
    assert load(b"(I1\nI2\nl.") == [1, 2]
    assert load(b"I1\n2\x86.") == (1, 1)
    assert load(b"I1\n(I2\nI3\n1.") == 1


# Nothing runs


def test_unknown_module_becomes_opaque_and_is_not_imported():
    machine = PickleMachine({})
    value = machine.load(b"cno_such_module_xyz\nThing\n(K\x01X\x01\0\0\0atR.")
    assert isinstance(value, Opaque)
    assert value.maker == Global("no_such_module_xyz", "Thing")
    assert value.arguments == (1, "a")
    assert machine.opaque == {"no_such_module_xyz.Thing": 1}


def test_importable_module_is_not_imported():
    module = "this"
    assert module not in sys.modules
    assert isinstance(load(f"c{module}\ns\n)R.".encode()), Opaque)
    assert module not in sys.modules


class Calls:
    """Pickles as a call of ``function``."""

    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_executed(tmp_path, protocol):
    import os

    sentinel = tmp_path / "sentinel"
    data = pickle.dumps(Calls(os.system, f"touch '{sentinel}'"), protocol)
    value = load(data)
    assert isinstance(value, Opaque)
    assert value.maker.name == "system"
    assert not sentinel.exists()
    pickle.loads(data)
    assert sentinel.exists(), "the pickle would not have done harm anyway"


@pytest.mark.parametrize(
    "data",
    [
        b"(cos\nsystem\nX\x04\0\0\0trueo.",
        b"(X\x04\0\0\0trueios\nsystem\n.",
        b"cos\nsystem\nX\x04\0\0\0true\x85\x81.",
        b"cos\nsystem\nX\x04\0\0\0true\x85}\x92.",
        b"X\x02\0\0\0osX\x06\0\0\0system\x93X\x04\0\0\0true\x85R.",
    ],
    ids=["OBJ", "INST", "NEWOBJ", "NEWOBJ_EX", "STACK_GLOBAL"],
)
def test_every_way_to_call_is_inert(data, monkeypatch):
    monkeypatch.setattr("os.system", lambda command: pytest.fail(f"called with {command}"))
    machine = PickleMachine({})
    value = machine.load(data)
    assert isinstance(value, Opaque)
    assert value.maker == Global("os", "system")
    assert value.arguments[0] == "true"
    assert machine.opaque == {"os.system": 1}


def test_called_result_can_be_called_again():
    value = load(b"cbuiltins\ngetattr\n(cos\nsystem\nX\x04\0\0\0nametR)R.")
    assert isinstance(value, Opaque)
    assert isinstance(value.maker, Opaque)


class Plain:
    def __init__(self) -> None:
        self.a, self.b = 1, [2]


class Slotted:
    __slots__ = ("a",)

    def __init__(self) -> None:
        self.a = 1


class Mapped(dict):
    pass


@pytest.mark.parametrize("protocol", range(2, 6))
def test_state_of_unknown_objects_is_kept(protocol):
    assert load(pickle.dumps(Plain(), protocol)).attributes() == {"a": 1, "b": [2]}
    assert load(pickle.dumps(Mapped(x=1), protocol)).items == [("x", 1)]
    assert load(pickle.dumps(Slotted(), protocol)).state == (None, {"a": 1})


def test_extension_and_buffer_instructions_are_refused():
    for data in (b"\x82\x01.", b"\x83\x01\0.", b"\x84\x01\0\0\0.", b"\x97.", b"\x97\x98."):
        with pytest.raises(DamagedError):
            load(data)


def test_persistent_ids_are_resolved_by_the_caller_alone():
    assert PickleMachine({}, lambda name: ("got", name)).load(b"X\x01\0\0\0aQ.") == ("got", "a")
    assert PickleMachine({}, lambda name: ("got", name)).load(b"Pkey\n.") == ("got", "key")
    with pytest.raises(DamagedError, match="persistent id"):
        load(b"X\x01\0\0\0aQ.")


def test_builder_that_refuses_its_arguments_is_damage():
    for error in (TypeError, ValueError, IndexError, KeyError):

        def refuse(arguments, error=error):
            raise error("no")

        with pytest.raises(DamagedError):
            PickleMachine({"a.b": refuse}).load(b"ca\nb\n)R.")


# Bounds


def test_opcode_limit():
    data = b"N0" * 50 + b"N."
    assert load(data, limits=Limits(num_opcodes=102)) is None
    with pytest.raises(LimitError):
        load(data, limits=Limits(num_opcodes=101))


def test_stack_limit():
    assert len(load(b"(" + b"N" * 98 + b"t.", limits=Limits(num_stack=100))) == 98
    with pytest.raises(LimitError):
        load(b"(" + b"N" * 150 + b"t.", limits=Limits(num_stack=100))


def test_size_limit():
    assert load(b"N.", limits=Limits(num_bytes=2)) is None
    with pytest.raises(LimitError):
        load(b"N0N.", limits=Limits(num_bytes=2))


def test_integers_up_to_the_limit_and_no_further():
    size = Limits().num_long_bytes
    assert load(b"\x8b" + size.to_bytes(4, "little") + b"\x7f" * size + b".") > 0
    with pytest.raises(LimitError):
        load(b"\x8b" + (size + 1).to_bytes(4, "little") + b"\x7f" * (size + 1) + b".")
    for letter in (b"I", b"L"):
        assert load(letter + b"9" * size + b"\n.") == int("9" * size)
        with pytest.raises(LimitError):
            load(letter + b"9" * (size + 1) + b"\n.")


def test_integer_limit_of_the_machine_counts():
    with pytest.raises(LimitError):
        load(b"\x8a\x08" + b"\x7f" * 8 + b".", limits=Limits(num_long_bytes=4))


@pytest.mark.parametrize(
    "put", [b"r\xff\xff\xff\x7f", b"r\xff\xff\xff\xff", b"p2147483648\n", b"p" + b"9" * 4000 + b"\n"]
)
def test_huge_memo_index_costs_no_memory(put):
    get = (b"j" if put[:1] == b"r" else b"g") + put[1:]
    tracemalloc.start()
    try:
        assert load(b"K\x07" + put + b"0" + get + b".") == 7
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("code", [b"B", b"\x8e", b"X", b"\x8d", b"\x96", b"T", b"\x8b", b"\x95"])
def test_huge_announced_length_costs_no_memory(code):
    width = 8 if code in (b"\x8e", b"\x8d", b"\x96", b"\x95") else 4
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError):
            load(code + b"\xff" * (width - 1) + b"\x7fabc.")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_negative_length_is_damage():
    for code in (b"T", b"\x8b"):
        with pytest.raises(DamagedError):
            load(code + b"\xff\xff\xff\xff.")


DEEP = 1_000_000


@pytest.mark.parametrize(
    "data",
    [b")" + b"\x85" * DEEP + b".", b"(" * DEEP + b"t" * DEEP + b".", b"]" * DEEP + b"a" * (DEEP - 1) + b"."],
    ids=["TUPLE1", "TUPLE", "list"],
)
def test_value_nested_a_million_deep_loads_or_is_damage(data):
    try:
        value, depth = load(data), 0
    except DamagedError:
        return
    while value:
        value, depth = value[0], depth + 1
    assert depth >= DEEP - 1


@pytest.mark.parametrize("use", [b"Ns.", b"\x90.", b"(\x91."], ids=["dict", "set", "frozenset"])
@pytest.mark.parametrize("depth", [100, DEEP])
def test_deeply_nested_key_is_given_up(use, depth):
    nested = b")" + b"\x85" * depth
    data = {b"Ns.": b"}" + nested + b"Ns.", b"\x90.": b"\x8f(" + nested + b"\x90.", b"(\x91.": b"(" + nested + b"\x91."}
    with pytest.raises(LimitError, match="nested"):
        load(data[use])


def test_huge_flat_key_is_given_up():
    with pytest.raises(LimitError):
        load(b"}(" + b"N" * 20_000 + b"tNs.")


def test_ordinary_tuple_keys_are_kept():
    assert load(pickle.dumps({(1, ("a", (2, 3))): 4})) == {(1, ("a", (2, 3))): 4}


def test_equal_deeply_nested_frozensets_load_or_are_damage():
    tower = b"(" * 5000 + b"\x91" * 5000
    assert is_value_or_damage(b"(" + tower * 2 + b"\x91.")


def test_equal_frozensets_of_ordinary_depth_are_one():
    tower = b"(" * 5 + b"\x91" * 5
    assert len(load(b"(" + tower * 2 + b"\x91.")) == 1


@pytest.mark.parametrize(
    "copy",
    [b"ccopy\nit\nq\x010(" + b"h\x01h\x00\x85R" * 2000, b"ccopy\nit\nq\x010(" + b"h\x01h\x00\x85N\x92" * 2000],
    ids=["REDUCE", "NEWOBJ_EX"],
)
@pytest.mark.parametrize("argument", [b"t", b"l"])
def test_one_large_argument_used_many_times_is_given_up(copy, argument):
    data = b"(" + b"N" * 10_000 + argument + b"q\x000" + copy + b"t."
    machine = PickleMachine({"copy.it": lambda arguments: list(arguments[0])}, limits=Limits(num_copied=100_000))
    tracemalloc.start()
    try:
        with pytest.raises(LimitError):
            machine.load(data)
        assert tracemalloc.get_traced_memory()[1] < 100_000 * 8 * 3
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("limit", [2999, 3000])
def test_elements_of_arguments_are_counted_over_all_calls(limit):
    data = b"cno\nthing\nq\x000" + b"h\x00(" + b"N" * 1000 + b"l\x85R0" + b"h\x00(" + b"N" * 2000 + b"t\x85R."
    if limit == 3000:
        assert isinstance(load(data, limits=Limits(num_copied=limit)), Opaque)
    else:
        with pytest.raises(LimitError):
            load(data, limits=Limits(num_copied=limit))


# Broken pickles


def is_value_or_damage(data: bytes) -> bool:
    with suppress(DamagedError):
        load(data)
    return True


def real_pickles() -> dict[str, bytes]:
    found = {}
    for path in sorted((FIXTURES / "tp4" / "global_step6").glob("*_00[_-]*")):
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
            found[path.name] = archive.read(f"{path.stem}/data.pkl")
    return found


@pytest.mark.parametrize("name", sorted(name for name, data in real_pickles().items() if len(data) < 4000))
def test_real_pickle_cut_at_every_byte_is_damage(name):
    data = real_pickles()[name]

    def run(part: bytes) -> object:
        return PickleMachine({}, lambda key: Storage(str(key), None, 0)).load(part)

    run(data)
    for length in range(len(data)):
        with pytest.raises(DamagedError):
            run(data[:length])


@pytest.mark.parametrize("protocol", range(6))
def test_plain_pickle_cut_at_every_byte_is_damage(protocol):
    value = {
        "a": [1, 1 << 40, 2.5, None, True, "text" * 100],
        (1, 2): {b"x" * 300, frozenset({3})},
        "z": OrderedDict(q=1),
    }
    data = pickle.dumps(value, protocol)
    load(data)
    for length in range(len(data)):
        with pytest.raises(DamagedError):
            load(data[:length])


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None, suppress_health_check=SLOW)
def test_random_bytes_load_or_are_damage(noise):
    assert is_value_or_damage(noise)
    assert is_value_or_damage(noise + b".")


CODES = sorted(ord(code.code) for code in pickletools.opcodes)


@given(
    st.lists(
        st.sampled_from(CODES).map(lambda code: bytes([code])) | st.binary(max_size=4) | st.just(b"1\n"), max_size=60
    )
)
@settings(max_examples=500, deadline=None, suppress_health_check=SLOW)
def test_random_instructions_load_or_are_damage(parts):
    assert is_value_or_damage(b"".join(parts) + b".")


@given(st.sampled_from(sorted(real_pickles().values())), st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=SLOW)
def test_real_pickle_with_changed_bytes_loads_or_is_damage(data, draw):
    changed = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        changed[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.sampled_from(CODES) | st.integers(0, 255))
    assert is_value_or_damage(bytes(changed))


@pytest.mark.parametrize("code", [code.code for code in pickletools.opcodes], ids=[c.name for c in pickletools.opcodes])
def test_every_instruction_on_an_empty_stack_loads_or_is_damage(code):
    for rest in (b"", b".", b"\x01.", b"1\n.", b"1\n1\n.", bytes(8) + b"."):
        assert is_value_or_damage(code.encode("latin-1") + rest)
        assert is_value_or_damage(b"N" + code.encode("latin-1") + rest)
        assert is_value_or_damage(b"(NN" + code.encode("latin-1") + rest)


@pytest.mark.parametrize(
    "data",
    [b"", b"N", b".", b"\x80\x06N.", b"\x80\x05\x95\xff\0\0\0\0\0\0\0N.", b"\xff.", b"h\x05.", b"g1\n.", b"t.", b"}Na.",
     b"](Na.", b"}(Nu.", b"NNR.", b"N)R0", b"S'a\n.", b"Sabc\n.", b"F1x\n.", b"Iabc\n.", b"}]Ns.", b"NN\x93.",
     b"X\x02\0\0\0\xff\xff."],
)  # fmt: skip
def test_broken_pickles_are_damage(data):
    with pytest.raises(DamagedError):
        load(data)


def torch_file(pickled: bytes) -> MemoryStore:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("file/data.pkl", pickled)
    return MemoryStore({"file.pt": target.getvalue()})


NESTED = b")" + b"\x85" * 50_000


@pytest.mark.parametrize(
    "data",
    [
        b"c__builtin__\ncomplex\n\x8a\xc8" + b"\x7f" * 200 + b"\x85R.",
        b"ccollections\nOrderedDict\nK\x01\x85R.",
        b"ccollections\nOrderedDict\n]N\x85a\x85R.",
        b"ctorch\nSize\nK\x01\x85R.",
        b"c__builtin__\nset\n]]a\x85R.",
        b"ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"ctorch._utils\n_rebuild_parameter\n)R.",
        b"ctorch._tensor\n_rebuild_from_type_v2\n)R.",
    ],
)
def test_builders_of_torch_files_turn_nonsense_into_damage(data):
    with torch_file(data).open("file.pt") as handle, pytest.raises(DamagedError):
        read_torch_file(handle)


@pytest.mark.parametrize(
    "data",
    [
        b"c_codecs\nencode\n" + NESTED + b"N\x86R.",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\n" + NESTED + b"NNtR.",
        b"c__builtin__\nset\n]" + NESTED + b"a\x85R.",
        b"ctorch\nSize\n" + NESTED + b"\x85R.",
    ],
    ids=["encode", "from_type", "set", "size"],
)
def test_builders_of_torch_files_bear_deep_nesting(data):
    with torch_file(data).open("file.pt") as handle, suppress(DamagedError):
        assert read_torch_file(handle).entry.name == "file.pt"
