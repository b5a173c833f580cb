"""Encoders (BERT and ModernBERT layers) with packed tokens, bidirectional attention and no KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec
from headway.kernels.experts.bound import ExpertsKind
from headway.kernels.linear.choice import LinearKernels
from headway.kernels.linear.linear import Linear
from headway.kernels.step.config import Activation
from headway.kernels.step.operations import Embedding, Heads, Norm, Operations, Rope
from headway.models.checkpoints.weights import WeightSource
from headway.models.config import LayerConfig, RopeConfig
from headway.models.families.rope import rope_tables
from headway.models.layers.decoder import operations_for


@dataclass(frozen=True)
class EncoderNames:
    """Module names without `.weight` and `.bias`. None means that the model has no such module."""

    embed: str
    embed_norm: str
    layer: str
    """Prefix of all names in a layer; `{}` is the layer's index."""
    qkv: tuple[str, ...]
    """Names of the query, key and value projections, or a single name if all three are in one tensor."""
    o: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str
    positions: str | None = None
    token_types: str | None = None
    norm: str | None = None
    """Norm after the last layer."""


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes and options of an encoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    norm_eps: float
    max_position_embeddings: int
    """Maximum length of a text, in tokens."""
    layers: tuple[LayerConfig, ...]
    names: EncoderNames
    activation: Activation
    ropes: tuple[RopeConfig, ...] = ()
    """Rotary embeddings. Empty means learned positions."""
    norm_first: bool = False
    """True if norms precede each part (ModernBERT; its first layer has no attention norm); False if norms follow it (BERT)."""
    gated: bool = False
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    type_vocab_size: int = 0
    """Number of token types with embeddings. 0 or 1 means that token types have no effect."""
    position_offset: int = 0
    """Number of rows before position 0 in the position table (RoBERTa)."""

    @property
    def head_dim(self) -> int:
        """Number of elements per attention head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True, eq=False)
class EncoderTensors:
    """Reader of an encoder's norms and linear layers below a prefix."""

    config: EncoderConfig
    weights: WeightSource
    prefix: str = ""
    """Prefix of every module name."""
    kernels: LinearKernels | None = None
    """Kernels for linear layers. None means Headway's own."""

    def norm(self, module: str) -> Norm:
        """Return a LayerNorm over the residual stream. A missing bias becomes zeros, because a `Norm` without a bias is an
        RMSNorm."""
        size = (self.config.hidden_size,)
        weight = self.weights.take(f"{self.prefix}{module}.weight", size)
        bias = self.weights.take(f"{self.prefix}{module}.bias", size) if self.config.norm_bias else torch.zeros_like(weight)
        return Norm(weight, self.config.norm_eps, bias)

    def linear(self, sizes: Mapping[str, int], in_features: int, bias: bool) -> Linear:
        """Return linear layers with the same input, merged into one. sizes: module name -> out_features."""
        names = {f"{self.prefix}{module}": size for module, size in sizes.items()}
        weight = self.weights.take_product({f"{name}.weight": size for name, size in names.items()}, in_features)
        biases = self.weights.take_merged({f"{name}.bias": size for name, size in names.items()}) if bias else None
        return Linear(weight, biases, dtype=self.weights.dtype, kernels=self.kernels)


class Encoder:
    """Encoder over the packed tokens of all texts of a batch, one row per token; only attention mixes rows."""

    def __init__(self, config: EncoderConfig, weights: WeightSource, kernels: LinearKernels | None = None) -> None:
        """Read the tensors from `weights`; the caller must call `weights.finish`. kernels: as in `EncoderTensors`."""
        self.config = config
        names = config.names
        hidden = config.hidden_size
        tensors = EncoderTensors(config, weights)
        table = weights.take(f"{names.embed}.weight", (config.vocab_size, hidden))
        positions = _positions(config, weights)
        self._types = None
        if names.token_types is not None:
            kinds = weights.take(f"{names.token_types}.weight", (config.type_vocab_size, hidden))
            assert positions is not None, "families that tell kinds of tokens have a table of positions"
            positions = positions + kinds[0]  # most tokens have type 0; others add the difference
            self._types = kinds - kinds[0] if config.type_vocab_size > 1 else None
        self.embed = Embedding(table, positions=positions)
        self.embed_norm = tensors.norm(names.embed_norm)
        kind = NormFirstLayer if config.norm_first else NormLastLayer
        self.layers = [kind(config, index, weights, kernels) for index in range(len(config.layers))]
        self.norm = None if names.norm is None else tensors.norm(names.norm)
        self.operations = operations_for(*rope_tables(config.ropes, weights.device), kernels)
        self.attention_specs: Sequence[AttentionSpec] = [layer.spec for layer in self.layers]

    @property
    def products(self) -> list[tuple[Linear, bool]]:
        """Linear layers of the encoder, each paired with True if the layer is gated, else False."""
        return [product for layer in self.layers for product in layer.products]

    expert_kinds: Sequence[ExpertsKind] = ()
    """Always empty: encoders have no MoE layers."""

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention, token_types: Tensor | None = None) -> Tensor:
        """Return the last hidden states [num_tokens, hidden_size]. input_ids, positions, token_types: int64 [num_tokens]."""
        ops = self.operations
        x, ropes = ops.embed(input_ids, positions, self.embed)
        if token_types is not None and self._types is not None:
            x = x + embedding(token_types, self._types)
        x = ops.norm(x, self.embed_norm)
        for layer in self.layers:
            x = layer(x, ropes, ops, attention)
        return x if self.norm is None else ops.norm(x, self.norm)


