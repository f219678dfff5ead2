"""What files that hold a state as a tree have at its leaves: arrays as byte ranges, and plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from auditor.model.dtype import DType


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of an array that lie without gaps."""

    offset: int
    """First byte in the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of the tree."""

    dtype: DType | None
    """None where numpy's word for it is not known here."""
    dtype_name: str
    shape: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    """Its bytes in C order; several where it was cut into chunks."""
    column_major: bool = False
    """Whether they lie in Fortran's order instead: the first dim is the fastest."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A number, text or null of the tree, or what is in the place of something longer or unknown."""

    value: float | int | bool | str | None
