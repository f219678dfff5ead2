"""Whether numbers are of a narrower dtype than they are kept in: gradients behind first moments, and whole tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from auditor.comparison.holding import Holding
from auditor.comparison.lockstep import Stored, boxes
from auditor.model.catalog import Role
from auditor.model.dtype import DTYPES
from auditor.observe.decode import rounded, to_float64

NEAR = 8
"""Distances of float32 numbers within which one counts as a number of bfloat16: roundings of the moment itself."""
COARSENED = "its gradient is made of bfloat16 numbers"
"""What is said of a first moment where it is so."""
FEWEST = 32
"""Elements that aren't zero, to tell by."""
ROUNDED = 8
"""Elements that became other numbers of a narrower dtype than the reference's, and by chance once in 1,000 are such."""


def share_coarse(first: Stored, beta: float) -> float:
    """Of the elements of m/(1 − β₁), the share that are bfloat16 numbers; 0 where there are too few.

    By chance one float32 number in 4,000 is. After one step m/(1 − β₁) is the gradient as the optimizer got it.

    Raises:
        SourceLostError: the moment can't be read.
    """
    coarse = count = 0
    for box in boxes(first.tensor.shape):
        _, values = first.values(box)
        with np.errstate(over="ignore", invalid="ignore"):
            bits = (values / (1 - beta)).astype(np.float32).view(np.uint32)
        rest = bits[values != 0] & np.uint32(0xFFFF)
        count += rest.size
        coarse += int(np.count_nonzero(np.minimum(rest, np.uint32(0x10000) - rest) <= NEAR))
    return coarse / count if count >= FEWEST else 0.0


def told_of_coarse(candidate: Holding, coarse: Mapping[str, bool], num_moments: int) -> str:
    """What is to be said of gradients that are made of bfloat16 numbers in a computation that gives such; or nothing.

    ``coarse``: the parameters, and whether the reference's gradients are so, too. A sum over ranks is made of bfloat16
    numbers only where it was taken in bfloat16; many choose that, and it differs by no more than the computation
    rounds: it is said, and no standing.
    """
    if 2 * len(coarse) < num_moments or not coarse:
        return ""
    what = f"gradients of {len(coarse)} tensors are made of bfloat16 numbers"
    if 2 * sum(coarse.values()) < len(coarse):
        return (
            f"{what}, most of the reference's are not: they were summed in bfloat16, or are no sums of several products"
        )
    ranks = data_parallel(candidate)
    return f"{what}, though they are sums over {ranks} ranks: they were reduced in bfloat16" if ranks > 1 else ""


def data_parallel(holding: Holding) -> int:
    """Ranks over which gradients are summed; 1 where that is not known.

    Where a layout counts ranks and no more, they are data-parallel if every parameter is cut over them, norms too.
    """
    if holding.mesh.degree("dp") > 1 or holding.source is None:
        return holding.mesh.degree("dp")
    ranks, catalog = holding.mesh.degree("rank"), holding.source.catalog
    own = [number for number, what in enumerate(catalog.tensors) if what.role is Role.PARAMETER and what.shape]
    cut = all(
        len(catalog.rows_by_tensor.get(number, ())) > 1 or catalog.tensors[number].shape[0] < ranks for number in own
    )
    return ranks if own and cut else 1


def narrowed(reference: Stored, candidate: Stored) -> str:
    """The dtype to which the candidate, kept in the reference's float32, was rounded on its way; empty for none.

    What is too small for the dtype becomes zero, or one of few numbers, and tells nothing.

    Raises:
        SourceLostError: a side can't be read.
    """
    wide = DTYPES["float32"]
    if reference.tensor.dtype != wide or candidate.tensor.dtype != wide:
        return ""
    counts = {"bfloat16": 0, "float16": 0}
    for box in boxes(reference.tensor.shape):
        (bits, own), (_, theirs) = reference.values(box), candidate.values(box)
        for name in [*counts]:
            dtype = DTYPES[name]
            if np.array_equal(to_float64(rounded(bits, wide, dtype), dtype), theirs, equal_nan=True):
                usual = np.abs(theirs) >= math.ldexp(1.0, 1 - dtype.bias)
                counts[name] += int(np.count_nonzero(usual & (own != theirs)))
            else:
                del counts[name]
        if not counts:
            return ""
    return next((name for name, count in counts.items() if count >= ROUNDED), "")
