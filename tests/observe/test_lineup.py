"""Pairs of tensors, read in lock-step whatever the layouts of the two sides are."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.model.catalog import File, FileState, Role, c_strides
from auditor.model.dtype import DTYPES
from auditor.model.mesh import EVERYWHERE, NO_MESH, Coordinate
from auditor.model.observation import Read
from auditor.model.pairing import Pairing, PairKind
from auditor.model.region import Box, FlatRange, whole
from auditor.observe import plan, together, unit
from auditor.observe.digest import digest_array
from auditor.observe.one_pass import observe, wanted_rows
from auditor.observe.shares import Everything
from auditor.storage.memory import MemoryStore

FLOAT32, BFLOAT16 = DTYPES["float32"], DTYPES["bfloat16"]


def rounded(values):
    """float32 to the bits of bfloat16, to nearest, ties to even; written out apart from the kernels."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Written:
    """A weight, its master and two moments in files in memory."""

    def __init__(self, shape, seed=0):
        self.builder, self.files = CatalogBuilder(), {}
        self.shape, random = shape, np.random.default_rng(seed)
        self.master = random.normal(size=shape).astype(np.float32)
        self.weight = rounded(self.master)
        self.first = random.normal(size=shape).astype(np.float32)
        self.second = np.square(self.first) * 2

    def tensor(self, role, dtype, **more):
        return self.builder.tensor("w", role, dtype, self.shape, 0, **more)

    def piece(self, tensor, values, file, region, *, order=None, coordinate=EVERYWHERE, gap=0):
        """Write ``region`` of ``values`` behind what ``file`` holds, dims from slowest to fastest in ``order``."""
        content = self.files.setdefault(file, bytearray())
        content.extend(b"\xee" * gap)
        number, at = list(self.files).index(file), len(content)
        if isinstance(region, FlatRange):
            content.extend(values.reshape(-1)[region.start : region.stop].tobytes())
            self.builder.piece(tensor, number, at, region, coordinate)
            return
        part = values[tuple(map(slice, region.start, region.stop))]
        order = tuple(range(part.ndim)) if order is None else order
        strides = dict(zip(order, c_strides([part.shape[dim] for dim in order]), strict=True))
        content.extend(part.transpose(order).tobytes())
        self.builder.piece(tensor, number, at, region, coordinate, strides=[strides[d] for d in range(part.ndim)])

    def observe(self, pairings, threads=1, states=(), rows=None):
        store = MemoryStore({name: bytes(content) for name, content in self.files.items()})
        for name, content in self.files.items():
            state = dict(states).get(name, FileState.PRESENT)
            self.builder.file(File(name, len(content), store.stat(name).identity, state, detail="spoilt"))
        catalog = self.builder.build(1, "", "made-up", NO_MESH, {}, ())
        with ThreadPoolExecutor(threads) as pool:
            wanted = wanted_rows(catalog) if rows is None else np.array(rows)
            return catalog, observe(store, catalog, wanted, Everything(pool), pairings=pairings)


def cast(left, right):
    return Pairing(PairKind.CAST, left, right)


def one(seen, pairing):
    (result,) = seen.pairs[pairing]
    return result


# Layouts


def cuts_of(draw, size):
    inner = draw(st.lists(st.integers(0, size), max_size=3))
    return list(pairwise(sorted({0, size, *inner})))


@st.composite
def regions(draw, shape):
    """A tiling of a tensor: flat ranges, or boxes along one dim, with the dims' order in the file."""
    if draw(st.booleans()):
        size = int(np.prod(shape))
        return [(FlatRange(low, high), None) for low, high in cuts_of(draw, size)]
    dim, order = draw(st.integers(0, len(shape) - 1)), tuple(draw(st.permutations(range(len(shape)))))
    found = []
    for low, high in cuts_of(draw, shape[dim]):
        start = tuple(low if d == dim else 0 for d in range(len(shape)))
        stop = tuple(high if d == dim else n for d, n in enumerate(shape))
        found.append((Box(start, stop), order))
    return found


