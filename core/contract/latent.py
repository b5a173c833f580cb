"""Latent attention (MLA, DeepSeek-V2) as it is composed: what a model hands in for a layer, and the two specs over one cache.

The cache holds one row a token that all heads share, the latent. *Absorbed*, the product that would expand it is applied to the
query instead, and the latent is key and value of all heads: little memory is read, which decides decode. *Expanded*, each head
has keys and values of its own, shorter ones: less is computed, which decides prompts. (DeepSeek-AI 2024, arXiv 2405.04434.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec


class LatentLayer(Protocol):
    """What a model hands in, once, for a latent layer.

    The layer calls `attention(layer, q, latent, value)` with q [num_tokens, num_heads, expanded.head_dim], the latent
    [num_tokens, 1, head_dim of its cache] and the value inside it, and gets [num_tokens, num_heads, expanded.v_head_dim].
    """

    @property
    def expanded(self) -> AttentionSpec:
        """The layer with keys and values for each head; `dense`, since they are never cached."""

    def absorb(self, q: Tensor) -> Tensor:
        """[n, num_heads, expanded.head_dim] to [n, num_heads, head_dim of the cache]: queries of latents."""

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [n, 1, head_dim of the cache] to k and v [n, num_heads, expanded.head_dim and v_head_dim]."""

    def project(self, attended: Tensor, out: Tensor) -> None:
        """Attention over latents, [n, num_heads, v_head_dim of the cache], to `out` [n, num_heads, expanded.v_head_dim]."""


Expanded = Mapping[AttentionSpec, AttentionSpec]
"""The spec of a latent layer's cache -> the one with which its prompts without context are computed."""


def latent_layers(model: object) -> Mapping[int, LatentLayer]:
    """By number of the layer; a model without any need not have the attribute `latent_layers`."""
    found: Mapping[int, LatentLayer] = getattr(model, "latent_layers", {})
    return found


def expanded_specs(specs: Sequence[AttentionSpec], latents: Mapping[int, LatentLayer]) -> dict[AttentionSpec, AttentionSpec]:
    """What the latent layers of a model expand to. specs: of all its layers."""
    return {specs[layer]: latent.expanded for layer, latent in latents.items()}


def value_head_dims(specs: Sequence[AttentionSpec], latents: Mapping[int, LatentLayer]) -> list[int]:
    """Elements of one head of what each layer's attention returns."""
    return [latents[n].expanded.v_head_dim if n in latents else spec.v_head_dim for n, spec in enumerate(specs)]


def spec_in(phase: Phase, spec: AttentionSpec, expanded: Expanded) -> AttentionSpec:
    """What a layer asks a backend for in a phase. spec: of its cache."""
    return expanded.get(spec, spec) if phase is Phase.PREFILL else spec


def phases_of(spec: AttentionSpec, expanded: Expanded) -> frozenset[Phase]:
    """The phases in which a layer asks for a spec, of its cache or expanded."""
    if spec.dense:
        return frozenset({Phase.PREFILL})
    return frozenset(Phase) - {Phase.PREFILL} if spec in expanded else frozenset(Phase)
