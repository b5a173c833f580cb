"""Interface for the operations of a decoder between attentions, which devices may fuse, and the values that they take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.model import LatentLayer
from headway.core.contract.ranks import Ranks
from headway.core.contract.spec import AttentionSpec
from headway.kernels.experts.bound import Experts
from headway.kernels.experts.weights import RoutedWeights
from headway.kernels.linear.choice import LinearChoice
from headway.kernels.linear.linear import Linear
from headway.kernels.step.config import Activation, GateActivation, LatentConfig


@dataclass(frozen=True, slots=True)
class NormShare:
    """One rank's shard of rows that are normed across ranks. The shard is an equal part of one group of elements."""

    ranks: Ranks
    groups: int = 1
    """Number of groups of elements that are normed separately. Each one is divided among an equal number of consecutive ranks."""

    def normed(self, eps: float, *parts: Tensor) -> list[Tensor]:
        """Return the RMSNorm, without a weight, of each of `parts`. One all-reduce handles all of them.

        parts: float32 [rows, size] each, the rank's elements.
        """
        group = self.ranks.rank * self.groups // self.ranks.size
        squares = parts[0].new_zeros(parts[0].shape[0], self.groups, len(parts))
        squares[:, group] = torch.stack([part.square().sum(dim=1) for part in parts], dim=1)
        sums = self.ranks.all_reduce(squares)[:, group]
        share = self.groups / self.ranks.size
        return [part * torch.rsqrt(sums[:, place, None] * (share / part.shape[1]) + eps) for place, part in enumerate(parts)]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm (Zhang and Sennrich 2019) or, if there is a bias, LayerNorm (Ba et al. 2016)."""

    weight: Tensor
    """[size], in the model's dtype or float32."""
    eps: float
    bias: Tensor | None = None
    """[size]: bias of a LayerNorm. None means RMSNorm."""
    absorbed: bool = False
    """True if the weight is folded into the next linear layer and is now all ones. Only the factor per row remains to be
    applied."""
    share: NormShare | None = None
    """Shard of this rank if the elements of an RMSNorm are divided among ranks. None means that the rank has all elements."""
    by_length: tuple[Tensor, Tensor] | None = field(init=False, repr=False, compare=False, default=None)
    """float32 factors of an RMSNorm on a CPU: weight * sqrt(size) and sqrt(size * eps).

    With these factors a and b and the Euclidean length |x|, the norm is x / hypot(|x|, b) * a, which takes four operations
    instead of seven. The overhead of a torch operation exceeds the time for its arithmetic.
    """

    def __post_init__(self) -> None:
        if self.bias is None and self.share is None and self.weight.device.type == "cpu":
            size = self.weight.shape[0]
            object.__setattr__(self, "by_length", (self.weight.float() * size**0.5, torch.tensor((size * self.eps) ** 0.5)))


@dataclass(frozen=True, slots=True)
class Embedding:
    """Tables and factor of the token embedding."""

    table: Tensor
    """[vocab_size, hidden_size]: one row per token of the vocabulary."""
    scale: float = 1.0
    """Factor by which a token's row is multiplied."""
    positions: Tensor | None = None
    """[positions, hidden_size]: learned position embeddings, added to each token. None if the model has none."""
    tokens: range | None = None
    """Token IDs in this rank's shard of the table. The shard's last row is all zeros and represents all other tokens. None means
    that the rank has all tokens."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads in a row of the merged qkv linear layer's output, and the norms of q and k."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Norm | None = None
    """RMSNorm of q before RoPE. It covers each head (Qwen3), or all heads together if the weight has that size. Set if and only
    if `k_norm` is set."""
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    """RMSNorm of each head of v, with a weight of ones (Gemma 4)."""

    @property
    def whole_norm(self) -> bool:
        """Return whether all heads of q are normed as one row, and likewise all heads of k."""
        if self.q_norm is None:
            return False
        return self.q_norm.share is not None or self.q_norm.weight.shape[0] == self.num_heads * self.head_dim != self.head_dim


@dataclass(frozen=True, slots=True)
class Gate:
    """Gate that multiplies the output of attention or of a recurrence before the output projection, and its norm."""

    activation: GateActivation
    """Activation that is applied to the gate's input."""
    norm: Norm | None = None
    """RMSNorm of the gated tensor, in groups of `size` elements. The weight has `size` elements, or one per element of a row."""
    size: int = 0
    gate_first: bool = False
    """True if the gate is applied before the norm (Mamba 2) instead of after."""


Rope = tuple[Tensor, Tensor]
"""cos and sin of the rotary embedding at a step's positions."""


