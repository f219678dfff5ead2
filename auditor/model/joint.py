"""What is measured element by element over two saved steps of one run, read in lock-step."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from auditor.model.catalog import Catalog


class JointKind(enum.Enum):
    """What is asked of the elements at one place."""

    DECAY = "decay"
    """Second moments, new and old: factor * old > new + floor is beyond."""
    STRIDE = "stride"
    """Weight, new and old, second moments, new and old, old first moment: the weight moved by more than is possible."""
    REST = "rest"
    """First moments, new and old: the same bits, and not zero, is beyond."""
    VARIANCE = "variance"
    """Second moment by the gradient that first moments one step apart tell: another one is beyond."""
    UPDATE = "update"
    """Weight, new and old, and new moments, one step apart: a weight that the step does not lead to is beyond."""


@dataclass(frozen=True, slots=True)
class Joint:
    """A request. The first tensor is of the later step, and is the one that is accused."""

    kind: JointKind
    later: tuple[int, ...]
    """Numbers of tensors in the later step's Catalog."""
    earlier: tuple[int, ...]
    """And in the earlier one's; all have one shape."""
    constants: tuple[float, ...] = ()
    """As the kind wants them: see ``observe/replay.py``."""

    @property
    def streams(self) -> tuple[tuple[bool, int], ...]:
        """Its tensors as its function takes them: whether each is of the later step, and its number."""
        return (*((True, number) for number in self.later), *((False, number) for number in self.earlier))


@dataclass(frozen=True, slots=True)
class Beside:
    """A saved step that is read beside the next one, and what is measured over both."""

    catalog: Catalog
    joints: Sequence[Joint]


@dataclass(frozen=True, slots=True)
class JointResult:
    """What was measured in one piece of the first tensor."""

    row: int
    """In the later step's Catalog."""
    num_compared: int = 0
    num_beyond: int = 0
    largest: float = 0.0
    """Of those beyond, how far the worst is, as a multiple of what is allowed; 0 where there is none."""
    first: int = -1
    """C-order index in the tensor of the first element beyond; -1 where there is none."""
    last: int = -1
