"""How fast are the kernels, against a plain warm read of as many bytes? See README.md here."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from auditor.model.dtype import DTYPES, DType
from auditor.model.pairing import Pairing, PairKind
from auditor.observe.decode import rounded
from auditor.observe.digest import digest_rows
from auditor.observe.kernel_choice import choose
from auditor.observe.kernels import Kernels, Runs, Side, empty_rows, empty_tallies
from auditor.observe.statistics import statistics_of_rows

BUFFER_BYTES = 1 << 20
LAYOUTS = ("contiguous", "odd start", "rows of 128", "odd rows of 128", "tiny, 64 B")
CONTENTS = ("normal", "some NaN", "zeros", "subnormal")
PAIRS = (
    (PairKind.CAST, "bfloat16", "float32"), (PairKind.CAST, "float16", "float32"),
    (PairKind.BOUND, "float32", "float32"), (PairKind.BOUND, "bfloat16", "bfloat16"),
    (PairKind.EQUAL, "bfloat16", "bfloat16"),
)  # fmt: skip


def content(name: str, kind: str, num_bytes: int = BUFFER_BYTES) -> np.ndarray:
    """Elements of a dtype as bytes."""
    dtype = DTYPES[name]
    carrier = np.dtype(dtype.carrier)
    values = np.random.default_rng(0).normal(0, 0.02, num_bytes // carrier.itemsize)
    if dtype.exponent_bits:
        bits = rounded(values.view(np.uint64), DTYPES["float64"], dtype).astype(carrier)
    else:
        bits = (values * 1000).astype(np.int64).astype(carrier)
    if kind == "some NaN":
        bits[::37] = (1 << (8 * carrier.itemsize - 1)) - 1
    elif kind == "zeros":
        bits[:] = 0
    elif kind == "subnormal":
        bits = bits & carrier.type((1 << dtype.mantissa_bits) - 1) | carrier.type(1)
    return bits.view(np.uint8)


def runs(layout: str, width: int) -> Runs:
    """How a buffer is cut, and where in its tensor it lies."""
    count = BUFFER_BYTES // width
    one = np.zeros(1, np.int64)
    if layout in ("contiguous", "odd start"):
        odd = int(layout == "odd start")
        return Runs(one + odd * width, one + count - odd, one + odd, one)
    if layout == "tiny, 64 B":
        number = np.arange(BUFFER_BYTES // 64)
        return Runs(number * 64, np.full(len(number), 64 // width), np.zeros(len(number), np.int64), number)
    number = np.arange(count // 128)
    start = number * 1024 + int(layout.startswith("odd"))
    return Runs(number * 128 * width, np.full(len(number), 128), start, np.zeros(len(number), np.int64))


def seconds(actions: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Median CPU seconds of every action; they take turns, so that other load falls on all."""
    spent: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(repeat + 1):
        for name, action in actions.items():
            start = time.process_time_ns()
            action()
            if turn:
                spent[name].append((time.process_time_ns() - start) / 1e9)
    return {name: statistics.median(found) for name, found in spent.items()}


def measuring(kernels: Kernels, buffer: np.ndarray, dtype: DType, parts: Runs) -> Callable[[], object]:
    rows = empty_rows(int(parts.row.max()) + 1)
    return lambda: kernels.measure(buffer, dtype, parts, rows)


def reading(path: Path, buffer: np.ndarray, then: Callable[[], object]) -> Callable[[], object]:
    """Read a file in buffers, and do something with every one."""

    def read() -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            for offset in range(0, os.fstat(descriptor).st_size, BUFFER_BYTES):
                os.preadv(descriptor, [memoryview(buffer)], offset)
                then()
        finally:
            os.close(descriptor)

    return read


def against_reading(kernels: list[Kernels], names: list[str], folder: Path, mib: int, repeat: int) -> None:
    print(f"read in 1 MiB buffers and measured; {mib} MiB, warm; GB per CPU second, ratio to reading alone")
    for name in names:
        path, buffer = folder / name, np.zeros(BUFFER_BYTES, np.uint8)
        path.write_bytes(content(name, "normal").tobytes() * mib)
        parts = runs("contiguous", np.dtype(DTYPES[name].carrier).itemsize)
        actions = {"read": reading(path, buffer, lambda: None)}
        for one in kernels:
            actions[one.name] = reading(path, buffer, measuring(one, buffer, DTYPES[name], parts))
        spent = seconds(actions, repeat)
        path.unlink()
        rates = [
            f"{what} {mib * BUFFER_BYTES / took / 1e9:.2f} ({spent['read'] / took:.2f})" for what, took in spent.items()
        ]
        print(f"  {name:14s} " + "   ".join(rates))


