import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.model.catalog import File, FileState, Role, c_strides
from auditor.model.dtype import DTYPES, Kind
from auditor.model.mesh import EVERYWHERE, NO_MESH, Coordinate
from auditor.model.observation import Read
from auditor.model.region import Box, FlatRange, whole
from auditor.observe import plan, together, unit
from auditor.observe.digest import add, digest_array
from auditor.observe.one_pass import observe, wanted_rows
from auditor.observe.shares import Everything
from auditor.observe.statistics import statistics
from auditor.storage.faulty import Faults, FaultyStore
from auditor.storage.memory import MemoryStore
from auditor.storage.retrying import RetryingStore
from auditor.storage.store import TransientReadError

FLOAT32, BFLOAT16, UINT8 = DTYPES["float32"], DTYPES["bfloat16"], DTYPES["uint8"]
FINITE_BYTES = 0x40
"""Bytes below this make finite numbers of every float of 16 bits or more."""


class Written:
    """Tensors, written to files in memory; the Catalog that says so."""

    def __init__(self):
        self.builder = CatalogBuilder()
        self.files = {}
        self.expected = []
        self.numbers = 0

    def tensor(self, dtype, shape, role=Role.PARAMETER, **more):
        """A new tensor: its number, and its value bits (complex ones with a last dim of two)."""
        self.numbers += 1
        raw = np.random.default_rng(self.numbers).integers(
            0, FINITE_BYTES, math.prod(shape) * dtype.bits // 8, np.uint8
        )
        bits = raw.view(dtype.carrier).reshape((*shape, 2) if dtype.kind is Kind.COMPLEX else shape)
        return self.builder.tensor(f"t{self.numbers}", role, dtype, shape, self.numbers, **more), dtype, shape, bits

    def number(self, file):
        self.files.setdefault(file, bytearray())
        return list(self.files).index(file)

    def piece(self, tensor, file, region, *, order=None, gap=0, at=None, coordinate=EVERYWHERE):
        """Write ``region`` behind what the file holds, with its dims from slowest to fastest in ``order``."""
        number, dtype, shape, bits = tensor
        halves = dtype.kind is Kind.COMPLEX
        if isinstance(region, FlatRange):
            part = bits.reshape((-1, 2) if halves else -1)[region.start : region.stop]
            base, steps, extents = region.start, (1,), (region.num_elements,)
        else:
            part = bits[tuple(map(slice, region.start, region.stop))]
            steps, extents = c_strides(shape), region.shape
            base = sum(a * s for a, s in zip(region.start, steps, strict=True))
        order = tuple(range(len(extents))) if order is None else order
        strides = dict(zip(order, c_strides([extents[dim] for dim in order]), strict=True))
        where, content = self.number(file), self.files[file]
        content.extend(b"\xee" * gap)
        if at is None:
            at = len(content)
            content.extend(part.transpose((*order, part.ndim - 1) if halves else order).tobytes())
        self.builder.piece(number, where, at, region, coordinate, strides=[strides[dim] for dim in range(len(extents))])
        self.expected.append((digest_array(part, dtype, base, steps), statistics(part, dtype)))
        return at

    def finish(self, **states):
        """The store and the Catalog; ``states``: file to state."""
        store = MemoryStore({name: bytes(content) for name, content in self.files.items()})
        for name, content in self.files.items():
            state = states.get(name, FileState.PRESENT)
            detail = "" if state is FileState.PRESENT else "it is spoilt"
            self.builder.file(File(name, len(content), store.stat(name).identity, state, detail=detail))
        return store, self.builder.build(3, "", "made-up", NO_MESH, {}, ())


def run(store, catalog, threads=1, rows=None):
    with ThreadPoolExecutor(threads) as pool:
        return observe(store, catalog, np.arange(len(catalog.pieces)) if rows is None else rows, Everything(pool))


