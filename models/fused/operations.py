"""A decoder's operations on a GPU: few launches, and products of up to 128 rows by kernels of ours."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
import triton
from torch import Tensor

from headway.models.fused.launch import Launcher
from headway.models.fused.products import FewRows
from headway.models.fused.step_kernels import embed_tokens, norm_and_rotate, rms_norm, silu_and_mul
from headway.models.fused.tiles import Tiles
from headway.models.linear import Linear
from headway.models.operations import Heads, Norm, Rope


class Fused:
    """Operations of one model, on a GPU or under Triton's interpreter.

    No call synchronises or looks at values, so all of it can be captured in a CUDA graph, and a graph runs the kernels that the
    same number of rows gets without one. The residual stream is kept in the model's dtype, as vLLM keeps it.
    """

    def __init__(self, inv_freq: Tensor, rope_factor: float) -> None:
        """inv_freq: float32 [head_dim / 2]; rope_factor multiplies cos and sin."""
        self._inv_freq, self._rope_factor = inv_freq, rope_factor
        self._device = inv_freq.device
        self._launchers: dict[Hashable, Launcher] = {}
        self._few_rows, self._tiles = FewRows(self._device), Tiles(self._device)

    def _launcher(self, key: Hashable, make: Callable[[], Launcher]) -> Launcher:
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers[key] = make()
        return launcher

    def absorb(self, norm: Norm, linear: Linear) -> tuple[Norm, Linear]:
        """The norm's weight goes into the product's, whose result a kernel after it scales by row: a launch less from 17 rows on.

        In bfloat16 alone, where a row of any size fits; and for rows so short that each program of that kernel may read them.
        """
        if linear.weight.dtype != torch.bfloat16 or linear.bias is not None or linear.in_features > _SHORT:
            return norm, linear
        weight = (linear.weight.float() * norm.weight.float()).to(torch.bfloat16)
        return Norm(torch.ones_like(norm.weight), norm.eps, absorbed=True), Linear(weight)

    def embed(self, input_ids: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Rope]:
        """One launch. cos and sin: float32 [num_tokens, head_dim / 2]."""
        num_tokens, hidden, half = input_ids.shape[0], table.shape[1], self._inv_freq.shape[0]
        x = torch.empty(num_tokens, hidden, dtype=table.dtype, device=self._device)
        cos, sin = torch.empty(2, num_tokens, half, device=self._device).unbind()
        if num_tokens:

            def make() -> Launcher:
                block, block_half = triton.next_power_of_2(hidden), triton.next_power_of_2(half)
                sizes = {"HIDDEN": hidden, "BLOCK": block, "HALF": half, "BLOCK_HALF": block_half}
                return Launcher(embed_tokens, 4, self._device, **sizes)

            launch = self._launcher(("embed", hidden), make)
            launch((num_tokens, 1, 1), input_ids, positions, table, self._inv_freq, self._rope_factor, x, cos, sin)
        return x, (cos, sin)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """One launch."""
        rows, size = x.shape
        y = torch.empty_like(x)
        if rows:

            def make() -> Launcher:
                block = triton.next_power_of_2(size)
                return Launcher(rms_norm, 4 if block <= 2048 else 8, self._device, SIZE=size, BLOCK=block)

            self._launcher(("norm", size), make)((rows, 1, 1), x, norm.weight, y, norm.eps)
        return y

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        """One launch."""
        if self._few_rows.takes(x, linear):
            return self._few_rows(x, linear, out=out)
        return self._tiles(x, linear, out=out) if self._tiles.takes(x, linear) else linear(x, out)

    def norm_qkv(self, x: Tensor, norm: Norm, linear: Linear, heads: Heads, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """One launch for few rows, else two or three; q, k and v are views of the product."""
        if self._few_rows.takes(x, linear, heads):
            qkv = self._few_rows(x, linear, norm, rotated=(heads, rope))
        else:
            qkv = self.product(x if norm.absorbed else self.norm(x, norm), linear)
            self._rotate(qkv, heads, rope, (x, norm.eps) if norm.absorbed else None)
        qkv = qkv.view(x.shape[0], heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
        rotated = heads.num_heads + heads.num_kv_heads
        return qkv[:, : heads.num_heads], qkv[:, heads.num_heads : rotated], qkv[:, rotated:]

    def _rotate(self, qkv: Tensor, heads: Heads, rope: Rope, scaled_by: _RowScale | None) -> None:
        """One launch, in place. scaled_by: the rows whose norm is still to be divided by, and epsilon."""
        num_tokens, dim = qkv.shape[0], heads.head_dim
        num_heads, touched = heads.num_heads, heads.num_heads + heads.num_kv_heads * (1 if scaled_by is None else 2)
        normed = heads.q_norm is not None and heads.k_norm is not None
        if num_tokens:
            block_half = triton.next_power_of_2(dim // 2)
            block_h = min(triton.next_power_of_2(touched), max(1, _ROTATED // block_half))
            x, eps = (qkv, 0.0) if scaled_by is None else scaled_by
            size = 0 if scaled_by is None else x.shape[1]

            def make() -> Launcher:
                sizes = {"HEADS": num_heads, "KV_HEADS": heads.num_kv_heads, "HEAD_DIM": dim, **_row_sizes(size)}
                return Launcher(norm_and_rotate, 2, self._device, **sizes, BLOCK_HALF=block_half, BLOCK_H=block_h, NORM=normed)

            launch = self._launcher(("rotate", num_heads, heads.num_kv_heads, dim, normed, size), make)
            q_norm, k_norm = heads.q_norm, heads.k_norm
            weights = (q_norm.weight, k_norm.weight, x, q_norm.eps) if q_norm and k_norm else (qkv, qkv, x, 0.0)
            launch((num_tokens, triton.cdiv(touched, block_h), 1), qkv, *rope, *weights, eps)

    def norm_gated_product(self, x: Tensor, norm: Norm, linear: Linear) -> Tensor:
        """One launch for few rows, two for tiles, else two or three."""
        if self._few_rows.takes(x, linear):
            return self._few_rows(x, linear, norm, gated=True)
        if self._tiles.takes(x, linear, gated=True):
            return self._tiles(self.norm(x, norm), linear, gated=True)
        both = linear(x if norm.absorbed else self.norm(x, norm))
        rows, size = both.shape[0], both.shape[1] // 2
        y = torch.empty(rows, size, dtype=both.dtype, device=self._device)
        if rows:
            scaled_by, row_size = (x, x.shape[1]) if norm.absorbed else (both, 0)

            def make() -> Launcher:
                return Launcher(silu_and_mul, 4, self._device, SIZE=size, BLOCK=_GATED, **_row_sizes(row_size))

            launch = self._launcher(("silu", size, row_size), make)
            launch((rows, triton.cdiv(size, _GATED), 1), both, y, scaled_by, norm.eps)
        return y

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        """In place, the sum part of the product."""
        if self._few_rows.takes(x, linear):
            return self._few_rows(x, linear, add_to=residual)
        if self._tiles.takes(x, linear):
            return self._tiles(x, linear, add_to=residual)
        return linear.add_to(residual, x)


_ROTATED = 512
"""Elements of half heads that one program of two warps turns: eight a thread, one 16-byte access in half precision."""
_GATED = 1024
"""Likewise for SiLU-and-multiply, four warps."""
_SHORT = 2048
"""Elements of a row that every program of those two may read for the sum of its squares, 4 KB out of L2."""

_RowScale = tuple[Tensor, float]
"""Rows x [rows, size] and epsilon of the RMSNorm whose factor, one for each row, is still to be multiplied by."""


def _row_sizes(size: int) -> dict[str, int]:
    """Compile-time constants for the rows of a norm; 0: there is none."""
    return {"ROW": size, "BLOCK_ROW": triton.next_power_of_2(max(size, 1))}
