"""The reader of OCDBT: what honest databases hold, and that others are faults of a file, told in bounded time."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.containers import ocdbt
from auditor.containers.damage import DamagedError, LimitError, UnsupportedError
from auditor.containers.ocdbt import Place, read_database
from auditor.storage.memory import MemoryStore
from auditor.storage.store import ObjectMissingError
from tests import ocdbt_writer as writer
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "orbax"


def read(objects):
    return read_database(MemoryStore(objects), "")


def faults(objects):
    return [(fault.file, str(fault)) for fault in read(objects).lost]


@pytest.mark.parametrize("compressed", [False, True])
def test_values_lie_in_nodes_or_in_files(compressed):
    found = read(writer.database({"a/.zarray": b"{}", "a/0.0": (0, 3, 4), "b": b""}, b"0123456", compressed))
    assert {key: value.inline for key, value in found.values.items()} == {"a/.zarray": b"{}", "a/0.0": None, "b": b""}
    assert found.values["a/0.0"].place == Place("", "d/values", 3, 4)
    assert not found.lost


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(min_size=1, max_size=12), st.binary(max_size=20) | st.tuples(
    st.just(0), st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1, max_size=30))  # fmt: skip
def test_every_honest_database_reads_back(entries):
    def place(value):
        return None if isinstance(value, bytes) else Place("", "d/values", value[1], value[2])

    ordered = {key: entries[key] for key in sorted(entries, key=str.encode)}
    found = read(writer.database(ordered)).values
    assert {key: value.inline for key, value in found.items()} == {
        key: value if isinstance(value, bytes) else None for key, value in entries.items()
    }
    assert all(place(entries[key]) in (None, value.place) for key, value in found.items())


def tree(**changes):
    """Two leaves below an inner node, all in one file; ``changes``: places of the children."""
    leaves = [writer.envelope(writer.BTREE, writer.leaf({key: b"v"})) for key in ("x", "y")]
    starts = [0, len(leaves[0])]
    children = {f"p/{key}": (0, starts[at], len(leaves[at]), 2) for at, key in enumerate("xy")}
    children |= {f"p/{key}": value for key, value in changes.items()}
    top = writer.envelope(writer.BTREE, writer.inner(children, ["d/n"]))
    at = sum(map(len, leaves))
    objects = {
        "manifest.ocdbt": writer.manifest([(1, 0, at, len(top), 2)], ["d/n"]), "d/n": b"".join([*leaves, top]),
    }  # fmt: skip
    return objects, (0, at, len(top), 2)


def test_keys_below_an_inner_node_have_its_prefix():
    assert {*read(tree()[0]).values} == {"p/x", "p/y"}


def test_a_node_that_leads_back_to_itself_is_told_and_read_once():
    for _ in range(2):
        objects, top = tree()
        size = len(objects["d/n"])
        objects, top = tree(y=(0, top[1], top[2], 2))
        assert len(objects["d/n"]) == size
        found = read(objects)
        assert {*found.values} == {"p/x"}
        ((file, text),) = [(fault.file, str(fault)) for fault in found.lost]
        assert file == "d/n"
        assert "met twice" in text or "another height" in text


def test_a_leaf_that_is_everyones_child_is_read_once():
    objects, _ = tree()
    leaf_bytes = len(writer.envelope(writer.BTREE, writer.leaf({"x": b"v"})))
    children = {f"k{at:05}": (0, 0, leaf_bytes, 0) for at in range(5000)}
    top = writer.envelope(writer.BTREE, writer.inner(children, ["d/n"]))
    objects["d/top"] = top
    objects["manifest.ocdbt"] = writer.manifest([(1, 0, 0, len(top), 2)], ["d/top"])
    found = read(objects)
    assert found.num_nodes == 2
    assert len(found.lost) <= ocdbt.MAX_LOST


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ((0, 10**9, 50, 2), "is said to lie at bytes 1000000000"),
        ((0, 0, 10**15, 2), "larger than any honest one"),
        ((0, 5, 40, 2), "no node of the database"),
        ((0, 0, 3, 2), "no node of the database"),
        ((0, 0, 30, 60_000), "don't fit together"),
        ((7, 0, 30, 2), "does not list"),
    ],
)
def test_a_child_that_is_elsewhere_than_said(place, told):
    objects, _ = tree(y=place)
    ((file, text), *_) = faults(objects)
    assert file == "d/n"
    assert told in text


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "d/../../x", "d//x", "", "d/\0x", "./d"])
def test_no_file_outside_the_database_is_named(name):
    node = writer.envelope(writer.BTREE, writer.leaf({"k": (0, 0, 1)}, [name]))
    objects = {"manifest.ocdbt": writer.manifest([(0, 0, 0, len(node), 1)], ["d/n"]), "d/n": node}
    ((file, text),) = faults(objects)
    assert (file, "outside the database" in text) == ("d/n", True)
    with pytest.raises(DamagedError, match="outside the database"):
        read({"manifest.ocdbt": writer.manifest([(0, 0, 0, 1, 1)], [name])})


def test_a_file_that_is_not_there_is_told():
    objects = writer.database({"k": b"v"})
    del objects["d/node"]
    assert faults(objects) == [("d/node", "it is not there")]
    del objects["manifest.ocdbt"]
    with pytest.raises(ObjectMissingError):
        read(objects)


@pytest.mark.parametrize("what", ["manifest.ocdbt", "d/node"])
def test_every_flipped_bit_of_a_node_is_seen(what):
    objects = writer.database({"a": b"value", "b": (0, 1, 2)}, b"xyz", compressed=True)
    for at in range(len(objects[what])):
        raw = bytearray(objects[what])
        raw[at] ^= 1 << (at % 8)
        broken = {**objects, what: bytes(raw)}
        if what == "d/node":
            assert [file for file, _ in faults(broken)] == ["d/node"]
        else:
            with pytest.raises((DamagedError, UnsupportedError)):
                read(broken)


def test_a_node_that_expands_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr(ocdbt, "MAX_NODE_BYTES", 1 << 20)
    body = writer.leaf({"k": bytes(64 << 20)})
    node = writer.envelope(writer.BTREE, body, compressed=True)
    objects = {"manifest.ocdbt": writer.manifest([(0, 0, 0, len(node), 1)], ["d/n"]), "d/n": node}
    ((file, text),) = faults(objects)
    assert (file, "expands to more than" in text) == ("d/n", True)


def test_counts_that_the_bytes_can_not_hold():
    for body in (
        b"\x00" + writer.varint(1 << 60), b"\x00\x00" + writer.varint(1 << 40), b"\x00\x00\x00", b"\x00" + b"\xff" * 20,
        bytes([255]) + b"\x00\x00",
    ):  # fmt: skip
        node = writer.envelope(writer.BTREE, body)
        objects = {"manifest.ocdbt": writer.manifest([(0, 0, 0, len(node), 1)], ["d/n"]), "d/n": node}
        begun = time.process_time()
        assert [file for file, _ in faults(objects)] == ["d/n"]
        assert time.process_time() - begun < 1


def test_a_tree_as_high_as_none_is():
    node = writer.envelope(writer.BTREE, writer.leaf({"k": b"v"}))
    with pytest.raises(LimitError):
        read({"manifest.ocdbt": writer.manifest([(200, 0, 0, len(node), 1)], ["d/n"]), "d/n": node})


def test_what_is_not_known_is_said():
    with pytest.raises(UnsupportedError, match="numbered manifests"):
        read({"manifest.ocdbt": writer.manifest([], [], kind=1)})


def test_an_empty_database_holds_nothing():
    assert read({"manifest.ocdbt": writer.manifest([], [])}).values == {}
    assert read({"manifest.ocdbt": writer.manifest([(0, 0, 0, 0, 0)], ["d/n"])}).values == {}


@pytest.mark.parametrize("item", sorted(path.parent for path in FIXTURES.rglob("manifest.ocdbt"))[::3])
def test_tensorstore_lists_the_same_keys(item: Path):
    ts = pytest.importorskip("tensorstore")
    keys = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"}).result().list().result()
    objects = {path.relative_to(item).as_posix(): path.read_bytes() for path in item.rglob("*") if path.is_file()}
    assert sorted(key.decode() for key in keys) == sorted(read(objects).values)
