"""Triton kernels before and after latent attention (MLA): norm and RoPE, absorption of queries, projection of attended latents.

Sums are float32. PDL: see step_kernels.py. Weights are loaded before the wait, since no kernel writes them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.triton_launch import INTERPRETED, Launchers
from headway.kernels.step.config import LatentConfig
from headway.kernels.step.operations import Norm, Rope
from headway.kernels.step.torch_operations import PlainLatentLayer

# Triton reads annotations at compile time, so they must not be deferred here.


@triton.jit
def norm_and_rotate_latents(
    q_ptr,  # [num_tokens, HEADS, NOPE + 2 HALF], row stride Q_ROW; the last 2 HALF of each head are overwritten
    latent_ptr,  # [num_tokens, RANK + 2 HALF], row stride LATENT_ROW, overwritten
    norm_ptr,  # [RANK]
    cos_ptr,  # float32 [num_tokens, HALF]
    sin_ptr,
    eps,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    HALF: tl.constexpr,
    RANK: tl.constexpr,
    Q_ROW: tl.constexpr,
    LATENT_ROW: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Apply RMSNorm to the latents, and RoPE (Su et al. 2021) to the key part after them and to the end of each query head.

    Grid (num_tokens, 1 + cdiv(HEADS, BLOCK_H)): the first program of a token handles its latent, the other programs its queries.
    """
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_HALF)
    r = tl.arange(0, BLOCK_RANK)
    weight = tl.load(norm_ptr + r, mask=r < RANK, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    cos = tl.load(cos_ptr + token * HALF + h, mask=h < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + h, mask=h < HALF, other=0.0)
    if tl.program_id(1) == 0:
        row = latent_ptr + token * LATENT_ROW
        x = tl.load(row + r, mask=r < RANK, other=0.0).to(tl.float32)
        y = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * weight
        tl.store(row + r, y.to(latent_ptr.dtype.element_ty), mask=r < RANK)
        _rotate(row + RANK + h, cos, sin, h < HALF, HALF)
    else:
        head = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        at = q_ptr + token * Q_ROW + head * (NOPE + 2 * HALF) + NOPE + h[None, :]
        _rotate(at, cos[None, :], sin[None, :], (head < HEADS) & (h < HALF)[None, :], HALF)


@triton.jit
def _rotate(at, cos, sin, mask, HALF: tl.constexpr):
    """Rotate each element at the offsets `at` together with the element HALF positions later (RoPE)."""
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (low * cos - high * sin).to(at.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (high * cos + low * sin).to(at.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def absorb_queries(
    q_ptr,  # [rows, HEADS, NOPE + ROPE], row stride Q_ROW
    weight_ptr,  # [HEADS, NOPE + VALUE, RANK]
    y_ptr,  # [rows, HEADS, RANK + ROPE], written
    rows,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    Q_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # NOPE rounded up to a power of two
    BLOCK_ROPE: tl.constexpr,
    DOT: tl.constexpr,  # type of the operands of tl.dot
    PDL: tl.constexpr,
):
    """y = q W (GEMM per head) for the first NOPE elements. The other elements are copied.

    Grid (cdiv(RANK, BLOCK_N), HEADS, cdiv(rows, BLOCK_M)).
    """
    head = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = (m < rows)[:, None]
    weight_at = weight_ptr + (head * (NOPE + VALUE) + k)[:, None] * RANK + n[None, :]
    weight = tl.load(weight_at, mask=(k < NOPE)[:, None] & (n < RANK)[None, :], other=0.0).to(DOT)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q_at = q_ptr + m.to(tl.int64)[:, None] * Q_ROW + head * (NOPE + ROPE)
    y_at = y_ptr + (m.to(tl.int64)[:, None] * HEADS + head) * (RANK + ROPE)
    q = tl.load(q_at + k[None, :], mask=live & (k < NOPE)[None, :], other=0.0).to(DOT)
    y = tl.dot(q, weight)
    tl.store(y_at + n[None, :], y.to(y_ptr.dtype.element_ty), mask=live & (n < RANK)[None, :])
    if tl.program_id(0) == 0:
        t = tl.arange(0, BLOCK_ROPE)
        mask = live & (t < ROPE)[None, :]
        tl.store(y_at + RANK + t[None, :], tl.load(q_at + NOPE + t[None, :], mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def project_latents(
    x_ptr,  # [rows, HEADS, RANK]
    weight_ptr,  # [HEADS, NOPE + VALUE, RANK]
    y_ptr,  # [rows, HEADS, VALUE], row stride Y_ROW, written
    rows,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    Y_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # RANK rounded up to a power of two
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = x W^T (GEMM) for each head. Grid (cdiv(VALUE, BLOCK_N), HEADS, cdiv(rows, BLOCK_M))."""
    head = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = (m < rows)[:, None]
    weight_at = weight_ptr + (head * (NOPE + VALUE) + NOPE + n)[:, None] * RANK + k[None, :]
    weight = tl.load(weight_at, mask=(n < VALUE)[:, None] & (k < RANK)[None, :], other=0.0).to(DOT)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x_at = x_ptr + (m.to(tl.int64)[:, None] * HEADS + head) * RANK + k[None, :]
    x = tl.load(x_at, mask=live & (k < RANK)[None, :], other=0.0).to(DOT)
    y = tl.dot(x, tl.trans(weight))
    y_at = y_ptr + m.to(tl.int64)[:, None] * Y_ROW + head * VALUE + n[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=live & (n < VALUE)[None, :])


MAX_ROWS = 256
"""Maximum number of rows for these kernels. With more rows, cuBLAS's batched GEMM can fill the GPU."""
_BLOCK_M = 16
_ABSORBED, _PROJECTED = 64, 16
"""Number of columns per program of `absorb_queries` and of `project_latents`, chosen so that a model with 16 heads has a program
for every SM."""
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class LatentKernels:
    """Launchers of one model's kernels before and after latent attention."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launchers = Launchers(device)

    def rotate(self, q: Tensor, latent: Tensor, config: LatentConfig, norm: Norm, rope: Rope) -> tuple[Tensor, Tensor]:
        """Norm latents, and rotate queries and keys in place; see Operations.rotate_latent."""
        (num_tokens, q_size), half = q.shape, config.qk_rope_head_dim // 2
        heads = q_size // config.q_dim
        if num_tokens:
            block_half = triton.next_power_of_2(half)
            block_h = min(triton.next_power_of_2(heads), max(1, _ROTATED // block_half))
            sizes = {
                "HEADS": heads,
                "NOPE": config.qk_nope_head_dim,
                "HALF": half,
                "RANK": config.kv_lora_rank,
                "Q_ROW": q.stride(0),
                "LATENT_ROW": latent.stride(0),
                "BLOCK_H": block_h,
                "BLOCK_HALF": block_half,
                "BLOCK_RANK": triton.next_power_of_2(config.kv_lora_rank),
            }
            launch, (cos, sin) = self._launchers.get(norm_and_rotate_latents, 2, sizes), rope
            grid = num_tokens, 1 + triton.cdiv(heads, block_h), 1
            launch(grid, q_ptr=q, latent_ptr=latent, norm_ptr=norm.weight, cos_ptr=cos, sin_ptr=sin, eps=norm.eps)
        return q.view(num_tokens, heads, config.q_dim), latent[:, None]

    def absorb(self, q: Tensor, kv_b: Tensor, config: LatentConfig) -> Tensor:
        """Absorb q [rows, heads, q_dim], whose heads are adjacent. Return [rows, heads, kv_dim]."""
        rows, heads, _ = q.shape
        y = q.new_empty(rows, heads, config.kv_dim)
        sizes = {
            **self._sizes(heads, config, q.dtype),
            "ROPE": config.qk_rope_head_dim,
            "Q_ROW": q.stride(0),
            "BLOCK_N": _ABSORBED,
            "BLOCK_K": max(triton.next_power_of_2(config.qk_nope_head_dim), 16),
            "BLOCK_ROPE": triton.next_power_of_2(config.qk_rope_head_dim),
        }
        grid = triton.cdiv(config.kv_lora_rank, _ABSORBED), heads, triton.cdiv(rows, _BLOCK_M)
        self._launchers.get(absorb_queries, 4, sizes)(grid, q_ptr=q, weight_ptr=kv_b, y_ptr=y, rows=rows)
        return y

    def project(self, x: Tensor, kv_b: Tensor, config: LatentConfig, out: Tensor) -> None:
        """Project x [rows, heads, kv_lora_rank], contiguous, to out [rows, heads, v_head_dim], whose heads are adjacent."""
        rows, heads, _ = x.shape
        sizes = {
            **self._sizes(heads, config, x.dtype),
            "Y_ROW": out.stride(0),
            "BLOCK_N": _PROJECTED,
            "BLOCK_K": max(triton.next_power_of_2(config.kv_lora_rank), 16),
        }
        grid = triton.cdiv(config.v_head_dim, _PROJECTED), heads, triton.cdiv(rows, _BLOCK_M)
        self._launchers.get(project_latents, 4, sizes)(grid, x_ptr=x, weight_ptr=kv_b, y_ptr=out, rows=rows)

    def _sizes(self, heads: int, config: LatentConfig, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "HEADS": heads,
            "NOPE": config.qk_nope_head_dim,
            "VALUE": config.v_head_dim,
            "RANK": config.kv_lora_rank,
            "BLOCK_M": _BLOCK_M,
            "DOT": tl.float32 if INTERPRETED else _TYPES[dtype],
        }


class FusedLatentLayer(PlainLatentLayer):
    """Latent layer with Triton kernels for few rows in half precision, else like `PlainLatentLayer`."""

    def __init__(self, expanded: AttentionSpec, config: LatentConfig, kv_b: Tensor, kernels: LatentKernels) -> None:
        """Prepare the layer. kv_b: see Operations.latent_layer."""
        super().__init__(expanded, config, kv_b)
        self._config = config
        self._kv_b = kv_b
        self._kernels = kernels

    def absorb(self, q: Tensor) -> Tensor:
        """Absorb queries in one launch for few rows, else in two."""
        if not self._takes(q):
            return super().absorb(q)
        return self._kernels.absorb(q, self._kv_b, self._config)

    def project(self, attended: Tensor, out: Tensor) -> None:
        """Project attended latents in one launch."""
        if self._takes(out) and attended.is_contiguous():
            self._kernels.project(attended, self._kv_b, self._config, out)
        else:
            super().project(attended, out)

    def _takes(self, x: Tensor) -> bool:
        """Return whether the Triton kernels support rows [n, heads, dim]."""
        side_by_side = x.stride(2) == 1 and x.stride(1) == x.shape[2]
        return 0 < x.shape[0] <= MAX_ROWS and x.dtype in _TYPES and side_by_side


_ROTATED = 512
"""Number of half-head elements that one program of two warps rotates (RoPE)."""
