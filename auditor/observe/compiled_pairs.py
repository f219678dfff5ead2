"""The compiled comparisons of two tensors: a quick look at many vectors, and a count where there is something to count.

Each comparison is a pair of intrinsics. The one only says whether anything may have to be counted, the other counts and
gives what the numpy kernels give. Both take whole vectors; what is left of a run is padded with zeros, which are equal,
and inside any bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from auditor.observe.compiled_vectors import (
    DOUBLES,
    FORMS,
    I64,
    VECTOR,
    Builder,
    Value,
    Vectors,
    load_vector,
    loop,
    splat,
    store_vector,
)  # fmt: skip

BEYOND, ONE_ULP, FIRST, DISTANCE, APART, LARGEST, NUM_COUNTS = 0, 1, 2, 3, 4, 5, 6
"""Places of what is counted: elements beyond; neighbours; number of the first beyond, or -1; largest distance;
whether a NaN stands against a number; and as a double, the largest ratio."""

_ZERO, _MINUS_ONE = ir.Constant(I64, 0), ir.Constant(I64, -1)
_I32 = ir.IntType(32)
_WIDE = ir.VectorType(_I32, 16)
"""Elements of a cast are taken as so many 32-bit integers."""


def _written(result: Any, forms: Sequence[Any], arguments: Sequence[Any], write: Callable[..., Value]) -> Any:
    if not all(isinstance(form, types.IntegerLiteral) for form in forms):
        return None

    def codegen(context: Any, builder: Builder, signature: Any, values: Sequence[Value]) -> Value:
        written = write(builder, *(FORMS[form.literal_value] for form in forms), *values[len(forms) :])
        return context.get_dummy_value() if result is types.void else written

    return result(*forms, *arguments), codegen


def flag(b: Builder, mask: Value) -> Value:
    """1 where a mask has a bit, else 0."""
    whole = ir.IntType(mask.type.count)
    return b.zext(b.icmp_unsigned("!=", b.bitcast(mask, whole), ir.Constant(whole, 0)), I64)


class _Counter:
    """Counts masks of one vector after the other."""

    def __init__(self, b: Builder, lanes: int) -> None:
        self.b, self.lanes = b, lanes

    def bits(self, mask: Value) -> Value:
        narrow = self.b.bitcast(mask, ir.IntType(self.lanes))
        return narrow if self.lanes == 64 else self.b.zext(narrow, I64)

    def add(self, total: Value, mask: Value) -> Value:
        return self.b.add(total, self.b.ctpop(self.bits(mask)))

    def first(self, known: Value, mask: Value, index: Value) -> Value:
        """The number of the first element in a mask, if none was known."""
        b, bits = self.b, self.bits(mask)
        place = b.add(b.mul(index, ir.Constant(I64, self.lanes)), b.cttz(bits, ir.Constant(ir.IntType(1), 0)))
        new = b.and_(b.icmp_signed("<", known, _ZERO), b.icmp_unsigned("!=", bits, _ZERO))
        return b.select(new, place, known)


def _put(b: Builder, out: Value, found: Sequence[tuple[int, Value]]) -> None:
    for place, value in found:
        store_vector(b, value, out, 8 * place)


class _Cast:
    """One vector of float32 and its low-precision elements, as 32-bit integers."""

    def __init__(self, b: Builder, form: Any, left: Value, right: Value, index: Value) -> None:
        self.b, self.form = b, form
        stored = load_vector(b, b.add(left, b.mul(index, ir.Constant(I64, 32))), ir.VectorType(ir.IntType(16), 16))
        self.stored = b.zext(stored, _WIDE)
        self.master = load_vector(b, b.add(right, b.mul(index, ir.Constant(I64, 64))), _WIDE)
        self.unknown = b.icmp_unsigned(">", b.and_(self.master, self.all(0x7FFFFFFF)), self.all(0x7F800000))
        self.rounded = self.round()

    def all(self, value: int) -> Value:
        return ir.Constant(_WIDE, [value] * 16)

    def round(self) -> Value:
        b = self.b
        if self.form.kind == "brain":
            odd = b.and_(b.lshr(self.master, self.all(16)), self.all(1))
            return b.lshr(b.add(b.add(self.master, odd), self.all(0x7FFF)), self.all(16))
        halves = b.fptrunc(b.bitcast(self.master, ir.VectorType(ir.FloatType(), 16)), ir.VectorType(ir.HalfType(), 16))
        return b.zext(b.bitcast(halves, ir.VectorType(ir.IntType(16), 16)), _WIDE)

    def ordered(self, bits: Value) -> Value:
        b = self.b
        magnitude = b.and_(bits, self.all(0x7FFF))
        negative = b.icmp_unsigned(">", bits, self.all(0x7FFF))
        return b.select(negative, b.sub(self.all(0), magnitude), magnitude)

    def masks(self) -> tuple[Value, Value, Value]:
        """What is not equal; of that, where a NaN stands against a number; and the distance elsewhere."""
        b = self.b
        lost = b.icmp_unsigned(">", b.and_(self.stored, self.all(0x7FFF)), self.all(self.form.infinity))
        unequal = b.or_(b.icmp_unsigned("!=", self.stored, self.rounded), self.unknown)
        beyond = b.and_(unequal, b.not_(b.and_(lost, self.unknown)))
        apart = b.and_(beyond, b.xor(lost, self.unknown))
        way = b.sub(self.ordered(self.stored), self.ordered(self.rounded))
        size = b.select(b.icmp_signed("<", way, self.all(0)), b.sub(self.all(0), way), way)
        return beyond, apart, b.select(b.and_(beyond, b.not_(apart)), size, self.all(0))


@intrinsic(prefer_literal=True)
def look_cast(typingctx: Any, form: Any, left: Any, right: Any, count: Any) -> Any:
    """Whether among 16·``count`` elements there is one that is not the rounded master, or a master that is NaN."""

    def write(b: Builder, form: Any, left: Value, right: Value, count: Value) -> Value:
        def step(index: Value, totals: list[Value]) -> list[Value]:
            pair = _Cast(b, form, left, right, index)
            return [b.or_(totals[0], b.or_(b.icmp_unsigned("!=", pair.stored, pair.rounded), pair.unknown))]

        none = ir.Constant(ir.VectorType(ir.IntType(1), 16), [0] * 16)
        return flag(b, loop(b, count, [none], step)[0])

    return _written(types.int64, [form], [types.int64] * 3, write)


@intrinsic(prefer_literal=True)
def count_cast(typingctx: Any, form: Any, left: Any, right: Any, count: Any, out: Any) -> Any:
    """Write what is to be told of 16·``count`` elements against their masters."""

    def write(b: Builder, form: Any, left: Value, right: Value, count: Value, out: Value) -> None:
        counter = _Counter(b, 16)

        def step(index: Value, totals: list[Value]) -> list[Value]:
            pair = _Cast(b, form, left, right, index)
            beyond, apart, distance = pair.masks()
            larger = b.icmp_signed(">", distance, totals[4])
            return [
                counter.add(totals[0], beyond),
                counter.add(totals[1], b.icmp_signed("==", distance, pair.all(1))),
                counter.first(totals[2], beyond, index),
                counter.add(totals[3], apart),
                b.select(larger, distance, totals[4]),
            ]

        start = [_ZERO, _ZERO, _MINUS_ONE, _ZERO, ir.Constant(_WIDE, [0] * 16)]
        found = loop(b, count, start, step)
        reduce = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(_I32, [_WIDE]), "llvm.vector.reduce.smax.v16i32"
        )
        largest = b.zext(b.call(reduce, [found[4]]), I64)
        _put(b, out, [*zip((BEYOND, ONE_ULP, FIRST, APART), found, strict=False), (DISTANCE, largest)])

    return _written(types.void, [form], [types.int64] * 4, write)


def _call(b: Builder, name: str, *operands: Value) -> Value:
    function = ir.FunctionType(DOUBLES, [DOUBLES] * len(operands))
    return b.call(cgutils.get_or_insert_function(b.module, function, f"llvm.{name}.v8f64"), operands)


def doubles_at(b: Builder, form: Any, address: Value, index: Value) -> Value:
    """Eight elements, the ``index``-th eight from ``address`` on."""
    narrow = ir.VectorType(ir.IntType(8 * form.width), 8)
    bits = load_vector(b, b.add(address, b.mul(index, ir.Constant(I64, 8 * form.width))), narrow)
    if form.kind == "brain":
        words = ir.VectorType(_I32, 8)
        bits = b.shl(b.zext(bits, words), ir.Constant(words, [16] * 8))
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.FloatType(), 8)), DOUBLES)
    if form.width == 8:
        return b.bitcast(bits, DOUBLES)
    scalar = ir.FloatType() if form.width == 4 else ir.HalfType()
    return b.fpext(b.bitcast(bits, ir.VectorType(scalar, 8)), DOUBLES)


@intrinsic(prefer_literal=True)
def look_bound(
    typingctx: Any, first: Any, second: Any, left: Any, right: Any, count: Any, square: Any, floor: Any
) -> Any:
    """Whether among 8·``count`` elements left² > ``square`` · (right + ``floor``) anywhere."""

    def write(
        b: Builder, first: Any, second: Any, left: Value, right: Value, count: Value, square: Value, floor: Value
    ) -> Value:
        factor, least = splat(b, square, 8), splat(b, floor, 8)

        def step(index: Value, totals: list[Value]) -> list[Value]:
            moment, other = doubles_at(b, first, left, index), doubles_at(b, second, right, index)
            bound = b.fmul(factor, b.fadd(other, least))
            return [b.or_(totals[0], b.fcmp_ordered(">", b.fmul(moment, moment), bound))]

        none = ir.Constant(ir.VectorType(ir.IntType(1), 8), [0] * 8)
        return flag(b, loop(b, count, [none], step)[0])

    return _written(types.int64, [first, second], [types.int64] * 3 + [types.float64] * 2, write)


@intrinsic(prefer_literal=True)
def count_bound(
    typingctx: Any, first: Any, second: Any, left: Any, right: Any, count: Any, limit: Any, floor: Any, out: Any
) -> Any:
    """Write what is to be told of 8·``count`` elements against limit · sqrt(right + floor)."""

    def write(
        b: Builder, first: Any, second: Any, left: Value, right: Value, count: Value, limit: Value, floor: Value,
        out: Value,
    ) -> None:  # fmt: skip
        counter, factor, least = _Counter(b, 8), splat(b, limit, 8), splat(b, floor, 8)
        zero, infinity = (ir.Constant(DOUBLES, [value] * 8) for value in (0.0, float("inf")))

        def step(index: Value, totals: list[Value]) -> list[Value]:
            size = _call(b, "fabs", doubles_at(b, first, left, index))
            other = doubles_at(b, second, right, index)
            judged = b.and_(b.fcmp_ordered("<", size, infinity), b.fcmp_ordered("<", other, infinity))
            judged = b.and_(judged, b.fcmp_ordered(">=", other, zero))
            root = _call(b, "sqrt", b.fadd(other, least))
            beyond = b.and_(judged, b.fcmp_ordered(">", size, b.fmul(factor, root)))
            ratio = b.select(b.and_(judged, b.fcmp_ordered(">", size, zero)), b.fdiv(size, root), zero)
            largest = b.select(b.fcmp_ordered(">", ratio, totals[2]), ratio, totals[2])
            return [counter.add(totals[0], beyond), counter.first(totals[1], beyond, index), largest]

        found = loop(b, count, [_ZERO, _MINUS_ONE, zero], step)
        reduce = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(ir.DoubleType(), [DOUBLES]), "llvm.vector.reduce.fmax.v8f64"
        )
        _put(b, out, [(BEYOND, found[0]), (FIRST, found[1]), (LARGEST, b.call(reduce, [found[2]]))])

    return _written(types.void, [first, second], [types.int64] * 3 + [types.float64] * 2 + [types.int64], write)


@intrinsic(prefer_literal=True)
def count_unequal(typingctx: Any, form: Any, left: Any, right: Any, count: Any, out: Any) -> Any:
    """Write how many elements of ``count`` vectors have not the same bits, and which is the first."""

    def write(b: Builder, form: Any, left: Value, right: Value, count: Value, out: Value) -> None:
        vectors = Vectors(b, form)
        counter = _Counter(b, vectors.count)

        def step(index: Value, totals: list[Value]) -> list[Value]:
            offset = b.mul(index, ir.Constant(I64, VECTOR))
            unequal = b.icmp_unsigned("!=", *(vectors.load(b.add(side, offset)) for side in (left, right)))
            return [counter.add(totals[0], unequal), counter.first(totals[1], unequal, index)]

        found = loop(b, count, [_ZERO, _MINUS_ONE], step)
        _put(b, out, [(BEYOND, found[0]), (FIRST, found[1])])

    return _written(types.void, [form], [types.int64] * 4, write)