def in_cache(kernels: list[Kernels], names: list[str], repeat: int) -> None:
    print("measured out of the cache, 1 MiB; GB per CPU second, microseconds a run")
    for name in names:
        width = np.dtype(DTYPES[name].carrier).itemsize
        cases = [(layout, "normal") for layout in LAYOUTS]
        cases += [("contiguous", kind) for kind in CONTENTS[1:] if DTYPES[name].mantissa_bits]
        for layout, kind in cases:
            buffer, parts = content(name, kind), runs(layout, width)
            spent = seconds({one.name: measuring(one, buffer, DTYPES[name], parts) for one in kernels}, repeat)
            print(f"  {name:14s} {layout:16s} {kind:10s} " + rates(spent, BUFFER_BYTES, len(parts.at)))
        elements, start = content(name, "normal").view(DTYPES[name].carrier).reshape(1, -1), np.zeros(1, np.int64)
        parts = {
            "digest": partial(digest_rows, elements, start, DTYPES[name]),
            "statistics": partial(statistics_of_rows, elements, DTYPES[name]),
        }
        print(f"  {name:14s} numpy's parts alone         " + rates(seconds(parts, repeat), BUFFER_BYTES, 1))


def rates(spent: dict[str, float], num_bytes: int, num_runs: int) -> str:
    return "   ".join(
        f"{name} {num_bytes / took / 1e9:5.2f} ({took / num_runs * 1e6:.2f})" for name, took in spent.items()
    )


def pair_of(kind: PairKind, left: str, right: str, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of two tensors that belong together, but for what is wrong with them."""
    rng, count, double = np.random.default_rng(0), BUFFER_BYTES // 8, DTYPES["float64"]
    values = rng.normal(0, 1e-40 if what == "subnormal" else 1e-3, count)
    if kind is PairKind.BOUND:
        others = values**2 * 0.05 if what != "subnormal" else np.abs(values)
        values = values * rng.uniform(0, 0.5, count)
        first, second = (
            rounded(x.view(np.uint64), double, DTYPES[name]) for x, name in ((values, left), (others, right))
        )
    else:
        second = rounded(values.view(np.uint64), double, DTYPES[right])
        first = rounded(second, DTYPES[right], DTYPES[left]) if kind is PairKind.CAST else second.copy()
    if what == "all wrong":
        first = second * 0 + 1 if kind is PairKind.BOUND else first ^ first.dtype.type(1)
        second = second * 0 if kind is PairKind.BOUND else second
    return first.view(np.uint8), second.view(np.uint8)


def comparing(kernels: list[Kernels], repeat: int) -> None:
    print("compared out of the cache; bytes of both sides, GB per CPU second")
    for kind, left, right in PAIRS:
        for what in ("healthy", "subnormal", "all wrong"):
            first, second = pair_of(kind, left, right, what)
            count, zero = np.array([BUFFER_BYTES // 8]), np.zeros(1, np.int64)
            sides = Side(first, DTYPES[left], zero), Side(second, DTYPES[right], zero)
            pairing, tally = Pairing(kind, 0, 1, limit=3.2, floor=1e-30), empty_tallies(1)
            actions = {one.name: partial(one.compare, pairing, *sides, count, zero, tally) for one in kernels}
            spent = seconds(actions, repeat)
            print(f"  {kind.value:6s} {left:9s} {right:9s} {what:10s} " + rates(spent, len(first) + len(second), 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", nargs="+", default=["numpy", "numba"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32", "float16", "float8_e4m3fn", "int64"])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=9)
    arguments = parser.parse_args()
    kernels = [choose(0, name) for name in arguments.kernels]
    with tempfile.TemporaryDirectory() as folder:
        against_reading(kernels, arguments.dtypes, Path(folder), arguments.mib, arguments.repeat)
    in_cache(kernels, arguments.dtypes, arguments.repeat)
    comparing(kernels, arguments.repeat)


if __name__ == "__main__":
    main()