@given(st.data(), st.sampled_from([(7,), (5, 6), (3, 4, 5)]), st.sampled_from([64, 1 << 20]))
def test_cells_compare_every_element_once_whatever_the_layouts(data, shape, buffer_bytes):
    made = Written(shape)
    spoilt = data.draw(st.sets(st.integers(0, made.master.size - 1), max_size=3))
    made.weight.reshape(-1)[list(spoilt)] += 5
    weight, master = made.tensor(Role.PARAMETER, BFLOAT16), made.tensor(Role.MASTER, FLOAT32)
    for number, (region, order) in enumerate(data.draw(regions(shape))):
        made.piece(weight, made.weight, f"w{number % 2}", region, order=order, gap=data.draw(st.sampled_from([0, 1])))
    for region, order in data.draw(regions(shape)):
        made.piece(master, made.master, "m", region, order=order, gap=data.draw(st.sampled_from([0, 3])))
    with (
        mock.patch.object(unit, "BUFFER_BYTES", buffer_bytes),
        mock.patch.object(together, "BUFFER_BYTES", buffer_bytes),
        mock.patch.object(plan, "UNIT_BYTES", 100 if buffer_bytes == 64 else 1 << 26),
    ):
        catalog, seen = made.observe([cast(weight, master)])
    result = one(seen, cast(weight, master))
    assert (result.num_compared, result.num_beyond, result.complete) == (made.master.size, len(spoilt), True)
    assert result.first == (min(spoilt) if spoilt else -1)
    assert (seen.pieces["read"] == Read.DONE).all()
    for number, values in ((weight, made.weight), (master, made.master)):
        rows = catalog.rows_by_tensor[number]
        total = tuple(int(seen.pieces[lane][rows].sum(dtype=np.uint64)) for lane in ("lane0", "lane1"))
        dtype = catalog.tensors[number].dtype
        bits = values.view(dtype.carrier)
        assert total == digest_array(bits, dtype, 0, c_strides(shape))


