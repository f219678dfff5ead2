"""The tensor digest against an implementation in plain integers, written from ``docs/digest.md`` alone.

``python tests/observe/test_digest.py`` writes ``digest_vectors.json`` anew by that implementation.
"""

import json
import math
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.model.catalog import c_strides
from auditor.model.dtype import APART, DTYPES, Kind
from auditor.observe.digest import add, block_key, digest_array, digest_rows, displayed, word_keys

VECTORS = Path(__file__).parent / "digest_vectors.json"
BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "int64": 64, "int32": 32, "int16": 16, "int8": 8,
        "uint64": 64, "uint32": 32, "uint16": 16, "uint8": 8, "bool": 8, "complex64": 64, "complex128": 128,
        "float8_e5m2": 8, "float8_e4m3": 8, "float8_e3m4": 8, "float8_e4m3fn": 8, "float8_e4m3fnuz": 8,
        "float8_e4m3b11fnuz": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8}  # fmt: skip
"""Width of an element of every dtype that is not packed; for packed ones digest_array is not meant."""

# The specification in plain integers. Nothing of it is imported from the package.

TWO64 = 1 << 64
GAMMA = 0x9E3779B97F4A7C15
WORD_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)
BLOCK_SEEDS = (0xA4093822299F31D0, 0x082EFA98EC4E6C89)


def splitmix(state):
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % TWO64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % TWO64
    return state ^ state >> 31


@lru_cache
def plain_word_keys(lane):
    keys, counter = [], 0
    while len(keys) < 2048:
        counter += 1
        key = splitmix((WORD_SEEDS[lane] + counter * GAMMA) % TWO64) // (1 << 32) | 1
        if key not in keys:
            keys.append(key)
    return keys


@lru_cache(maxsize=1 << 16)
def plain_key(lane, word):
    block, inside = divmod(word, 2048)
    return (splitmix((BLOCK_SEEDS[lane] + (block + 1) * GAMMA) % TWO64) | 1) * plain_word_keys(lane)[inside]