class Operations(Protocol):
    """Operations of one model. Each treats rows independently.

    Methods with a body are defaults for devices without a faster implementation.
    """

    def absorb(self, norm: Norm, linear: Linear) -> tuple[Norm, Linear]:
        """Prepare a norm and the next linear layer. This is called once, before any step. The returned pair gives the same
        results as the arguments.

        The pair may only be used in `norm_qkv` with a rotary embedding, in `norm_gated_product`, and in `norm` before `product`.
        """
        return norm, linear

    def linear_choices(self, products: Iterable[tuple[Linear, bool]]) -> list[LinearChoice]:
        """Return the choices for linear layers whose kernel is selected by measured times.

        products: (linear layer, True if it is gated) for all linear layers.
        """
        return []

    def embed(self, input_ids: Tensor, positions: Tensor, embed: Embedding) -> tuple[Tensor, tuple[Rope, ...]]:
        """Return the residual stream [num_tokens, hidden_size], and cos and sin of each rotary embedding, for `norm_qkv`.

        input_ids, positions: int32 or int64 [num_tokens].
        """

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Return the norm of each row of x [rows, size]."""

    def add_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """Return residual + norm of x [rows, size]. Both arguments may be overwritten."""

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        """Return a linear layer's output for x [rows, in_features]: [rows, out_features], in `out` (contiguous) if given."""

    def norm_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation | None) -> Tensor:
        """Apply a norm (if any), a linear layer, and an activation (if any). x: [rows, in_features], rows may be strided.

        Returns [rows, out_features].
        """

    def norm_gated_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation) -> Tensor:
        """Apply a norm (if any) and a linear layer, and multiply the activation of the output's first half by its second half.

        Returns [rows, out_features / 2].
        """

    def norm_qkv(
        self, x: Tensor, norm: Norm | None, linear: Linear, heads: Heads, rope: Rope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply a norm (if any) and the merged qkv linear layer, then norm the heads, and rotate those of q and k (RoPE).

        x: [num_tokens, hidden_size]. linear: has (num_heads + 2 num_kv_heads) head_dim outputs, and may have further heads
            after v. rope: result of `embed`; None means no rotation.
        Returns q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim]; rows may be strided.
        """

    def rotate_heads(self, qkv: Tensor, heads: Heads, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the part of `norm_qkv` after the linear layer. qkv: [num_tokens, elements of all heads], contiguous; may be
        overwritten.
        """

    def activated(self, y: Tensor, activation: Activation, gated: bool) -> Tensor:
        """Apply the part of `norm_product` or (if gated) `norm_gated_product` after the linear layer.

        y: contiguous; may be overwritten.
        """

    def rotate_latent(
        self, q: Tensor, latent: Tensor, config: LatentConfig, norm: Norm, rope: Rope | None
    ) -> tuple[Tensor, Tensor]:
        """Rotate the last elements of each query head, norm the latents, and rotate the key elements after them (RoPE).

        q: [num_tokens, num_heads q_dim]. latent: [num_tokens, kv_dim]. Rows may be strided, and both may be overwritten.
            norm: has kv_lora_rank elements. rope: result of `embed`; None means no rotation.
        Returns q [num_tokens, num_heads, q_dim] and latents [num_tokens, 1, kv_dim].
        """

    def latent_layer(self, expanded: AttentionSpec, config: LatentConfig, kv_b: Tensor) -> LatentLayer:
        """Return the linear layers before and after latent attention. This is called once, before any step.

        kv_b: [num_heads (qk_nope_head_dim + v_head_dim), kv_lora_rank], maps a latent to each head's key and value.
        """

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        """Return residual + linear layer of x [rows, in_features]. residual: [rows, out_features]; may be overwritten."""

    def add_products(self, residual: Tensor, terms: Sequence[tuple[Tensor, Linear]]) -> Tensor:
        """Return residual + the sum of several linear layers' outputs. terms: (x, linear layer) for each layer, as in
        `add_product`."""
        for x, linear in terms:
            residual = self.add_product(residual, x, linear)
        return residual

    def gate(self, x: Tensor, by: Tensor, gate: Gate) -> Tensor:
        """Return x times the activation of `by`, with the gate's norm. x, by: [num_tokens, size]; rows may be strided."""

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        """Return cap * tanh(logits / cap), in place (Gemma 2)."""
        return logits.div_(cap).tanh_().mul_(cap)

    def experts(self, config: ExpertsConfig, weights: RoutedWeights, norm: Norm) -> Experts:
        """Return a layer of experts and its norm, bound to kernels. This is called once, before any step."""
