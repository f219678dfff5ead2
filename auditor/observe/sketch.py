"""A count-sketch of a tensor's values: 64 numbers by which the distance of two tensors is told when neither is there.

Elements lie in blocks of 2048 of the tensor's C order, seen as 32 rows of 64 columns. With i the index of an element,
b = i div 2048 its block, r its row and c its column there, its value is added to

    bucket (c + k_b) mod 64  with the sign  S[r, c] · u_b[r]

S is a fixed table of signs; the 32 row signs u_b and the rotation k_b are bits of a hash of the block. So rows of a
matrix that is as wide as a block (or a part, or several) meet fresh signs in every block, and a difference in one
column, or of rank one, is spread as evenly as any other: with one table of signs for all blocks the terms of a column
would add up alike in each of them. The sketch is linear: sketches of pieces add up, the sketch of a difference is the
difference of the sketches, and its squared length is, on average over hashes, the squared length of what was sketched
(Charikar, Chen, Farach-Colton 2002; variance of the square 2/64 of its square, so about 9 % of the length).
Numbers that aren't finite count as zero. Measured errors: ``benchmarks/README.md``.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from auditor.model.catalog import Catalog
from auditor.model.observation import BUCKETS
from auditor.observe.digest import mix64

ROWS = 32
BLOCK = ROWS * BUCKETS
LONG = 1 << 10
"""Runs of so many elements are filled up to whole blocks; shorter ones are scattered element by element."""
SIGN_SEED, BLOCK_SEED = 0x452821E638D01377, 0xBE5466CF34E90C6C
"""Of S, and of the blocks' hashes: pi's digits after those of the digest."""
MAX_SKETCHES = 1 << 18
"""128 MB of them; a checkpoint of more tensors and replicas is kept without."""
_MASK, _GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15


@lru_cache(maxsize=1)
def signs() -> NDArray[np.float64]:
    """S, shape (32, 64): bit c of the r-th hash, as 1 or -1."""
    rows = [mix64((SIGN_SEED + (row + 1) * _GOLDEN) & _MASK) for row in range(ROWS)]
    return np.array([[1.0 - 2.0 * (bits >> column & 1) for column in range(BUCKETS)] for bits in rows])


def block_hashes(blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Bits 0 to 31: the row signs of a block (1 for minus); bits 32 to 37: its rotation."""
    z = np.uint64(BLOCK_SEED) + (blocks.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sketch_rows(values: NDArray[np.float64], starts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sketches of runs of one length, shape (runs, 64).

    Args:
        values: one run a row.
        starts: C-order index in the whole tensor of each row's first element.
    """
    found = _sketch(values, starts)
    if not np.isfinite(found).all():
        found = _sketch(np.where(np.isfinite(values), values, 0.0), starts)
    return found


def _sketch(values: NDArray[np.float64], starts: NDArray[np.int64]) -> NDArray[np.float64]:
    if values.shape[1] < LONG:
        return _sketch_short(values, starts)
    with np.errstate(invalid="ignore"):
        return np.array([_sketch_run(row, start) for row, start in zip(values, starts.tolist(), strict=True)])


def _sketch_run(values: NDArray[np.float64], start: int) -> NDArray[np.float64]:
    """One long run, filled up with zeros to whole blocks."""
    first, low = start // BLOCK, start % BLOCK
    count = -(-(low + len(values)) // BLOCK)
    if low or len(values) % BLOCK:
        filled = np.zeros(count * BLOCK)
        filled[low : low + len(values)] = values
        values = filled
    hashes = block_hashes(np.arange(first, first + count))
    minus = (hashes[:, None] >> np.arange(ROWS, dtype=np.uint64)) & np.uint64(1)
    summed = np.einsum("brc,rc,br->bc", values.reshape(count, ROWS, BUCKETS), signs(), 1.0 - 2.0 * minus)
    buckets = (np.arange(BUCKETS) + _rotations(hashes)[:, None]) % BUCKETS
    return np.bincount(buckets.reshape(-1), summed.reshape(-1), BUCKETS).astype(np.float64, copy=False)


def _sketch_short(values: NDArray[np.float64], starts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Runs that reach into two blocks at most."""
    index = starts[:, None] + np.arange(values.shape[1], dtype=np.int64)
    first = starts // BLOCK
    one, other = block_hashes(first), block_hashes(first + 1)
    hashes = np.where(index // BLOCK == first[:, None], one[:, None], other[:, None])
    row, column = index // BUCKETS % ROWS, index % BUCKETS
    minus = (hashes >> row.astype(np.uint64)) & np.uint64(1)
    signed = values * signs()[row, column] * (1.0 - 2.0 * minus)
    buckets = (column + _rotations(hashes)) % BUCKETS + BUCKETS * np.arange(len(values))[:, None]
    found = np.bincount(buckets.reshape(-1), signed.reshape(-1), BUCKETS * len(values))
    return found.reshape(len(values), BUCKETS).astype(np.float64, copy=False)


def _rotations(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    return ((hashes >> np.uint64(32)) & np.uint64(BUCKETS - 1)).astype(np.int64)


def slots(catalog: Catalog, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Tensor and replica of every sketch, and for every one of ``rows`` the number of its sketch."""
    pieces = catalog.pieces
    most = int(pieces.replica[rows].max(initial=0)) + 1
    keys, inverse = np.unique(pieces.tensor[rows].astype(np.int64) * most + pieces.replica[rows], return_inverse=True)
    return keys // most, keys % most, inverse
