"""The compiled loop that reads files in lock-step, measures and compares: block by block, without the interpreter.

A block is so small that what was read is measured and compared while it lies in the L2 cache; in Python the calls for
so small blocks would cost more than they save, and threads would wait for each other's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from auditor.observe.compiled_vectors import I64, Builder, Value, inlined, load_64, store

NUM_HEAD, NUM_SIDE, NUM_PAIR, NUM_JOINT = 8, 8, 6, 2
"""Numbers of the head: address of ``pread``, elements of a block, C-order index of the first element, elements of a
row, steps in C order from one row to the next, how many sides, pairs and joints there are. Of a side: descriptor, byte
of the first element, bytes of an element, and the addresses of its buffer, of what measures it (or 0), of room for the
columns of a block's runs and of its places, and its row of the totals. Of a pair: the addresses of what compares it, of
room for runs, of its table and of its doubles, bytes of an element on the left and on the right. Of a joint: the
addresses of what looks at it, and of its numbers."""


@intrinsic
def call_address(typingctx: Any, address: Any, first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """Call the C function at an address with four numbers of 64 bits; what it takes in 32 bits is their lower half."""

    def codegen(context: Any, builder: Builder, signature: Any, values: Sequence[Value]) -> Value:
        function = builder.inttoptr(values[0], ir.FunctionType(I64, [I64] * 4).as_pointer())
        return builder.call(function, values[1:])

    return types.int64(*[types.int64] * 5), codegen


@inlined
def _filled(pread: int, side: Any, done: int, size: int) -> bool:
    """Read ``size`` elements from number ``done`` on; whether they are there.

    The system may give less than it is asked for, but before the end never nothing.
    """
    width = side[2]
    have, want = 0, size * width
    while have < want:
        count = call_address(pread, side[0], side[3] + have, want - have, side[1] + done * width + have)
        if count <= 0:
            return False
        have += count
    return True


@inlined
def _number(head: Any, done: int, size: int) -> Any:
    """How many rows, or parts of them, a block is of."""
    return (done + size - 1) // head[3] - done // head[3] + 1


@inlined
def _runs(head: Any, done: int, size: int, lengths: int, starts: int) -> None:
    """Write the lengths of a block's runs and where in the tensor they begin."""
    row, at, n = done // head[3], done % head[3], 0
    while size > 0:
        length = min(head[3] - at, size)
        store(lengths + n, length)
        store(starts + n, head[2] + row * head[4] + at)
        size -= length
        row, at, n = row + 1, 0, n + 8


@inlined
def _offsets(offsets: int, lengths: int, count: int, width: int) -> None:
    """Write where the runs begin in a buffer."""
    at = 0
    for n in range(count):
        store(offsets + 8 * n, at)
        at += load_64(lengths + 8 * n) * width


@inlined
def _measured(head: Any, side: Any, done: int, size: int) -> None:
    count, columns, places = _number(head, done, size), side[5], side[6]
    lengths = columns + 8 * count
    _runs(head, done, size, lengths, columns + 16 * count)
    _offsets(columns, lengths, count, side[2])
    for n in range(count):
        store(columns + 24 * count + 8 * n, side[7])
    store(places, side[3])
    store(places + 8, size * side[2])
    call_address(side[4], columns, count, places, 0)


@inlined
def _compared(head: Any, pair: Any, done: int, size: int) -> None:
    count, columns, table = _number(head, done, size), pair[1], pair[2]
    lengths = columns + 16 * count
    _runs(head, done, size, lengths, columns + 24 * count)
    _offsets(columns, lengths, count, pair[4])
    _offsets(columns + 8 * count, lengths, count, pair[5])
    store(table + 8, size * pair[4])
    store(table + 24, size * pair[5])
    call_address(pair[0], columns, count, table, pair[3])


@inlined
def _seen(joints: Any, num_joints: int, size: int) -> bool:
    """Whether something of a block may be beyond."""
    for n in range(num_joints):
        if call_address(joints[n * NUM_JOINT], 0, size, joints[n * NUM_JOINT + 1], 0) != 0:
            return True
    return False


@lru_cache
def sweeping(stamp: int, compiled: Callable[..., Any]) -> Any:
    """The loop over the blocks of ``count`` elements. It takes the head, and sides, pairs, joints one after the other.

    It gives the number of elements that are done; less than ``count`` where a file can't be read as far as that, or
    where something may be beyond: that is for others to measure.
    """

    @compiled
    def sweep(head: Any, count: int, tables: Any, doubles: Any) -> int:
        known = carray(head, NUM_HEAD, np.int64)
        pread, block, num_sides, num_pairs, num_joints = known[0], known[1], known[5], known[6], known[7]
        table = carray(tables, num_sides * NUM_SIDE + num_pairs * NUM_PAIR + num_joints * NUM_JOINT, np.int64)
        pairs = table[num_sides * NUM_SIDE :]
        joints = pairs[num_pairs * NUM_PAIR :]
        done = stamp & 0
        while done < count:
            size = min(block, count - done)
            for n in range(num_sides):
                if not _filled(pread, table[n * NUM_SIDE : (n + 1) * NUM_SIDE], done, size):
                    return done
            if _seen(joints, num_joints, size):
                return done
            for n in range(num_sides):
                if table[n * NUM_SIDE + 4] != 0:
                    _measured(known, table[n * NUM_SIDE : (n + 1) * NUM_SIDE], done, size)
            for n in range(num_pairs):
                _compared(known, pairs[n * NUM_PAIR : (n + 1) * NUM_PAIR], done, size)
            done += size
        return done

    return sweep
