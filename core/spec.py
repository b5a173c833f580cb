"""What a backend may know of an attention layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One kind of attention layer. Hashable: layers with equal specs share a backend instance and its plan."""

    num_heads: int
    """Query heads; a multiple of `num_kv_heads`. Query head h reads kv head h // group_size."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Elements of one head, the same for query, key and value."""
    scale: float
    """Multiplies q.k before the softmax; never applied twice, never assumed to be head_dim ** -0.5."""
    dtype: torch.dtype = torch.float32
    """Of q, k, v, out and the cache."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the layer runs."""
    sliding_window: int | None = None
    """Keys a query may see, itself included: query position p sees positions p - sliding_window + 1 .. p."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap), after scaling and before bias and mask (Gemma 2)."""
    alibi_slopes: tuple[float, ...] | None = None
    """One slope a query head; adds -slope * (query position - key position) to the scores (Press et al. 2022)."""

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads"
        assert self.alibi_slopes is None or len(self.alibi_slopes) == self.num_heads, "one ALiBi slope a query head"

    @property
    def group_size(self) -> int:
        """Query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def features(self) -> frozenset[str]:
        """What this layer asks for beyond plain causal attention, named as the fields are."""
        names = ("sliding_window", "softcap", "alibi_slopes")
        return frozenset(name for name in names if getattr(self, name) is not None)

    def __str__(self) -> str:
        extra = "".join(f" {name}" for name in sorted(self.features))
        dtype = DTYPE_NAMES.get(self.dtype, str(self.dtype))
        return f"{self.num_heads}/{self.num_kv_heads} heads x {self.head_dim} {dtype} on {self.device.type}{extra}"
