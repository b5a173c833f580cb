"""A packed decoder for Llama, SmolLM, Qwen2, Qwen3 and Mistral checkpoints: no padding, no batch axis, merged projections."""

from __future__ import annotations

from torch import Tensor

from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec
from headway.models.config import DecoderConfig
from headway.models.device_operations import operations_for
from headway.models.invariant import invariant_operations
from headway.models.linear import Linear
from headway.models.operations import Heads, Norm, Operations, Rope
from headway.models.weights import WeightSource


class Decoder:
    """Tokens of all sequences of a step in one row each; attention is the only place where they meet."""

    def __init__(self, config: DecoderConfig, weights: WeightSource, batch_invariant: bool = False) -> None:
        """batch_invariant: compute so that a row's bits do not depend on the other rows or their number; slower.

        :raises ModelError: batch_invariant, and this machine's products are not.
        """
        self.config = config
        device = weights.device
        self.embed = weights.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self.layers = [DecoderLayer(config, index, weights) for index in range(config.num_layers)]
        self.norm = Norm(weights.take("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps)
        tied = config.tie_word_embeddings and "lm_head.weight" not in weights
        head = self.embed if tied else weights.take("lm_head.weight", (config.vocab_size, config.hidden_size))
        self.lm_head = Linear(head)
        weights.finish()
        rope = config.inv_freq.to(device), config.rope_factor
        linears = [self.lm_head, *(linear for layer in self.layers for linear in layer.linears)]
        self.operations = invariant_operations(*rope, linears) if batch_invariant else operations_for(*rope)
        for layer in self.layers:
            layer.absorb_norms(self.operations)
        self.attention_specs = [self._spec(window, weights, batch_invariant) for window in config.sliding_windows]

    def _spec(self, window: int | None, weights: WeightSource, batch_invariant: bool) -> AttentionSpec:
        config = self.config
        return AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            dtype=weights.dtype,
            device=weights.device,
            sliding_window=window,
            batch_invariant=batch_invariant,
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
        """input_ids, positions: int32 or int64 [num_tokens]. Returns the last hidden states [num_tokens, hidden_size], normed."""
        x, rope = self.operations.embed(input_ids, positions, self.embed)
        for layer in self.layers:
            x = layer(x, rope, self.operations, attention)
        return self.operations.norm(x, self.norm)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden: [rows, hidden_size], only the rows that will be sampled. Returns [rows, vocab_size], see core.model.Model."""
        return self.operations.product(hidden, self.lm_head, out)


class DecoderLayer:
    """Attention and MLP with their norms and residuals."""

    def __init__(self, config: DecoderConfig, index: int, weights: WeightSource) -> None:
        self.index = index
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        at = f"model.layers.{index}."

        def take(name: str, *shape: int) -> Tensor:
            return weights.take(at + name, shape)

        def norm(name: str, size: int) -> Norm:
            return Norm(take(name, size), config.rms_norm_eps)

        def merged(names: dict[str, int], bias: bool) -> Linear:
            weight = weights.take_merged({f"{at}{name}.weight": size for name, size in names.items()}, hidden)
            biases = {f"{at}{name}.bias": size for name, size in names.items()}
            return Linear(weight, weights.take_merged(biases) if bias else None)

        self.input_norm = norm("input_layernorm.weight", hidden)
        projections = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        self.qkv_proj = merged(projections, config.qkv_bias)
        q_norm = norm("self_attn.q_norm.weight", dim) if config.qk_norm else None
        k_norm = norm("self_attn.k_norm.weight", dim) if config.qk_norm else None
        self.heads = Heads(config.num_heads, config.num_kv_heads, dim, q_norm, k_norm)
        o_bias = take("self_attn.o_proj.bias", hidden) if config.o_bias else None
        self.o_proj = Linear(take("self_attn.o_proj.weight", hidden, q_size), o_bias)
        self.post_norm = norm("post_attention_layernorm.weight", hidden)
        self.gate_up_proj = merged({"mlp.gate_proj": inner, "mlp.up_proj": inner}, config.mlp_bias)
        down_bias = take("mlp.down_proj.bias", hidden) if config.mlp_bias else None
        self.down_proj = Linear(take("mlp.down_proj.weight", hidden, inner), down_bias)

    def absorb_norms(self, ops: Operations) -> None:
        """Let what computes the layer prepare its norms and the products after them."""
        self.input_norm, self.qkv_proj = ops.absorb(self.input_norm, self.qkv_proj)
        self.post_norm, self.gate_up_proj = ops.absorb(self.post_norm, self.gate_up_proj)

    @property
    def linears(self) -> list[Linear]:
        """Its products."""
        return [self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj]

    def __call__(self, x: Tensor, rope: Rope, ops: Operations, attention: Attention) -> Tensor:
        """x: [num_tokens, hidden_size], the residual stream, used up; rope: of `Operations.embed`."""
        out = attention(self.index, *ops.norm_qkv(x, self.input_norm, self.qkv_proj, self.heads, rope))
        x = ops.add_product(x, out.flatten(1), self.o_proj)
        return ops.add_product(x, ops.norm_gated_product(x, self.post_norm, self.gate_up_proj), self.down_proj)
