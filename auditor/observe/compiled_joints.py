"""The compiled look at joints: whether any of many elements may be beyond. What may be is measured by numpy.

The formulas are those of :mod:`~auditor.observe.replay`, each turned into a comparison without a quotient where that
saves time, and loosened so far that rounding hides nothing. So what is measured is the same with and without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from auditor.model.joint import JointKind
from auditor.observe.compiled_pairs import doubles_at, flag
from auditor.observe.compiled_vectors import DOUBLES, FORMS, I64, Builder, Value, load_vector, loop, splat

LANES = 8
TILE = 1024
"""Elements that are looked at together, while they lie in the L1 cache."""
MAX_SIDES, NUM_NUMBERS = 5, 6
"""Of a joint; addresses of its sides' elements, and of its constants."""
_LOOSE, _LOOSER = 1 - 1e-11, 1 - 1e-6
"""What is allowed, as it is looked for: far from what rounding in 53 bits could change; the second where what is found
is a difference of what is nearly the same, and allowed are some roundings of 24 bits."""
_SINGLE, _TINY = 2.0**-24, 2.0**-126


class _Writer:
    """Arithmetic on vectors of doubles."""

    def __init__(self, b: Builder, constants: Value, count: int) -> None:
        self.b = b
        kind = ir.DoubleType()
        self.constants = [splat(b, load_vector(b, constants, kind, 8 * n), LANES) for n in range(count)]

    def all(self, value: float) -> Value:
        """A vector of one value."""
        return ir.Constant(DOUBLES, [value] * LANES)

    def sum(self, *values: Value) -> Value:
        total = values[0]
        for value in values[1:]:
            total = self.b.fadd(total, value)
        return total

    def product(self, *values: Value) -> Value:
        total = values[0]
        for value in values[1:]:
            total = self.b.fmul(total, value)
        return total

    def call(self, name: str, value: Value) -> Value:
        function = ir.FunctionType(DOUBLES, [DOUBLES])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, function, f"llvm.{name}.v8f64"), [value])

    def size(self, value: Value) -> Value:
        return self.call("fabs", value)

    def root(self, value: Value) -> Value:
        return self.call("sqrt", value)

    def larger(self, one: Value, other: Value) -> Value:
        return self.b.select(self.b.fcmp_ordered(">", one, other), one, other)

    def beyond(self, found: Value, allowed: Value, loose: float = _LOOSE) -> Value:
        """Where something is more than is allowed; nowhere where either is no number."""
        return self.b.fcmp_ordered(">", found, self.b.fmul(allowed, self.all(loose)))


def _decay(w: _Writer, sides: Sequence[Value]) -> Value:
    new, old = sides
    factor, floor = w.constants
    return w.beyond(w.product(factor, old), w.sum(new, floor))


def _rest(w: _Writer, sides: Sequence[Value]) -> Value:
    same = w.b.fcmp_ordered("==", *sides)
    return w.b.and_(same, w.b.fcmp_ordered(">", w.size(sides[0]), w.all(1e-30)))


def _stride_first(w: _Writer, sides: Sequence[Value]) -> Value:
    """The bound by the gradients alone, squared: ln x >= 1 - 1/x, and no quotient is left.

    |moved|^2 <= (rate * fresh)^2 * (1 - before/after + logarithm), times ``after``.
    """
    new, second, old, second_before, _ = sides
    rate, _, fresh, logarithm, floor, limit, _, _ = w.constants
    moved = w.size(w.b.fsub(new, old))
    after, before = w.sum(second, floor), w.sum(second_before, floor)
    reach, whole = w.product(rate, fresh), w.product(rate, limit)
    growth = w.b.fsub(w.product(w.sum(w.all(1.0), logarithm), after), before)
    far = w.beyond(w.product(moved, moved, after), w.product(reach, reach, w.larger(growth, w.all(0.0))))
    return w.b.or_(far, w.beyond(moved, whole))


def _stride(w: _Writer, sides: Sequence[Value]) -> Value:
    new, second, old, second_before, first_before = sides
    rate, carried, fresh, logarithm, floor, limit, decays, rounds = w.constants
    after, before = w.sum(second, floor), w.sum(second_before, floor)
    growth = w.sum(w.b.fsub(w.all(1.0), w.b.fdiv(before, after)), logarithm)
    growth = w.root(w.larger(growth, w.all(0.0)))
    steps = w.sum(w.b.fdiv(w.product(carried, w.size(first_before)), w.root(before)), w.product(fresh, growth))
    steps = w.b.select(w.b.fcmp_ordered("<", steps, limit), steps, limit)
    reach = w.product(rate, steps)
    around = w.product(w.sum(decays, rounds), w.sum(w.size(old), reach))
    return w.beyond(w.size(w.b.fsub(new, old)), w.sum(reach, around, w.all(_TINY)))


def _variance(w: _Writer, sides: Sequence[Value]) -> Value:
    second, first, second_before, first_before = sides
    beta1, beta2, u = w.constants
    rest1, rest2 = (w.b.fsub(w.all(1.0), beta) for beta in (beta1, beta2))
    gradient = w.b.fdiv(w.b.fsub(first, w.product(beta1, first_before)), rest1)
    size, square, twice = w.size(gradient), w.product(gradient, gradient), w.all(2 * _SINGLE)
    off = w.product(w.all(4.0), u, w.sum(w.size(first), w.size(first_before)))
    off = w.b.fdiv(w.sum(off, w.product(twice, w.sum(size, w.size(first_before)))), rest1)
    wanted = w.sum(w.product(beta2, second_before), w.product(rest2, square))
    allowed = w.product(rest2, w.sum(w.product(w.all(2.0), size, off), w.product(off, off)))
    rounding = w.product(w.all(8.0), u, w.sum(second, second_before))
    allowed = w.sum(allowed, rounding, w.product(twice, w.sum(square, second_before)), w.all(4 * _TINY))
    return w.beyond(w.size(w.b.fsub(second, wanted)), allowed, _LOOSER)


