"""What each family's configuration says about latent attention, in our terms."""

from __future__ import annotations

import math
from typing import Any

from headway.core.contract.errors import ModelError
from headway.kernels.step.config import LatentConfig
from headway.models.families.experts import deepseek as experts

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def deepseek(config: Any) -> dict[str, Any]:
    """DeepSeek-V2 and V3 (Moonlight)."""
    return {**experts(config), **latent_attention(config)}


def latent_attention(config: Any) -> dict[str, Any]:
    """Sizes, scale and biases of latent attention."""
    for name in _SIZES:
        size = getattr(config, name, None)
        if type(size) is not int or size < 1:
            raise ModelError(f"{name}: needs a whole number of at least 1, got {size!r}")
    rank = getattr(config, "q_lora_rank", None)
    if rank is not None and (type(rank) is not int or rank < 1):
        raise ModelError(f"q_lora_rank: needs null or a whole number of at least 1, got {rank!r}")
    latent = LatentConfig(
        **{name: getattr(config, name) for name in _SIZES},
        q_lora_rank=rank,
        # DeepSeek-V2 is computed on pairs of neighbours; V3's configuration tells.
        interleaved=bool(getattr(config, "rope_interleave", True)),
    )
    bias = bool(getattr(config, "attention_bias", False))
    scale = latent.q_dim**-0.5 * _sharpening(getattr(config, "rope_parameters", None) or {})
    return {"latent": latent, "scale": scale, "qkv_bias": bias, "o_bias": bias}


def _sharpening(rope: dict[str, Any]) -> float:
    """What YaRN multiplies the scores by (Peng et al. 2023), where DeepSeek applies it to them and not to cos and sin."""
    whole, factor = rope.get("mscale_all_dim") or 0, rope.get("factor") or 1
    if rope.get("rope_type", "default") == "default" or not whole or factor <= 1:
        return 1.0
    return float((0.1 * whole * math.log(factor) + 1.0) ** 2)
