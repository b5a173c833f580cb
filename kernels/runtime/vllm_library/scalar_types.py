"""Numbers by which vLLM's operators know element types."""

from __future__ import annotations

from typing import Final


def scalar_type(exponent: int, mantissa: int, signed: bool, bias: int = 0, finite: bool = False, nan: int = 1) -> int:
    """Number by which vLLM's operators know an element type: fields of 8, 8, 1, 32, 1 and 8 bits, the first lowest.

    nan: how there are numbers that are none: 0 not at all, 1 as IEEE 754 has them, 2 with all bits set.
    """
    return exponent | mantissa << 8 | int(signed) << 16 | bias << 17 | int(finite) << 49 | nan << 50


INT4: Final = scalar_type(0, 4, signed=False)
"""Whole numbers of 4 bits beside zeros, ..."""
INT4_LESS_8: Final = scalar_type(0, 4, signed=False, bias=8)
"""... and those from which 8 is subtracted."""
FLOAT8: Final = scalar_type(4, 3, signed=True, finite=True, nan=2)
FLOAT4: Final = scalar_type(2, 1, signed=True, finite=True, nan=0)
