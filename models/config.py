"""Configuration of the decoder: shapes, tensor names, parts of each layer, and the specs of their caches and states."""

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
    """Tensor names of a mixture of experts, below a layer's prefix. `{}` is the expert's number."""

    router: str = "mlp.gate"
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    interleaved: bool = False
    """True if the next two tensors are transposed and interleave gate and up (gpt-oss)."""
    stacked_gate_up: str = "mlp.experts.gate_up_proj"
    """Tensor of all experts, read instead of `gate` and `up` if a checkpoint has it."""
    stacked_down: str = "mlp.experts.down_proj"
    shared: str = "mlp.shared_experts"
    """Prefix of the shared experts' MLP, which has the next two modules."""
    shared_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Gate and up projection, or one name for both in one tensor."""
    shared_down: str = "down_proj"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True)
class LatentNames:
    """Module names of latent attention's linear layers and norms, below a layer's prefix."""

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
    """Names of a recurrent part's linear layers, norms and parameters, below a layer's prefix."""

    norm: str | None = "input_layernorm"
    """Norm before the part."""
    inputs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Input projections, and the sections that each holds, in order; `layers/` defines the sections of each kind."""
    by_key_head: bool = False
    """True if a projection groups the rows of all sections by key head (Qwen3-Next)."""
    conv: tuple[str, ...] = ()
    """Convolutions: one over all channels, or one for each section."""
    A_log: str = ""
    dt_bias: str = ""
    D: str = ""
    out_norm: str = ""
    """Norm of the recurrence's output."""
    out: str = ""
    low_rank: tuple[str, ...] = ()
    """Second halves of low-rank projections: decay and output gate (`kda`), dt (`mamba1`)."""
    from_conv: str = ""
    """Projection of the convolution's output to dt, B and C (`mamba1`)."""
    from_conv_norms: tuple[str, ...] = ()
    """Norms of dt, B and C (`mamba1`)."""


@dataclass(frozen=True)
class TensorNames:
    """Module names without `.weight` and `.bias`. None means that the model has no such part; this determines where norms are."""

    embed: str = "model.embed_tokens"
    positions: str | None = None
    """Table of learned positions."""
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    """Prefix of the names below; `{}` is the layer's number."""
    attention_norm: str | None = "input_layernorm"
    """Norm before attention."""
    mixer_norm: str = "input_layernorm"
    """Norm before a mixer: attention and a recurrent part side by side, or a part that adds to the normed input."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Query, key and value projections, or one name for all three in one tensor."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    o: str = "self_attn.o_proj"
    attention_post_norm: str | None = None
    """Norm of attention's output before it is added to the residual stream."""
    mlp_norm: str | None = "post_attention_layernorm"
    """Norm before the MLP."""
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up projection, or one name for both in one tensor; of an ungated MLP, its first linear layer."""
    down: str = "mlp.down_proj"
    mlp_post_norm: str | None = None
    experts: ExpertNames = field(default_factory=ExpertNames)
    latent: LatentNames = field(default_factory=LatentNames)
    state: StateNames = field(default_factory=StateNames)
    transposed: bool = False
    """True if weights are stored as [in_features, out_features] (GPT-2)."""
    ignored: tuple[str, ...] = ()
    """Suffixes of unneeded tensors that some of the family's checkpoints have."""
    ignored_modules: tuple[str, ...] = ()
    """Prefixes of unneeded modules, such as draft (MTP) layers."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Pairs of a part of a name and its replacement in some checkpoints."""


LLAMA_NAMES = TensorNames()


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding (RoPE), including its scaling (Su et al. 2021). Equal ones are computed once for all layers."""

    inv_freq: tuple[float, ...]
    """head_dim / 2 frequencies; 0 for elements that are not rotated."""
    factors: tuple[float, ...]
    """Factor of cos and sin for each frequency: YaRN's attention factor, else 1."""
    rotary_dim: int
    """Number of leading elements of a head that the checkpoint rotates; see `rope.rotary_order`."""


