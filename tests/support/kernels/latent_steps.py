"""Random inputs for what stands around latent attention, and what one way of computing it gives."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.core.contract.spec import AttentionSpec
from headway.kernels.step.config import LatentConfig
from headway.kernels.step.operations import Embedding, Norm, Operations

LITE = LatentConfig(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
ODD = LatentConfig(kv_lora_rank=48, qk_nope_head_dim=20, qk_rope_head_dim=12, v_head_dim=36)


def latent_steps(
    ops: Operations, config: LatentConfig, heads: int, rows: int, dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    """Each step's result in float64 on the CPU. Inputs depend on the sizes alone, and lie as the merged product leaves them."""
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device, dtype, copy=True)

    _, (rope,) = ops.embed(torch.arange(rows).to(device), (7 * torch.arange(rows)).to(device), Embedding(draw(max(rows, 1), 16)))
    both, norm = draw(rows, heads * config.q_dim + config.kv_dim), Norm(draw(config.kv_lora_rank), 1e-6)
    expanded = AttentionSpec(heads, heads, config.q_dim, 1.0, v_head_dim=config.v_head_dim, dense=True)
    weight = draw(heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank) * config.kv_lora_rank**-0.5
    layer = ops.latent_layer(expanded, config, weight)
    attended, out = (
        draw(rows, heads, config.kv_lora_rank),
        torch.empty(rows, heads, config.v_head_dim, dtype=dtype, device=device),
    )
    whole = [both[:, : heads * config.q_dim], both[:, heads * config.q_dim :]]
    results = {"absorb": layer.absorb(whole[0].view(rows, heads, config.q_dim))}
    results["k"], results["v"] = layer.expand(whole[1][:, None])
    layer.project(attended, out)
    results["project"] = out
    kept = both.clone().tensor_split([heads * config.q_dim], dim=1)
    results["q, not turned"], results["latent, not turned"] = ops.rotate_latent(*kept, config, norm, None)
    results["q"], results["latent"] = ops.rotate_latent(*whole, config, norm, rope)  # last, since it may be in place
    return {name: result.double().cpu() for name, result in results.items()}
