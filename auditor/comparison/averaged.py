"""Whether a tensor is the mean of replicas that drifted apart, as converters average what ranks should hold alike.

Source: huggingface/transformers ``models/bloom/convert_bloom_original_checkpoint_to_pytorch.py`` (4.47).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from auditor.comparison.holding import Holding
from auditor.comparison.lockstep import Stored, boxes

MOST = 64
"""Replicas that are read again."""


def told_of_mean(reference: Holding, number: int, candidate: Stored) -> str:
    """What is to be said of a tensor that is the mean of the reference's replicas; empty where it isn't.

    Raises:
        SourceLostError: something of it can't be read.
    """
    rows = reference.rows[number]
    if reference.source is None or not 1 < len(rows) <= MOST:
        return ""
    replicas = [Stored(reference.source, number, int(reference.contents.replica[row])) for row in rows]
    return f"it is the mean of the reference's {len(rows)} replicas" if is_mean(replicas, candidate) else ""


def is_mean(replicas: Sequence[Stored], candidate: Stored) -> bool:
    """Whether every element is the replicas' mean, summed one by one in the dtype in which they are kept, and divided.

    Each of the n sums, and the quotient, may be rounded once: (n + 1)/2 distances between numbers of the mean size.

    Raises:
        SourceLostError: something of it can't be read.
    """
    dtype = candidate.tensor.dtype
    if not dtype.epsilon:
        return False
    for box in boxes(candidate.tensor.shape):
        own = np.stack([replica.values(box)[1] for replica in replicas])
        _, theirs = candidate.values(box)
        allowed = (len(replicas) + 1) / 2 * dtype.epsilon * np.abs(own).mean(axis=0)
        with np.errstate(invalid="ignore"):
            if not (np.abs(own.mean(axis=0) - theirs) <= allowed).all():
                return False
    return True
