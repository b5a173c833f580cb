"""Which products our kernels compute, and their launch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.linear.linear import Linear
from headway.kernels.linear.product_kernels import few_rows, one_row
from headway.kernels.runtime.triton_launch import INTERPRETED, FixedLauncher, shared_memory
from headway.kernels.step.config import Activation
from headway.kernels.step.operations import Heads, Norm, Rope

MAX_ROWS = 16
"""Rows up to which ours are used. This and the constants below were measured on an H200 beside cuBLAS (docs/kernels.md)."""
MAX_WEIGHT = 2**24
"""Elements of the weight up to which ours serve more than one row, and half as many more than half of MAX_ROWS; a larger one is
read as fast by cuBLAS, or faster. With 16 rows cuBLAS takes an H100 16 us for 5120 x 2880 and for 2880 x 4096, where ours took 22
in a step of gpt-oss-20b, what comes before and after them included."""
HEAD_MULTIPLE = 16
"""A head that a product rotates is made of so many rows of the weight, times a whole number."""
_BLOCK_K = 1024
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class _Variant:
    """All that a kernel is compiled for."""

    dtype: torch.dtype
    block_m: int
    """Rows, rounded up to what the matrix units take; 1: one row, which needs none."""
    in_features: int
    out_features: int
    norm: bool
    gated: bool
    activation: Activation | None
    add: bool
    bias: bool
    heads: tuple[int, int, int, bool] | None
    """num_heads, num_kv_heads, head_dim and whether they are normed, where they are to be rotated."""


class FewRows:
    """Products of up to MAX_ROWS rows in half precision, with what comes before and after them, a launch each.

    The kernel follows from the number of rows and the shape alone, and a row's result does not depend on the other rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launchers: dict[_Variant, tuple[FixedLauncher, int]] = {}
        self._arrivals: dict[int, Tensor] = {}
        """Counters by their number, zero between launches; never freed, since captured graphs keep their addresses."""

    def takes(self, x: Tensor, linear: Linear, heads: Heads | None = None) -> bool:
        """Whether the kernels serve the product of x [rows, in_features], with its heads rotated where they are given."""
        if not isinstance(linear.weight, Tensor):
            return False
        size = linear.out_features * linear.in_features
        most = MAX_ROWS if size <= MAX_WEIGHT // 2 else MAX_ROWS // 2 if size <= MAX_WEIGHT else 1
        return 0 < x.shape[0] <= most and x.dtype in _TYPES and (heads is None or heads.head_dim % HEAD_MULTIPLE == 0)

    def __call__(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None = None,
        gated: bool = False,
        activation: Activation | None = None,
        add_to: Tensor | None = None,
        rotated: tuple[Heads, Rope] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Product of x [rows, in_features]: [rows, out_features], half of it where gated.

        norm: RMSNorm of x, before. activation: of the product; gated: of its first half, times the second. add_to: what the
        product is added to, in place. rotated: its q and k heads are normed and rotated. out: where it goes, contiguous, unless
        it is added to something.
        """
        rows, in_features = x.shape
        out_features = linear.out_features // 2 if gated else linear.out_features
        y = add_to if add_to is not None else out
        if y is None:
            y = torch.empty(rows, out_features, dtype=x.dtype, device=self._device)
        block_m = 1 if rows == 1 else 8 if rows <= 8 else 16
        shape = None if rotated is None else _shape(rotated[0])
        switches = norm is not None, gated, activation, add_to is not None, linear.bias is not None
        variant = _Variant(x.dtype, block_m, in_features, out_features, *switches, shape)
        known = self._launchers.get(variant)
        if known is None:
            known = self._launchers[variant] = _launcher(variant, self._device)
        launch, programs = known
        assert isinstance(linear.weight, Tensor)
        first = [x, linear.weight, x if norm is None else norm.weight, x if linear.bias is None else linear.bias, y]
        last = [rows] if rows > 1 else []
        launch((programs, 1, 1), *first, 0.0 if norm is None else norm.eps, *self._rotation(x, rotated), *last)
        return y

    def _rotation(self, unused: Tensor, rotated: tuple[Heads, Rope] | None) -> tuple[Tensor | float, ...]:
        """cos, sin, the weights of q's and k's norm, counters, and epsilon."""
        if rotated is None:
            return (*[unused] * 5, 0.0)
        heads, rope = rotated
        count = heads.num_heads + heads.num_kv_heads
        arrivals = self._arrivals.get(count)
        if arrivals is None:
            arrivals = self._arrivals[count] = torch.zeros(count, dtype=torch.int32, device=self._device)
        if heads.q_norm is None or heads.k_norm is None:
            return (*rope, unused, unused, arrivals, 0.0)
        return (*rope, heads.q_norm.weight, heads.k_norm.weight, arrivals, heads.q_norm.eps)


def _shape(heads: Heads) -> tuple[int, int, int, bool]:
    return heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.q_norm is not None and heads.k_norm is not None


def _launcher(variant: _Variant, device: torch.device) -> tuple[FixedLauncher, int]:
    """The kernel for a variant, and its programs."""
    block_k = min(max(triton.next_power_of_2(variant.in_features), 128), _BLOCK_K)
    chunks = triton.cdiv(variant.in_features, block_k)
    num_heads, num_kv_heads, head_dim, qk_norm = variant.heads or (0, 0, HEAD_MULTIPLE, False)
    constants = {
        "N": variant.out_features,
        "K": variant.in_features,
        "BLOCK_K": block_k,
        "NORM": variant.norm,
        "GATED": variant.gated,
        "ACTIVATION": variant.activation or "",
        "ADD": variant.add,
        "BIAS": variant.bias,
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_HALF": triton.next_power_of_2(head_dim // 2),
        "QK_NORM": qk_norm,
    }
    if variant.block_m == 1:
        block_n = 4
        launcher = FixedLauncher(one_row, 4, device, BLOCK_N=block_n, DEPTH=min(4, chunks), **constants)
    else:
        # Every program reads all of x: where one chunk holds it there is room for larger programs, if they still fill the GPU.
        block_n = 32 if chunks == 1 and not variant.gated and variant.out_features >= 4096 else 16
        block_n = math.gcd(block_n, head_dim) if variant.heads else block_n
        room = shared_memory(device) // (2 * block_k) - 2 * variant.block_m  # x lies there twice
        depth = max(1, min(3, chunks, room // (2 * block_n if variant.gated else block_n)))
        # The interpreter multiplies the raw bits of bfloat16.
        shape = {"BLOCK_N": block_n, "BLOCK_M": variant.block_m, "SLICES": 4, "DEPTH": depth}
        dot = tl.float32 if INTERPRETED else _TYPES[variant.dtype]
        early = variant.block_m == 8  # measured: of 1, 8 and 16 rows, whole steps with attention are faster so at 8 alone
        launcher = FixedLauncher(few_rows, 4, device, DOT=dot, EARLY=early, **shape, **constants)
    return launcher, triton.cdiv(variant.out_features, block_n)
