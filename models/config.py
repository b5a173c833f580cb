"""Configuration of the decoder: shapes, tensor names, parts of each layer, and the specs of their caches and states."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from headway.core.contract.errors import ModelError
from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.layer import Invariance
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateSpec
from headway.kernels.step.config import Activation, GateActivation, LatentConfig


@dataclass(frozen=True)
class ExpertNames:
    """Tensor names of a mixture of experts, after the layer's prefix. `{}` is the expert's index."""

    router: str = "mlp.gate"
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    interleaved: bool = False
    """True if `stacked_gate_up` and `stacked_down` are transposed and gate and up are interleaved (gpt-oss)."""
    stacked_gate_up: str = "mlp.experts.gate_up_proj"
    """Stacked tensor of all experts, read instead of `gate` and `up` if the checkpoint has it."""
    stacked_down: str = "mlp.experts.down_proj"
    shared: str = "mlp.shared_experts"
    """Prefix of the shared experts' MLP; `shared_up` and `shared_down` are names after this prefix."""
    shared_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Names of the gate and up projections, or a single name if both are in one tensor."""
    shared_down: str = "down_proj"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True)
class LatentNames:
    """Module names of latent attention's linear layers and norms, after the layer's prefix."""

    q: str = "self_attn.q_proj"
    """Query projection of models without a low-rank query."""
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"


@dataclass(frozen=True)
class StateNames:
    """Names of a recurrent part's linear layers, norms and parameters, after the layer's prefix."""

    norm: str | None = "input_layernorm"
    """Norm before the recurrent part. None means that the norm is absent."""
    inputs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Input projections, each with its sections in order; `layers/` defines the sections of each kind of recurrence."""
    by_key_head: bool = False
    """True if input projections group the rows of all sections by key head (Qwen3-Next)."""
    conv: tuple[str, ...] = ()
    """Names of the convolutions: one over all channels, or one for each section."""
    A_log: str = ""
    dt_bias: str = ""
    D: str = ""
    out_norm: str = ""
    """Norm of the recurrence's output."""
    out: str = ""
    low_rank: tuple[str, ...] = ()
    """Second linear layers of low-rank projections: decay and output gate (`kda`), dt (`mamba1`)."""
    from_conv: str = ""
    """Projection from the convolution's output to dt, B and C (`mamba1`)."""
    from_conv_norms: tuple[str, ...] = ()
    """Norms of dt, B and C (`mamba1`)."""


@dataclass(frozen=True)
class LayerInputNames:
    """Names of the tensors of per-layer inputs (Gemma 4 E2B). `gate`, `out` and `post_norm` follow the layer's prefix."""

    table: str = "model.embed_tokens_per_layer"
    proj: str = "model.per_layer_model_projection"
    norm: str = "model.per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    out: str = "per_layer_projection"
    post_norm: str = "post_per_layer_input_norm"


@dataclass(frozen=True)
class TensorNames:
    """Module names without `.weight` and `.bias`. None means that the model has no such module."""

    embed: str = "model.embed_tokens"
    positions: str | None = None
    """Table of learned position embeddings."""
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    """Prefix of all names in a layer; `{}` is the layer's index."""
    attention_norm: str | None = "input_layernorm"
    """Norm before attention."""
    mixer_norm: str = "input_layernorm"
    """Norm before a mixer: attention and a recurrent part in parallel, or a part that adds to the normed input."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Names of the query, key and value projections, or a single name if all three are in one tensor."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    lambdas: str = "self_attn.lambda_{}"
    """Vectors of differential attention; `{}` is q1, k1, q2 or k2."""
    o: str = "self_attn.o_proj"
    attention_post_norm: str | None = None
    """Norm of attention's output before it is added to the residual stream."""
    mlp_norm: str | None = "post_attention_layernorm"
    """Norm before the MLP."""
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Names of the gate and up projections, or a single name if both are in one tensor. An ungated MLP has only the name of its
    first linear layer."""
    down: str = "mlp.down_proj"
    mlp_post_norm: str | None = None
    experts: ExpertNames = field(default_factory=ExpertNames)
    latent: LatentNames = field(default_factory=LatentNames)
    state: StateNames = field(default_factory=StateNames)
    inputs: LayerInputNames = field(default_factory=LayerInputNames)
    scalar: str | None = None
    """Number by which a layer's output, the residual stream, is multiplied (Gemma 4)."""
    transposed: bool = False
    """True if weights are stored as [in_features, out_features] (GPT-2)."""
    ignored: tuple[str, ...] = ()
    """Name suffixes of unneeded tensors in some of the family's checkpoints."""
    ignored_modules: tuple[str, ...] = ()
    """Name prefixes of unneeded modules, such as draft (MTP) layers."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Pairs of a substring of a tensor name and the substring that replaces it in some checkpoints."""


