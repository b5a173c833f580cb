"""Which way multiplies over a quantised weight: by measured times of its kind of product, or by a rule where there are none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from torch import Tensor

from headway.core.contract.support import Support
from headway.core.select.costs import Axis, AxisTimes
from headway.kernels.linear.linear import Linear

ROW_COUNTS = tuple(2**n for n in range(14))
"""Numbers of rows that are measured; any other takes the choice of the next larger one, whose kernel is cut alike."""
ROWS = Axis("rows", ROW_COUNTS)
FEW, SHARED = "few_rows", "shared_rows"
"""Kernels of ours in CUDA C++, for up to 16 rows and for up to 512."""
FLOAT8 = "w8a8"
"""Another, for up to 256 rows, which are rounded to floats of 8 bits."""
KERNEL, SCALED, DEQUANTIZED = "kernel", "scaled_mm", "dequantize"
"""Our kernel in Triton; `torch._scaled_mm`, for which x is rounded to floats of 8 bits; the weight expanded for each product of
cuBLAS."""


def rule(rows: int, able: Collection[str]) -> str:
    """Choose without a measurement: a kernel as long as reading the weight takes longest, then what multiplies fastest."""
    most = FEW_ROWS if SCALED in able else MORE_ROWS
    if FEW in able and rows <= LEAST_SHARED:
        return FEW
    if SHARED in able and rows <= most:
        return SHARED
    if KERNEL in able and rows <= most:
        return KERNEL
    return SCALED if SCALED in able else DEQUANTIZED


WORTH = 1.05
"""How much faster a way that rounds x must be than one that does not."""
LEAST_SHARED = 8
"""Rows up to which `few_rows` serves. On an H200, an 8B layer in 4 bits: 55 us to 67 at 8 rows, 73 to 65 at 16."""
FEW_ROWS = 32
"""Rows up to which the kernel serves where `torch._scaled_mm` does too. On an H200, fp8 28672 x 4096: 91 us to 63 at 64 rows."""
MORE_ROWS = 256
"""Likewise where only `dequantize` does. On an H200, 4 bits 28672 x 4096: 209 us to 202 at 256 rows."""


class MeasuredWay:
    """A way of computing products, as far as a choice must know it; see `ProductWay`."""

    name: str
    """Times are kept by it."""
    rounds: ClassVar[bool] = False
    """Whether x is rounded to floats of 8 bits, which makes a coarser product."""
    library: ClassVar[bool] = False
    """Whether a library that is found computes it, which may change from one start to the next: each start tries it."""
    arranges: ClassVar[bool] = False
    """Whether it reads an arrangement of its own, which is made of a layer once and takes memory beside the layer's weight."""
    most_rows: int | None = None
    """Rows up to which it may serve; None: any."""

    def prepare(self, linear: Linear) -> int:
        """Make the arrangement of a layer, where there is none; bytes that it takes.

        :raises ArithmeticError: the weight's scales have no place in it.
        """
        return 0

    def release(self, linear: Linear) -> None:
        """Drop the arrangement of a layer, if there is one."""


class ProductKind:
    """Products over weights of one form and shape: their ways, and the one that serves each number of rows."""

    def __init__(self, name: str, ways: Iterable[MeasuredWay], gated: bool, refused: Mapping[str, Support] | None = None) -> None:
        """name: form, shape and whatever else tells kinds apart. ways: that compute it. refused: the other ways, and why not."""
        self.name = name
        self.gated = gated
        self.ways = {way.name: way for way in ways}
        self.refused = dict(refused or {})
        self.compute: Callable[[Tensor, Linear], Tensor] | None = None
        """The step of x [rows, in_features] and a layer of the kind by the chosen way: the product, or where it is gated
        RMSNorm (weight 1, epsilon 1e-6), both products, and SiLU of the first times the second."""
        self.examples: list[Linear] = []
        """A model's layers of this kind, to measure with."""
        self._times: AxisTimes | None = None
        self._chosen: dict[int, str] = {}
        self._trial: str | None = None

    def able(self, rows: int) -> list[str]:
        """Names of the ways that may serve so many rows."""
        return [name for name, way in self.ways.items() if way.most_rows is None or rows <= way.most_rows]

    def leave_out(self, name: str, why: Support) -> None:
        """Have a way serve no longer."""
        del self.ways[name]
        self.refused[name] = why
        self._chosen.clear()

    def way_for(self, rows: int) -> str:
        """Name of what computes products of so many rows."""
        if self._trial is not None:
            return self._trial
        way = self._chosen.get(rows)
        if way is None:
            able = self.able(rows)
            coarser = {name: WORTH for name in able if self.ways[name].rounds}
            measured = None if self._times is None else self._times.fastest(rows, able, coarser)
            way = self._chosen[rows] = measured or rule(rows, able)
        return way

    def obey(self, times: AxisTimes) -> None:
        """Choose by measured times from now on: before any graph is captured."""
        self._times = times
        self._chosen.clear()

    @contextmanager
    def by(self, name: str) -> Iterator[None]:
        """Have one way serve inside, whatever the choice is: for trials."""
        self._trial = name
        try:
            yield
        finally:
            self._trial = None

    @property
    def source(self) -> str:
        """The word that the choice is made by: kept times, or the rule."""
        return "rule, not measured" if self._times is None else self._times.source

    def serving(self) -> dict[str, int]:
        """Names of the ways that serve, and the least of ROW_COUNTS that each does."""
        return {self.way_for(rows): rows for rows in reversed(ROW_COUNTS)}

    def changes(self) -> dict[int, str]:
        """Number of rows -> the way that serves from there on."""
        return ROWS.changes(self.way_for)

    def describe(self) -> str:
        """Which way serves how many rows, and by whose word."""
        return ROWS.describe(self.changes(), self.source)
