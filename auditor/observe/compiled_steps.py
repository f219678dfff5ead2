"""What the compiled kernels do with 64 bytes at a time to digest and measure them.

The running totals of one row of results lie in a *state* of 64-byte vectors, so that they are summed up across their
lanes once a row and not once a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from auditor.observe.compiled_vectors import (
    DOUBLES,
    I64,
    KEY_NAMES,
    VECTOR,
    WORDS,
    Builder,
    Value,
    Vectors,
    load_vector,
    loop,
    signature_of,
    splat,
    store_vector,
)  # fmt: skip

LANES, KEYS, SUMS, COUNTS, STATE_VECTORS = 0, 2, 7, 11, 12
"""Vectors of a state: both lanes' sums; signed and unsigned maxima and minima and the bits used (:data:`KEY_NAMES`);
sums of squares; numbers of NaN, infinities and zeros."""


def _commit(v: Vectors, state: Value, found: Sequence[Value]) -> None:
    """Add to the state."""
    known = [v.load(state, offset=VECTOR * (KEYS + n)) for n in range(len(KEY_NAMES))]
    for n, value in enumerate(v.keys(known, found)):
        store_vector(v.b, value, state, VECTOR * (KEYS + n))
    for n, value in enumerate(found[len(KEY_NAMES) : len(KEY_NAMES) + v.num_sums()]):
        offset = VECTOR * (SUMS + n)
        store_vector(v.b, v.b.fadd(v.load(state, DOUBLES, offset), value), state, offset)
    for n, value in enumerate(found[len(KEY_NAMES) + v.num_sums() :]):
        offset = VECTOR * COUNTS + 8 * n
        store_vector(v.b, v.b.add(v.load(state, I64, offset), value), state, offset)


def _digest(b: Builder, words: Value, keys: Sequence[Value], sums: Sequence[Value]) -> list[Value]:
    """Products of 32-bit words with both lanes' keys.

    Words are multiplied as the lower halves of 64-bit ones: the even ones as they are, the odd ones shifted down. Odd
    keys are the lower halves of what lies one word further.
    """
    lower, upper = ir.Constant(WORDS, [0xFFFFFFFF] * 8), ir.Constant(WORDS, [32] * 8)
    even, odd = b.and_(words, lower), b.lshr(words, upper)
    found = []
    for lane, address in enumerate(keys):
        both = load_vector(b, address, WORDS)
        even_keys, odd_keys = b.and_(both, lower), b.lshr(both, upper)
        found.append(b.add(sums[2 * lane], b.mul(even, even_keys)))
        found.append(b.add(sums[2 * lane + 1], b.mul(odd, odd_keys)))
    return found


def _commit_digest(b: Builder, state: Value, sums: Sequence[Value], block_keys: Sequence[Value]) -> None:
    for lane, key in enumerate(block_keys):
        product = b.mul(b.add(sums[2 * lane], sums[2 * lane + 1]), splat(b, key, 8))
        offset = VECTOR * (LANES + lane)
        store_vector(b, b.add(load_vector(b, state, WORDS, offset), product), state, offset)


_NO_WORDS = [ir.Constant(WORDS, [0] * 8)] * 4


@intrinsic(prefer_literal=True)
def measure_vectors(
    typingctx: Any, form: Any, address: Any, count: Any, keys0: Any, keys1: Any, key0: Any, key1: Any, state: Any
) -> Any:
    """Digest ``count`` >= 1 whole vectors of one block and measure them, in one pass.

    Gives 1 where the statistics were not added, as something has to be counted: :func:`count_elements`.
    """

    def write(
        v: Vectors, address: Value, count: Value, keys0: Value, keys1: Value, key0: Value, key1: Value, state: Value
    ) -> Value:
        b, measured = v.b, v.form.kind != "opaque"
        start = [*_NO_WORDS, *v.neutral()] if measured else list(_NO_WORDS)

        def step(index: Value, totals: list[Value]) -> list[Value]:
            offset = b.shl(index, ir.Constant(I64, 6))
            at, *keys = (b.add(base, offset) for base in (address, keys0, keys1))
            sums = _digest(b, v.load(at, WORDS), keys, totals[:4])
            if not measured:
                return sums
            found = v.keys(totals[4:9], [v.load(at)] * 5)
            wide = v.widen(lambda kind, n: v.load(at, kind, n * kind.count * kind.element.width // 8))
            return sums + found + v.squares(totals[9:], wide)

        found = loop(b, count, start, step)
        _commit_digest(b, state, found[:4], (key0, key1))
        if not measured:
            return ir.Constant(I64, 0)
        odd = v.odd(found[4:9])
        with b.if_then(b.not_(odd), likely=True):
            _commit(v, state, found[4:])
        return b.zext(odd, I64)

    return signature_of(form, types.int64, 7, write)


@intrinsic(prefer_literal=True)
def count_elements(typingctx: Any, form: Any, address: Any, count: Any, low: Any, high: Any, state: Any) -> Any:
    """Measure ``count`` >= 1 vectors element by element; those from number ``low`` to ``high`` - 1 alone count."""

    def write(v: Vectors, address: Value, count: Value, low: Value, high: Value, state: Value) -> None:
        b = v.b
        if v.form.kind == "opaque":
            return

        def step(index: Value, totals: list[Value]) -> list[Value]:
            bits = v.load(b.add(address, b.mul(index, ir.Constant(I64, VECTOR))))
            valid = v.inside(low, high, b.mul(index, ir.Constant(I64, v.count)))
            return v.counted(bits, valid, totals)

        _commit(v, state, loop(b, count, [*v.neutral(), *[ir.Constant(I64, 0)] * 3], step))

    return signature_of(form, types.void, 5, write)


@intrinsic(prefer_literal=True)
def digest_part(
    typingctx: Any, form: Any, address: Any, low: Any, high: Any, keys0: Any, keys1: Any, key0: Any, key1: Any,
    state: Any,
) -> Any:  # fmt: skip
    """Digest the elements number ``low`` to ``high`` - 1 of one vector."""

    def write(
        v: Vectors, address: Value, low: Value, high: Value, keys0: Value, keys1: Value, key0: Value, key1: Value,
        state: Value,
    ) -> None:  # fmt: skip
        bits = v.b.select(v.inside(low, high, ir.Constant(I64, 0)), v.load(address), v.all(0))
        sums = _digest(v.b, v.b.bitcast(bits, WORDS), (keys0, keys1), _NO_WORDS)
        _commit_digest(v.b, state, sums, (key0, key1))

    return signature_of(form, types.void, 8, write)


@intrinsic(prefer_literal=True)
def extremum(typingctx: Any, form: Any, which: Any, state: Any) -> Any:
    """Number ``which`` of the keys over all elements of a state, its bits extended by zeros."""
    if not isinstance(which, types.IntegerLiteral):
        return None
    name, offset = f"vector.reduce.{KEY_NAMES[which.literal_value]}", VECTOR * (KEYS + which.literal_value)

    def write(v: Vectors, _: Value, state: Value) -> Value:
        if v.form.kind == "opaque":
            return ir.Constant(I64, 0)
        found = v.load(state, offset=offset)
        function = ir.FunctionType(v.element, [v.type])
        full = f"llvm.{name}.v{v.count}i{v.element.width}"
        value = v.b.call(cgutils.get_or_insert_function(v.b.module, function, full), [found])
        return value if v.form.width == 8 else v.b.zext(value, I64)

    signature = signature_of(form, types.int64, 2, write)
    return signature and (types.int64(form, which, types.int64), signature[1])


@intrinsic(prefer_literal=True)
def as_double(typingctx: Any, form: Any, bits: Any) -> Any:
    """The number that an element's bits, extended by zeros, mean."""

    def write(v: Vectors, bits: Value) -> Value:
        if v.form.kind == "opaque":
            return ir.Constant(ir.DoubleType(), 0.0)
        narrow = bits if v.form.width == 8 else v.b.trunc(bits, v.element)
        wide = v.widen(v.slices(splat(v.b, narrow, v.count)))
        return v.b.extract_element(wide[0], ir.Constant(ir.IntType(32), 0))

    return signature_of(form, types.float64, 1, write)
