"""A packed decoder for Llama, SmolLM, Qwen2, Qwen3 and Mistral checkpoints: no padding, no batch axis, merged projections."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu

from headway.core.model import Attention
from headway.core.spec import AttentionSpec
from headway.models.config import DecoderConfig
from headway.models.linear import Linear
from headway.models.weights import Weights


class Decoder:
    """Tokens of all sequences of a step in one row each; attention is the only place where they meet."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        self.config = config
        device = weights.device
        self.embed = weights.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self.layers = [DecoderLayer(config, index, weights) for index in range(config.num_layers)]
        self.norm = weights.take("model.norm.weight", (config.hidden_size,))
        tied = config.tie_word_embeddings and "lm_head.weight" not in weights
        head = self.embed if tied else weights.take("lm_head.weight", (config.vocab_size, config.hidden_size))
        self.lm_head = Linear(head)
        weights.finish()
        self.inv_freq = config.inv_freq.to(device)
        self.attention_specs = [self._spec(window, weights) for window in config.sliding_windows]

    def _spec(self, window: int | None, weights: Weights) -> AttentionSpec:
        config = self.config
        return AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            dtype=weights.dtype,
            device=weights.device,
            sliding_window=window,
        )

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.config.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Positions the model was made for."""
        return self.config.max_position_embeddings

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """input_ids, positions: int64 [num_tokens]. Returns the last hidden states [num_tokens, hidden_size], normed."""
        x = embedding(input_ids, self.embed)
        rope = self._rope(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, rope, attention)
        return rms_norm(x, self.norm.shape, self.norm, self.config.rms_norm_eps)

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos twice, and sin with its first half negated: x * cos + swap_halves(x) * sin is the rotation, in three operations."""
        angles = positions[:, None, None] * self.inv_freq  # float32 [num_tokens, 1, head_dim / 2]
        cos, sin = angles.cos() * self.config.rope_factor, angles.sin() * self.config.rope_factor
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size], only the rows that will be sampled. Returns float32 [rows, vocab_size]."""
        return self.lm_head(hidden).float()


class DecoderLayer:
    """Attention and MLP with their norms and residuals."""

    def __init__(self, config: DecoderConfig, index: int, weights: Weights) -> None:
        self.config, self.index = config, index
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        self.at = f"model.layers.{index}."

        def take(name: str, *shape: int) -> Tensor:
            return weights.take(self.at + name, shape)

        def merged(names: dict[str, int], bias: bool) -> Linear:
            parts = [take(f"{name}.weight", size, hidden) for name, size in names.items()]
            biases = [take(f"{name}.bias", size) for name, size in names.items()] if bias else None
            return Linear(torch.cat(parts), torch.cat(biases) if biases else None)

        self.input_norm = take("input_layernorm.weight", hidden)
        projections = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        self.qkv_proj = merged(projections, config.qkv_bias)
        self.q_norm = take("self_attn.q_norm.weight", dim) if config.qk_norm else None
        self.k_norm = take("self_attn.k_norm.weight", dim) if config.qk_norm else None
        o_bias = take("self_attn.o_proj.bias", hidden) if config.o_bias else None
        self.o_proj = Linear(take("self_attn.o_proj.weight", hidden, q_size), o_bias)
        self.post_norm = take("post_attention_layernorm.weight", hidden)
        self.gate_up_proj = merged({"mlp.gate_proj": inner, "mlp.up_proj": inner}, config.mlp_bias)
        down_bias = take("mlp.down_proj.bias", hidden) if config.mlp_bias else None
        self.down_proj = Linear(take("mlp.down_proj.weight", hidden, inner), down_bias)

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """x: [num_tokens, hidden_size]; rope: cos and sin [num_tokens, 1, head_dim]."""
        config = self.config
        heads, kv_heads, dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        qkv = self.qkv_proj(rms_norm(x, self.input_norm.shape, self.input_norm, eps)).view(-1, heads + 2 * kv_heads, dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(qk[:, :heads], (dim,), self.q_norm, eps)
            k = rms_norm(qk[:, heads:], (dim,), self.k_norm, eps)
            qk = torch.cat([q, k], dim=1)
        qk = _rotate(qk, *rope)
        out = attention(self.index, qk[:, :heads], qk[:, heads:], v)
        x = x + self.o_proj(out.flatten(1))
        gate, up = self.gate_up_proj(rms_norm(x, self.post_norm.shape, self.post_norm, eps)).chunk(2, dim=1)
        return x + self.down_proj(silu(gate) * up)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (Su et al. 2021) in transformers' half-split order. x: [num_tokens, heads, head_dim]."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.roll(x, half, dims=-1), sin)