LLAMA_NAMES = TensorNames()


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding (RoPE), including its scaling (Su et al. 2021). Layers with equal rotary embeddings share one
    RopeConfig."""

    inv_freq: tuple[float, ...]
    """head_dim / 2 frequencies in radians per token; 0 for elements that are not rotated. head_dim is that of the layers."""
    factors: tuple[float, ...]
    """Factor of cos and sin for each frequency: YaRN's attention factor, else 1."""
    rotary_dim: int
    """Number of leading elements of a head that the checkpoint rotates; see `rope.rotary_order`."""


@dataclass(frozen=True)
class LayerConfig:
    """Parts of one layer: attention, a recurrent part or both in parallel, then an MLP. Any part may be absent."""

    sliding_window: int | None = None
    rope: int | None = 0
    """Index of the layer's rotary embedding in `DecoderConfig.ropes`. None means no RoPE."""
    attention: bool = True
    """True if the layer has attention, which is latent if `DecoderConfig.latent` is set."""
    state: bool = False
    """True if the layer has the recurrent part of `DecoderConfig.state`. If the layer also has attention, both parts read the
    same normed input, and the sum of their outputs is added to the residual stream (Falcon-H1)."""
    mlp: Literal["dense", "experts"] | None = "dense"
    """Kind of MLP; `experts` means `DecoderConfig.experts`. None means no MLP."""
    normed_scales: tuple[float, float] | None = None
    """Factors of the normed streams to which the outputs of the mixer and the MLP are added (MiniMax-01). None means that outputs
    are added to the usual residual stream."""
    slopes: tuple[float, ...] = ()
    """Slope of each head (`lightning`): the state decays by exp(-slope) per token."""
    names: TensorNames | None = None
    """Names of the layer's tensors if they differ from `DecoderConfig.names`."""
    head_dim: int | None = None
    """Number of elements per head if it differs from `DecoderConfig.head_dim`. The next two fields are sizes of the layer too."""
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    value_is_key: bool = False
    """True if the value is the output of the key projection, before norm and RoPE (Gemma 4 31B)."""
    shares_kv: int | None = None
    """Index of the earlier layer whose keys, values and KV cache the layer reads (Gemma 4 E2B). None means its own."""

    @property
    def caches(self) -> bool:
        """Return whether the layer has a KV cache of its own."""
        return self.attention and self.shares_kv is None


@dataclass(frozen=True)
class StateConfig:
    """Configuration of a model's recurrent parts, all of one kind, and of the operations around the recurrence."""

    spec: StateSpec
    """Sizes of the recurrence. The decoder sets the dtype and device to those of the loaded model."""
    gate: GateActivation = "silu"
    """Activation of the gate that multiplies the recurrence's output."""
    norm_size: int = 0
    """Number of output elements that are normalized together. 0 means no norm."""
    norm_eps: float | None = None
    """Epsilon of the output norm. None means the model's epsilon."""
    norm_all_weights: bool = False
    """True if the output norm has a weight for each output element; False if all groups share one set of weights."""
    gate_first: bool = False
    """True if the output is multiplied by its gate before the norm."""
    slopes: tuple[float, ...] = ()
    """Decay slopes of one layer (`lightning`), copied from its LayerConfig."""
    dt_rank: int = 0
    """Rank of the projection to dt (`mamba1`)."""
    conv_bias: bool = False
    in_bias: bool = False
    out_bias: bool = False


@dataclass(frozen=True)
class LayerInputsConfig:
    """Sizes of the per-layer inputs (Gemma 4 E2B): each layer adds a projection of its own embedding of every token."""

    vocab_size: int
    num_layers: int
    size: int
    """Number of elements of one layer's input."""