def tensor_parallel(made, columns, data_parallel=2):
    """A column-parallel weight in a file a rank; its master flat over data-parallel ranks of each."""
    weight, master = made.tensor(Role.PARAMETER, BFLOAT16), made.tensor(Role.MASTER, FLOAT32)
    rows, width = made.shape
    for rank in range(width // columns):
        box = Box((0, rank * columns), (rows, (rank + 1) * columns))
        made.piece(weight, made.weight, f"layer-{rank}", box)
        for part in range(data_parallel):
            low, high = part * rows // data_parallel, (part + 1) * rows // data_parallel
            made.piece(master, made.master, f"zero-{rank}-{part}", Box((low, box.start[1]), (high, box.stop[1])))
    return weight, master


@pytest.mark.parametrize("threads", [1, 2])
def test_every_byte_is_read_once(threads):
    made = Written((64, 512))
    weight, master = tensor_parallel(made, 128)
    with mock.patch.object(plan, "UNIT_BYTES", 10_000):
        _, seen = made.observe([cast(weight, master)], threads)
    assert one(seen, cast(weight, master)).num_beyond == 0
    assert seen.num_bytes_read == sum(map(len, made.files.values()))
    assert seen.num_bytes_reread == 0


def test_many_small_tensors_share_reads():
    """One read a file for neighbours on all sides, not one a tensor."""
    builder, files, expected = CatalogBuilder(), {"w": bytearray(), "m": bytearray()}, []
    for number in range(50):
        made = Written((8, 3), seed=number)
        pair = []
        for role, dtype, values, file in ((Role.PARAMETER, BFLOAT16, made.weight, "w"),
                                          (Role.MASTER, FLOAT32, made.master, "m")):  # fmt: skip
            tensor = builder.tensor(f"t{number}", role, dtype, (8, 3), number)
            at = list(files).index(file)
            builder.piece(tensor, at, len(files[file]), whole((8, 3)), EVERYWHERE)
            files[file].extend(values.tobytes())
            pair.append(tensor)
        expected.append(cast(*pair))
    reads = []

    class Counting(MemoryStore):
        def open(self, name):
            reads.append(name)
            return super().open(name)

    store = Counting({name: bytes(content) for name, content in files.items()})
    for name, content in files.items():
        builder.file(File(name, len(content), store.stat(name).identity))
    catalog = builder.build(1, "", "made-up", NO_MESH, {}, ())
    with ThreadPoolExecutor(1) as pool:
        seen = observe(store, catalog, wanted_rows(catalog), Everything(pool), pairings=expected)
    assert all(one(seen, pairing).num_compared == 24 for pairing in expected)
    assert sorted(reads) == ["m", "w"]
    assert seen.num_bytes_read == 50 * 24 * 6


# Replicas


def test_each_replica_of_the_weight_is_held_against_its_own_master():
    made = Written((6, 4))
    places = [Coordinate.of(tp=0), Coordinate.of(tp=1)]
    weight = made.tensor(Role.PARAMETER, BFLOAT16, replicas=places, replica_axes=("tp",))
    master = made.tensor(Role.MASTER, FLOAT32, replicas=places, replica_axes=("tp",))
    for rank, place in enumerate(places):
        drifted = made.master + np.float32(rank)
        made.piece(weight, rounded(drifted), "w", whole((6, 4)), coordinate=place)
        made.piece(master, drifted, "m", whole((6, 4)), coordinate=place)
    _, seen = made.observe([cast(weight, master)])
    results = seen.pairs[cast(weight, master)]
    assert [(r.left_replica, r.right_replica, r.num_beyond) for r in results] == [(0, 0, 0), (1, 1, 0)]


def test_a_master_that_is_stored_once_serves_all_replicas_and_is_read_once():
    made = Written((6, 4))
    places = [Coordinate.of(tp=0), Coordinate.of(tp=1)]
    weight = made.tensor(Role.PARAMETER, BFLOAT16, replicas=places, replica_axes=("tp",))
    master = made.tensor(Role.MASTER, FLOAT32)
    for place in places:
        made.piece(weight, made.weight, f"w{place}", whole((6, 4)), coordinate=place)
    made.piece(master, made.master, "m", FlatRange(0, 24))
    _, seen = made.observe([cast(weight, master)])
    assert [(r.left_replica, r.right_replica, r.complete) for r in seen.pairs[cast(weight, master)]] == [
        (0, 0, True), (1, 0, True),
    ]  # fmt: skip
    assert seen.num_bytes_read == 24 * (2 + 2 + 4)


def test_pairings_that_share_a_tensor_share_its_bytes():
    made = Written((30,))
    first, second = made.tensor(Role.FIRST_MOMENT, FLOAT32), made.tensor(Role.SECOND_MOMENT, FLOAT32)
    weight = made.tensor(Role.PARAMETER, FLOAT32)
    for tensor, values in ((first, made.first), (second, made.second), (weight, made.master)):
        made.piece(tensor, values, "f", FlatRange(0, 30))
    bound, equal = Pairing(PairKind.BOUND, first, second, limit=1.0), Pairing(PairKind.EQUAL, weight, first)
    _, seen = made.observe([bound, equal])
    assert one(seen, bound).num_beyond == 0
    assert one(seen, bound).largest == pytest.approx(0.5**0.5, rel=1e-6)
    assert one(seen, equal).num_beyond == 30
    assert seen.num_bytes_read == 3 * 120


# What is not all there


def test_a_lost_file_costs_the_comparison_and_nothing_else():
    made = Written((64, 512))
    weight, master = tensor_parallel(made, 128)
    catalog, seen = made.observe([cast(weight, master)], states={"zero-1-0": FileState.MISSING})
    result = one(seen, cast(weight, master))
    assert (result.num_compared, result.num_beyond, result.complete) == (64 * 512 - 32 * 128, 0, False)
    lost = [catalog.file_of(row).name == "zero-1-0" for row in range(len(catalog.pieces))]
    assert (seen.pieces["read"] == np.where(lost, Read.LOST, Read.DONE)).all()


def test_what_is_only_compared_is_not_measured_beside_what_is_measured():
    """Two tensors in one file, the master of one of them half lost: nothing of one may be counted for the other."""
    builder, files, pairs = CatalogBuilder(), {"w": bytearray(), "m": bytearray(), "lost": bytearray()}, []
    for number in range(2):
        made = Written((8,), seed=number)
        weight = builder.tensor(f"t{number}", Role.PARAMETER, BFLOAT16, (8,), number)
        master = builder.tensor(f"t{number}", Role.MASTER, FLOAT32, (8,), number)
        builder.piece(weight, 0, len(files["w"]), FlatRange(0, 8), EVERYWHERE)
        files["w"].extend(made.weight.tobytes())
        for low in (0, 4):
            file = "lost" if number == 0 and low else "m"
            builder.piece(master, list(files).index(file), len(files[file]), FlatRange(low, low + 4), EVERYWHERE)
            files[file].extend(made.master[low : low + 4].tobytes())
        pairs.append(cast(weight, master))
    store = MemoryStore({name: bytes(content) for name, content in files.items()})
    for name, content in files.items():
        state = FileState.MISSING if name == "lost" else FileState.PRESENT
        builder.file(File(name, len(content), store.stat(name).identity, state))
    catalog = builder.build(1, "", "made-up", NO_MESH, {}, ())
    with ThreadPoolExecutor(1) as pool:
        apart = observe(store, catalog, wanted_rows(catalog), Everything(pool))
        seen = observe(store, catalog, wanted_rows(catalog), Everything(pool), pairings=pairs)
    assert (seen.pieces == apart.pieces).all()
    assert [one(seen, pair).num_compared for pair in pairs] == [4, 8]
    assert seen.num_bytes_read == apart.num_bytes_read
    assert seen.num_bytes_reread == 4 * (2 + 4)


def test_a_file_that_ends_early_costs_only_what_lay_behind_its_end():
    made = Written((40, 16))
    weight, master = made.tensor(Role.PARAMETER, BFLOAT16), made.tensor(Role.MASTER, FLOAT32)
    made.piece(weight, made.weight, "w", whole((40, 16)))
    for low in (0, 20):
        made.piece(master, made.master, "m", Box((low, 0), (low + 20, 16)))
    made.files["m"] = made.files["m"][:-1]
    catalog, seen = made.observe([cast(weight, master)])
    assert [Read(state).name for state in seen.pieces["read"]] == ["DONE", "DONE", "LOST"]
    assert one(seen, cast(weight, master)).num_compared == 320
    rows = catalog.rows_by_tensor[weight]
    lanes = digest_array(made.weight, BFLOAT16, 0, (16, 1))
    assert tuple(int(seen.pieces[lane][rows].sum(dtype=np.uint64)) for lane in ("lane0", "lane1")) == lanes


def test_tensors_of_other_shapes_are_not_compared():
    made = Written((6,))
    weight = made.tensor(Role.PARAMETER, BFLOAT16)
    other = made.builder.tensor("other", Role.MASTER, FLOAT32, (3, 2), 1)
    made.piece(weight, made.weight, "f", FlatRange(0, 6))
    made.piece(other, made.master, "f", FlatRange(0, 6))
    _, seen = made.observe([cast(weight, other)])
    assert seen.pairs == {}
    assert (seen.pieces["read"] == Read.DONE).all()


def test_pieces_that_were_not_asked_for_are_not_compared():
    made = Written((6,))
    weight, master = made.tensor(Role.PARAMETER, BFLOAT16), made.tensor(Role.MASTER, FLOAT32)
    made.piece(weight, made.weight, "f", FlatRange(0, 6))
    made.piece(master, made.master, "f", FlatRange(0, 6))
    _, seen = made.observe([cast(weight, master)], rows=[0])
    assert one(seen, cast(weight, master)).num_compared == 0
    assert [Read(state).name for state in seen.pieces["read"]] == ["DONE", "NOT_ASKED"]
