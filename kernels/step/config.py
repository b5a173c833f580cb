"""Activation functions, and sizes of rotary embeddings and latent attention (MLA), for model configurations and kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor
from torch.nn.functional import gelu, relu, silu

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
GateActivation = Literal["silu", "sigmoid", "none"]
ACTIVATE: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
    "relu2": lambda x: relu(x).square(),
}


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of multi-head latent attention (MLA, DeepSeek-V2)."""

    kv_lora_rank: int
    """Number of elements of the latent from which keys and values are computed."""
    qk_nope_head_dim: int
    """Number of elements of a query or key head without rotary embedding."""
    qk_rope_head_dim: int
    """Number of elements of a query or key head with rotary embedding. All heads share these elements of the key."""
    v_head_dim: int
    q_lora_rank: int | None = None
    """Number of elements of the latent vector from which queries are computed. None means that one linear layer computes the
    queries."""
    interleaved: bool = True
    """True if the checkpoint pairs adjacent elements for rotation (interleaved RoPE). False if it pairs elements of the two
    halves."""

    @property
    def q_dim(self) -> int:
        """Number of elements of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_dim(self) -> int:
        """Number of elements cached per token: the latent, followed by the key's rotary part."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def ropes_of(inv_freq: Tensor, factors: Tensor, halves: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the frequencies and factors of each rotary embedding.

    halves: number of frequencies of each; the rest of a row is padding. Empty means that no row is padded.
    """
    sizes = halves or [inv_freq.shape[1]] * len(inv_freq)
    return [(row[:half], factor[:half]) for row, factor, half in zip(inv_freq, factors, sizes, strict=True)]
