"""The compiled kernels, by numba. They give what the numpy kernels give; see :mod:`~auditor.observe.kernels`."""

from __future__ import annotations

import ctypes
import inspect
import platform
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from llvmlite.binding import get_host_cpu_features
from numba import types
from numpy.typing import NDArray

from auditor.model.dtype import DType, Kind
from auditor.model.joint import Joint, JointKind
from auditor.model.observation import OBSERVED
from auditor.model.pairing import Pairing, PairKind
from auditor.observe import (
    compiled_joints,
    compiled_loops,
    compiled_pair_loops,
    compiled_pairs,
    compiled_steps,
    compiled_sweep,
    compiled_vectors,
    digest,
)  # fmt: skip
from auditor.observe.compiled_joints import Look, looking
from auditor.observe.compiled_loops import Places, measuring
from auditor.observe.compiled_pair_loops import NUM_PAIR_PLACES, SCRATCH_BYTES, comparing
from auditor.observe.compiled_pairs import BEYOND, FIRST, NUM_COUNTS, ONE_ULP
from auditor.observe.compiled_sketch import add_sketches
from auditor.observe.compiled_steps import KEYS, STATE_VECTORS
from auditor.observe.compiled_sweep import sweeping
from auditor.observe.compiled_vectors import FORMS, VECTOR, Form
from auditor.observe.decode import to_float64
from auditor.observe.digest import WORDS_PER_BLOCK, counting_pattern, word_keys
from auditor.observe.kernels import Bytes, Rows, Runs, Side, Stream, comparable
from auditor.observe.numpy_kernels import NumpyKernels

_AT = np.zeros(1, np.int64)


