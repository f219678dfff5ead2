"""Measures of torch tensors where they live: on the CPU by the offline kernels on a view, elsewhere by torch's own ops.

On devices everything is modular multiply-add of int64, which wraps around, so the digests are those of the offline
kernels bit for bit; so are counts and extrema. Temporaries stay below 64 MiB: elements are taken in parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from auditor.hooks.recording import add_measured, measured_on_cpu, runs_of
from auditor.model.dtype import DType, Kind
from auditor.model.region import Box, FlatRange, Region
from auditor.observe.digest import WORDS_PER_BLOCK, block_keys, counting_pattern, word_keys
from auditor.observe.kernels import Kernels, empty_rows

PART = 1 << 20
"""Elements (halves, of complex ones) that are widened at once on a device, a multiple of a block. At most seven
temporaries of eight bytes each are alive at a time: 56 MiB."""
COPY_BYTES = 16 << 20
"""Of what does not lie without gaps so much is copied at once."""
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def measure(
    kernels: Kernels, values: torch.Tensor, dtype: DType, shape: tuple[int, ...], region: Region
) -> NDArray[np.void]:
    """One row of OBSERVED of a rank's part of a tensor of ``shape``, which lies at ``region`` of it."""
    values = values.detach()
    if values.is_conj() or values.is_neg():
        values = values.resolve_conj().resolve_neg()
    if values.is_contiguous() or isinstance(region, FlatRange):
        return _measure(kernels, values.contiguous(), dtype, shape, region)
    totals = empty_rows(1)
    for part, box in _blocks(values, region):
        add_measured(totals, _measure(kernels, part.contiguous(), dtype, shape, box))
    return totals


def _blocks(values: torch.Tensor, box: Box) -> Iterator[tuple[torch.Tensor, Box]]:
    """Parts of a tensor that is to be copied, cut along its first dim."""
    row = max(1, values[:1].numel() * values.element_size())
    together = max(1, COPY_BYTES // row)
    for low in range(0, len(values), together):
        high = min(low + together, len(values))
        start, stop = (box.start[0] + low, *box.start[1:]), (box.start[0] + high, *box.stop[1:])
        yield values[low:high], Box(start, stop)


def _measure(
    kernels: Kernels, values: torch.Tensor, dtype: DType, shape: tuple[int, ...], region: Region
) -> NDArray[np.void]:
    # Dims of one element may have any stride, also where the whole lies without gaps.
    flat = values.reshape(-1).contiguous()
    if flat.device.type == "cpu":
        buffer = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)
        return measured_on_cpu(kernels, buffer, dtype, shape, region)
    return measured_on_device(flat, dtype, shape, region)


