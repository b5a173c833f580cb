"""What a checkpoint calls its tensors; the defaults are Llama's."""

from __future__ import annotations

from dataclasses import dataclass, field


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
