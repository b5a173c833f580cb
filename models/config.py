"""What the decoder must know of a checkpoint, read from a transformers configuration; anything it cannot do is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.contract.errors import ModelError
from headway.models.checkpoint import ARCHITECTURES, BeyondDecoderError


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and switches of a Llama-like decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    inv_freq: torch.Tensor
    """float32 [head_dim / 2]: RoPE frequencies, scaling included."""
    rope_factor: float
    """Multiplies cos and sin (YaRN's attention factor; 1 elsewhere)."""
    sliding_windows: tuple[int | None, ...]
    """Each layer's window."""
    qk_norm: bool
    """RMSNorm over head_dim of q and k before RoPE (Qwen3)."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool

    @classmethod
    def from_transformers(cls, config: Any) -> DecoderConfig:
        """Read a transformers PretrainedConfig.

        :raises BeyondDecoderError: an architecture, activation or RoPE type that the decoder does not compute.
        :raises ModelError: a number that none could compute with.
        """
        kind = config.model_type
        if kind not in ARCHITECTURES:
            named = ", ".join(config.architectures or [kind])
            raise BeyondDecoderError(f"model architecture: needs one of {', '.join(ARCHITECTURES.values())}, got {named}")
        if config.hidden_act != "silu":
            raise BeyondDecoderError(f"hidden_act: needs silu, got {config.hidden_act}")
        _check_numbers(config)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        inv_freq, rope_factor = _rope(config, head_dim)
        bias = bool(getattr(config, "attention_bias", False))
        return cls(
            model_type=kind,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=config.num_key_value_heads or heads,
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            inv_freq=inv_freq,
            rope_factor=rope_factor,
            sliding_windows=_windows(config),
            qk_norm=kind == "qwen3",
            qkv_bias=bias or kind == "qwen2",
            o_bias=bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            tie_word_embeddings=bool(config.tie_word_embeddings),
        )


def _check_numbers(config: Any) -> None:
    """What the shapes do not show: a norm or a RoPE that divides by nothing, a list of layers of another length."""
    eps, theta = config.rms_norm_eps, (config.rope_parameters or {}).get("rope_theta", 1.0)
    for name, value in (("rms_norm_eps", eps), ("rope_theta", theta)):
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise ModelError(f"{name}: needs a number above 0, got {value!r}")
    kinds = getattr(config, "layer_types", None)
    if kinds and len(kinds) != config.num_hidden_layers:
        raise ModelError(f"layer_types: needs one for each of the {config.num_hidden_layers} layers, got {len(kinds)}")


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(config: Any, head_dim: int) -> tuple[torch.Tensor, float]:
    """Frequencies and factor; rare scaled types are computed by transformers, so that they mean what the checkpoint means."""
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if float(parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise BeyondDecoderError(f"partial_rotary_factor: needs 1, got {parameters['partial_rotary_factor']}")
    if kind in ("default", "llama3"):
        inv_freq = 1.0 / parameters["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        return inv_freq if kind == "default" else _llama3(inv_freq, parameters), 1.0
    if kind not in ("linear", "yarn"):  # the others change with the length of the sequence
        raise BeyondDecoderError(f"rope_type: needs default, linear, llama3 or yarn, got {kind}")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    compute: Callable[..., tuple[torch.Tensor, float]] = ROPE_INIT_FUNCTIONS[kind]
    return compute(config, torch.device("cpu"))


def _llama3(inv_freq: torch.Tensor, parameters: Mapping[str, float]) -> torch.Tensor:
    """Llama 3.1's scaling: long waves are stretched by `factor`, short ones kept, those between interpolated."""
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    context = parameters["original_max_position_embeddings"]
    wavelen = 2 * math.pi / inv_freq
    stretched = torch.where(wavelen > context / low, inv_freq / factor, inv_freq)
    smooth = (context / wavelen - low) / (high - low)
    between = (wavelen >= context / high) & (wavelen <= context / low)
    return torch.where(between, (1 - smooth) * stretched / factor + smooth * stretched, stretched)