def plain_digest(elements, bits, indices):
    """``elements``: value bits, one integer each (complex: real part in the low half); ``indices``: C-order places."""
    lanes = [0, 0]
    for element, index in zip(elements, indices, strict=True):
        if bits < 32:
            per_word = 32 // bits
            shift = bits * (index % per_word)
            words = [(index // per_word, (element << shift) + (1 << shift))]
        else:
            num_words = bits // 32
            words = [(index * num_words + n, element >> 32 * n & 0xFFFFFFFF) for n in range(num_words)]
            words[0] = (words[0][0], words[0][1] + 1)
        for lane in (0, 1):
            for word, value in words:
                lanes[lane] += value * plain_key(lane, word)
    return lanes[0] % TWO64, lanes[1] % TWO64


def plain_indices(shape, start, box):
    """C-order places, in a tensor of ``shape``, of the box of extents ``box`` that begins at ``start``."""
    places = []
    for inside in product(*map(range, box)):
        index = 0
        for extent, first, step in zip(shape, start, inside, strict=True):
            index = index * extent + first + step
        places.append(index)
    return places


def elements_of(stored, bits):
    """Little-endian bytes as one integer an element."""
    return [int.from_bytes(stored[at : at + bits // 8], "little") for at in range(0, len(stored), bits // 8)]


# Our implementation, called the way the reading pass calls it.


def box_digest(bits, dtype, shape, start):
    """``bits``: value bits of a box in the carrier; complex ones with a last dim of two."""
    strides = c_strides(shape)
    return digest_array(bits, dtype, sum(a * s for a, s in zip(start, strides, strict=True)), strides)


def as_bits(stored, dtype, box):
    shape = (*box, 2) if dtype.kind is Kind.COMPLEX else tuple(box)
    return np.frombuffer(stored, dtype.carrier).reshape(shape)


def random_bits(dtype, box, seed=0):
    stored = np.random.default_rng(seed).bytes(math.prod(box) * BITS[dtype.name] // 8)
    return as_bits(stored, dtype, box)


def whole_digest(bits, dtype):
    shape = bits.shape[:-1] if dtype.kind is Kind.COMPLEX else bits.shape
    return box_digest(bits, dtype, shape, (0,) * len(shape))


FLOAT32, BFLOAT16, UINT8 = DTYPES["float32"], DTYPES["bfloat16"], DTYPES["uint8"]
NAMES = st.sampled_from(sorted(BITS))


def test_every_unpacked_dtype_is_tried():
    assert {name: dtype.bits for name, dtype in DTYPES.items() if dtype.bits >= 8} == BITS


@pytest.mark.parametrize("name", ["int4", "uint4", "float4_e2m1fn", "int2", "uint2"])
@pytest.mark.parametrize(("shape", "start", "box"), [
    ((5, 7), (0, 0), (5, 7)), ((5, 7), (1, 3), (3, 2)), ((41, 33), (3, 0), (38, 33)), ((70_000,), (5,), (69_900,)),
])  # fmt: skip
def test_elements_of_few_bits_that_have_a_byte_each(name, shape, start, box):
    """The byte's upper bits say nothing: int4 of -8 is 0x08 in one file, 0xf8 in another."""
    dtype = APART[name]
    bits = np.random.default_rng(5).integers(0, 256, box, np.uint8)
    values = (bits & (1 << dtype.bits) - 1).reshape(-1).tolist()
    indices = plain_indices(shape, start, box)
    assert box_digest(bits, dtype, shape, start) == plain_digest(values, dtype.bits, indices)
    rows = bits.reshape(-1, box[-1])
    firsts = np.array(indices, np.int64).reshape(rows.shape)[:, 0]
    lanes = digest_rows(rows, firsts, dtype).sum(axis=1, dtype=np.uint64)
    assert tuple(map(int, lanes)) == plain_digest(values, dtype.bits, indices)


# Committed vectors


@lru_cache
def vectors():
    return json.loads(VECTORS.read_text())["vectors"]


def stored_bytes(vector):
    """Explicit bytes, or those of the generator: little-endian outputs of SplitMix64 from a seed."""
    if "bytes" in vector:
        return bytes.fromhex(vector["bytes"])
    num_bytes = math.prod(vector["box"]) * BITS[vector["dtype"]] // 8
    words = (splitmix((vector["seed"] + n * GAMMA) % TWO64) for n in range(1, num_bytes // 8 + 2))
    return b"".join(word.to_bytes(8, "little") for word in words)[:num_bytes]


def vector_lanes(vector):
    bits = BITS[vector["dtype"]]
    places = plain_indices(vector["shape"], vector["start"], vector["box"])
    return [f"{lane:016x}" for lane in plain_digest(elements_of(stored_bytes(vector), bits), bits, places)]


def test_vectors_are_there():
    assert len(vectors()) >= 24
    assert len({vector["dtype"] for vector in vectors()}) >= 14


@pytest.mark.parametrize("number", range(24))
def test_both_implementations_reproduce_the_committed_vectors(number):
    vector = vectors()[number]
    dtype = DTYPES[vector["dtype"]]
    assert vector_lanes(vector) == vector["lanes"]
    bits = as_bits(stored_bytes(vector), dtype, vector["box"])
    ours = box_digest(bits, dtype, vector["shape"], vector["start"])
    assert [f"{lane:016x}" for lane in ours] == vector["lanes"]


def regenerate():
    """Write the committed vectors anew."""

    def whole_of(dtype, shape, **content):
        return {"dtype": dtype, "shape": shape, "start": [0] * len(shape), "box": shape, **content}

    def box_of(dtype, shape, start, box, **content):
        return {"dtype": dtype, "shape": shape, "start": start, "box": box, **content}

    made = [
        whole_of("float32", [1], bytes="00000000"),
        whole_of("float32", [4], bytes="0000803f000000c0000000800000c07f"),
        whole_of("float32", [], bytes="0000803f"),
        whole_of("float32", [0, 3], bytes=""),
        whole_of("float32", [2, 2049], seed=1),
        whole_of("bfloat16", [3], bytes="803f00c0ffff"),
        whole_of("bfloat16", [5, 7], seed=2),
        box_of("bfloat16", [5, 7], [1, 2], [3, 4], seed=3),
        box_of("bfloat16", [2, 8192], [0, 4093], [2, 7], seed=4),
        whole_of("float16", [4097], seed=5),
        whole_of("uint8", [5], bytes="0001ff7f80"),
        box_of("uint8", [100], [3], [11], seed=6),
        whole_of("int8", [3, 3, 3], seed=7),
        whole_of("bool", [9], bytes="010001010000010001"),
        whole_of("float64", [2], bytes="000000000000f03f0000000000000080"),
        box_of("float64", [1030, 2], [1020, 0], [10, 2], seed=8),
        whole_of("int64", [3], bytes="ffffffffffffffff01000000000000000000000080000000"),
        whole_of("int32", [2, 3, 4], seed=9),
        whole_of("int16", [6], seed=10),
        whole_of("complex64", [2], bytes="0000803f0000004000000000000080bf"),
        box_of("complex128", [600, 3], [510, 1], [4, 2], seed=11),
        whole_of("float8_e4m3fn", [17], seed=12),
        box_of("float8_e8m0fnu", [4, 9], [1, 1], [3, 5], seed=13),
        # Block numbers beyond 32 bits: the last elements of 2**45.
        box_of("float32", [1 << 25, 1 << 20], [(1 << 25) - 2, (1 << 20) - 3], [2, 3], seed=14),
    ]
    lines = ",\n".join("  " + json.dumps({**vector, "lanes": vector_lanes(vector)}) for vector in made)
    VECTORS.write_text('{"format": 1, "vectors": [\n' + lines + "\n]}\n")


# Against the plain implementation

EXTENTS = st.sampled_from([1, 1, 2, 2, 3, 4, 5, 7, 8, 16, 33])


@st.composite
def boxes(draw):
    """A dtype, a whole shape, and a box of it of at most some thousand elements."""
    shape = draw(st.lists(st.one_of(EXTENTS, st.sampled_from([2047, 2048, 4097, 10_000])), max_size=4).map(tuple))
    start, box, room = [], [], 3000
    for extent in reversed(shape):
        size = draw(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, max(1, min(extent, room))))
        size = extent if extent <= room and draw(st.booleans()) else size
        room = room // max(size, 1)
        box.append(size)
        start.append(draw(st.integers(0, extent - size)))
    return DTYPES[draw(NAMES)], shape, tuple(start[::-1]), tuple(box[::-1])


@given(boxes(), st.integers(0, 2**32))
def test_any_box_of_any_dtype_has_the_digest_of_the_specification(case, seed):
    dtype, shape, start, box = case
    bits = random_bits(dtype, box, seed)
    expected = plain_digest(elements_of(bits.tobytes(), dtype.bits), dtype.bits, plain_indices(shape, start, box))
    assert box_digest(bits, dtype, shape, start) == expected


@given(boxes(), st.data())
def test_memory_order_does_not_matter(case, data):
    dtype, shape, start, box = case
    bits = random_bits(dtype, box)
    order = data.draw(st.permutations(range(bits.ndim)))
    shuffled = np.ascontiguousarray(bits.transpose(order)).transpose(np.argsort(order)) if bits.ndim else bits
    spread = np.repeat(bits, 3, axis=0)[::3] if bits.ndim else bits
    expected = box_digest(bits, dtype, shape, start)
    assert box_digest(shuffled, dtype, shape, start) == expected
    assert box_digest(spread, dtype, shape, start) == expected


@pytest.mark.parametrize("name", sorted(BITS))
@pytest.mark.parametrize("first", [0, 1, 2047, 2048, 2049, 4095, (1 << 40) + 3])
def test_runs_that_start_anywhere(name, first):
    dtype = DTYPES[name]
    bits = random_bits(dtype, (2500,), first & 0xFF)
    strides = (1,)
    expected = plain_digest(elements_of(bits.tobytes(), dtype.bits), dtype.bits, range(first, first + 2500))
    assert digest_array(bits, dtype, first, strides) == expected


def test_nothing_has_the_digest_zero():
    assert digest_array(np.zeros(0, "<u4"), FLOAT32, 7, (1,)) == (0, 0)
    assert whole_digest(np.zeros((3, 0), "<u2"), BFLOAT16) == (0, 0)


# Additivity


@given(NAMES, st.integers(1, 6000), st.lists(st.integers(0, 6000), max_size=6), st.integers(0, 2**32))
def test_flat_cuts_add_up(name, count, cuts, seed):
    dtype = DTYPES[name]
    bits = random_bits(dtype, (count,), seed)
    borders = sorted({0, count, *(cut % (count + 1) for cut in cuts)})
    total = (0, 0)
    for low, high in pairwise(borders):
        total = add(total, digest_array(bits[low:high], dtype, low, (1,)))
    assert total == whole_digest(bits, dtype)


@given(NAMES, st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple), st.data())
def test_cuts_along_any_dim_add_up(name, shape, data):
    dtype = DTYPES[name]
    bits = random_bits(dtype, shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cuts = data.draw(st.lists(st.integers(0, shape[dim]), max_size=3))
    borders = sorted({0, shape[dim], *cuts})
    total = (0, 0)
    for low, high in pairwise(borders):
        part = bits[(slice(None),) * dim + (slice(low, high),)]
        start = tuple(low if d == dim else 0 for d in range(len(shape)))
        total = add(total, box_digest(part, dtype, shape, start))
    assert total == whole_digest(bits, dtype)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "uint8", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("degree", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_tensor_parallel_parts_add_up(name, degree, dim):
    """Rows and columns, with parts of odd length too: the runs then begin inside words."""
    dtype, shape = DTYPES[name], (48, 72 if degree != 8 else 40)
    bits = random_bits(dtype, shape, degree)
    total = (0, 0)
    for rank, part in enumerate(np.split(bits, degree, axis=dim)):
        start = [0, 0]
        start[dim] = rank * shape[dim] // degree
        total = add(total, box_digest(part, dtype, shape, start))
    assert total == whole_digest(bits, dtype)


def test_flat_partitions_of_column_parts_add_up():
    """A rank's columns laid end to end and cut in two, as optimizer partitions are."""
    shape, bits = (6, 10), random_bits(FLOAT32, (6, 10))
    total = (0, 0)
    for rank in (0, 1):
        local = bits[:, 5 * rank : 5 * rank + 5]
        for row in range(6):
            for low, high in ((0, 2), (2, 5)):
                total = add(total, box_digest(local[row : row + 1, low:high], FLOAT32, shape, (row, 5 * rank + low)))
    assert total == whole_digest(bits, FLOAT32)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "uint8", "float64", "complex64", "complex128"])
@pytest.mark.parametrize(
    ("shape", "start", "box"),
    [
        ((40, 4096), (1, 2040), (36, 20)),  # all rows begin at one place of a block and cross its border
        ((40, 4096), (0, 4000), (40, 96)),
        ((64, 256), (3, 8), (60, 120)),  # at few places
        ((64, 512, 4), (0, 508, 0), (64, 4, 4)),
        ((70, 260), (0, 4), (70, 16)),  # at nearly as many places as there are rows
        ((9, 3, 2048), (0, 1, 1024), (9, 2, 1024)),
    ],
)
def test_many_short_rows(name, shape, start, box):
    dtype = DTYPES[name]
    bits = random_bits(dtype, box)
    expected = plain_digest(elements_of(bits.tobytes(), dtype.bits), dtype.bits, plain_indices(shape, start, box))
    assert box_digest(bits, dtype, shape, start) == expected


def test_rows_far_apart_need_no_table_of_the_blocks_between():
    shape = (1 << 20, 1 << 22)
    bits = random_bits(BFLOAT16, (3, 5))
    starts = (5, 7), (1 << 19, 1)
    for start in starts:
        expected = plain_digest(elements_of(bits.tobytes(), 16), 16, plain_indices(shape, start, (3, 5)))
        assert box_digest(bits, BFLOAT16, shape, start) == expected


# What must show


@pytest.mark.parametrize("word", [0, 1, 2046, 2047, 2048, 2049, 4095, 4096, 5000])
@pytest.mark.parametrize("bit", [0, 15, 31])
def test_one_changed_bit_changes_both_lanes(word, bit):
    bits = random_bits(FLOAT32, (5001,)).copy()
    before = whole_digest(bits, FLOAT32)
    bits[word] ^= np.uint32(1 << bit)
    after = whole_digest(bits, FLOAT32)
    assert before[0] != after[0]
    assert before[1] != after[1]


@given(st.integers(0, 9999), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_one_changed_word_changes_both_lanes(word, old, new):
    if old == new:
        return
    one, other = (digest_array(np.array([value], "<u4"), FLOAT32, word, (1,)) for value in (old, new))
    assert one[0] != other[0]
    assert one[1] != other[1]


@pytest.mark.parametrize("name", sorted(BITS))
def test_a_lost_zero_shows(name):
    dtype = DTYPES[name]
    bits = np.zeros_like(random_bits(dtype, (4100,)))
    whole = whole_digest(bits, dtype)
    assert whole != (0, 0)
    for lost in (0, 1, 2047, 2048, 4099):
        rest = add(digest_array(bits[:lost], dtype, 0, (1,)), digest_array(bits[lost + 1 :], dtype, lost + 1, (1,)))
        assert rest[0] != whole[0]
        assert rest[1] != whole[1]


def test_zeros_counted_twice_show():
    bits = np.zeros(100, "<u2")
    twice = add(whole_digest(bits, BFLOAT16), digest_array(bits[10:11], BFLOAT16, 10, (1,)))
    assert twice != whole_digest(bits, BFLOAT16)


@given(st.integers(0, 2**32), st.integers(0, 4999), st.integers(0, 4999))
def test_two_swapped_elements_show(seed, one, other):
    bits = random_bits(BFLOAT16, (5000,), seed).copy()
    before = whole_digest(bits, BFLOAT16)
    bits[[one, other]] = bits[[other, one]]
    assert (whole_digest(bits, BFLOAT16) != before) == (bits[one] != bits[other])


@pytest.mark.parametrize("permuted", [lambda a: a[::-1], lambda a: np.roll(a, 1, 0), lambda a: np.roll(a, 2048, 1),
                                      lambda a: a.T.reshape(a.shape)])  # fmt: skip
def test_permutations_show(permuted):
    bits = random_bits(FLOAT32, (4, 4096))
    before, after = whole_digest(bits, FLOAT32), whole_digest(permuted(bits), FLOAT32)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_place_matters_not_only_content():
    bits = random_bits(FLOAT32, (10,))
    assert len({digest_array(bits, FLOAT32, base, (1,)) for base in (0, 1, 10, 2048, 1 << 40)}) == 5


# Keys


def test_word_keys_are_odd_distinct_and_of_32_bits():
    keys = word_keys()
    assert keys.shape == (2, 2048)
    assert (keys % 2 == 1).all()
    assert int(keys.max()) < 1 << 32
    assert len(set(keys.reshape(-1).tolist())) == 4096
    assert [keys[lane].tolist() for lane in (0, 1)] == [plain_word_keys(0), plain_word_keys(1)]


def test_block_keys_are_odd_and_differ_between_blocks_and_lanes():
    keys = [block_key(lane, block) for lane in (0, 1) for block in (*range(1000), 1 << 32, (1 << 52) - 1)]
    assert all(key % 2 for key in keys)
    assert len(set(keys)) == len(keys)
    assert block_key(0, 5) * int(word_keys()[0][9]) == plain_key(0, 5 * 2048 + 9)


def pairs_of_keys():
    """Both lanes' keys of all pairs of places in a block."""
    one, other = np.triu_indices(2048, 1)
    return [(keys[one], keys[other]) for keys in word_keys()]


def test_no_two_places_have_keys_in_the_same_ratio_in_both_lanes():
    """So two changes in one block whose sum does not wrap can't cancel in both lanes."""
    reduced = [(one // np.gcd(one, other), other // np.gcd(one, other)) for one, other in pairs_of_keys()]
    assert not ((reduced[0][0] == reduced[1][0]) & (reduced[0][1] == reduced[1][1])).any()


def test_no_four_equal_changes_in_a_block_cancel_in_both_lanes():
    """Signs included: that is the weakest case of equal changes, in which the fewest bits must vanish."""

    def joint(lane0, lane1):
        # Lane 0 to all its 33 bits, of lane 1 as many as there is room for.
        low = np.uint64((1 << 31) - 1)
        return (lane0 % np.uint64(1 << 33) << np.uint64(31)) | (lane1 & low)

    (a0, b0), (a1, b1) = pairs_of_keys()
    sums, negative = joint(a0 + b0, a1 + b1), joint(-(a0 + b0), -(a1 + b1))
    found = np.sort(np.concatenate([sums, negative, joint(a0 - b0, a1 - b1), joint(b0 - a0, b1 - a1)]))
    assert (found[1:] != found[:-1]).all()


# The displayed form


def test_the_displayed_form_depends_on_lanes_dtype_and_shape():
    forms = {displayed((1, 2), FLOAT32, (4,)), displayed((2, 1), FLOAT32, (4,)), displayed((1, 2), BFLOAT16, (4,)),
             displayed((1, 2), FLOAT32, (2, 2)), displayed((1, 2), FLOAT32, ())}  # fmt: skip
    assert len(forms) == 5
    assert all(len(form) == 32 and int(form, 16) >= 0 for form in forms)


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_the_displayed_form_is_the_same_in_any_layout(seed):
    bits = random_bits(FLOAT32, (40, 30), seed)
    parts = [box_digest(bits[:, at : at + 15], FLOAT32, (40, 30), (0, at)) for at in (0, 15)]
    assert displayed(add(*parts), FLOAT32, (40, 30)) == displayed(whole_digest(bits, FLOAT32), FLOAT32, (40, 30))


if __name__ == "__main__":
    regenerate()
