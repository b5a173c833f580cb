"""Launching the fused kernels: each with the compile-time constants of one layer kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway.backends.triton.launch import Launcher as CompiledLauncher
from headway.backends.triton.launch import launches_early
from headway.backends.triton.layer import INTERPRETED

__all__ = ["INTERPRETED", "Launcher", "shared_memory"]


def shared_memory(device: torch.device) -> int:
    """Bytes of it that a block of threads may have."""
    if device.type != "cuda":
        return 128 * 1024  # nothing runs there but the interpreter
    properties = torch.cuda.get_device_properties(device)
    num_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return num_bytes


class Launcher:
    """One kernel with one set of compile-time constants: what one layer kind needs of it.

    The kernel is compiled once for each combination of types and alignments that it meets. Its integer arguments, if any, must
    not be specialised on.
    """

    def __init__(self, kernel: Any, num_warps: int, device: torch.device, **constants: Any) -> None:
        self.kernel = kernel
        self._launch = CompiledLauncher(kernel)
        self._num_warps, self._constants = num_warps, {**constants, "PDL": launches_early(device)}

    def __call__(self, grid: tuple[int, int, int], *arguments: Tensor | float) -> None:
        """Run the kernel; arguments in its order."""
        key = tuple([(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else None for a in arguments])
        self._launch(key, grid, arguments, self._constants, num_warps=self._num_warps)