def assert_measured(seen, expected):
    assert len(seen.pieces) == len(expected)
    for row, (lanes, wanted) in zip(seen.pieces, expected, strict=True):
        assert row["read"] == Read.DONE
        assert (int(row["lane0"]), int(row["lane1"])) == lanes
        for name in ("num_nan", "num_infinite", "num_zero", "minimum", "maximum"):
            assert row[name] == getattr(wanted, name)
        assert row["sum_squares"] == pytest.approx(wanted.sum_squares, rel=1e-12)


def states(seen):
    return [Read(row["read"]).name for row in seen.pieces]


# What is measured


@st.composite
def written(draw):
    """Some tensors of any dtype, cut into boxes or flat ranges, in any memory order, with gaps, over two files."""
    made = Written()
    for _ in range(draw(st.integers(0, 4))):
        dtype = DTYPES[draw(st.sampled_from(["float32", "bfloat16", "uint8", "float64", "complex64", "float8_e5m2"]))]
        shape = draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
        tensor, count = made.tensor(dtype, shape), math.prod(shape)
        gap, file = draw(st.sampled_from([0, 1, 3, 300])), draw(st.sampled_from(["a", "b"]))
        if draw(st.booleans()):
            cuts = draw(st.lists(st.integers(0, count), max_size=2))
            for low, high in pairwise(sorted([0, count, *cuts])):
                made.piece(tensor, file, FlatRange(low, high), gap=gap)
        else:
            dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
            at = draw(st.integers(0, shape[dim])) if shape else 0
            order = draw(st.permutations(range(len(shape))))
            box = whole(shape)
            low = Box(box.start, tuple(at if d == dim else n for d, n in enumerate(shape)))
            high = Box(tuple(at if d == dim else 0 for d in range(len(shape))), box.stop)
            for part in (low, high) if shape else (box,):
                made.piece(tensor, file, part, order=tuple(order), gap=gap)
    return made


@given(written(), st.sampled_from([64, 128, 1024, 1 << 20]), st.sampled_from([100, 1 << 26]))
def test_every_piece_is_measured_as_numpy_does_whatever_the_buffer(made, buffer_bytes, unit_bytes):
    store, catalog = made.finish()
    with (
        mock.patch.object(unit, "BUFFER_BYTES", buffer_bytes),
        mock.patch.object(together, "BUFFER_BYTES", buffer_bytes),
        mock.patch.object(plan, "UNIT_BYTES", unit_bytes),
        mock.patch.object(together, "MAX_GAP_BYTES", 16),
    ):
        seen = run(store, catalog)
    assert_measured(seen, made.expected)
    assert (seen.failures, seen.changed) == ({}, ())


def large():
    """Pieces of several times the buffer: rows, columns of a transposed array, a flat range, an odd start."""
    made = Written()
    rows, columns = made.tensor(FLOAT32, (1500, 700)), made.tensor(BFLOAT16, (1500, 1001))
    made.piece(rows, "a", Box((0, 0), (701, 700)))
    made.piece(rows, "b", Box((701, 0), (1500, 700)))
    made.piece(columns, "a", Box((0, 0), (1500, 333)), order=(1, 0), gap=1)
    made.piece(columns, "b", Box((0, 333), (1500, 1001)), order=(1, 0))
    flat, wide = made.tensor(UINT8, (3_000_001,)), made.tensor(DTYPES["complex128"], (300, 333))
    made.piece(flat, "a", FlatRange(0, 1_000_001))
    made.piece(flat, "b", FlatRange(1_000_001, 3_000_001))
    made.piece(wide, "c", whole((300, 333)), order=(1, 0))
    return made


def test_pieces_larger_than_the_buffer_are_measured_whole():
    made = large()
    assert_measured(run(*made.finish()), made.expected)