def _update(w: _Writer, sides: Sequence[Value]) -> Value:
    new, first, second, old = sides
    rate, weight_decay, eps, correction1, correction2, u = w.constants
    root = w.b.fdiv(w.root(w.larger(second, w.all(0.0))), w.root(correction2))
    step = w.b.fdiv(w.product(w.b.fdiv(rate, correction1), first), w.sum(root, eps))
    kept = w.product(old, w.b.fsub(w.all(1.0), w.product(rate, weight_decay)))
    allowed = w.product(w.all(4.0), u, w.sum(w.size(old), w.size(new)))
    allowed = w.sum(allowed, w.product(w.all(1e-4), w.size(step)), w.all(_TINY))
    return w.beyond(w.size(w.b.fsub(new, w.b.fsub(kept, step))), allowed, _LOOSER)


_Mask = Callable[[_Writer, Sequence[Value]], Value]
_LOOKS: tuple[tuple[_Mask, int, int], ...] = (
    (_decay, 2, 2), (_rest, 2, 0), (_stride_first, 5, 8), (_stride, 5, 8), (_variance, 4, 3), (_update, 4, 6),
)  # fmt: skip
"""What says where elements may be beyond, and how many sides and constants it takes."""
_OF_KIND: Mapping[JointKind, tuple[int, int]] = {
    JointKind.DECAY: (0, 0), JointKind.REST: (1, 1), JointKind.STRIDE: (2, 3), JointKind.VARIANCE: (4, 4),
    JointKind.UPDATE: (5, 5),
}  # fmt: skip
"""Two looks at a kind, of which the second is taken where the first sees something."""


@intrinsic(prefer_literal=True)
def _look(
    typingctx: Any, which: Any, f0: Any, f1: Any, f2: Any, f3: Any, f4: Any, numbers: Any, first: Any, count: Any
) -> Any:
    """Whether any of 8·``count`` elements from number ``first`` on may be beyond."""
    literals = (which, f0, f1, f2, f3, f4)
    if not all(isinstance(one, types.IntegerLiteral) for one in literals):
        return None

    def codegen(context: Any, b: Builder, signature: Any, values: Sequence[Value]) -> Value:
        mask, num_sides, num_constants = _LOOKS[which.literal_value]
        forms = [FORMS[one.literal_value] for one in literals[1 : 1 + num_sides]]
        table, start, number = values[6:]
        writer = _Writer(b, load_vector(b, table, I64, 8 * MAX_SIDES), num_constants)
        starts = [b.add(load_vector(b, table, I64, 8 * n), b.mul(start, ir.Constant(I64, form.width)))
                  for n, form in enumerate(forms)]  # fmt: skip

        def step(index: Value, totals: list[Value]) -> list[Value]:
            sides = [doubles_at(b, form, at, index) for form, at in zip(forms, starts, strict=True)]
            return [b.or_(totals[0], mask(writer, sides))]

        none = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [0] * LANES)
        return flag(b, loop(b, number, [none], step)[0])

    return types.int64(*literals, *[types.int64] * 3), codegen


@lru_cache
def looking(kind: JointKind, forms: tuple[int, ...], stamp: int, compiled: Callable[..., Any]) -> Any:
    """The loop over ``count`` elements that lie without gaps on all sides: 1 where any may be beyond, else 0.

    ``numbers``: the addresses of the sides, 0 for those that the kind doesn't take, and of the constants.
    """
    first, second = _OF_KIND[kind]
    f0, f1, f2, f3, f4 = (*forms, *[0] * (MAX_SIDES - len(forms)))

    @compiled
    def look(unused: Any, count: int, numbers: Any, table: Any) -> int:
        # The address of the numbers themselves is their last.
        places = carray(numbers, NUM_NUMBERS + 1, np.int64)
        at, done = places[NUM_NUMBERS], np.int64(stamp & 0)
        if count < LANES:
            return 1
        while done < count:
            size = min(np.int64(TILE), count - done)
            # What is left of a vector is looked at with what lies before it.
            begin = done if size >= LANES else count - LANES
            number = max(np.int64(1), size // LANES)
            if _look(first, f0, f1, f2, f3, f4, at, begin, number) and (
                first == second or _look(second, f0, f1, f2, f3, f4, at, begin, number)
            ):
                return 1
            done += size if size < LANES else number * LANES
        return 0

    return look


class Look:
    """The look at one joint in buffers."""

    def __init__(self, loop: Any, constants: Sequence[float], addresses: Sequence[int]) -> None:
        self.loop, self.addresses = loop, addresses
        self.constants = np.array(constants or (0.0,), np.float64)
        self.numbers = np.array([*addresses, *[0] * (NUM_NUMBERS - len(addresses)), 0], np.int64)
        self.numbers[NUM_NUMBERS - 1 :] = self.constants.ctypes.data, self.numbers.ctypes.data

    def may_be_beyond(self, at: Sequence[int], length: int) -> bool:
        """Whether any element of a run may be beyond, which begins with these bytes of the buffers."""
        self.numbers[: len(at)] = [address + byte for address, byte in zip(self.addresses, at, strict=True)]
        return bool(self.loop(0, length, self.numbers.ctypes.data, 0))
