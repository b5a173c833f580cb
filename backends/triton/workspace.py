"""Device memory for partial results, shared by the launches of one backend instance."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Buffers for partial results. They grow, and outgrown ones are kept: a captured graph may still use them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[Tensor] = []
        self._floats = torch.empty(0, device=device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)

    def floats(self, count: int) -> Tensor:
        """At least `count` float32, not initialised."""
        if self._floats.numel() < count:
            self._kept.append(self._floats)
            self._floats = torch.empty(max(count, 2 * self._floats.numel()), device=self._device)
        return self._floats

    def counters(self, count: int) -> Tensor:
        """At least `count` int32 that are zero between launches."""
        if self._counters.numel() < count:
            self._kept.append(self._counters)
            size = max(count, 2 * self._counters.numel())
            self._counters = torch.zeros(size, dtype=torch.int32, device=self._device)
        return self._counters
