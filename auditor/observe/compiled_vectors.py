"""Vectors of 64 bytes for the compiled kernels: LLVM's vector instructions, written out.

A compiler that is left to find the vectors in loops over single elements finds half of them. Vectors of 64 bytes are
one register with AVX-512 and are split on smaller machines. Nothing here needs aligned addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

VECTOR = 64
"""Bytes."""
KEY_NAMES = ("smax", "smin", "umax", "umin", "or")

I64, _BOOL = ir.IntType(64), ir.IntType(1)
WORDS = ir.VectorType(I64, 8)
DOUBLES = ir.VectorType(ir.DoubleType(), 8)

Value = Any
Builder = Any


@dataclass(frozen=True, slots=True)
class Form:
    """How the elements of a vector are read."""

    width: int
    """Bytes of an element."""
    kind: str
    """``float``, ``brain`` (bfloat16), ``signed``, ``unsigned``, or ``opaque``: digested and nothing else."""
    infinity: int = 0
    """Bits of +infinity; 0 where there is none."""


FORMS = (
    Form(1, "opaque"),
    Form(2, "brain", 0x7F80), Form(2, "float", 0x7C00), Form(4, "float", 0x7F800000), Form(8, "float", 0x7FF << 52),
    Form(2, "signed"), Form(4, "signed"), Form(8, "signed"),
    Form(2, "unsigned"), Form(4, "unsigned"), Form(8, "unsigned"),
)  # fmt: skip
"""A form's number is what compiled code is specialised by."""
DOUBLE = 4
"""The number of float64's form."""


