"""The tensor digest: a sum over value bits that does not depend on how the tensor is cut into pieces.

Specification, analysis and test vectors: ``docs/digest.md``. In short: the elements' bits in C order are a stream of
32-bit little-endian words x_W. For each of two lanes

    D = Σ_W (x_W + c_W) · K(W div 2048) · T[W mod 2048]   mod 2^64

where c_W counts the elements of word W (bit 0 of every element's place), so that lost zeros show. T holds 2048 odd,
distinct 32-bit keys, K is an odd 64-bit mix of the block number. The sum is linear: digests of pieces add up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from auditor.model.dtype import DType, Kind

WORDS_PER_BLOCK = 2048
WORDS_AT_ONCE = 32 * WORDS_PER_BLOCK
"""So many, widened to 64 bits, stay in a usual L2 cache."""
LONG_ROW = 8 * WORDS_PER_BLOCK
"""Runs of so many words are worth a pass of their own; shorter ones are taken together."""
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
LANE_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)
"""Seeds of T for the two lanes: the fractional part of pi, as in Blowfish's tables (nothing up the sleeve)."""
BLOCK_SEEDS = (0xA4093822299F31D0, 0x082EFA98EC4E6C89)
"""Seeds of K for the two lanes: pi's next digits."""

Lanes = tuple[int, int]


def mix64(value: int) -> int:
    """SplitMix64's output function (Steele, Lea, Flood 2014; constants of Vigna's reference code)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def block_key(lane: int, block: int) -> int:
    """K of one lane for one block of 2048 words."""
    return mix64((BLOCK_SEEDS[lane] + (block + 1) * _GOLDEN) & _MASK) | 1


@lru_cache(maxsize=1)
def word_keys() -> NDArray[np.uint64]:
    """T of both lanes, shape (2, 2048): the first 2048 distinct values of the generator's high half, made odd."""
    keys = np.empty((2, WORDS_PER_BLOCK), np.uint64)
    for lane, seed in enumerate(LANE_SEEDS):
        found: dict[int, None] = {}
        counter = 0
        while len(found) < WORDS_PER_BLOCK:
            counter += 1
            found[mix64((seed + counter * _GOLDEN) & _MASK) >> 32 | 1] = None
        keys[lane] = list(found)
    return keys


