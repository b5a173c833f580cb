"""The products around latent attention (MLA, DeepSeek-V2) by torch's operations."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.core.contract.spec import AttentionSpec
from headway.kernels.linear.linear import Linear
from headway.kernels.step.config import LatentConfig


class PlainLatentLayer:
    """Absorbs queries, expands latents, projects what was attended; one weight serves all three, read as it lies."""

    def __init__(self, expanded: AttentionSpec, config: LatentConfig, kv_b: Tensor) -> None:
        """kv_b: see Operations.latent_layer."""
        self.expanded = expanded
        self._nope_dim = config.qk_nope_head_dim
        self._rank = config.kv_lora_rank
        of_heads = kv_b.view(expanded.num_heads, -1, self._rank)
        self._to_key = of_heads[:, : self._nope_dim]
        """[num_heads, nope_dim, rank]"""
        self._to_value = of_heads[:, self._nope_dim :].transpose(1, 2)
        """[num_heads, rank, v_head_dim]"""
        self._both = Linear(kv_b)

    def absorb(self, q: Tensor) -> Tensor:
        """See LatentLayer."""
        still, turned = q[..., : self._nope_dim], q[..., self._nope_dim :]
        out = q.new_empty(*q.shape[:2], self._rank + turned.shape[-1])
        torch.bmm(still.transpose(0, 1), self._to_key, out=out[..., : self._rank].transpose(0, 1))
        out[..., self._rank :] = turned
        return out

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """See LatentLayer. v is a view of the product."""
        rows, turned = latent[:, 0, : self._rank], latent[..., self._rank :]
        both = self._both(rows).view(latent.shape[0], self.expanded.num_heads, self._nope_dim + self.expanded.v_head_dim)
        still, v = both[..., : self._nope_dim], both[..., self._nope_dim :]
        return torch.cat([still, turned.expand(*still.shape[:2], -1)], dim=-1), v

    def project(self, attended: Tensor, out: Tensor) -> None:
        """See LatentLayer."""
        torch.bmm(attended.transpose(0, 1), self._to_value, out=out.transpose(0, 1))
