"""How far one step of Adam moves, and may lead apart what rounding made differ: far where gradients are small."""

from __future__ import annotations

import math

import numpy as np

from auditor.comparison.lockstep import Stored, boxes
from auditor.comparison.rounding import Model, Motion

MOST = 2.0
"""Two updates of length one in opposite directions."""
SLOPE = 3.0
"""Of the update m/√v in the gradient's error over √v: one from m, and up to two from v."""
USUAL_EPSILON = 1e-8
"""Where none is recorded."""
FASTEST = 10.0
"""No element of m/√v is larger where Adam made both (docs/optimizer-bound.md: 7.27 with usual betas)."""


def motion_of(first: Stored, second: Stored, noise: float, model: Model) -> Motion:
    """By which lengths, in units of the learning rate, one step moves a weight, and two runs may differ after it.

    Each element moves by m/√v. With an error of ``noise`` in its gradient that changes by no more than 3·noise/√v, and
    by no more than 2 in all. A row that never got a gradient does not move on either side.

    Args:
        first: the reference's first moments.
        second: its second moments, of the same shape.
        noise: round-off of one element of the gradient.
        model: the optimizer's numbers.

    Raises:
        SourceLostError: the moments can't be read.
    """
    betas = model.betas or (0.9, 0.999)
    corrections = [1 - math.pow(beta, max(1.0, model.counted)) for beta in betas]
    apart = moved = 0.0
    for box in boxes(second.tensor.shape):
        m, v = (np.nan_to_num(side.values(box)[1], nan=0.0, posinf=0.0, neginf=0.0) for side in (first, second))
        size = np.sqrt(np.maximum(v, 0.0) / corrections[1])
        with np.errstate(divide="ignore", over="ignore"):
            own = np.minimum(MOST, np.where(size > 0, SLOPE * noise / np.where(size > 0, size, 1.0), MOST))
            step = np.abs(m) / corrections[0] / (size + (USUAL_EPSILON if model.epsilon is None else model.epsilon))
        if size.ndim:
            own *= (size > 0).any(axis=-1, keepdims=True)
        apart += float(np.sum(own**2))
        moved += float(np.sum(np.minimum(step, FASTEST) ** 2))
    return Motion(math.sqrt(apart), math.sqrt(moved))