def block_keys(blocks: NDArray[np.uint64], lane: int) -> NDArray[np.uint64]:
    """K of one lane for many blocks."""
    z = np.uint64(BLOCK_SEEDS[lane]) + (blocks + np.uint64(1)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def add(left: Lanes, right: Lanes) -> Lanes:
    """The digest of two disjoint parts of a tensor together."""
    return (left[0] + right[0]) & _MASK, (left[1] + right[1]) & _MASK


def counting_pattern(dtype: DType) -> tuple[int, ...]:
    """c_W over the words of one element (wide types), or of one word (narrow ones)."""
    if dtype.bits >= 32:
        return (1, *(0 for _ in range(dtype.bits // 32 - 1)))
    return (sum(1 << shift for shift in range(0, 32, dtype.bits)),)


def digest_array(bits: NDArray[np.unsignedinteger], dtype: DType, base: int, strides: Sequence[int]) -> Lanes:
    """Digest of a box of a tensor.

    Args:
        bits: value bits in the dtype's carrier, any memory order; complex elements are two along the last dim.
        dtype: of the tensor; no packed one.
        base: C-order index in the whole tensor of the box's first element.
        strides: C strides of the whole tensor, in elements.
    """
    if dtype.apart:
        bits = bits & np.uint8((1 << dtype.bits) - 1)
    if dtype.kind is Kind.COMPLEX:
        # An element is two words (or four): the stream is that of twice as many halves.
        half = DType("half", dtype.bits // 2, Kind.UNSIGNED)
        return _digest(bits, half, 2 * base, (*(2 * s for s in strides), 1), counting_pattern(dtype))
    return _digest(bits, dtype, base, tuple(strides), counting_pattern(dtype))


def _digest(
    bits: NDArray[np.unsignedinteger], dtype: DType, base: int, strides: tuple[int, ...], pattern: tuple[int, ...]
) -> Lanes:
    if bits.size == 0:
        return 0, 0
    rows, _, starts = _as_rows(bits, base, strides)
    lanes = _digest_rows(rows, starts, dtype.bits, pattern).sum(axis=1, dtype=np.uint64)
    return int(lanes[0]), int(lanes[1])


def digest_rows(rows: NDArray[np.unsignedinteger], starts: NDArray[np.int64], dtype: DType) -> NDArray[np.uint64]:
    """Digests of runs of one length, shape (2, runs).

    Args:
        rows: value bits in the dtype's carrier, one run a row; complex elements are two each.
        starts: C-order index in the whole tensor of each row's first element; complex elements count twice.
        dtype: of the tensor; no packed one.
    """
    width = dtype.bits // 2 if dtype.kind is Kind.COMPLEX else dtype.bits
    if dtype.apart:
        rows = rows & np.uint8((1 << dtype.bits) - 1)
    return _digest_rows(rows, starts, width, counting_pattern(dtype))


def _digest_rows(
    rows: NDArray[np.unsignedinteger], starts: NDArray[np.int64], bits: int, pattern: tuple[int, ...]
) -> NDArray[np.uint64]:
    per_word = max(1, 32 // bits)
    if per_word == 1:
        return _digest_words(np.ascontiguousarray(rows).view("<u4"), starts * (bits // 32), pattern)
    phases = starts % per_word
    if (phases == phases[0]).all():
        return _digest_narrow(rows, starts, bits, pattern)
    lanes = np.empty((2, len(rows)), np.uint64)
    for phase in range(per_word):
        alike = np.flatnonzero(phases == phase)
        if len(alike):
            lanes[:, alike] = _digest_narrow(rows[alike], starts[alike], bits, pattern)
    return lanes


def _digest_narrow(
    rows: NDArray[np.unsignedinteger], starts: NDArray[np.int64], bits: int, pattern: tuple[int, ...]
) -> NDArray[np.uint64]:
    """Elements narrower than a word, whose rows all start at the same place of a word."""
    per_word = 32 // bits
    low = min(-int(starts[0]) % per_word, rows.shape[1])
    high = low + (rows.shape[1] - low) // per_word * per_word
    lanes = np.zeros((2, len(rows)), np.uint64)
    if high > low:
        words = np.ascontiguousarray(_together(rows[:, low:high], bits)).view("<u4")
        lanes += _digest_words(words, (starts + low) // per_word, pattern)
    for first, last in ((0, low), (high, rows.shape[1])):
        if last > first:
            lanes += _digest_ragged(rows[:, first:last], starts + first, bits)
    return lanes


def _together(rows: NDArray[np.unsignedinteger], bits: int) -> NDArray[np.unsignedinteger]:
    """Elements of fewer than 8 bits, one a byte, as bytes that several share: the first in the lowest bits."""
    if bits >= 8:
        return rows
    found = np.zeros((len(rows), rows.shape[1] * bits // 8), np.uint8)
    for place in range(0, 8, bits):
        found |= rows[:, place // bits :: 8 // bits] << np.uint8(place)
    return found


def _digest_words(words: NDArray[np.uint32], first: NDArray[np.int64], pattern: tuple[int, ...]) -> NDArray[np.uint64]:
    if len(first) > 1 and words.shape[1] < LONG_ROW:
        return _digest_short_rows(words, first, pattern)
    runs = [_digest_run(row, at, pattern) for row, at in zip(words, first.tolist(), strict=True)]
    return np.array(runs, np.uint64).reshape(-1, 2).T


def _as_rows(
    bits: NDArray[np.unsignedinteger], base: int, strides: tuple[int, ...]
) -> tuple[NDArray[np.unsignedinteger], int, NDArray[np.int64]]:
    """``bits`` as (rows, run) where a run is contiguous in the whole tensor, and each row's first C-order index."""
    run, dims = 1, bits.ndim
    while dims and (bits.shape[dims - 1] == 1 or strides[dims - 1] == run):
        run *= bits.shape[dims - 1]
        dims -= 1
    starts = np.array([base], np.int64)
    for extent, stride in zip(bits.shape[:dims], strides[:dims], strict=True):
        starts = (starts[:, None] + np.arange(extent, dtype=np.int64) * stride).reshape(-1)
    return bits.reshape(-1, run), run, starts


def _digest_run(words: NDArray[np.uint32], first: int, pattern: tuple[int, ...]) -> Lanes:
    """A run of words that starts at word ``first`` of the stream, block by block."""
    head = min(-first % WORDS_PER_BLOCK, len(words))
    body = (len(words) - head) // WORDS_PER_BLOCK * WORDS_PER_BLOCK
    total = _digest_part(words[:head], first, pattern)
    for low in range(head, head + body, WORDS_AT_ONCE):
        inside = words[low : min(low + WORDS_AT_ONCE, head + body)].reshape(-1, WORDS_PER_BLOCK).astype(np.uint64)
        blocks = np.arange(len(inside), dtype=np.uint64) + np.uint64((first + low) // WORDS_PER_BLOCK)
        lanes = []
        for lane in (0, 1):
            sums = np.einsum("bw,w->b", inside, word_keys()[lane]) + np.uint64(_counted(lane, pattern))
            lanes.append(int((sums * block_keys(blocks, lane)).sum(dtype=np.uint64)))
        total = add(total, (lanes[0], lanes[1]))
    return add(total, _digest_part(words[head + body :], first + head + body, pattern))


@lru_cache(maxsize=64)
def _counted(lane: int, pattern: tuple[int, ...]) -> int:
    """The counting term of one whole block before its block key: closed form, outside the hot loop."""
    ones = np.resize(np.array(pattern, np.uint64), WORDS_PER_BLOCK)
    return int((ones * word_keys()[lane]).sum(dtype=np.uint64))


def _digest_part(words: NDArray[np.uint32], first: int, pattern: tuple[int, ...]) -> Lanes:
    """Words that lie within one block."""
    if len(words) == 0:
        return 0, 0
    at = first % WORDS_PER_BLOCK
    ones = np.resize(np.roll(np.array(pattern, np.uint64), -(first % len(pattern))), len(words))
    counted = words.astype(np.uint64) + ones
    lanes = [
        int((counted * word_keys()[lane][at : at + len(words)]).sum(dtype=np.uint64))
        * block_key(lane, first // WORDS_PER_BLOCK)
        & _MASK
        for lane in (0, 1)
    ]
    return lanes[0], lanes[1]


def _digest_short_rows(
    words: NDArray[np.uint32], first: NDArray[np.int64], pattern: tuple[int, ...]
) -> NDArray[np.uint64]:
    """Many short runs: those that start at the same place of a block share their keys.

    Rows of a tensor whose width divides a block (or the other way round) start at few places; where they start at
    nearly as many places as there are rows, the keys of every word are gathered instead.
    """
    length = words.shape[1]
    places, inverse = np.unique(first % WORDS_PER_BLOCK, return_inverse=True)
    if 8 * len(places) > len(first):
        index = first[:, None] + np.arange(length, dtype=np.int64)
        ones = np.array(pattern, np.uint64)[index % len(pattern)]
        return _sum_by_place(words.astype(np.uint64) + ones, index)
    lanes = np.zeros((2, len(words)), np.uint64)
    for number, place in enumerate(places.tolist()):
        rows = np.flatnonzero(inverse == number)
        inside = words[rows].astype(np.uint64)
        blocks = (first[rows] // WORDS_PER_BLOCK).astype(np.uint64)
        low, high = 0, min(length, WORDS_PER_BLOCK - place)
        while low < length:
            lanes[:, rows] += _digest_aligned(inside[:, low:high], blocks, place if low == 0 else 0, pattern)
            low, high = high, min(length, high + WORDS_PER_BLOCK)
            blocks = blocks + np.uint64(1)
    return lanes


def _digest_aligned(
    words: NDArray[np.uint64], blocks: NDArray[np.uint64], place: int, pattern: tuple[int, ...]
) -> NDArray[np.uint64]:
    """Rows that start at the same place of their blocks and don't leave them."""
    length = words.shape[1]
    ones = np.resize(np.roll(np.array(pattern, np.uint64), -(place % len(pattern))), length)
    lanes = np.empty((2, len(words)), np.uint64)
    for lane in (0, 1):
        keys = word_keys()[lane][place : place + length]
        sums = np.einsum("rw,w->r", words, keys) + (ones * keys).sum(dtype=np.uint64)
        lanes[lane] = sums * block_keys(blocks, lane)
    return lanes


def _digest_ragged(rows: NDArray[np.unsignedinteger], starts: NDArray[np.int64], bits: int) -> NDArray[np.uint64]:
    """Narrow elements whose runs don't fill words: each element adds its shifted bits to its word."""
    per_word = 32 // bits
    index = starts[:, None] + np.arange(rows.shape[1], dtype=np.int64)
    shift = (index % per_word * bits).astype(np.uint64)
    return _sum_by_place((rows.astype(np.uint64) + np.uint64(1)) << shift, index // per_word)


def _sum_by_place(values: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.uint64]:
    inside, blocks = places % WORDS_PER_BLOCK, places // WORDS_PER_BLOCK
    low, high = int(blocks.min()), int(blocks.max())
    if high - low > 4 * values.size:
        # Rows far apart: a table of all blocks between them would be larger than the data.
        found, which = np.unique(blocks, return_inverse=True)
        which = which.reshape(blocks.shape)
    else:
        found, which = np.arange(low, high + 1), blocks - low
    lanes = np.empty((2, len(values)), np.uint64)
    for lane in (0, 1):
        keys = word_keys()[lane][inside] * block_keys(found.astype(np.uint64), lane)[which]
        lanes[lane] = (values * keys).sum(axis=1, dtype=np.uint64)
    return lanes


def displayed(lanes: Lanes, dtype: DType, shape: Sequence[int]) -> str:
    """The form shown to people: 32 hexadecimal digits that mix both lanes with dtype and shape.

    Not truncated sums: their low bits are mere parities. No signature: who can choose the data can collide it.
    """
    text = f"{dtype.name}:{','.join(map(str, shape))}:{lanes[0]:016x}{lanes[1]:016x}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
