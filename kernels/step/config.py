"""Names and sizes that a model's configuration and the kernels share: activations, and multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
GateActivation = Literal["silu", "sigmoid", "none"]


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention in place of heads of keys and values (MLA, DeepSeek-V2)."""

    kv_lora_rank: int
    """Elements of the latent that keys and values are expanded from."""
    qk_nope_head_dim: int
    """Elements of a query and key head that are not rotated."""
    qk_rope_head_dim: int
    """Elements that are rotated; the key's are shared by all heads."""
    v_head_dim: int
    q_lora_rank: int | None = None
    """Elements of the queries' latent; None: queries are a plain product."""
    interleaved: bool = True
    """Whether the checkpoint rotates neighbouring elements with each other instead of the two halves."""

    @property
    def q_dim(self) -> int:
        """Elements of a head of query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_dim(self) -> int:
        """Elements cached of a token: a latent, and behind the latent the key's rotated part."""
        return self.kv_lora_rank + self.qk_rope_head_dim