def test_digests_of_the_pieces_add_up_to_the_tensors():
    made = large()
    store, catalog = made.finish()
    seen = run(store, catalog)
    bits = np.random.default_rng(1).integers(0, FINITE_BYTES, 1500 * 700 * 4, np.uint8).view("<u4").reshape(1500, 700)
    parts = [(int(row["lane0"]), int(row["lane1"])) for row in seen.pieces[catalog.rows_of(0, 0)]]
    assert add(*parts) == digest_array(bits, FLOAT32, 0, (700, 1))


def test_the_number_of_threads_does_not_change_a_bit():
    made = large()
    store, catalog = made.finish()
    with mock.patch.object(plan, "UNIT_BYTES", 1 << 19):
        one, four = run(store, catalog, 1), run(store, catalog, 4)
    assert one.pieces.tobytes() == four.pieces.tobytes()
    assert one.num_bytes_read == four.num_bytes_read


def test_rows_that_were_not_asked_for_stay_unread():
    made = Written()
    for _ in range(3):
        made.piece(made.tensor(FLOAT32, (5,)), "a", whole((5,)))
    store, catalog = made.finish()
    seen = run(store, catalog, rows=np.array([2, 0]))
    assert states(seen) == ["DONE", "NOT_ASKED", "DONE"]
    assert (int(seen.pieces[2]["lane0"]), int(seen.pieces[2]["lane1"])) == made.expected[2][0]


def test_an_empty_catalog():
    store, catalog = Written().finish()
    seen = run(store, catalog)
    assert (len(seen.pieces), seen.num_bytes_read) == (0, 0)


def test_progress_is_told_all_bytes():
    store, catalog = large().finish()
    told = []
    with ThreadPoolExecutor(2) as pool:
        seen = observe(store, catalog, np.arange(len(catalog.pieces)), Everything(pool), told.append)
    assert sum(told) == seen.num_bytes_read > 0


# What is read


def counted(made, **states):
    store, catalog = made.finish(**states)
    faults = Faults()
    seen = run(FaultyStore(store, faults), catalog)
    return seen, faults, catalog


def test_every_byte_is_read_once():
    made = large()
    seen, faults, catalog = counted(made)
    assert_measured(seen, made.expected)
    sizes = {file.name: file.num_bytes for file in catalog.files}
    assert all(faults.num_bytes_read[name] <= size for name, size in sizes.items())
    assert sum(faults.num_bytes_read.values()) == seen.num_bytes_read == int(catalog.num_bytes().sum())


def test_tiny_neighbours_are_read_together():
    made = Written()
    for _ in range(2000):
        made.piece(made.tensor(BFLOAT16, (7,)), "a", whole((7,)), gap=50)
    seen, faults, catalog = counted(made)
    assert_measured(seen, made.expected)
    assert faults.reads["a"] <= 3
    assert faults.num_bytes_read["a"] <= catalog.files[0].num_bytes


def test_a_wide_gap_is_not_read():
    made = Written()
    made.piece(made.tensor(FLOAT32, (10,)), "a", whole((10,)))
    made.piece(made.tensor(FLOAT32, (10,)), "a", whole((10,)), gap=500_000)
    seen, faults, _ = counted(made)
    assert_measured(seen, made.expected)
    assert (faults.reads["a"], faults.num_bytes_read["a"]) == (2, 80)


def sharing(count):
    """Two tensors of ``count`` elements that are the same bytes of one file, as tied weights are."""
    made = Written()
    first = made.tensor(FLOAT32, (count,))
    at = made.piece(first, "a", whole((count,)))
    number, *_ = made.tensor(FLOAT32, (count,))
    made.piece((number, *first[1:]), "a", whole((count,)), at=at)
    return made


def test_small_pieces_that_share_bytes_are_read_once():
    made = sharing(1000)
    seen, faults, _ = counted(made)
    assert_measured(seen, made.expected)
    assert (faults.reads["a"], faults.num_bytes_read["a"]) == (1, 4000)


def test_large_pieces_that_share_bytes_are_measured_both():
    made = sharing(400_000)
    assert_measured(counted(made)[0], made.expected)


