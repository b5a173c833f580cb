"""What the decoder must know of a model: shapes, and which parts its layers are put together from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.core.contract.errors import ModelError
from headway.core.contract.state import StateSpec
from headway.kernels.experts.config import ExpertsConfig
from headway.kernels.step.config import Activation, GateActivation, LatentConfig
from headway.models.families.names import LLAMA_NAMES, TensorNames


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
