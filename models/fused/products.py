"""Which products our kernels compute, and their launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.fused.launch import INTERPRETED, Launcher
from headway.models.fused.product_kernels import few_rows, one_row
from headway.models.linear import Linear
from headway.models.operations import Norm

MAX_ROWS = 16
"""Rows up to which ours are used. This and the constants below were measured on an H200 beside cuBLAS (docs/kernels.md)."""
MAX_WEIGHT = 2**24
"""Elements of the weight up to which ours serve more than one row; a larger one is read as fast by cuBLAS, or faster."""
_BLOCK_K = 1024
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class _Variant:
    dtype: torch.dtype
    block_m: int
    in_features: int
    out_features: int
    norm: bool
    gated: bool
    add: bool
    bias: bool


class FewRows:
    """Products of up to MAX_ROWS rows in half precision, with what comes before and after them, a launch each.

    The kernel follows from the number of rows and the shape alone, and a row's result does not depend on the other rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launchers: dict[_Variant, tuple[Launcher, int]] = {}

    def takes(self, x: Tensor, linear: Linear) -> bool:
        """Whether the kernels serve the product of x [rows, in_features]."""
        most = MAX_ROWS if linear.out_features * linear.in_features <= MAX_WEIGHT else 1
        return 0 < x.shape[0] <= most and x.dtype in _TYPES

    def __call__(
        self, x: Tensor, linear: Linear, norm: Norm | None = None, gated: bool = False, add_to: Tensor | None = None
    ) -> Tensor:
        """Product of x [rows, in_features], normed before, gated after or added in place to `add_to` [rows, out_features]."""
        rows, in_features = x.shape
        out_features = linear.out_features // 2 if gated else linear.out_features
        y = torch.empty(rows, out_features, dtype=x.dtype, device=self._device) if add_to is None else add_to
        block_m = 1 if rows == 1 else 8 if rows <= 8 else 16
        variant = _Variant(
            x.dtype, block_m, in_features, out_features, norm is not None, gated, add_to is not None, linear.bias is not None
        )
        known = self._launchers.get(variant)
        if known is None:
            known = self._launchers[variant] = _launcher(variant, self._device)
        launch, programs = known
        arguments = [x, linear.weight, x if norm is None else norm.weight, x if linear.bias is None else linear.bias, y]
        launch((programs, 1, 1), *arguments, 0.0 if norm is None else norm.eps, *([rows] if rows > 1 else []))
        return y


def _launcher(variant: _Variant, device: torch.device) -> tuple[Launcher, int]:
    """The kernel for a variant, and its programs."""
    block_k = min(max(triton.next_power_of_2(variant.in_features), 128), _BLOCK_K)
    chunks = triton.cdiv(variant.in_features, block_k)
    sizes = {"N": variant.out_features, "K": variant.in_features, "BLOCK_K": block_k}
    switches = {"NORM": variant.norm, "GATED": variant.gated, "ADD": variant.add, "BIAS": variant.bias}
    if variant.block_m == 1:
        block_n = 4
        launcher = Launcher(one_row, 4, device, BLOCK_N=block_n, DEPTH=min(4, chunks), **sizes, **switches)
    else:
        # Every program reads all of x: where one chunk holds it there is room for larger programs, if they still fill the GPU.
        block_n = 32 if chunks == 1 and not variant.gated and variant.out_features >= 4096 else 16
        room = _shared_rows(device, block_k) - 2 * variant.block_m  # x lies there twice
        depth = max(1, min(3, chunks, room // (2 * block_n if variant.gated else block_n)))
        launcher = Launcher(
            few_rows,
            4,
            device,
            BLOCK_N=block_n,
            BLOCK_M=variant.block_m,
            SLICES=4,
            DEPTH=depth,
            DOT=tl.float32 if INTERPRETED else _TYPES[variant.dtype],  # the interpreter multiplies the raw bits of bfloat16
            **sizes,
            **switches,
        )
    return launcher, triton.cdiv(variant.out_features, block_n)


def _shared_rows(device: torch.device, size: int) -> int:
    """Rows of `size` half-precision elements that a program's shared memory holds."""
    if device.type != "cuda":
        return 64
    properties = torch.cuda.get_device_properties(device)
    num_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return num_bytes // (2 * size)