class Vectors:
    """Writes instructions for elements of one form."""

    def __init__(self, builder: Builder, form: Form) -> None:
        self.b, self.form = builder, form
        self.count = VECTOR // form.width
        self.element = ir.IntType(8 * form.width)
        self.type = ir.VectorType(self.element, self.count)
        self.sign = 1 << (8 * form.width - 1)
        self.ones = (1 << 8 * form.width) - 1

    def all(self, value: int) -> Value:
        """A vector of one value."""
        return ir.Constant(self.type, [value] * self.count)

    def load(self, address: Value, kind: Any = None, offset: int = 0) -> Value:
        """A vector from any address."""
        return load_vector(self.b, address, kind or self.type, offset)

    def call(self, name: str, *operands: Value) -> Value:
        """An LLVM intrinsic on vectors."""
        return call(self.b, name, *operands)

    def neutral(self) -> list[Value]:
        """Of :data:`KEY_NAMES`, and of the sums."""
        keys = [self.all(value) for value in (self.sign, self.sign - 1, 0, self.ones, 0)]
        return keys + [ir.Constant(DOUBLES, [0.0] * 8)] * self.num_sums()

    def num_sums(self) -> int:
        """How many vectors of doubles the sums of squares of one vector take."""
        return min(4, 8 // self.form.width)

    def widen(self, part: Callable[[Any, int], Value]) -> list[Value]:
        """Elements as doubles, eight a vector; ``part`` gives the n-th vector of a type."""
        b, kind = self.b, self.form.kind
        if kind == "brain":
            words = part(ir.VectorType(ir.IntType(32), 16), 0)
            half, upper = (ir.Constant(words.type, [value] * 16) for value in (16, 0xFFFF0000))
            single = ir.VectorType(ir.FloatType(), 8)
            whole = [self.slices(value) for value in (b.shl(words, half), b.and_(words, upper))]
            return [b.fpext(b.bitcast(each(ir.VectorType(ir.IntType(32), 8), n), single), DOUBLES)
                    for each in whole for n in range(2)]  # fmt: skip
        parts = [part(ir.VectorType(self.element, 8), n) for n in range(self.count // 8)]
        if kind == "float":
            scalar = {2: ir.HalfType(), 4: ir.FloatType(), 8: ir.DoubleType()}[self.form.width]
            values = [b.bitcast(value, ir.VectorType(scalar, 8)) for value in parts]
            return values if self.form.width == 8 else [b.fpext(value, DOUBLES) for value in values]
        convert = b.sitofp if kind == "signed" else b.uitofp
        return [convert(value, DOUBLES) for value in parts]

    def squares(self, sums: Sequence[Value], values: Sequence[Value]) -> list[Value]:
        """Add squares to sums of squares."""
        flags = ("contract",)
        return [
            self.b.fadd(total, self.b.fmul(value, value, flags=flags), flags=flags)
            for total, value in zip(sums, values, strict=True)
        ]

    def keys(self, totals: Sequence[Value], values: Sequence[Value]) -> list[Value]:
        """Take more into the extrema and the bits used."""
        found = [self.call(name, *pair) for name, *pair in zip(KEY_NAMES[:4], totals, values, strict=False)]
        return [*found, self.b.or_(totals[4], values[4])]

    def odd(self, keys: Sequence[Value]) -> Value:
        """Whether something lies under the extrema that must be counted: not finite, or zero."""
        b = self.b
        found = b.icmp_unsigned("==", keys[3], self.all(0))
        if self.form.infinity:
            found = b.or_(found, b.icmp_signed("==", keys[1], self.all(self.sign)))
            found = b.or_(found, b.icmp_signed(">=", keys[0], self.all(self.form.infinity)))
            found = b.or_(found, b.icmp_unsigned(">=", keys[2], self.all(self.sign | self.form.infinity)))
        return self.any(found)

    def any(self, mask: Value) -> Value:
        """Whether a mask has a bit."""
        whole = ir.IntType(self.count)
        return self.b.icmp_unsigned("!=", self.b.bitcast(mask, whole), ir.Constant(whole, 0))

    def number(self, mask: Value) -> Value:
        """How many bits a mask has."""
        return self.b.zext(self.b.ctpop(self.b.bitcast(mask, ir.IntType(self.count))), I64) \
            if self.count < 64 else self.b.ctpop(self.b.bitcast(mask, I64))  # fmt: skip

    def slices(self, bits: Value) -> Callable[[Any, int], Value]:
        """Parts of a vector that is in a register, for :meth:`widen`."""

        def part(kind: Any, number: int) -> Value:
            each = kind.count
            total = VECTOR * 8 // kind.element.width
            whole = self.b.bitcast(bits, ir.VectorType(kind.element, total))
            places = ir.Constant(ir.VectorType(ir.IntType(32), each), list(range(number * each, (number + 1) * each)))
            return self.b.shuffle_vector(whole, whole, places)

        return part

    def counted(self, bits: Value, valid: Value, totals: Sequence[Value]) -> list[Value]:
        """One vector whose elements must be looked at one by one; only the ``valid`` ones count."""
        b, form, last = self.b, self.form, len(KEY_NAMES) + self.num_sums()
        magnitude = b.and_(bits, self.all(self.sign - 1)) if form.infinity else bits
        infinity, none = self.all(form.infinity or self.ones), ir.Constant(valid.type, [0] * self.count)
        nan = b.and_(valid, b.icmp_unsigned(">", magnitude, infinity))
        infinite = b.and_(valid, b.icmp_unsigned("==", magnitude, infinity)) if form.infinity else none
        zero = b.and_(valid, b.icmp_unsigned("==", magnitude, self.all(0)))
        numbers = b.and_(valid, b.not_(nan))
        outside = self.neutral()
        keys = [b.select(numbers, bits, key) for key in outside[:4]] + [b.select(valid, bits, outside[4])]
        finite = b.select(b.and_(numbers, b.not_(infinite)), bits, self.all(0))
        counts = [b.add(old, self.number(mask)) for old, mask in zip(totals[last:], (nan, infinite, zero), strict=True)]
        squares = self.squares(totals[len(KEY_NAMES) : last], self.widen(self.slices(finite)))
        return [*self.keys(totals, keys), *squares, *counts]

    def inside(self, low: Value, high: Value, first: Value) -> Value:
        """Which elements' numbers, from ``first`` on, are at least ``low`` and below ``high``."""
        b = self.b
        number = ir.Constant(self.type, list(range(self.count)))
        places = b.add(self.splat(first), number)
        above = b.icmp_unsigned(">=", places, self.splat(low))
        return b.and_(above, b.icmp_unsigned("<", places, self.splat(high)))

    def splat(self, value: Value) -> Value:
        """A vector of one value, given as 64 bits."""
        narrow = value if self.form.width == 8 else self.b.trunc(value, self.element)
        return splat(self.b, narrow, self.count)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """As numba's ``register_jitable``, but the number of a form stays a constant on its way through."""

    @overload(function, jit_options={"forceinline": True}, strict=False, prefer_literal=True)
    def same(*arguments: Any) -> Callable[..., Any]:
        return function

    return function


def load_vector(b: Builder, address: Value, kind: Any, offset: int = 0) -> Value:
    """A vector from any address."""
    at = b.add(address, ir.Constant(I64, offset)) if offset else address
    return b.load(b.inttoptr(at, kind.as_pointer()), align=1)


def store_vector(b: Builder, value: Value, address: Value, offset: int = 0) -> None:
    """A vector, or a scalar, to any address."""
    at = b.add(address, ir.Constant(I64, offset)) if offset else address
    b.store(value, b.inttoptr(at, value.type.as_pointer()), align=1)


def splat(b: Builder, value: Value, count: int) -> Value:
    """A vector of ``count`` times one value."""
    kind = ir.VectorType(value.type, count)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count))


def call(b: Builder, name: str, *operands: Value) -> Value:
    """The LLVM intrinsic ``name`` for vectors of the operands' type."""
    kind = operands[0].type
    letter = "f" if kind.element == ir.DoubleType() else "i"
    width = 64 if letter == "f" else kind.element.width
    function = ir.FunctionType(kind, [operand.type for operand in operands])
    full = f"llvm.{name}.v{kind.count}{letter}{width}"
    return b.call(cgutils.get_or_insert_function(b.module, function, full), operands)


def loop(
    b: Builder, count: Value, first: Sequence[Value], body: Callable[[Value, list[Value]], list[Value]]
) -> list[Value]:
    """Do ``body`` for 0, 1, … ``count`` - 1, which is at least once; what it returns is what it gets next."""
    before, inside, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
    b.branch(inside)
    b.position_at_end(inside)
    index, *values = [b.phi(value.type) for value in (ir.Constant(I64, 0), *first)]
    found = body(index, values)
    following = b.add(index, ir.Constant(I64, 1))
    for phi, start, again in zip((index, *values), (ir.Constant(I64, 0), *first), (following, *found), strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(again, b.block)
    b.cbranch(b.icmp_signed("<", following, count), inside, after)
    b.position_at_end(after)
    return found


def signature_of(form: Any, result: Any, num_integers: int, write: Callable[..., Value]) -> Any:
    """What numba wants of an intrinsic whose first argument is the number of a form, the others 64-bit integers."""
    if not isinstance(form, types.IntegerLiteral):
        return None

    def codegen(context: Any, builder: Builder, signature: Any, values: Sequence[Value]) -> Value:
        written = write(Vectors(builder, FORMS[form.literal_value]), *values[1:])
        return context.get_dummy_value() if result is types.void else written

    return result(form, *[types.int64] * num_integers), codegen


@intrinsic
def load_64(typingctx: Any, address: Any) -> Any:
    """Eight bytes at any address."""

    def codegen(context: Any, builder: Builder, signature: Any, values: Sequence[Value]) -> Value:
        return load_vector(builder, values[0], I64)

    return types.int64(types.int64), codegen


@intrinsic(prefer_literal=True)
def load_unsigned(typingctx: Any, address: Any, width: Any) -> Any:
    """An unsigned integer of ``width`` bytes at any address."""
    if not isinstance(width, types.IntegerLiteral):
        return None
    kind = ir.IntType(8 * width.literal_value)

    def codegen(context: Any, builder: Builder, signature: Any, values: Sequence[Value]) -> Value:
        return (
            builder.zext(load_vector(builder, values[0], kind), I64)
            if kind.width < 64
            else load_vector(builder, values[0], kind)
        )

    return types.uint64(types.int64, width), codegen


@intrinsic
def store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a number of the width that it has at any address."""

    def codegen(context: Any, builder: Builder, signature: Any, values: Sequence[Value]) -> Value:
        store_vector(builder, values[1], values[0])
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen
