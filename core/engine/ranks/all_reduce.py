"""Ways of summing a tensor over ranks, and which of them is fastest for how many bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

SIZES: Final = tuple(2**n for n in range(10, 24))
"""Bytes of tensors that are measured; any other takes the nearest one's choice, by ratio."""


class AllReduce(Protocol):
    """A way of summing a tensor over all ranks. Every rank takes the same one for the same call."""

    @property
    def name(self) -> str:
        """The way's name in reports and tables."""

    def takes(self, x: Tensor) -> bool:
        """Whether it sums such a tensor: by shape and type alone, so that all ranks agree."""

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return the sum, or `onto` with the sum added; see `Ranks.all_reduce`."""

    def abort(self) -> None:
        """Have calls that wait for other ranks end or fail; any thread may do so."""


@dataclass(frozen=True)
class AllReduceChoice:
    """Measured times of one number of ranks on GPUs of one kind."""

    us: Mapping[str, Sequence[float | None]]
    """Way -> microseconds for each of SIZES; None: it does not take so many bytes, or failed."""
    source: str
    """Where they come from, in words."""

    def fastest(self, num_bytes: int, able: Sequence[AllReduce]) -> AllReduce:
        """Return the fastest of the ways that take so many bytes; the last of them where nothing was measured."""
        names = {each.name: each for each in able}
        return names[self._fastest(num_bytes, list(names))]

    def _fastest(self, num_bytes: int, names: Sequence[str]) -> str:
        cell = min(max(round(math.log2(max(num_bytes, 1))) - round(math.log2(SIZES[0])), 0), len(SIZES) - 1)
        times = [(us, name) for name in names if name in self.us and (us := self.us[name][cell]) is not None]
        return min(times)[1] if times else names[-1]

    def __str__(self) -> str:
        chosen = [self._fastest(size, list(self.us)) for size in SIZES]
        changes = [cell for cell, name in enumerate(chosen) if cell == 0 or name != chosen[cell - 1]]
        ranges = ", ".join(f"{chosen[cell]} from {SIZES[cell]:,} bytes" for cell in changes)
        return f"{ranges} on ({self.source})"
