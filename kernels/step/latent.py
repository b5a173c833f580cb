"""What stands around latent attention on a GPU: a launch each for the rows of a decode."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.triton_launch import INTERPRETED, FixedLauncher
from headway.kernels.step.config import LatentConfig
from headway.kernels.step.latent_kernels import absorb_queries, project_latents, turn_latent
from headway.kernels.step.operations import Norm, Rope
from headway.kernels.step.plain_latent import PlainLatentLayer

MAX_ROWS = 256
"""Rows up to which our kernels absorb and project; from there on cuBLAS's batched product has enough to do."""
_BLOCK_M = 16
_ABSORBED, _PROJECTED = 64, 16
"""Columns of a program: so that a model of 16 heads has a program for every multiprocessor."""
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class LatentKernels:
    """The launchers of one model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launchers: dict[Hashable, FixedLauncher] = {}

    def turn(self, q: Tensor, latent: Tensor, config: LatentConfig, norm: Norm, rope: Rope) -> tuple[Tensor, Tensor]:
        """See Operations.rotate_latent; in place."""
        (num_tokens, q_size), half = q.shape, config.qk_rope_head_dim // 2
        heads = q_size // config.q_dim
        if num_tokens:
            block_half = triton.next_power_of_2(half)
            block_h = min(triton.next_power_of_2(heads), max(1, _TURNED // block_half))
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
            launch = self._launcher(turn_latent, 2, sizes)
            launch((num_tokens, 1 + triton.cdiv(heads, block_h), 1), q, latent, norm.weight, *rope, norm.eps)
        return q.view(num_tokens, heads, config.q_dim), latent[:, None]

    def absorb(self, q: Tensor, kv_b: Tensor, config: LatentConfig) -> Tensor:
        """q: [rows, heads, q_dim], heads side by side. Returns [rows, heads, kv_dim]."""
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
        self._launcher(absorb_queries, 4, sizes)(grid, q, kv_b, y, rows)
        return y

    def project(self, x: Tensor, kv_b: Tensor, config: LatentConfig, out: Tensor) -> None:
        """x: [rows, heads, kv_lora_rank], contiguous; out: [rows, heads, v_head_dim], heads side by side."""
        rows, heads, _ = x.shape
        sizes = {
            **self._sizes(heads, config, x.dtype),
            "Y_ROW": out.stride(0),
            "BLOCK_N": _PROJECTED,
            "BLOCK_K": max(triton.next_power_of_2(config.kv_lora_rank), 16),
        }
        grid = triton.cdiv(config.v_head_dim, _PROJECTED), heads, triton.cdiv(rows, _BLOCK_M)
        self._launcher(project_latents, 4, sizes)(grid, x, kv_b, out, rows)

    def _sizes(self, heads: int, config: LatentConfig, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "HEADS": heads,
            "NOPE": config.qk_nope_head_dim,
            "VALUE": config.v_head_dim,
            "RANK": config.kv_lora_rank,
            "BLOCK_M": _BLOCK_M,
            "DOT": tl.float32 if INTERPRETED else _TYPES[dtype],
        }

    def _launcher(self, kernel: Any, num_warps: int, sizes: dict[str, Any]) -> FixedLauncher:
        key = kernel.__name__, *sizes.values()
        known = self._launchers.get(key)
        if known is None:
            known = self._launchers[key] = FixedLauncher(kernel, num_warps, self._device, **sizes)
        return known


class FusedLatentLayer(PlainLatentLayer):
    """As the plain one, with kernels of ours for few rows in half precision."""

    def __init__(self, expanded: AttentionSpec, config: LatentConfig, kv_b: Tensor, kernels: LatentKernels) -> None:
        """kv_b: see Operations.latent_layer."""
        super().__init__(expanded, config, kv_b)
        self._config = config
        self._kv_b = kv_b
        self._kernels = kernels

    def absorb(self, q: Tensor) -> Tensor:
        """One launch for few rows, else two."""
        if not self._takes(q):
            return super().absorb(q)
        return self._kernels.absorb(q, self._kv_b, self._config)

    def project(self, attended: Tensor, out: Tensor) -> None:
        """One launch."""
        if self._takes(out) and attended.is_contiguous():
            self._kernels.project(attended, self._kv_b, self._config, out)
        else:
            super().project(attended, out)

    def _takes(self, x: Tensor) -> bool:
        """Whether our kernels serve rows [n, heads, dim]."""
        side_by_side = x.stride(2) == 1 and x.stride(1) == x.shape[2]
        return 0 < x.shape[0] <= MAX_ROWS and x.dtype in _TYPES and side_by_side


_TURNED = 512
"""Elements of half heads that one program of two warps turns."""
