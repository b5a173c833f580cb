"""Interfaces between engine and model: `Model`, `Attention`, MLA layers and layers with a state (linear attention, SSM)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateParameters, StateSpec


class Attention(Protocol):
    """Attention over the KV caches and states of a step's sequences. The engine passes it to the model."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v to a layer's cache and return the layer's attention, [num_tokens, num_heads, v_head_dim].

        q: [num_tokens, num_heads, head_dim]; k: [num_tokens, num_kv_heads, head_dim]; v: [num_tokens, num_kv_heads, v_head_dim].

        Model layers that share a cache call the same layer again in one step, with another q and the same k and v. They call the
        method `again` instead, which writes nothing, if the attention has it.
        """

    def state(self, layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        """Run a layer with a state, update the states of the sequences, and return [num_tokens, out_channels].

        layer: index in `Model.state_layers`; x: [num_tokens, input_channels]; gates: inputs of the layer's kind, as described in
        `StateBackend.scan`.
        """


class WatchedAttention(Attention, Protocol):
    """An `Attention` whose steps can be recorded, and recognised as repetitions of earlier steps."""

    @property
    def step_kind(self) -> Hashable | None:
        """Key that is equal for steps with the same launches. Such steps differ only in tensor contents. None means that the step
        repeats no other step.

        This attribute is optional.
        """

    def compute(self, layer: int, q: Tensor, k: Tensor, v: Tensor, writes: bool = True) -> Tensor:
        """Compute attention as a call does, but with torch operations that a dispatch mode can intercept. writes: False computes
        what `again` does."""


def _no_states(layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
    raise NotImplementedError("this attention runs no layers with a state")


@dataclass(frozen=True, slots=True)
class AttentionFunctions:
    """An `Attention` built from functions, for trial runs, recordings and tests."""

    attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    run_state: Callable[[int, Tensor, Sequence[Tensor]], Tensor] = _no_states
    attend_again: Callable[[int, Tensor, Tensor, Tensor], Tensor] | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(layer, q, k, v)

    def again(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of another q over the same k and v by calling `attend_again`, or `attend` if there is none."""
        return (self.attend_again or self.attend)(layer, q, k, v)

    def state(self, layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        """Run a layer with a state by calling `run_state`."""
        return self.run_state(layer, x, gates)


class StateLayer(NamedTuple):
    """A model's layer with a state. Its index in `Model.state_layers` is the argument `layer` of `Attention.state`."""

    spec: StateSpec
    parameters: StateParameters


def state_layers(model: object) -> Sequence[StateLayer]:
    """Return a model's layers with a state. The attribute `state_layers` is optional."""
    found: Sequence[StateLayer] = getattr(model, "state_layers", ())
    return found


def embedding_size(model: object) -> int | None:
    """Return the size of the embedding rows that a model accepts instead of token ids, or None if it accepts only ids.

    The attribute `embedding_size` is optional. A model that has it takes a fourth argument, `embedded`: pairs of a token's index
    and the embedding rows of this token and the following ones.
    """
    found: int | None = getattr(model, "embedding_size", None)
    return found


class Model(Protocol):
    """A decoder over packed tokens."""

    @property
    def attention_specs(self) -> Sequence[AttentionSpec]:
        """Spec of each layer, in the order of the argument `layer` of `Attention`."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary. Token ids are less than this."""

    @property
    def max_position_embeddings(self) -> int:
        """Maximum number of positions that the model supports."""

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return hidden states [num_tokens, hidden_size]. input_ids, positions: int64 [num_tokens]."""

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [rows, vocab_size] in the model's dtype, written to `out` if given.

        hidden: [rows, hidden_size]

        A model that is sharded over ranks returns the logits of its vocabulary shard, [rows, width]: width is vocab_size / ranks,
        rounded up; rank r's tokens begin at r * width. Logits of padding after the vocabulary are -inf.
        """


class LatentLayer(Protocol):
    """The GEMMs around multi-head latent attention (MLA, DeepSeek-V2). A model provides one `LatentLayer` per MLA layer.

    The cache holds one row per token, the latent, which all heads share. *Absorbed*: the up-projection is applied to the query
    and the output, and the latent is key and value of all heads. This reads little memory and is used in decode. *Expanded*: each
    head has separate, shorter keys and values. This computes less and is used for prompts. (DeepSeek-AI 2024, arXiv 2405.04434.)

    The model calls `attention(layer, q, latent, value)` with q [num_tokens, num_heads, expanded.head_dim], the latent
    [num_tokens, 1, head_dim of the cache] and the value, a part of the latent. The result is [num_tokens, num_heads,
    expanded.v_head_dim].
    """

    @property
    def expanded(self) -> AttentionSpec:
        """Spec of the layer with keys and values per head. It is `dense`, since they are never cached."""

    def absorb(self, q: Tensor) -> Tensor:
        """Project queries [n, num_heads, expanded.head_dim] to latent space, [n, num_heads, head_dim of the cache]."""

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Project latents [n, 1, head_dim of the cache] to k [n, num_heads, expanded.head_dim] and v [n, num_heads,
        v_head_dim]."""

    def project(self, attended: Tensor, out: Tensor) -> None:
        """Project attention over latents [n, num_heads, v_head_dim of the cache] to `out` [n, num_heads, expanded.v_head_dim]."""


def latent_layers(model: object) -> Mapping[int, LatentLayer]:
    """Return a model's MLA layers, keyed by layer index. The attribute `latent_layers` is optional."""
    found: Mapping[int, LatentLayer] = getattr(model, "latent_layers", {})
    return found
