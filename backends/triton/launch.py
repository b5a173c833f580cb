"""Launching a compiled kernel again without Triton's argument analysis, which costs more than the kernel at small sizes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from headway.backends.triton.layer import INTERPRETED
from headway.core.contract.compiled import AHEAD

PDL_CAPABILITY = (9, 0)
"""The first compute capability that launches a kernel before those it depends on have ended."""


class Launcher:
    """Remembers what a kernel was compiled to for each `key`.

    The caller guarantees that equal keys mean equal compile-time constants, equal integer arguments (but for those the kernel
    does not specialise on) and equally aligned pointers: those are what Triton compiles for.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        self._ahead: set[Hashable] = set()
        """Keys that were compiled ahead of the first launch."""

    def __call__(
        self, key: Hashable, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: Mapping[str, Any], **options: int
    ) -> None:
        """Run the kernel. arguments: in the kernel's order; constants: its compile-time constants by name, all of them.

        options: num_warps, num_stages. A true constant PDL asks for a programmatic dependent launch: the kernel waits by itself
        for those before it.
        """
        if AHEAD.get() is not None:
            if key not in self._ahead:
                self._ahead.add(key)
                options |= {"launch_pdl": True} if constants.get("PDL") else {}
                self._kernel.warmup(*arguments, grid=grid, **constants, **options)
            return
        known = self._compiled.get(key)
        if known is not None:
            known[0][grid](*arguments, *known[1])
            return
        if constants.get("PDL"):
            options["launch_pdl"] = True
        compiled = self._kernel[grid](*arguments, **constants, **options)
        if not INTERPRETED:
            names = self._kernel.arg_names[len(arguments) :]
            self._compiled[key] = (compiled, tuple(constants[name] for name in names))


def aligned(*pointers: int) -> tuple[bool, ...]:
    """Which addresses Triton compiles 16-byte accesses for."""
    return tuple(pointer % 16 == 0 for pointer in pointers)


def launches_early(device: torch.device) -> bool:
    """Whether kernels on a device may be launched programmatically dependent (constant PDL)."""
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= PDL_CAPABILITY
