"""Which way multiplies over a quantised weight: by measured times, or by a rule where there are none."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

ROW_COUNTS = tuple(2**n for n in range(14))
"""Numbers of rows that are measured; any other takes the nearest one's choice, by ratio."""
KERNEL, SCALED, DEQUANTIZED = "kernel", "scaled_mm", "dequantize"
"""Our kernel; `torch._scaled_mm`, for which x is rounded to floats of 8 bits; the weight expanded for each product of cuBLAS."""


@dataclass(frozen=True)
class ProductTimes:
    """Measured times of one shape and form on one device."""

    us: Mapping[str, Sequence[float | None]]
    """Way -> microseconds for each of ROW_COUNTS; None: it does not take so many, or failed."""
    source: str
    """Where they come from, in words."""

    def fastest(self, rows: int, able: Collection[str]) -> str | None:
        """Return the fastest of the ways; None where nothing was measured."""
        cell = nearest(rows)
        known = [(self.us[way][cell], way) for way in able if cell < len(self.us.get(way, ()))]
        times = [(us, way) for us, way in known if us is not None]
        return min(times)[1] if times else None


def nearest(rows: int) -> int:
    """Index of the nearest of ROW_COUNTS, by ratio."""
    return min(max(round(math.log2(max(rows, 1))), 0), len(ROW_COUNTS) - 1)


def rule(rows: int, able: Collection[str]) -> str:
    """Choose without a measurement: the kernel as long as reading the weight takes longest, then what multiplies fastest."""
    most = FEW_ROWS if SCALED in able else MORE_ROWS
    if KERNEL in able and rows <= most:
        return KERNEL
    return SCALED if SCALED in able else DEQUANTIZED


FEW_ROWS = 32
"""Rows up to which the kernel serves where `torch._scaled_mm` does too. Not measured yet, nor is the next one."""
MORE_ROWS = 128
