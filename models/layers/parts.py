"""Parts that a decoder layer is made of, as the decoder sees them; and attention beside a part with a state."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headway.core.contract.model import Attention, StateLayer
from headway.core.contract.spec import AttentionSpec
from headway.kernels.linear.linear import Linear
from headway.kernels.step.operations import Norm, Operations, Rope


class Part(Protocol):
    """A part of a layer with its norms, products and residual."""

    @property
    def linears(self) -> list[Linear]:
        """Products of this part, which absorb norms and are checked for batch invariance."""

    def absorb_norms(self, ops: Operations) -> None:
        """Merge norms into the products that follow them, where the operations can."""


class MixerPart(Part, Protocol):
    """A part in which tokens meet: attention, or a part with a state."""

    def __call__(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """Compute the part and return the new residual stream.

        x: [num_tokens, hidden_size], the residual stream, overwritten; rope: as `Operations.embed` returned it.
        """

    @property
    def out_proj(self) -> Linear:
        """The last product."""

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """Return what the part's last product is applied to. x: as above, left as it is."""

    def add(self, x: Tensor, mixed: Tensor, ops: Operations) -> Tensor:
        """Return the new residual stream. x: the residual stream, overwritten; mixed: of `mix`."""


class AttentionPart(MixerPart, Protocol):
    """The attention of a layer."""

    @property
    def spec(self) -> AttentionSpec:
        """The layer's attention as a backend sees it."""


class StatefulPart(MixerPart, Protocol):
    """The part with a state of a layer."""

    @property
    def state_layers(self) -> list[StateLayer]:
        """What a backend sees of it: one layer with a state, or a convolution and a recurrence with a product between them."""


class MLPPart(Part, Protocol):
    """The MLP of a layer, dense or with experts."""

    def __call__(self, x: Tensor, ops: Operations) -> Tensor:
        """Return the new residual stream. x: [num_tokens, hidden_size], the residual stream, overwritten."""


class OntoNormed:
    """Attention or a part with a state that adds to its normed input instead of to the residual stream (MiniMax-01)."""

    def __init__(self, norm: Norm, kept: float, part: MixerPart) -> None:
        """kept: multiplies the normed input before that; part: without a norm of its own."""
        self.norm = norm
        self._kept = kept
        self._part = part

    def __call__(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """See MixerPart."""
        normed = ops.norm(x, self.norm)
        mixed = self._part.mix(normed, rope, ops, attention)
        return self._part.add(normed if self._kept == 1.0 else normed * self._kept, mixed, ops)


class SideBySide:
    """Attention and a part with a state that read one normed input; both outputs are added to the residual stream (Falcon-H1)."""

    def __init__(self, norm: Norm, attention: AttentionPart, state: StatefulPart) -> None:
        """attention, state: without norms of their own, before them or after."""
        self.norm = norm
        self._attention = attention
        self._state = state

    def __call__(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """See MixerPart."""
        normed = ops.norm(x, self.norm)
        attended = self._attention.mix(normed, rope, ops, attention)
        moved = self._state.mix(normed, rope, ops, attention)
        return ops.add_products(x, [(attended, self._attention.out_proj), (moved, self._state.out_proj)])
