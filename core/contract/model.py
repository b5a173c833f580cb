"""What the engine needs of a model: `Model`, the attention it is given, latent layers and layers with a state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateParameters, StateSpec


class Attention(Protocol):
    """The one object through which a step's tokens meet; the engine hands it in."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend in a layer and return [num_tokens, num_heads, v_head_dim]; k and v are written to the cache as well.

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim and v_head_dim].
        """

    def state(self, layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        """Run a layer with a state and return [num_tokens, out_channels]; the states of the sequences move on.

        layer: index in `Model.state_layers`; x: [num_tokens, input_channels]; gates: by the layer's kind, as
        `StateBackend.scan` says.
        """


class WatchedAttention(Attention, Protocol):
    """An attention whose steps may repeat each other, and which can be watched while it computes one."""

    @property
    def step_kind(self) -> Hashable | None:
        """What is equal for steps in which the attention does the same, but for what it finds in memory; None: nothing is.

        An attention need not have this attribute.
        """

    def compute(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend as a call does, by torch's operations that a dispatch mode sees one by one."""


def _no_states(layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
    raise NotImplementedError("this attention runs no layers with a state")


@dataclass(frozen=True, slots=True)
class AttentionFunctions:
    """An `Attention` made of functions: for trial runs, recordings and tests."""

    attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    run_state: Callable[[int, Tensor, Sequence[Tensor]], Tensor] = _no_states

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attention.__call__`."""
        return self.attend(layer, q, k, v)

    def state(self, layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        """See `Attention.state`."""
        return self.run_state(layer, x, gates)


class StateLayer(NamedTuple):
    """A layer with a state, as a model hands it in; `layer` of `Attention.state` is its index in `Model.state_layers`."""

    spec: StateSpec
    parameters: StateParameters


def state_layers(model: object) -> Sequence[StateLayer]:
    """Return a model's layers with a state; a model without any need not have the attribute `state_layers`."""
    found: Sequence[StateLayer] = getattr(model, "state_layers", ())
    return found


def embedding_size(model: object) -> int | None:
    """Elements of the rows that a model takes in place of token ids; None: it takes ids alone, and need not have this attribute.

    Such a model has a fourth argument, `embedded`: pairs of a token's index and the rows of this token and the next ones.
    """
    found: int | None = getattr(model, "embedding_size", None)
    return found


class Model(Protocol):
    """A decoder over packed tokens."""

    @property
    def attention_specs(self) -> Sequence[AttentionSpec]:
        """One spec per layer, in the order of the argument `layer` of `Attention`."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are below this number."""

    @property
    def max_position_embeddings(self) -> int:
        """Number of positions the model was made for."""

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return hidden states [num_tokens, hidden_size]. input_ids, positions: int64 [num_tokens]."""

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [rows, vocab_size] in the model's dtype (in `out`, where given). hidden: [rows, hidden_size].

        A model that is cut over ranks returns those of its own tokens, [rows, width]: width is vocab_size / ranks rounded up,
        rank r's tokens begin at r * width, and logits of those beyond the vocabulary are -inf.
        """


class LatentLayer(Protocol):
    """The products around latent attention (MLA, DeepSeek-V2), which a model hands in once for each latent layer.

    The cache holds one row per token that all heads share, the latent. *Absorbed*, the product that would expand it is applied to
    the query instead, and the latent is key and value of all heads: little memory is read, which decides decode. *Expanded*, each
    head has keys and values of its own, shorter ones: less is computed, which decides prompts. (DeepSeek-AI 2024,
    arXiv 2405.04434.)

    The layer calls `attention(layer, q, latent, value)` with q [num_tokens, num_heads, expanded.head_dim], the latent
    [num_tokens, 1, head_dim of its cache] and the value inside it, and gets [num_tokens, num_heads, expanded.v_head_dim].
    """

    @property
    def expanded(self) -> AttentionSpec:
        """The layer with keys and values for each head; `dense`, since they are never cached."""

    def absorb(self, q: Tensor) -> Tensor:
        """Turn queries [n, num_heads, expanded.head_dim] into queries of latents [n, num_heads, head_dim of the cache]."""

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Expand latents [n, 1, head_dim of the cache] to k and v, [n, num_heads, expanded.head_dim and v_head_dim]."""

    def project(self, attended: Tensor, out: Tensor) -> None:
        """Project attention over latents [n, num_heads, v_head_dim of the cache] to `out` [n, num_heads, expanded.v_head_dim]."""


def latent_layers(model: object) -> Mapping[int, LatentLayer]:
    """Return a model's latent layers by layer number; a model without any need not have the attribute `latent_layers`."""
    found: Mapping[int, LatentLayer] = getattr(model, "latent_layers", {})
    return found
