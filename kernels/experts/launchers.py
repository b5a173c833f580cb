"""Launchers of the experts' kernels, by the constants that they are compiled with."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from headway.kernels.experts.config import ExpertsConfig
from headway.kernels.runtime.triton_launch import FixedLauncher


class Launchers:
    """Kernels by the constants that they are compiled with."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Hashable, FixedLauncher] = {}

    def get(self, kernel: Any, num_warps: int, **constants: Any) -> FixedLauncher:
        """Return the launcher of a kernel with these constants."""
        key = kernel, num_warps, *constants.values()
        launcher = self._known.get(key)
        if launcher is None:
            launcher = self._known[key] = FixedLauncher(kernel, num_warps, self._device, **constants)
        return launcher


def activation(config: ExpertsConfig) -> dict[str, float]:
    """Constants of what stands between the experts' products."""
    return {"ALPHA": config.swiglu_alpha, "LIMIT": config.swiglu_limit or 0.0}
