"""What a decoder computes between its attentions, as steps that a device may fuse; and the plain way, torch's operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu

from headway.models.linear import Linear


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm (Zhang and Sennrich 2019)."""

    weight: Tensor
    """[size]"""
    eps: float
    absorbed: bool = False
    """Whether the weight, now all ones, is part of the product that follows: only a factor for each row is left of the norm."""


@dataclass(frozen=True, slots=True)
class Heads:
    """How a row of the merged q, k, v product divides, and how its q and k are normed."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Norm | None = None
    """RMSNorm over head_dim before RoPE (Qwen3); both or neither."""
    k_norm: Norm | None = None


Rope = tuple[Tensor, Tensor]
"""cos and sin of a step's positions."""


class Operations(Protocol):
    """The steps of one model. Rows are independent of each other in every one of them."""

    def absorb(self, norm: Norm, linear: Linear) -> tuple[Norm, Linear]:
        """A norm and the product that follows it, made once before any step: such that the two together compute the same."""

    def embed(self, input_ids: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Rope]:
        """Residual stream [num_tokens, hidden_size] and RoPE's cos and sin of a step, in the form that `norm_qkv` takes.

        input_ids, positions: int32 or int64 [num_tokens]; table: [vocab_size, hidden_size].
        """

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """RMSNorm over the rows of x [rows, size]."""

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        """The product of x [rows, in_features]: [rows, out_features]; `out`, contiguous, where it is given."""

    def norm_qkv(self, x: Tensor, norm: Norm, linear: Linear, heads: Heads, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """RMSNorm, the merged product, then norm and rotation of q and k's heads.

        x: [num_tokens, hidden_size]; linear: to (num_heads + 2 num_kv_heads) head_dim; rope: of `embed`.
        Returns q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim], rows perhaps strided.
        """

    def norm_gated_product(self, x: Tensor, norm: Norm, linear: Linear) -> Tensor:
        """RMSNorm, the product, SiLU of its first half times the second: [rows, in_features] to [rows, out_features / 2]."""

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        """residual + product of x [rows, in_features]; residual: [rows, out_features], which is used up."""


class Plain:
    """Every operation as torch has it: what a CPU runs, and what the fused kernels are tested against."""

    def __init__(self, inv_freq: Tensor, rope_factor: float) -> None:
        """inv_freq: float32 [head_dim / 2]; rope_factor multiplies cos and sin."""
        self._inv_freq, self._rope_factor = inv_freq, rope_factor

    def absorb(self, norm: Norm, linear: Linear) -> tuple[Norm, Linear]:
        """As they are."""
        return norm, linear

    def embed(self, input_ids: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Rope]:
        """cos twice, and sin with its first half negated: x * cos + swap_halves(x) * sin is the rotation, in three operations."""
        angles = positions[:, None, None] * self._inv_freq  # float32 [num_tokens, 1, head_dim / 2]
        cos, sin = angles.cos() * self._rope_factor, angles.sin() * self._rope_factor
        rope = torch.cat([cos, cos], dim=-1).to(table.dtype), torch.cat([-sin, sin], dim=-1).to(table.dtype)
        return embedding(input_ids, table), rope

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See Operations."""
        return rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        """See Operations."""
        return linear(x, out)

    def norm_qkv(self, x: Tensor, norm: Norm, linear: Linear, heads: Heads, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """RoPE (Su et al. 2021) in transformers' half-split order."""
        num_heads, rotated = heads.num_heads, heads.num_heads + heads.num_kv_heads
        qkv = linear(self.norm(x, norm)).view(-1, rotated + heads.num_kv_heads, heads.head_dim)
        qk, v = qkv[:, :rotated], qkv[:, rotated:]
        if heads.q_norm is not None and heads.k_norm is not None:
            qk = torch.cat([self.norm(qk[:, :num_heads], heads.q_norm), self.norm(qk[:, num_heads:], heads.k_norm)], dim=1)
        cos, sin = rope
        qk = torch.addcmul(qk * cos, torch.roll(qk, heads.head_dim // 2, dims=-1), sin)
        return qk[:, :num_heads], qk[:, num_heads:], v

    def norm_gated_product(self, x: Tensor, norm: Norm, linear: Linear) -> Tensor:
        """See Operations."""
        gate, up = linear(self.norm(x, norm)).chunk(2, dim=1)
        return silu(gate) * up

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        """See Operations."""
        return residual + linear(x)
