"""What would have been found: planted errors, held against the thresholds of the very tensors that were compared."""

from __future__ import annotations

import math

from auditor.comparison.lockstep import Distance
from auditor.comparison.outcome import Power
from auditor.comparison.rounding import Threshold

MOST_PARTS = 1 << 20


def power_of(threshold: Threshold, measured: Distance) -> Power:
    """The smallest planted errors that the threshold would call beyond rounding.

    A tensor scaled by 1 + f differs from itself by f. A row moved: the reference against itself rolled by one along the
    first dim, measured. One of k equal summands lacking (a rank's partial sum of an all-reduce): at least 1/k.
    """
    least = threshold.beyond
    rolled = math.sqrt(measured.rolled / measured.reference) if measured.reference > 0 and measured.rolled else None
    parts = min(MOST_PARTS, math.ceil(1 / least) - 1) if least > 0 else MOST_PARTS
    return Power(least, rolled, rolled is not None and rolled > least, parts if parts >= 2 else 0)