class EncoderLayer:
    """Base of encoder layers: tensors, attention and MLP; subclasses place the norms."""

    def __init__(self, config: EncoderConfig, index: int, weights: WeightSource, kernels: LinearKernels | None = None) -> None:
        names, hidden, inner = config.names, config.hidden_size, config.intermediate_size
        tensors = EncoderTensors(config, weights, names.layer.format(index), kernels)
        whole = {names.qkv[0]: 3 * hidden} if len(names.qkv) == 1 else dict.fromkeys(names.qkv, hidden)
        self._index = index
        self._rope = config.layers[index].rope
        self.qkv_proj = tensors.linear(whole, hidden, config.qkv_bias)
        self.heads = Heads(config.num_heads, config.num_heads, config.head_dim)
        self.o_proj = tensors.linear({names.o: hidden}, hidden, config.o_bias)
        self.up_proj = tensors.linear({names.up: inner * (2 if config.gated else 1)}, hidden, config.mlp_bias)
        self.down_proj = tensors.linear({names.down: hidden}, inner, config.mlp_bias)
        gated = (self.up_proj, config.gated)
        self.products = [(self.qkv_proj, False), (self.o_proj, False), gated, (self.down_proj, False)]
        self._gated = config.gated
        self._activation = config.activation
        without = config.norm_first and index == 0  # the embedding's norm is used
        self.attention_norm = None if without else tensors.norm(names.attention_norm)
        self.mlp_norm = tensors.norm(names.mlp_norm)
        self.spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            dtype=weights.dtype,
            device=weights.device,
            sliding_window=config.layers[index].sliding_window,
            dense=True,
            causal=False,
        )

    def attend(self, x: Tensor, norm: Norm | None, ropes: tuple[Rope, ...], ops: Operations, attention: Attention) -> Tensor:
        """Return x [num_tokens, hidden_size] plus projected attention. norm: norm of the projections' input; None means no
        norm."""
        rope = None if self._rope is None else ropes[self._rope]
        q, k, v = ops.norm_qkv(x, norm, self.qkv_proj, self.heads, rope)
        return ops.add_product(x, attention(self._index, q, k, v).flatten(1), self.o_proj)

    def mlp(self, x: Tensor, norm: Norm | None, ops: Operations) -> Tensor:
        """Return x [num_tokens, hidden_size] plus the MLP's output. norm: norm of the MLP's input; None means no norm."""
        compute = ops.norm_gated_product if self._gated else ops.norm_product
        return ops.add_product(x, compute(x, norm, self.up_proj, self._activation), self.down_proj)


class NormLastLayer(EncoderLayer):
    """Layer with norms after the residual sums (BERT)."""

    def __call__(self, x: Tensor, ropes: tuple[Rope, ...], ops: Operations, attention: Attention) -> Tensor:
        """Return the layer's output. x: [num_tokens, hidden_size], overwritten."""
        assert self.attention_norm is not None
        x = ops.norm(self.attend(x, None, ropes, ops, attention), self.attention_norm)
        return ops.norm(self.mlp(x, None, ops), self.mlp_norm)


class NormFirstLayer(EncoderLayer):
    """Layer with norms before its parts (ModernBERT)."""

    def __call__(self, x: Tensor, ropes: tuple[Rope, ...], ops: Operations, attention: Attention) -> Tensor:
        """Return the layer's output. x: [num_tokens, hidden_size], the residual stream, overwritten."""
        return self.mlp(self.attend(x, self.attention_norm, ropes, ops, attention), self.mlp_norm, ops)


def _positions(config: EncoderConfig, weights: WeightSource) -> Tensor | None:
    if config.names.positions is None:
        return None
    rows = config.max_position_embeddings + config.position_offset
    return weights.take(f"{config.names.positions}.weight", (rows, config.hidden_size))[config.position_offset :]
