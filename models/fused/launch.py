"""Launching a compiled kernel again without Triton's argument analysis, which costs more than the kernel at small sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run under Triton's interpreter (TRITON_INTERPRET=1 when triton was imported)."""


class Launcher:
    """One kernel with one set of compile-time constants: what one layer kind needs of it.

    The kernel is compiled once for each combination of types and alignments that it meets. Its integer arguments, if any, must
    not be specialised on.
    """

    def __init__(self, kernel: Any, num_warps: int, device: torch.device, **constants: Any) -> None:
        self._kernel, self._num_warps, self._device = kernel, num_warps, device
        pdl = not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self._constants: Mapping[str, Any] = {**constants, "PDL": pdl}
        self._options: Mapping[str, Any] = {"launch_pdl": True} if pdl else {}
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, grid: tuple[int, int, int], *arguments: Tensor | float) -> None:
        """Run the kernel; arguments in its order."""
        key = tuple([(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else None for a in arguments])
        known = self._compiled.get(key)
        if known is not None:
            known[0][grid](*arguments, *known[1])
            return
        compiled = self._kernel[grid](*arguments, **self._constants, num_warps=self._num_warps, **self._options)
        if not INTERPRETED:
            names = self._kernel.arg_names[len(arguments) :]
            self._compiled[key] = (compiled, tuple(self._constants[name] for name in names))