def measured_on_device(flat: torch.Tensor, dtype: DType, shape: tuple[int, ...], region: Region) -> NDArray[np.void]:
    """As :func:`measure`, by torch ops on the tensor's device. ``flat``: the part's elements in its C order."""
    totals = empty_rows(1)
    if not flat.numel():
        return totals
    width = np.dtype(dtype.carrier).itemsize
    if dtype.kind is Kind.COMPLEX:
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(_CARRIERS[width])
    sums = _Sums(dtype, bits.device)
    for runs in runs_of(region, shape, dtype):
        # All runs have one length.
        count, length = len(runs.length), int(runs.length[0])
        first = int(runs.at[0]) // width
        if length >= PART or count == 1:
            for number, start in enumerate(runs.start.tolist()):
                sums.add_run(bits[first + number * length : first + (number + 1) * length], start)
            continue
        together = max(1, PART // length)
        starts = torch.from_numpy(runs.start).to(bits.device)
        for low in range(0, count, together):
            rows = bits[first + low * length : first + min(low + together, count) * length]
            sums.add_rows(rows.view(-1, length), starts[low : low + together])
    return sums.into(totals)


class _Sums:
    """What was measured of one part so far; it stays on the device until all is queued there."""

    def __init__(self, dtype: DType, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.bits = dtype.bits // 2 if dtype.kind is Kind.COMPLEX else dtype.bits
        self.pattern = counting_pattern(dtype)
        self.tables = _tables(device)
        self.by_block: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Numbers of blocks, and the sums of both lanes in each before its block's key."""
        self.counts: list[torch.Tensor] = []
        self.extrema: list[torch.Tensor] = []
        self.squares: list[torch.Tensor] = []

    def add_run(self, run: torch.Tensor, start: int) -> None:
        """Add elements that lie without gaps from ``start`` of the tensor's C order on."""
        per_block = WORDS_PER_BLOCK * 32 // self.bits
        head = min(-start % per_block, len(run))
        body = head + (len(run) - head) // per_block * per_block
        for low, high in ((0, head), (body, len(run))):
            if high > low:
                starts = torch.full((1,), start + low, dtype=torch.int64, device=self.device)
                self.add_rows(run[low:high].view(1, -1), starts)
        for low in range(head, body, PART):
            part = run[low : min(low + PART, body)]
            self._blocks(part, (start + low) // per_block)
            self._statistics(part)

    def _blocks(self, part: torch.Tensor, first: int) -> None:
        """Whole blocks. Narrow elements are taken as the words that they lie in, where their storage allows."""
        if part.element_size() < 4 and part.storage_offset() * part.element_size() % 4:
            part = part.clone()
        words = part.view(torch.int32).view(-1, WORDS_PER_BLOCK).to(torch.int64)
        words &= 0xFFFFFFFF
        count = len(words)
        lanes = torch.stack([(words * self.tables[lane]).sum(1) for lane in (0, 1)])
        ones = np.resize(np.array(self.pattern, np.uint64), WORDS_PER_BLOCK)
        counted = (ones * word_keys()).sum(axis=1, dtype=np.uint64).view(np.int64)
        lanes += torch.from_numpy(counted.copy()).to(self.device)[:, None]
        self.by_block.append((torch.arange(first, first + count, device=self.device), lanes))

    def add_rows(self, rows: torch.Tensor, starts: torch.Tensor) -> None:
        """Add runs of one length, one a row, that begin at ``starts`` of the tensor's C order."""
        self._scattered(rows, starts)
        self._statistics(rows)

    def _scattered(self, rows: torch.Tensor, starts: torch.Tensor) -> None:
        bits = self.bits
        if bits == 64:
            rows, starts, bits = rows.contiguous().view(torch.int32), starts * 2, 32
        index = (starts[:, None] + torch.arange(rows.shape[1], device=self.device)).reshape(-1)
        values = rows.reshape(-1).to(torch.int64)
        values &= (1 << bits) - 1
        if bits == 32:
            values += index % len(self.pattern) == 0
        else:
            values += 1
            values <<= index % (32 // bits) * bits
            index //= 32 // bits
        block, which = torch.unique(torch.div(index, WORDS_PER_BLOCK, rounding_mode="floor"), return_inverse=True)
        index %= WORDS_PER_BLOCK
        sums = torch.zeros((2, len(block)), dtype=torch.int64, device=self.device)
        for lane in (0, 1):
            sums[lane].index_add_(0, which, values * self.tables[lane][index])
        self.by_block.append((block, sums))

    def _statistics(self, elements: torch.Tensor) -> None:
        if self.dtype.kind in (Kind.FLOAT, Kind.COMPLEX):
            self._of_floats(elements.contiguous().view(_float_of(self.dtype)).to(torch.float64))
            return
        values, unsigned = elements, self.dtype.kind is not Kind.SIGNED
        if unsigned and elements.dtype is not torch.uint8:
            # Unsigned numbers in signed carriers: with their highest bit turned they are in order.
            values = elements ^ -(1 << (self.bits - 1))
        elif not unsigned and self.bits == 8:
            values = elements.view(torch.int8)
        self.extrema.append(torch.stack([values.min(), values.max()]))
        wide = elements.to(torch.float64) if values is elements else values.to(torch.float64)
        if unsigned and elements.dtype is not torch.uint8:
            wide += 2.0 ** (self.bits - 1)
        zero = (elements == 0).sum()
        self.counts.append(torch.stack([torch.zeros_like(zero), torch.zeros_like(zero), zero]))
        self.squares.append((wide * wide).sum())

    def _of_floats(self, values: torch.Tensor) -> None:
        nan, infinite = torch.isnan(values), torch.isinf(values)
        self.counts.append(torch.stack([nan.sum(), infinite.sum(), (values == 0).sum()]))
        low = torch.where(nan, math.inf, values).min()
        self.extrema.append(torch.stack([low, torch.where(nan, -math.inf, values).max()]))
        values = torch.where(nan | infinite, 0.0, values)
        self.squares.append((values * values).sum())

    def into(self, totals: NDArray[np.void]) -> NDArray[np.void]:
        """Put everything into one row of OBSERVED; here the device is waited for."""
        total = totals[0]
        # One copy to the host for all: each of them waits for the device.
        blocks = torch.cat([numbers for numbers, _ in self.by_block]).cpu().numpy().astype(np.uint64)
        found = torch.cat([sums for _, sums in self.by_block], dim=1).cpu().numpy().view(np.uint64)
        for lane, name in enumerate(("lane0", "lane1")):
            total[name] = (found[lane] * block_keys(blocks, lane)).sum(dtype=np.uint64)
        total["num_nan"], total["num_infinite"], total["num_zero"] = torch.stack(self.counts).sum(0).tolist()
        extrema = torch.stack(self.extrema)
        turned = self.dtype.kind in (Kind.UNSIGNED, Kind.BOOL) and self.bits > 8
        by = 1 << (self.bits - 1) if turned else 0
        total["minimum"], total["maximum"] = (
            float(end.tolist() + by) + 0.0 for end in (extrema[:, 0].min(), extrema[:, 1].max())
        )
        total["sum_squares"] = float(torch.stack(self.squares).sum())
        return totals


@lru_cache(maxsize=16)
def _tables(device: torch.device) -> torch.Tensor:
    """The word keys of both lanes on a device, shape (2, 2048)."""
    return torch.from_numpy(word_keys().view(np.int64).copy()).to(device)


def _float_of(dtype: DType) -> torch.dtype:
    return getattr(torch, {"complex64": "float32", "complex128": "float64"}.get(dtype.name, dtype.name))
