"""What the decoder must know of a model: shapes, names of tensors, the parts of its layers, and the specs of these."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from headway.core.contract.errors import ModelError
from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateSpec
from headway.kernels.step.config import Activation, GateActivation, LatentConfig


@dataclass(frozen=True)
class ExpertNames:
    """Below a layer: the tensors of a mixture of experts. `{}` is the expert's number."""

    router: str = "mlp.gate"
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    interleaved: bool = False
    """Whether the next two are transposed, gate and up in turn (gpt-oss)."""
    stacked_gate_up: str = "mlp.experts.gate_up_proj"
    """A tensor of all experts: read in place of `gate` and `up` where a checkpoint has it."""
    stacked_down: str = "mlp.experts.down_proj"
    shared: str = "mlp.shared_experts"
    """An MLP with the next two."""
    shared_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Gate over up, or a single name for both."""
    shared_down: str = "down_proj"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True)
class LatentNames:
    """Below a layer: the products and norms of latent attention."""

    q: str = "self_attn.q_proj"
    """Where queries are a plain product."""
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"


@dataclass(frozen=True)
class StateNames:
    """Below a layer: the products, norms and parameters of a part with a state."""

    norm: str | None = "input_layernorm"
    """Before the part."""
    inputs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The products of the part's input, and the sections that each holds, in its order; `layers/` names each kind's sections."""
    by_key_head: bool = False
    """Whether a product holds all sections' rows of the first key head, then those of the second, and so on (Qwen3-Next)."""
    conv: tuple[str, ...] = ()
    """Convolutions: one over all channels, or one for each of the sections that they are made of."""
    A_log: str = ""
    dt_bias: str = ""
    D: str = ""
    out_norm: str = ""
    """Norm of the recurrence's output."""
    out: str = ""
    low_rank: tuple[str, ...] = ()
    """Second halves of products of low rank: of the decay and of the output's gate (`kda`), of dt (`mamba1`)."""
    from_conv: str = ""
    """The product of the convolution's output that gives dt, B and C (`mamba1`)."""
    from_conv_norms: tuple[str, ...] = ()
    """The norms of these products."""


@dataclass(frozen=True)
class TensorNames:
    """Modules without `.weight` and `.bias`. A part that is None is not there: so the placement of norms is told."""

    embed: str = "model.embed_tokens"
    positions: str | None = None
    """A table of learned positions."""
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    """What the names below begin with; `{}` is the layer's number."""
    attention_norm: str | None = "input_layernorm"
    """Before attention."""
    mixer_norm: str = "input_layernorm"
    """Before attention and the part with a state together, where a layer has both, and where parts add to the normed stream."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """One after the other; a single name is all three in one tensor."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    o: str = "self_attn.o_proj"
    attention_post_norm: str | None = None
    """Norm of what attention adds to the residual stream."""
    mlp_norm: str | None = "post_attention_layernorm"
    """Before the MLP."""
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate over up, or a single name for both; of an MLP that is not gated, its first product."""
    down: str = "mlp.down_proj"
    mlp_post_norm: str | None = None
    experts: ExpertNames = field(default_factory=ExpertNames)
    latent: LatentNames = field(default_factory=LatentNames)
    state: StateNames = field(default_factory=StateNames)
    transposed: bool = False
    """Whether weights lie as [in_features, out_features] (GPT-2)."""
    ignored: tuple[str, ...] = ()
    """Suffixes of tensors that some of the family's checkpoints carry and nobody needs."""
    ignored_modules: tuple[str, ...] = ()
    """What the names of such tensors begin with: whole modules, such as those that propose drafts."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Parts of names, and what some checkpoints have in their place."""


