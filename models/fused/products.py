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
"""Rows up to which ours are used; measured on an H200 beside cuBLAS (docs/kernels.md)."""
MAX_ROWS_WIDE = 1
"""Likewise where out_features is that of a vocabulary."""
_WIDE = 65536
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
        most = MAX_ROWS if linear.out_features < _WIDE else MAX_ROWS_WIDE
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
        weights = (linear.weight, x if norm is None else norm.weight, x if linear.bias is None else linear.bias)
        launch((programs, 1, 1), x, *weights, y, 0.0 if norm is None else norm.eps, rows)
        return y


def _launcher(variant: _Variant, device: torch.device) -> tuple[Launcher, int]:
    """The kernel for a variant, and its programs."""
    single = variant.block_m == 1
    block_k = min(max(triton.next_power_of_2(variant.in_features), 128), _BLOCK_K)
    block_n = 4 if single else 16
    weights = 2 if variant.gated else 1
    # What is asked for at once: registers bound it for one row, shared memory (x twice in it) where it feeds the matrix units.
    depth = 4 if single else min(3, (_shared_rows(device, block_k) - 2 * variant.block_m) // block_n)
    depth = min(max(depth // weights, 1), triton.cdiv(variant.in_features, block_k))
    launcher = Launcher(
        one_row if single else few_rows,
        4,
        device,
        N=variant.out_features,
        K=variant.in_features,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_M=variant.block_m,
        SLICES=1 if single else 4,
        DEPTH=depth,
        NORM=variant.norm,
        GATED=variant.gated,
        ADD=variant.add,
        BIAS=variant.bias,
        DOT=tl.float32 if INTERPRETED else _TYPES[variant.dtype],  # the interpreter multiplies the raw bits of bfloat16
    )
    return launcher, triton.cdiv(variant.out_features, block_n)


def _shared_rows(device: torch.device, size: int) -> int:
    """Rows of `size` half-precision elements that a program's shared memory holds."""
    if device.type != "cuda":
        return 64
    properties = torch.cuda.get_device_properties(device)
    num_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return num_bytes // (2 * size)
