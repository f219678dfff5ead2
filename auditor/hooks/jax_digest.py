"""Measures of one device's part of a jax.Array: on the CPU by the offline kernels on a view, else by a jitted loop.

Accelerators have no 64-bit integers unless they are asked for, so products of 32-bit words and keys are kept in four
limbs of 16 bits, summed for every block of the digest on the device, and put together on the host, which also knows the
blocks' numbers: they may exceed 32 bits. What is sent to the host is 64 bytes for every 8 KiB.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from auditor.hooks.recording import measured_on_cpu, runs_of
from auditor.model.dtype import DTYPES, DType, Kind
from auditor.model.region import Box
from auditor.observe.decode import to_float64
from auditor.observe.digest import WORDS_PER_BLOCK, block_keys, word_keys
from auditor.observe.kernels import Kernels, empty_rows


def dtype_of(array: Any) -> DType | None:
    """The dtype of an array, None where there are no kernels for it."""
    dtype = DTYPES.get(str(array.dtype))
    return dtype if dtype is not None and dtype.bits >= 8 else None


def measure(kernels: Kernels, values: Any, dtype: DType, shape: tuple[int, ...], box: Box) -> NDArray[np.void]:
    """One row of OBSERVED of ``values``, on a single device, which lie at ``box`` of a tensor of ``shape``."""
    if not values.size:
        return empty_rows(1)
    if next(iter(values.devices())).platform == "cpu":
        buffer = np.ascontiguousarray(np.asarray(values)).reshape(-1).view(np.uint8)
        return measured_on_cpu(kernels, buffer, dtype, shape, box)
    return measured_on_device(values, dtype, shape, box)


def measured_on_device(values: Any, dtype: DType, shape: tuple[int, ...], box: Box) -> NDArray[np.void]:
    """As :func:`measure`, by jitted ops on the device."""
    totals = empty_rows(1)
    width = dtype.bits // 2 if dtype.kind is Kind.COMPLEX else dtype.bits
    words = max(1, width // 32)
    per_word = max(1, 32 // width)
    bits = _as_bits(values)
    lanes = np.zeros(2, np.uint64)
    per_block = WORDS_PER_BLOCK * per_word
    at = 0
    for runs in runs_of(box, shape, dtype):
        count, length = len(runs.length), int(runs.length[0]) * words
        rows, starts = bits[at : at + count * length].reshape(count, length), runs.start * words
        at += count * length
        body = length // per_block * per_block
        pattern = _pattern(dtype)
        if body:
            pieces = starts[:, None] + np.arange(0, body, per_block)
            lanes += _digest(rows[:, :body].reshape(-1, per_block), pieces.reshape(-1), per_word, pattern)
        if length > body:
            lanes += _digest(rows[:, body:], starts + body, per_word, pattern)
    totals["lane0"], totals["lane1"] = lanes
    for name, value in _statistics(values, bits, dtype).items():
        # + 0.0: of the two zeros it is the positive one.
        totals[name] = value + 0.0 if name in ("minimum", "maximum") else value
    return totals


def _pattern(dtype: DType) -> int:
    """Words between two that count an element."""
    return max(1, dtype.bits // 32)


@jax.jit
def _as_bits(values: Any) -> Any:
    """The value bits as one row of uint8, uint16 or uint32, low halves of wider ones first."""
    if values.dtype == jnp.bool_:
        return values.astype(jnp.uint8).reshape(-1)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        values = jnp.stack([values.real, values.imag], -1)
    carrier = {1: jnp.uint8, 2: jnp.uint16}.get(values.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(values, carrier).reshape(-1)


def _digest(rows: Any, starts: NDArray[np.int64], per_word: int, pattern: int) -> NDArray[np.uint64]:
    """Both lanes of rows of at most a block's length, which begin at ``starts`` of the tensor's C order of carriers."""
    per_block = WORDS_PER_BLOCK * per_word
    inside = (starts % per_block).astype(np.uint32)
    limbs = np.asarray(_limbs(rows, inside, per_word, pattern)).astype(np.uint64)
    sums = (limbs << (np.arange(4, dtype=np.uint64) * np.uint64(16))).sum(axis=3, dtype=np.uint64)
    blocks = (starts // per_block).astype(np.uint64)
    found = np.zeros(2, np.uint64)
    for lane in (0, 1):
        for segment in (0, 1):
            keys = block_keys(blocks + np.uint64(segment), lane)
            found[lane : lane + 1] += (sums[:, segment, lane] * keys).sum(keepdims=True, dtype=np.uint64)
    return found


def _limbs(rows: Any, inside: NDArray[np.uint32], per_word: int, pattern: int) -> Any:
    return _limbs_of(per_word, pattern)(rows, inside)


@lru_cache(maxsize=16)
def _limbs_of(per_word: int, pattern: int) -> Callable[[Any, Any], Any]:
    """For rows and where each begins in its block: sums in the first block met and the next, both lanes, four limbs."""
    tables = [jnp.asarray(word_keys()[lane].astype(np.uint32)) for lane in (0, 1)]

    def limbs(rows: Any, inside: Any) -> Any:
        index = inside[:, None] + jnp.arange(rows.shape[1], dtype=jnp.uint32)
        shift = index % per_word * (32 // per_word)
        word = index // per_word
        values = rows.astype(jnp.uint32) << shift
        counted = (word % pattern == 0).astype(jnp.uint32) << shift
        next_block = word >= WORDS_PER_BLOCK
        found = []
        for segment in (False, True):
            mine = next_block == segment
            for table in tables:
                keys = table[word % WORDS_PER_BLOCK]
                parts = [a + b for a, b in zip(_product(values, keys), _product(counted, keys), strict=True)]
                # At most 8192 elements of below 2^18.6 each: no sum overflows.
                found.append(jnp.stack([jnp.where(mine, part, 0).sum(1, dtype=jnp.uint32) for part in parts], -1))
        return jnp.stack(found, 1).reshape(rows.shape[0], 2, 2, 4)

    compiled: Callable[[Any, Any], Any] = jax.jit(limbs)
    return compiled


def _product(one: Any, other: Any) -> list[Any]:
    """The 64-bit product of 32-bit numbers as the parts that add up to its limbs of 16 bits."""
    low, high = one & 0xFFFF, one >> 16
    low_key, high_key = other & 0xFFFF, other >> 16
    first, second, third, fourth = low * low_key, low * high_key, high * low_key, high * high_key
    return [
        first & 0xFFFF,
        (first >> 16) + (second & 0xFFFF) + (third & 0xFFFF),
        (second >> 16) + (third >> 16) + (fourth & 0xFFFF),
        fourth >> 16,
    ]


def _statistics(values: Any, bits: Any, dtype: DType) -> dict[str, float]:
    """Counts, extrema and sum of squares.

    Compilers flush denormals, so everything but the squares is told by the bits. Of denormals no square is counted.
    """
    if dtype.bits == 8:
        return _of_histogram(np.asarray(_histogram(bits)), dtype)
    if dtype.kind in (Kind.FLOAT, Kind.COMPLEX):
        infinity = ((1 << dtype.exponent_bits) - 1) << dtype.mantissa_bits
        found = jax.device_get(_of_floats(values, infinity))
        counts, (least, largest), unit, parts = found
        low, high = (_decoded(key, dtype) for key in (least, largest))
        if counts[0] == counts[3]:
            low, high = np.inf, -np.inf
        total = _sum(parts, unit)
        return {"num_nan": counts[0], "num_infinite": counts[1], "num_zero": counts[2], "minimum": low,
                "maximum": high, "sum_squares": total}  # fmt: skip
    zero, least, largest, unit, parts = jax.device_get(_of_integers(values))
    return {"num_zero": zero, "minimum": float(least), "maximum": float(largest), "sum_squares": _sum(parts, unit)}


def _sum(parts: NDArray[np.floating], unit: Any) -> float:
    with np.errstate(over="ignore"):
        return float(np.asarray(parts, np.float64).sum() * np.square(np.float64(unit)))


def _of_histogram(counts: NDArray[np.integer], dtype: DType) -> dict[str, float]:
    values = to_float64(np.arange(256, dtype=np.uint8), dtype)
    nan, infinite, met = np.isnan(values), np.isinf(values), counts > 0
    plain = values[met & ~nan]
    finite = met & ~nan & ~infinite
    return {
        "num_nan": int(counts[nan].sum()), "num_infinite": int(counts[infinite].sum()),
        "num_zero": int(counts[values == 0].sum()),
        "minimum": float(plain.min(initial=np.inf)), "maximum": float(plain.max(initial=-np.inf)),
        "sum_squares": float((counts[finite] * np.square(values[finite])).sum()),
    }  # fmt: skip


@jax.jit
def _histogram(bits: Any) -> Any:
    return jnp.bincount(bits, length=256)


def _decoded(key: Any, dtype: DType) -> float:
    """The value of an ordered key; see :func:`_of_floats`."""
    half = dtype.bits // 2 if dtype.kind is Kind.COMPLEX else dtype.bits
    sign, every = 1 << (half - 1), (1 << half) - 1
    bits = int(key) ^ (sign if int(key) & sign else every)
    part = DType("float", half, Kind.FLOAT, dtype.exponent_bits, dtype.mantissa_bits, dtype.bias, dtype.non_finite)
    kind = DTYPES.get("bfloat16") if dtype.name == "bfloat16" else part
    assert kind is not None
    return float(to_float64(np.array([bits], f"<u{half // 8}"), kind)[0])


@partial(jax.jit, static_argnums=1)
def _of_floats(values: Any, infinity: int) -> Any:
    """Counts of NaN, infinities, zeros and all; least and largest as keys in the order of values; unit and squares."""
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        values = jnp.stack([values.real, values.imag], -1)
    carrier = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[values.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(values, carrier).reshape(-1)
    sign = carrier(1 << (8 * values.dtype.itemsize - 1))
    magnitude = bits & ~sign
    nan, infinite = magnitude > carrier(infinity), magnitude == carrier(infinity)
    keys = jnp.where(bits & sign != 0, ~bits, bits | sign)
    ends = jnp.where(nan, ~carrier(0), keys).min(), jnp.where(nan, carrier(0), keys).max()
    wide = values.astype(jnp.float32) if values.dtype.itemsize < 4 else values
    finite = jnp.where(nan | infinite, 0, wide.reshape(-1))
    unit = jnp.maximum(jnp.abs(finite).max(), jnp.finfo(wide.dtype).tiny)
    counts = nan.sum(), infinite.sum(), (magnitude == 0).sum(), nan.size
    return counts, ends, unit, _squares(finite / unit)


@jax.jit
def _of_integers(values: Any) -> Any:
    wide = values.astype(jnp.float32).reshape(-1)
    unit = jnp.maximum(jnp.abs(wide).max(), 1)
    return (values == 0).sum(), values.min(), values.max(), unit, _squares(wide / unit)


def _squares(values: Any) -> Any:
    """Sums of squares a block: those of all blocks are added in 64 bits on the host."""
    squares = jnp.square(values)
    body = len(squares) // WORDS_PER_BLOCK * WORDS_PER_BLOCK
    return jnp.append(squares[:body].reshape(-1, WORDS_PER_BLOCK).sum(1), squares[body:].sum())
