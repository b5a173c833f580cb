"""Launches of products in CUDA C++ as the host's: what CudaProducts gives a GPU goes to the kernels of host_kernels.py.

So grids, arguments and tensor maps are tried that nothing else meets without a GPU.
"""

from __future__ import annotations

import ctypes
from struct import Struct
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.kernels.linear import cuda_products
from headway.kernels.runtime.nvrtc.compiler import Variant
from headway.kernels.runtime.nvrtc.launch import Arguments, Launch
from host_kernels import SAID, compiled

_MAP = Struct("=QQ3q88x")
"""Address, rows, rows and bytes of a box, and the swizzle, in place of the driver's form of a tensor map."""
_ARRANGING = {"arrange_rows": "arrange", "round_rows": "round_x"}


def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the launchers of products made from now on launch on the host."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(cuda_products, "load", lambda source, name, *_: HostKernel(source, name))
    monkeypatch.setattr(cuda_products, "tensor_map", _tensor_map)


def _tensor_map(tensor: Tensor, box: tuple[int, int], swizzle: int) -> bytes:
    return _MAP.pack(tensor.data_ptr(), len(tensor), *box, swizzle)


class HostKernel:
    """In place of `Kernel`."""

    def __init__(self, source: Variant, name: str) -> None:
        self._library, self._name, self._allowed = compiled(source), name, 48 * 1024
        self._constants = dict(source.constants)

    def allow_shared(self, shared_bytes: int) -> None:
        """See Kernel."""
        self._allowed = max(self._allowed, shared_bytes)

    def __call__(self, launch: Launch, arguments: Arguments) -> None:
        """See Kernel. Reads are not held to tensors here: those of host_kernels.py are."""
        assert launch.shared_bytes <= self._allowed
        everywhere = (ctypes.c_void_p * 1)(0), (ctypes.c_long * 1)(2**62), 1
        if self._name in _ARRANGING:
            *pointers, eps = arguments.values
            kernel = getattr(self._library, _ARRANGING[self._name])
            assert launch.block == (256, 1, 1)
            assert not kernel(*map(ctypes.c_void_p, pointers), ctypes.c_float(eps), launch.grid[0], *everywhere), SAID
            return
        assert launch.cluster[1] == launch.grid[1] == max(1, int(self._constants.get("SPLITS", 0)))
        how = launch.grid[0], launch.block[0], launch.shared_bytes, 0
        assert not self._library.run(*self._given(arguments.values), *how, *everywhere), SAID

    def _given(self, values: tuple[Any, ...]) -> list[Any]:
        if self._name == "few_rows":
            pointers, eps, head_eps, rows, tiles = values
            return [pointers, ctypes.c_float(eps), ctypes.c_float(head_eps), int(rows), int(tiles)]
        codes, pointers, *scales, rows = values
        address, codes_rows, box_rows, box_bytes, swizzle = _MAP.unpack(codes)
        outputs = 16 * int(self._constants["TILES"]) * int(self._constants["WARPS"]) // (1 + int(self._constants["GATED"]))
        assert (box_rows, box_bytes, swizzle) == (outputs, 128 if scales else 64, 128 if scales else 0)
        first = ctypes.c_void_p(scales[0] if scales else address)
        return [pointers, first, ctypes.c_long(codes_rows), int(rows)]
