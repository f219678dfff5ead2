"""Element types as checkpoints store them, numpy's own and those it lacks (bfloat16, float8, float4, int4).

A :class:`DType` says how wide an element is and how its bits are read. It never touches data: decoding lives in
``auditor.observe``. Floats are sign-magnitude: sign bit (unless ``signed`` is false), exponent, mantissa.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace


class Kind(enum.Enum):
    """What the bits of an element mean."""

    FLOAT = "float"
    SIGNED = "signed integer"
    UNSIGNED = "unsigned integer"
    BOOL = "bool"
    COMPLEX = "complex"


class NonFinite(enum.Enum):
    """Which bit patterns of a float are not finite numbers (ONNX and OCP float8 specifications)."""

    IEEE = "all-ones exponent: infinity with zero mantissa, else NaN"
    NAN_ONLY = "all ones in exponent and mantissa is NaN; no infinity"
    NEGATIVE_ZERO_IS_NAN = "the pattern of -0 is NaN; no infinity, no -0"
    NONE = "every pattern is a finite number"


@dataclass(frozen=True, slots=True)
class DType:
    """One element type."""

    name: str
    """The name used in messages and in the Zarr view, safetensors' and numpy's word where they agree."""
    bits: int
    """Width of one element."""
    kind: Kind
    exponent_bits: int = 0
    mantissa_bits: int = 0
    bias: int = 0
    """Exponent bias of a float."""
    non_finite: NonFinite = NonFinite.NONE
    signed: bool = True
    """False only for exponent-only scales (float8_e8m0fnu), which have no sign bit."""
    apart: bool = False
    """Of elements of fewer than 8 bits: whether each has a byte of its own, as ml_dtypes keeps them; the byte's upper
    bits say nothing. Else several share a byte."""

    @property
    def carrier(self) -> str:
        """The little-endian numpy unsigned integer that carries the bits: one element, or one byte of packed ones.

        Complex elements are carried by their component (twice as many).
        """
        width = self.bits // 2 if self.kind is Kind.COMPLEX else self.bits
        return f"<u{max(width, 8) // 8}" if width >= 16 else "u1"

    @property
    def largest_count(self) -> float:
        """Where a counter of this dtype stands still: adding one to the number rounds back to it. Integers: infinity.

        A float of m mantissa bits holds every whole number up to 2^(m+1) and only every second one beyond.
        """
        return float(1 << (self.mantissa_bits + 1)) if self.kind is Kind.FLOAT else math.inf

    @property
    def epsilon(self) -> float:
        """Distance from one to the next number of a float, 2^-m; 0 where there is no rounding.

        That is: of integers, bools, and floats that are an exponent alone.
        """
        return 2.0**-self.mantissa_bits if self.mantissa_bits else 0.0

    @property
    def packed(self) -> bool:
        """Whether several elements share a byte."""
        return self.bits < 8 and not self.apart

    @property
    def stored_bits(self) -> int:
        """From one element to the next."""
        return 8 if self.apart else self.bits

    def num_bytes(self, num_elements: int) -> int:
        """Bytes that ``num_elements`` elements occupy when stored without gaps; packed types round up."""
        return (num_elements * self.stored_bits + 7) // 8


def _float(name: str, bits: int, exponent: int, mantissa: int, non_finite: NonFinite, bias: int | None = None) -> DType:
    default = (1 << (exponent - 1)) - 1
    return DType(name, bits, Kind.FLOAT, exponent, mantissa, default if bias is None else bias, non_finite)


_IEEE, _NAN, _NEGATIVE_ZERO = NonFinite.IEEE, NonFinite.NAN_ONLY, NonFinite.NEGATIVE_ZERO_IS_NAN

FLOAT64 = _float("float64", 64, 11, 52, _IEEE)
FLOAT32 = _float("float32", 32, 8, 23, _IEEE)
FLOAT16 = _float("float16", 16, 5, 10, _IEEE)
BFLOAT16 = _float("bfloat16", 16, 8, 7, _IEEE)
INT64 = DType("int64", 64, Kind.SIGNED)
UINT8 = DType("uint8", 8, Kind.UNSIGNED)
BOOL = DType("bool", 8, Kind.BOOL)

_ALL = (
    FLOAT64, FLOAT32, FLOAT16, BFLOAT16,
    _float("float8_e5m2", 8, 5, 2, _IEEE),
    _float("float8_e4m3", 8, 4, 3, _IEEE),
    _float("float8_e3m4", 8, 3, 4, _IEEE),
    _float("float8_e4m3fn", 8, 4, 3, _NAN),
    _float("float8_e4m3fnuz", 8, 4, 3, _NEGATIVE_ZERO, bias=8),
    _float("float8_e4m3b11fnuz", 8, 4, 3, _NEGATIVE_ZERO, bias=11),
    _float("float8_e5m2fnuz", 8, 5, 2, _NEGATIVE_ZERO, bias=16),
    DType("float8_e8m0fnu", 8, Kind.FLOAT, 8, 0, 127, _NAN, signed=False),
    _float("float4_e2m1fn", 4, 2, 1, NonFinite.NONE),
    INT64,
    DType("int32", 32, Kind.SIGNED), DType("int16", 16, Kind.SIGNED), DType("int8", 8, Kind.SIGNED),
    DType("int4", 4, Kind.SIGNED), DType("int2", 2, Kind.SIGNED),
    DType("uint64", 64, Kind.UNSIGNED), DType("uint32", 32, Kind.UNSIGNED), DType("uint16", 16, Kind.UNSIGNED),
    UINT8, DType("uint4", 4, Kind.UNSIGNED), DType("uint2", 2, Kind.UNSIGNED),
    BOOL,
    DType("complex64", 64, Kind.COMPLEX, 8, 23, 127, _IEEE),
    DType("complex128", 128, Kind.COMPLEX, 11, 52, 1023, _IEEE),
)  # fmt: skip

DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _ALL}
"""Every known dtype by name; those of fewer than 8 bits packed."""
APART: dict[str, DType] = {name: replace(dtype, apart=dtype.bits < 8) for name, dtype in DTYPES.items()}
"""The same where every element has a byte of its own."""