def test_large_pieces_that_share_bytes_are_read_once():
    _, faults, _ = counted(sharing(400_000))
    assert faults.num_bytes_read["a"] == 1_600_000


def test_a_piece_inside_another_does_not_part_the_ones_around_it():
    made = Written()
    outer = made.tensor(UINT8, (20_000,))
    at = made.piece(outer, "a", whole((20_000,)))
    number, *_ = made.tensor(UINT8, (100,))
    made.piece((number, UINT8, (100,), outer[3][:100]), "a", whole((100,)), at=at)
    made.piece(made.tensor(UINT8, (10,)), "a", whole((10,)))
    seen, faults, _ = counted(made)
    assert_measured(seen, made.expected)
    assert (faults.reads["a"], faults.num_bytes_read["a"]) == (1, 20_010)


def interleaved():
    """Columns of one small array as two pieces that lie between each other."""
    made = Written()
    tensor = made.tensor(FLOAT32, (20, 6))
    number, _, _, bits = tensor
    made.number("a")
    made.files["a"].extend(bits.tobytes())
    for low, high in ((0, 2), (2, 6)):
        made.builder.piece(number, 0, 4 * low, Box((0, low), (20, high)), EVERYWHERE, strides=(6, 1))
        part = bits[:, low:high]
        made.expected.append((digest_array(part, FLOAT32, low, (6, 1)), statistics(part, FLOAT32)))
    return made


def test_interleaved_pieces_are_read_once():
    made = interleaved()
    seen, faults, _ = counted(made)
    assert_measured(seen, made.expected)
    assert (faults.reads["a"], faults.num_bytes_read["a"]) == (1, 480)


# What goes wrong


def two_files():
    made = Written()
    for file in ("a", "b"):
        made.piece(made.tensor(FLOAT32, (10,)), file, whole((10,)))
        made.piece(made.tensor(FLOAT32, (10,)), file, whole((10,)), gap=50_000)
    return made


@pytest.mark.parametrize(("state", "read"), [(FileState.MISSING, "LOST"), (FileState.DAMAGED, "LOST"),
                                             (FileState.UNREADABLE, "FAILED")])  # fmt: skip
def test_files_that_are_not_simply_present_are_not_opened(state, read):
    seen, faults, _ = counted(two_files(), a=state)
    assert states(seen) == [read, read, "DONE", "DONE"]
    assert faults.reads["a"] == 0
    assert (seen.failures, seen.changed) == ({0: "it is spoilt"}, ())


def test_a_file_that_vanished_is_lost_and_changed():
    store, catalog = two_files().finish()
    del store.objects["a"]
    seen = run(store, catalog)
    assert states(seen) == ["LOST", "LOST", "DONE", "DONE"]
    assert list(seen.failures) == [0]
    assert seen.changed == ("a",)


def test_a_file_that_may_not_be_read_says_nothing_of_the_checkpoint():
    store, catalog = two_files().finish()
    seen = run(FaultyStore(store, Faults(denied="b")), catalog)
    assert states(seen) == ["DONE", "DONE", "FAILED", "FAILED"]
    assert "denied" in seen.failures[1]
    assert seen.changed == ()


def test_transient_failures_are_no_damage():
    store, catalog = two_files().finish()
    faulty = FaultyStore(store, Faults(transient="a", num_transient=99))
    seen = run(faulty, catalog)
    assert states(seen) == ["FAILED", "FAILED", "DONE", "DONE"]
    assert seen.changed == ()


def test_transient_failures_that_pass_leave_no_trace():
    made = two_files()
    store, catalog = made.finish()
    faulty = FaultyStore(store, Faults(transient="*", num_transient=2))
    seen = run(RetryingStore(faulty, first_wait_seconds=0.0), catalog)
    assert_measured(seen, made.expected)
    assert (seen.failures, seen.changed) == ({}, ())


