"""The arithmetic of joints over blocks of numbers: the reference. Derivations: docs/motion-bound.md.

Every function takes float64 arrays of one shape, those of the later step first, and gives by how much each element is
beyond, as a multiple of what is allowed: above 1 it is beyond. What is not a number is never beyond (NUM speaks of it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from auditor.model.joint import JointKind

Block = NDArray[np.float64]
_SINGLE = 2.0**-24
_TINY = 2.0**-126


def decay(numbers: Sequence[Block], constants: Sequence[float]) -> Block:
    """Second moments: ``factor * old / (new + floor)``. Constants: factor, floor."""
    new, old = numbers
    factor, floor = constants
    ratio: Block = factor * old / (new + floor)
    return np.where((new >= 0) & (old >= 0), ratio, 0)


def stride(numbers: Sequence[Block], constants: Sequence[float]) -> Block:
    """Weights: what they moved over what they can have moved. New weight and second moment; old ones and first moment.

    Constants: learning rate times bias correction; weight of the old first moment; weight of the gradients; the decay's
    part of the logarithm; floor of second moments; limit of all steps together; decay and rounding of all steps
    together, relative to the weight.
    """
    new, second, old, second_before, first_before = numbers
    rate, carried, fresh, logarithm, floor, limit, decays, rounds = constants
    after, before = second + floor, second_before + floor
    growth = np.maximum(np.log(after / before) + logarithm, 0)
    steps = np.minimum(carried * np.abs(first_before) / np.sqrt(before) + fresh * np.sqrt(growth), limit)
    reach = rate * steps
    allowed = reach + (decays + rounds) * (np.abs(old) + reach) + _TINY
    moved: Block = np.abs(new - old) / allowed
    return np.where((second >= 0) & (second_before >= 0), moved, 0)


def rest(numbers: Sequence[Block], constants: Sequence[float]) -> Block:
    """First moments: 2 where they are the same and not zero."""
    new, old = numbers
    return np.where((new == old) & (np.abs(new) > 1e-30), 2.0, 0.0)


def variance(numbers: Sequence[Block], constants: Sequence[float]) -> Block:
    """Second moment: its distance from what the gradient makes of the old one. Constants: both betas, round-off."""
    second, first, second_before, first_before = numbers
    beta1, beta2, u = constants
    gradient = (first - beta1 * first_before) / (1 - beta1)
    size = np.abs(gradient)
    # m is rounded three times, and both betas may be handed over in float32.
    off = (4 * u * (np.abs(first) + np.abs(first_before)) + 2 * _SINGLE * (size + np.abs(first_before))) / (1 - beta1)
    wanted = beta2 * second_before + (1 - beta2) * gradient**2
    allowed = (1 - beta2) * (2 * size * off + off**2) + 8 * u * (second + second_before)
    allowed += 2 * _SINGLE * (gradient**2 + second_before) + 4 * _TINY
    found: Block = np.abs(second - wanted) / allowed
    return found


def update(numbers: Sequence[Block], constants: Sequence[float]) -> Block:
    """Weight: its distance from what the step makes of the old one.

    Constants: learning rate, decoupled weight decay, eps, both bias corrections, round-off of the weight.
    """
    new, first, second, old = numbers
    rate, weight_decay, eps, correction1, correction2, u = constants
    step = rate / correction1 * first / (np.sqrt(np.maximum(second, 0)) / np.sqrt(correction2) + eps)
    wanted = old * (1 - rate * weight_decay) - step
    # Rounded three times to the weight's dtype; the step itself in single precision, with single precision constants.
    allowed = 4 * u * (np.abs(old) + np.abs(new)) + 1e-4 * np.abs(step) + _TINY
    found: Block = np.abs(new - wanted) / allowed
    return np.where(second >= 0, found, 0)


REPLAY: Mapping[JointKind, Callable[[Sequence[Block], Sequence[float]], Block]] = {
    JointKind.DECAY: decay, JointKind.STRIDE: stride, JointKind.REST: rest, JointKind.VARIANCE: variance,
    JointKind.UPDATE: update,
}  # fmt: skip