class CompiledKernels:
    """Measures with loops that numba compiles when they are first wanted, and keeps on disk where it can."""

    name = "numba"
    sweeps = True

    def __init__(self) -> None:
        self.numpy = NumpyKernels()

    def measure(self, buffer: Bytes, dtype: DType, runs: Runs, totals: NDArray[np.void]) -> None:
        """As :meth:`~auditor.observe.kernels.Kernels.measure`.

        Raises:
            ValueError: a run lies outside the buffer, or its row outside the totals.
        """
        if not _is_compiled(dtype):
            self.numpy.measure(buffer, dtype, runs, totals)
            return
        columns = np.array((runs.at, runs.length, runs.start, runs.row), np.int64)
        room = _room(dtype)
        places = room.places
        places[:5] = _address(buffer), len(buffer), _rows_address(totals), totals.strides[0], len(totals)
        _no_run_outside(_measuring(room.form)(columns.ctypes.data, columns.shape[1], places.ctypes.data, 0))

    def compare(
        self, pairing: Pairing, left: Side, right: Side, length: NDArray[np.int64], start: NDArray[np.int64],
        tally: NDArray[np.void],
    ) -> None:  # fmt: skip
        """As :meth:`~auditor.observe.kernels.Kernels.compare`.

        Raises:
            ValueError: a run lies outside its buffer, or as the numpy kernels do.
        """
        compare = _comparing(pairing.kind, left.dtype, right.dtype)
        if compare is None:
            self.numpy.compare(pairing, left, right, length, start, tally)
            return
        columns, asked = np.array((left.at, right.at, length, start), np.int64), _Asked(pairing, (left, right), tally)
        table, doubles = asked.table.ctypes.data, asked.doubles.ctypes.data
        _no_run_outside(compare(columns.ctypes.data, columns.shape[1], table, doubles))
        asked.add_to(tally, int(columns[2].sum()))

    def sweep(
        self, streams: Sequence[Stream], pairs: Sequence[tuple[Pairing, int, int, NDArray[np.void]]], rows: Rows,
        totals: NDArray[np.void], joints: Sequence[tuple[Joint, Sequence[int], NDArray[np.void]]] = (),
    ) -> int:  # fmt: skip
        """As :meth:`~auditor.observe.kernels.Kernels.sweep`."""
        looked = [_looked(joint, [_whole(streams[n]) for n in sides], _AT_ONCE) for joint, sides, _ in joints]
        loops = [_comparing(pairing.kind, streams[a].dtype, streams[b].dtype) for pairing, a, b, _ in pairs]
        if None in loops or None in looked or not all(_is_compiled(stream.dtype) for stream in streams):
            return 0
        block = min(len(stream.buffer) // stream.width for stream in streams)
        columns = np.empty(4 * (block // rows.length + 2), np.int64)
        asked = [_Asked(pairing, [_whole(streams[n]) for n in (a, b)], tally) for pairing, a, b, tally in pairs]
        head = [_pread(), block, rows.start, rows.length, rows.step, len(streams), len(pairs), len(joints)]
        table = [number for stream in streams for number in _swept(stream, columns, totals)]
        for loop, one, (_, left, right, _) in zip(loops, asked, pairs, strict=True):
            addresses = (columns.ctypes.data, one.table.ctypes.data, one.doubles.ctypes.data)
            table += [loop.address, *addresses, streams[left].width, streams[right].width]
        table += [number for one in looked if one for number in (one.loop.address, one.numbers.ctypes.data)]
        numbers, tables = np.array(head, np.int64), np.array(table, np.int64)
        done = int(sweeping(_stamp(), _Loop)(numbers.ctypes.data, rows.count, tables.ctypes.data, 0))
        for one, (_, _, _, tally) in zip(asked, pairs, strict=True):
            one.add_to(tally, done)
        for _, _, seam in joints:
            seam["num_compared"] += done
        return done

    def join(
        self, joint: Joint, sides: Sequence[Side], length: NDArray[np.int64], start: NDArray[np.int64],
        seam: NDArray[np.void],
    ) -> None:  # fmt: skip
        """As :meth:`~auditor.observe.kernels.Kernels.join`.

        Raises:
            ValueError: a run lies outside its buffer.
        """
        looked = _looked(joint, sides, length)
        left = np.ones(len(length), bool)
        for run in np.flatnonzero(length >= _WORTH_LOOKING).tolist() if looked else ():
            if looked and not looked.may_be_beyond([int(side.at[run]) for side in sides], int(length[run])):
                left[run] = False
                seam["num_compared"] += length[run]
        if left.any():
            sides = [Side(side.buffer, side.dtype, side.at[left]) for side in sides]
            self.numpy.join(joint, sides, length[left], start[left], seam)

    def sketch(self, buffer: Bytes, dtype: DType, runs: Runs, sketches: NDArray[np.float64]) -> None:
        """As :meth:`~auditor.observe.kernels.Kernels.sketch`.

        Raises:
            ValueError: a run lies outside the buffer.
        """
        add_sketches(buffer, dtype, runs, sketches)


class _Asked:
    """One pairing's running counts, as the compiled loops want them."""

    def __init__(self, pairing: Pairing, sides: Sequence[Side], tally: NDArray[np.void]) -> None:
        self.room = np.zeros(SCRATCH_BYTES + 8 * NUM_COUNTS, np.uint8)
        at = self.room.ctypes.data
        ends = [value for side in sides for value in (_address(side.buffer), len(side.buffer))]
        self.table = np.array([*ends, at, at + SCRATCH_BYTES, *[0] * NUM_COUNTS], np.int64)
        self.counts = self.table[NUM_PAIR_PLACES:]
        self.counts[FIRST] = tally["first"][0]
        self.doubles = np.array((pairing.limit, pairing.floor, tally["largest"][0]), np.float64)

    def add_to(self, tally: NDArray[np.void], num_compared: int) -> None:
        """Put what was found of so many elements into the tally."""
        tally["num_compared"] += num_compared
        tally["num_beyond"] += self.counts[BEYOND]
        tally["num_one_ulp"] += self.counts[ONE_ULP]
        tally["largest"], tally["first"] = self.doubles[2], self.counts[FIRST]


_AT_ONCE = np.zeros(1, np.int64)
_WORTH_LOOKING = 512
"""Elements of a run that are worth a call."""


def _looked(joint: Joint, sides: Sequence[Side], length: NDArray[np.int64]) -> Look | None:
    """The compiled look at a joint; None where there is none for these dtypes."""
    for side in sides:
        ends = side.at + length * np.dtype(side.dtype.carrier).itemsize
        if len(length) and (int(side.at.min()) < 0 or int(ends.max()) > len(side.buffer)):
            raise ValueError("a run lies outside its buffer")
    loop = _looking(joint.kind, tuple(side.dtype for side in sides))
    return None if loop is None else Look(loop, joint.constants, [_address(side.buffer) for side in sides])


@lru_cache
def _looking(kind: JointKind, dtypes: tuple[DType, ...]) -> Any:
    """The compiled look, or None where there is none for these dtypes."""
    floats = all(_is_compiled(one) and one.kind is Kind.FLOAT and FORMS[_form(one)].width > 1 for one in dtypes)
    return looking(kind, tuple(map(_form, dtypes)), _stamp(), _Loop) if floats else None


def _whole(stream: Stream) -> Side:
    return Side(stream.buffer, stream.dtype, _AT)


def _swept(stream: Stream, columns: NDArray[np.int64], totals: NDArray[np.void]) -> list[int]:
    """A stream's numbers for the sweep; ``columns`` is room for a block's runs."""
    numbers = [stream.descriptor, stream.offset, stream.width, _address(stream.buffer)]
    if stream.row < 0:
        return [*numbers, 0, 0, 0, -1]
    room = _room(stream.dtype)
    room.places[2:5] = _rows_address(totals), totals.strides[0], len(totals)
    addresses = (_measuring(room.form).address, columns.ctypes.data, room.places.ctypes.data)
    return [*numbers, *addresses, stream.row]


def _address(buffer: Bytes) -> int:
    if buffer.itemsize != 1 or not buffer.flags.c_contiguous:
        raise ValueError("a buffer is bytes one after the other")
    return buffer.ctypes.data


def _rows_address(totals: NDArray[np.void]) -> int:
    if totals.dtype is not OBSERVED and totals.dtype != OBSERVED:
        raise ValueError("totals are rows of OBSERVED")
    return totals.ctypes.data


def _no_run_outside(run: int) -> None:
    # What is compiled would read foreign memory where numpy would have complained.
    if run >= 0:
        raise ValueError(f"run {run} lies outside the buffer or the totals")


@lru_cache
def _is_compiled(dtype: DType) -> bool:
    """Whether there are loops for the dtype, and this machine has the instructions: float16 else needs a library."""
    if dtype.apart:
        return False
    if dtype.name != "float16" or platform.machine().lower() in ("arm64", "aarch64"):
        return True
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return "+f16c" in (numba.config.CPU_FEATURES or "")
    return bool(get_host_cpu_features().get("f16c", False))


@lru_cache
def _comparing(kind: PairKind, left: DType, right: DType) -> Any:
    """The compiled loop, or None where there is none for these dtypes."""
    if not (comparable(kind, left, right) and _is_compiled(left) and _is_compiled(right)):
        return None
    first, second = _form(left), _form(right)
    if kind is PairKind.EQUAL:
        # Bits are bits: whatever kind of number they are.
        plain = FORMS.index(next(form for form in FORMS if form.width == FORMS[first].width))
        return comparing("equal", plain, plain, _stamp(), _Loop)
    floats = all(dtype.kind is Kind.FLOAT and FORMS[_form(dtype)].width > 1 for dtype in (left, right))
    if kind is PairKind.BOUND and floats:
        return comparing("bound", first, second, _stamp(), _Loop)
    if kind is PairKind.CAST and left.name in ("bfloat16", "float16") and right.name == "float32":
        return comparing("cast", first, second, _stamp(), _Loop)
    return None


@lru_cache
def _form(dtype: DType) -> int:
    width = np.dtype(dtype.carrier).itemsize
    if width == 1:
        return FORMS.index(Form(1, "opaque"))
    if dtype.name == "bfloat16":
        kind = "brain"
    elif dtype.kind in (Kind.FLOAT, Kind.COMPLEX):
        kind = "float"
    else:
        kind = "signed" if dtype.kind is Kind.SIGNED else "unsigned"
    return next(number for number, form in enumerate(FORMS) if (form.width, form.kind) == (width, kind))


def _measuring(form: int) -> Any:
    return measuring(form, _stamp(), _Loop)


@lru_cache
def _pread() -> int:
    """The address of the C library's function."""
    return ctypes.cast(ctypes.CDLL(None).pread, ctypes.c_void_p).value or 0


@lru_cache
def _stamp() -> int:
    """A number that changes with the source: numba itself looks at nothing but the age of the file of a loop."""
    modules = (compiled_joints, compiled_loops, compiled_pair_loops, compiled_pairs, compiled_steps, compiled_sweep,
               compiled_vectors, digest)  # fmt: skip
    return zlib.crc32("".join(inspect.getsource(module) for module in modules).encode())


class _Loop:
    """A compiled C function of four numbers, kept on disk for the next process if that can be.

    Called from Python it runs without the interpreter's lock; other loops call it by its address.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        signature = types.int64(types.voidptr, types.int64, types.voidptr, types.voidptr)
        try:
            self.compiled = numba.cfunc(signature, cache=True)(function)
        except (RuntimeError, OSError, EOFError):
            # numba finds no folder that it may write into, or what lies there can't be read, or no more be written.
            self.compiled = numba.cfunc(signature)(function)
        self.address = int(self.compiled.address)

    def __call__(self, runs: int, count: int, table: int, doubles: int) -> int:
        return int(self.compiled.ctypes(runs, count, table, doubles))


class _Rooms(threading.local):
    """Every thread's own, by the names of dtypes."""

    def __init__(self) -> None:
        self.made: dict[str, _Room] = {}


_rooms = _Rooms()


@dataclass(frozen=True, slots=True)
class _Room:
    """What one thread needs to measure elements of one dtype; making it anew for every call would cost more than it."""

    form: int
    places: NDArray[np.int64]
    """As :class:`~auditor.observe.compiled_loops.Places`; the first five change from call to call."""
    kept: tuple[NDArray[Any], ...]
    """The arrays whose addresses are in ``places``."""


def _room(dtype: DType) -> _Room:
    room = _rooms.made.get(dtype.name)
    if room is None:
        room = _rooms.made[dtype.name] = _make_room(dtype)
    return room


def _make_room(dtype: DType) -> _Room:
    form, pattern = _form(dtype), counting_pattern(dtype)
    blank = _blank(form)
    kept = (
        blank.copy(), blank, np.zeros(VECTOR, np.uint8), *_keys(), *_prefix(len(pattern)),
        np.zeros((8, 256), np.int64), _values(dtype),
    )  # fmt: skip
    columns = [
        OBSERVED.fields[name][1]
        for name in ("lane0", "num_nan", "minimum", "maximum", "sum_squares", "bits_used")
        if OBSERVED.fields
    ]
    places = Places._make([0, 0, 0, 0, 0, *(array.ctypes.data for array in kept), *columns, pattern[0]])
    return _Room(form, np.array(places, np.int64), kept)


@lru_cache
def _keys() -> NDArray[np.uint32]:
    """Both lanes' word keys; whole vectors are read from any of them on."""
    room = np.zeros(2 * (WORDS_PER_BLOCK + VECTOR) + VECTOR, np.uint32)
    # Aligned, as most runs begin at the beginning of a block.
    first = -room.ctypes.data % VECTOR // room.itemsize
    keys = room[first:][: 2 * (WORDS_PER_BLOCK + VECTOR)].reshape(2, -1)
    keys[:, :WORDS_PER_BLOCK] = word_keys()
    return keys


@lru_cache
def _prefix(stride: int) -> NDArray[np.uint64]:
    """Sums of the keys of all words below, of every ``stride``-th word alone."""
    sums = np.zeros((2, WORDS_PER_BLOCK + 1), np.uint64)
    counted = word_keys() * (np.arange(WORDS_PER_BLOCK) % stride == 0).astype(np.uint64)
    np.cumsum(counted, axis=1, out=sums[:, 1:])
    return sums


@lru_cache
def _blank(form: int) -> NDArray[np.uint64]:
    """A state to which nothing was added."""
    state = np.zeros((STATE_VECTORS, VECTOR // FORMS[form].width), f"<u{FORMS[form].width}")
    sign = 1 << (8 * FORMS[form].width - 1)
    state[KEYS], state[KEYS + 1], state[KEYS + 3] = sign, sign - 1, 2 * sign - 1
    return state.reshape(-1).view(np.uint64)


@lru_cache
def _values(dtype: DType) -> NDArray[np.float64]:
    """The value of every byte, for dtypes of one byte."""
    if np.dtype(dtype.carrier).itemsize > 1:
        return np.zeros(256)
    return to_float64(np.arange(256, dtype=np.uint8), dtype)