def test_what_was_read_before_a_failure_stays_read():
    store, catalog = two_files().finish()
    short = {**store.objects, "a": store.objects["a"][:100]}
    seen = run(MemoryStore(short), catalog)
    assert states(seen) == ["DONE", "LOST", "DONE", "DONE"]
    assert "ends at byte 100" in seen.failures[0]


def test_a_piece_before_the_end_of_a_short_file_is_not_lost():
    made = Written()
    made.piece(made.tensor(FLOAT32, (10,)), "a", whole((10,)))
    made.piece(made.tensor(FLOAT32, (10,)), "a", whole((10,)))
    store, catalog = made.finish()
    assert states(run(MemoryStore({"a": store.objects["a"][:60]}), catalog)) == ["DONE", "LOST"]


def test_a_file_that_shrinks_is_lost_and_changed():
    store, catalog = two_files().finish()
    seen = run(FaultyStore(store, Faults(shrinking="a", num_bytes_left=40)), catalog)
    assert states(seen)[1:] == ["LOST", "DONE", "DONE"]
    assert seen.changed == ("a",)


def test_a_file_that_was_replaced_is_changed():
    store, catalog = two_files().finish()
    store.objects["b"] = bytes(bytearray(store.objects["b"]))
    seen = run(store, catalog)
    assert states(seen) == ["DONE"] * 4
    assert seen.changed == ("b",)


class NotListing(MemoryStore):
    """Refuses to tell of a file once it was opened."""

    opened = False

    def stat(self, name):
        if self.opened:
            raise TransientReadError(f"{name}: injected")
        return super().stat(name)

    @contextmanager
    def open(self, name):
        with super().open(name) as handle:
            self.opened = True
            yield handle


def test_a_transient_failure_to_stat_is_no_change():
    made = Written()
    made.piece(made.tensor(FLOAT32, (10,)), "a", whole((10,)))
    store, catalog = made.finish()
    seen = run(NotListing(store.objects), catalog)
    assert states(seen) == ["DONE"]
    assert seen.changed == ()


def test_flipped_bits_show_in_both_lanes():
    made = two_files()
    store, catalog = made.finish()
    seen = run(FaultyStore(store, Faults(flipped="a")), catalog)
    for row, (lanes, _) in zip(seen.pieces[:2], made.expected, strict=False):
        assert int(row["lane0"]) != lanes[0]
        assert int(row["lane1"]) != lanes[1]


# What is wanted


def test_padding_is_never_wanted_and_single_copies_only_where_all_are():
    made, places = Written(), [Coordinate.of(tp=0), Coordinate.of(tp=1)]
    made.piece(made.tensor(FLOAT32, (4,), Role.PADDING), "a", whole((4,)))
    made.piece(made.tensor(FLOAT32, (4,)), "a", whole((4,)))
    twice = made.tensor(FLOAT32, (4,), replicas=places, replica_axes=("tp",))
    for place in places:
        made.piece(twice, "a", whole((4,)), coordinate=place)
    _, catalog = made.finish()
    assert wanted_rows(catalog).tolist() == [1, 2, 3]
    assert wanted_rows(catalog, [2]).tolist() == [2, 3]


@pytest.mark.parametrize("name", ["int4", "uint4", "float4_e2m1fn"])
def test_packed_elements_are_not_wanted(name):
    """They have no kernels; read as whole bytes they would be other numbers, and run beyond the piece's end."""
    builder = CatalogBuilder()
    tensor = builder.tensor("q", Role.PARAMETER, DTYPES[name], (8,), 0)
    builder.piece(tensor, builder.file(File("f", 4)), 0, FlatRange(0, 8), EVERYWHERE)
    assert wanted_rows(builder.build(0, "", "made-up", NO_MESH, {}, ())).tolist() == []


def test_nothing_is_wanted_of_a_catalog_without_pieces():
    assert wanted_rows(Written().finish()[1]).tolist() == []
