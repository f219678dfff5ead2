"""How far one step of Adam may lead apart what rounding made differ: far where gradients are small."""

from __future__ import annotations

import numpy as np

from auditor.comparison.lockstep import Stored, boxes

MOST = 2.0
"""Two updates of length one in opposite directions."""
SLOPE = 3.0
"""Of the update m/√v in the gradient's error over √v: one from m, and up to two from v."""


def softness(second: Stored, noise: float, correction: float) -> float:
    """Length, in units of the learning rate, by which the updates of two runs may differ after one step.

    Each element moves by m/√v. With an error of ``noise`` in its gradient that changes by no more than 3·noise/√v, and
    by no more than 2 in all. A row that never got a gradient does not move on either side.

    Args:
        second: the reference's second moments.
        noise: round-off of one element of the gradient.
        correction: 1 − β₂ᵗ, by which v is divided.

    Raises:
        SourceLostError: the moments can't be read.
    """
    total = 0.0
    for box in boxes(second.tensor.shape):
        _, values = second.values(box)
        size = np.sqrt(np.maximum(np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0), 0.0) / correction)
        with np.errstate(divide="ignore", over="ignore"):
            apart = np.minimum(MOST, np.where(size > 0, SLOPE * noise / np.where(size > 0, size, 1.0), MOST))
        if size.ndim:
            apart *= (size > 0).any(axis=-1, keepdims=True)
        total += float(np.sum(apart**2))
    return float(np.sqrt(total))