@dataclass(frozen=True)
class Multipliers:
    """Factors of the outputs of linear layers (Falcon-H1). Weights are multiplied by the factors while loading."""

    qkv: tuple[float, float, float] = (1.0, 1.0, 1.0)
    attention: float = 1.0
    """Factor of attention's output before it is added to the residual stream. `state` and `mlp` are the factors for the recurrent
    part and the MLP."""
    state: float = 1.0
    mlp: float = 1.0
    gate: float = 1.0
    """Factor of the MLP's gate projection, before the activation."""
    sections: tuple[tuple[str, float], ...] = ()
    """(section, factor) pairs for the sections of a recurrent part's input projection."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder. The decoder supports any combination of options."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Number of inner elements of a dense MLP."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of q.k before the softmax."""
    norm_eps: float
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    """Rotary embeddings. Empty means learned positions, or no positions."""
    tie_word_embeddings: bool
    names: TensorNames = LLAMA_NAMES
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    """Kind of norm: rms_plus_one adds 1 to the checkpoint's weight (Gemma); layer is LayerNorm with a bias."""
    qk_norm: Literal["head", "whole"] | None = None
    """RMSNorm of q and k before RoPE: per head (Qwen3, Gemma 3), or over all heads together (OLMo 2)."""
    v_norm: bool = False
    """True if each head of v is normed (RMSNorm without a weight; Gemma 4)."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    """True if the MLP multiplies its activation by a second projection (SwiGLU and similar; Shazeer 2020)."""
    activation: Activation = "silu"
    softcap: float | None = None
    """Soft cap of the attention scores (Gemma 2)."""
    sinks: bool = False
    """True if each layer has one sink logit per head in the softmax (gpt-oss)."""
    differential: bool = False
    """True if attention subtracts the outputs of two heads, h and h + num_heads / 2 (Ye et al. 2024, arXiv 2410.05258). The value
    of the KV heads j and j + num_kv_heads / 2 is v of both."""
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    state: StateConfig | None = None
    layer_inputs: LayerInputsConfig | None = None
    multipliers: Multipliers = Multipliers()
    output_gate: bool = False
    """True if attention's output is multiplied by the sigmoid of a gate computed by the q projection (Qwen3-Next)."""
    embedding_scale: float = 1.0
    position_offset: int = 0
    """Number of rows before position 0 in the table of learned positions (OPT)."""
    residual_scale: float = 1.0
    """Factor of each part's output when it is added to the residual stream (Granite)."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    def of_layer(self, layer: LayerConfig) -> DecoderConfig:
        """Return the configuration with the sizes and tensor names of one layer."""
        own = replace(
            self,
            names=layer.names or self.names,
            head_dim=layer.head_dim or self.head_dim,
            num_kv_heads=layer.num_kv_heads or self.num_kv_heads,
            intermediate_size=layer.intermediate_size or self.intermediate_size,
        )
        return self if own == self else own

    def place_of(self, index: int) -> int:
        """Return the index of a layer's KV cache among the model's KV caches."""
        source = self.layers[index].shares_kv
        return sum(layer.caches for layer in self.layers[: index if source is None else source])


class BeyondDecoderError(ModelError):
    """Raised for a valid model that Headway's own decoder does not support; transformers may support it."""


def cached_spec(
    config: DecoderConfig,
    layer: LayerConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    sinks: tuple[float, ...] | None = None,
    invariance: Invariance = Invariance.NONE,
) -> AttentionSpec:
    """Return the attention spec of a layer's KV cache. sinks: sink logit of each query head, from the checkpoint."""
    config = config.of_layer(layer)
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
        v_head_dim=config.head_dim * (2 if config.differential else 1),
        scale=config.scale,
        dtype=dtype,
        device=device,
        sliding_window=layer.sliding_window,
        softcap=config.softcap,
        sinks=sinks,
        invariance=invariance,
    )


def expanded_spec(config: DecoderConfig, latent: LatentConfig, cached: AttentionSpec) -> AttentionSpec:
    """Return the attention spec of a latent layer's expanded heads, used for prefill. cached: spec of the layer's cache."""
    return replace(
        cached, num_kv_heads=config.num_heads, head_dim=latent.q_dim, v_head_dim=latent.v_head_dim, value_in_key=False, dense=True
    )


def state_spec(
    state: StateConfig, dtype: torch.dtype, device: torch.device, invariance: Invariance = Invariance.NONE
) -> StateSpec:
    """Return the state spec of a recurrent layer with the dtype, device and invariance of the loaded model."""
    return replace(state.spec, dtype=dtype, device=device, invariance=invariance)