@dataclass(frozen=True)
class LayerConfig:
    """Parts of one layer: attention, a recurrent part, or both side by side, followed by an MLP. Each may be absent."""

    sliding_window: int | None = None
    rope: int | None = 0
    """Index of the layer's rotary embedding in `DecoderConfig.ropes`. None means no RoPE."""
    attention: bool = True
    """True if the layer has attention, which is latent if `DecoderConfig.latent` is set."""
    state: bool = False
    """True if the layer has the recurrent part of `DecoderConfig.state`. With attention, both read the same normed input, and the
    sum of their outputs is added (Falcon-H1).
    """
    mlp: Literal["dense", "experts"] | None = "dense"
    """Kind of MLP; `experts` means `DecoderConfig.experts`. None means no MLP."""
    normed_scales: tuple[float, float] | None = None
    """Factors of the normed stream to which the mixer and the MLP add their outputs, instead of to the stream before the norm
    (MiniMax-01). None means the usual residual stream.
    """
    slopes: tuple[float, ...] = ()
    """Decay of each head's state (`lightning`): exp(-slope) per token."""
    names: TensorNames | None = None
    """Names of the layer's tensors if they differ from `DecoderConfig.names`."""


@dataclass(frozen=True)
class StateConfig:
    """Recurrent parts of a model, all of one kind, with the operations around the recurrence."""

    spec: StateSpec
    """Sizes. The decoder sets the dtype and device with which the model is loaded."""
    gate: GateActivation = "silu"
    """Activation of the gate that multiplies the recurrence's output."""
    norm_size: int = 0
    """Number of output elements that are normalized together. 0 means no norm."""
    norm_eps: float | None = None
    """Epsilon of that norm. None means the model's."""
    norm_all_weights: bool = False
    """True if the norm has a weight for each output element; False if the groups share one set of weights."""
    gate_first: bool = False
    """True if the output is multiplied by its gate before the norm."""
    slopes: tuple[float, ...] = ()
    """Decays of one layer (`lightning`), from its LayerConfig."""
    dt_rank: int = 0
    """Rank of the projection to dt (`mamba1`)."""
    conv_bias: bool = False
    in_bias: bool = False
    out_bias: bool = False


@dataclass(frozen=True)
class Multipliers:
    """Factors of linear layers' outputs (Falcon-H1). Weights are multiplied by them while loading."""

    qkv: tuple[float, float, float] = (1.0, 1.0, 1.0)
    attention: float = 1.0
    """Factor of attention's output before it is added to the residual stream; `state` and `mlp` are the same for other parts."""
    state: float = 1.0
    mlp: float = 1.0
    gate: float = 1.0
    """Factor of the MLP's gate projection, before the activation."""
    sections: tuple[tuple[str, float], ...] = ()
    """Factors of sections of a recurrent part's input projection."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and switches of a decoder. The decoder supports any combination of these differences between families."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner size of a dense MLP."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of q.k before the softmax."""
    norm_eps: float
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    """Rotary embeddings, all of one size. Empty means learned positions or none."""
    tie_word_embeddings: bool
    names: TensorNames = LLAMA_NAMES
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    """Kind of norm: rms_plus_one adds 1 to the checkpoint's weight (Gemma); layer is LayerNorm with a bias."""
    qk_norm: Literal["head", "whole"] | None = None
    """RMSNorm of q and k before RoPE: per head (Qwen3, Gemma 3), or over all heads together (OLMo 2)."""
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
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    state: StateConfig | None = None
    multipliers: Multipliers = Multipliers()
    output_gate: bool = False
    """True if attention's output is multiplied by the sigmoid of a gate that the q projection computes per head (Qwen3-Next)."""
    embedding_scale: float = 1.0
    position_offset: int = 0
    """Rows of the table of learned positions before position 0 (OPT)."""
    residual_scale: float = 1.0
    """Factor of what a part adds to the residual stream (Granite)."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each attention layer; None means none."""
        return tuple(layer.sliding_window for layer in self.layers if layer.attention)


class BeyondDecoderError(ModelError):
    """A valid model that Headway's own decoder does not support; transformers may support it."""


def cached_spec(
    config: DecoderConfig,
    layer: LayerConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    sinks: tuple[float, ...] | None = None,
    batch_invariant: bool = False,
) -> AttentionSpec:
    """Return the attention spec of a layer's KV cache. sinks: one logit per query head from the checkpoint, if `config.sinks`."""
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
    """Return the spec of a latent layer's expanded heads, used for prefill. cached: the spec of its cache."""
    return replace(
        cached,
        num_kv_heads=config.num_heads,
        head_dim=latent.q_dim,
        v_head_dim=latent.v_head_dim,
        value_in_key=False,
        dense=True,
    )


def state_spec(state: StateConfig, dtype: torch.dtype, device: torch.device) -> StateSpec:
    """Return the spec of a recurrent layer with the dtype and device of the loaded model."""
    return replace(state.spec, dtype=dtype, device=device)
