"""Names and sizes that model configurations and kernels share: activations and multi-head latent attention (MLA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
GateActivation = Literal["silu", "sigmoid", "none"]


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