LLAMA_NAMES = TensorNames()


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding, scaling included (Su et al. 2021). Equal ones are computed once for all layers."""

    inv_freq: tuple[float, ...]
    """head_dim / 2 frequencies; 0 where an element is not rotated."""
    factors: tuple[float, ...]
    """What multiplies cos and sin of each (YaRN's attention factor; 1 elsewhere)."""
    rotary_dim: int
    """Elements of a head that the checkpoint rotates, its first ones; see `layers.rotary`."""


@dataclass(frozen=True)
class LayerConfig:
    """What one layer is made of: attention, a part with a state, or both side by side, and then an MLP; each may be absent."""

    sliding_window: int | None = None
    rope: int | None = 0
    """Index of the layer's rotary embedding in `DecoderConfig.ropes`; None: it has none."""
    attention: bool = True
    """Whether it has attention: latent where `DecoderConfig.latent` is given."""
    state: bool = False
    """Whether it has the part with a state of `DecoderConfig.state`. Beside attention both read one normed input, and the sum of
    what they give is added (Falcon-H1)."""
    mlp: Literal["dense", "experts"] | None = "dense"
    """experts: the one of `DecoderConfig.experts`."""
    kept: tuple[float, float] | None = None
    """Attention (or the part with a state) and the MLP add to the normed stream, multiplied by these, instead of to the stream
    before the norm (MiniMax-01)."""
    slopes: tuple[float, ...] = ()
    """Decay of each head's state (`lightning`): a token's is exp(-slope)."""
    names: TensorNames | None = None
    """What its tensors are called, where they are not called as in `DecoderConfig.names`."""


@dataclass(frozen=True)
class StateConfig:
    """The parts with a state, all of one kind, and what surrounds the recurrence in them."""

    spec: StateSpec
    """Sizes. The decoder puts in the element type and the device that the model is loaded with."""
    gate: GateActivation = "silu"
    """Activation of the gate that multiplies the recurrence's output."""
    norm_size: int = 0
    """Elements of the output that are normed together; 0: it is not normed."""
    norm_eps: float | None = None
    """Epsilon of that norm, where it is not the model's."""
    norm_all_weights: bool = False
    """Whether each element of the output has a weight of that norm, instead of each element of what is normed together."""
    gate_first: bool = False
    """Whether the output is multiplied by its gate before it is normed."""
    slopes: tuple[float, ...] = ()
    """Decays of one layer (`lightning`), out of its LayerConfig."""
    dt_rank: int = 0
    """Elements that dt is made of (`mamba1`)."""
    conv_bias: bool = False
    in_bias: bool = False
    out_bias: bool = False


@dataclass(frozen=True)
class Multipliers:
    """Factors of products' results (Falcon-H1), which the weights are multiplied by when they are read."""

    qkv: tuple[float, float, float] = (1.0, 1.0, 1.0)
    attention: float = 1.0
    """Multiplies what attention adds to the residual stream; the next does the same for other parts."""
    state: float = 1.0
    mlp: float = 1.0
    gate: float = 1.0
    """Multiplies the MLP's first product, whose result is activated."""
    sections: tuple[tuple[str, float], ...] = ()
    """Multiplies sections of the input product of a part with a state."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and switches of a decoder. What differs between families of models and stands here is computed for any of them."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner size of a dense MLP."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Multiplies q.k before the softmax."""
    norm_eps: float
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    """Rotary embeddings, all of one size; none: positions are learned, or not told at all."""
    tie_word_embeddings: bool
    names: TensorNames = LLAMA_NAMES
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    """rms_plus_one: the checkpoint's weight is what is missing from 1 (Gemma); layer: LayerNorm with a bias."""
    qk_norm: Literal["head", "whole"] | None = None
    """RMSNorm of q and k before RoPE: of each head (Qwen3, Gemma 3), or of all heads together (OLMo 2)."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    """Whether the MLP multiplies its activation by a second product (SwiGLU and its kin; Shazeer 2020)."""
    activation: Activation = "silu"
    softcap: float | None = None
    """Soft-cap of the attention scores (Gemma 2)."""
    sinks: bool = False
    """Whether each layer brings one logit a head that joins the softmax (gpt-oss)."""
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    state: StateConfig | None = None
    multipliers: Multipliers = Multipliers()
    output_gate: bool = False
    """Whether what attention gives is multiplied by the sigmoid of a gate, which the product of q has beside each head's query
    (Qwen3-Next)."""
    embedding_scale: float = 1.0
    position_offset: int = 0
    """Rows of a table of learned positions that come before that of position 0 (OPT)."""
    residual_scale: float = 1.0
    """Multiplies what a part adds to the residual stream (Granite)."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """The window of each layer of attention."""
        return tuple(layer.sliding_window for layer in self.layers if layer.attention)


class BeyondDecoderError(ModelError):
    """A sound model that Headway's own decoder does not compute; transformers may."""


def cached_spec(
    config: DecoderConfig,
    layer: LayerConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    sinks: tuple[float, ...] | None = None,
    batch_invariant: bool = False,
) -> AttentionSpec:
    """The spec of a layer's cache. sinks: one logit a query head, out of the checkpoint, where `config.sinks`."""
    if (latent := config.latent) is not None:
        return AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=1,
            head_dim=latent.kv_dim,
            v_head_dim=latent.kv_lora_rank,
            value_in_key=True,
            scale=config.scale,
            dtype=dtype,
            device=device,
        )
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.scale,
        dtype=dtype,
        device=device,
        sliding_window=layer.sliding_window,
        softcap=config.softcap,
        sinks=sinks,
        batch_invariant=batch_invariant,
    )


def expanded_spec(config: DecoderConfig, latent: LatentConfig, cached: AttentionSpec) -> AttentionSpec:
    """The spec to which a latent layer expands its prompts. cached: the spec of its cache."""
    return replace(
        cached,
        num_kv_heads=config.num_heads,
        head_dim=latent.q_dim,
        v_head_dim=latent.v_head_dim,
        value_in_key=False,
        dense=True,
    )


def state_spec(state: StateConfig, dtype: torch.dtype, device: torch.device) -> StateSpec:
    """The spec of a layer with a state, as a model is loaded with it."""
    return replace(state.spec, dtype=dtype, device=device)
