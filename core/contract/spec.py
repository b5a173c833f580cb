"""`AttentionSpec`: everything that a backend knows about an attention layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from headway.core.contract.layer import OPTIONAL, Invariance, describe, fault_of
from headway.core.contract.rule import AttentionRule

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "int8_per_token_head": torch.int8}
"""Element types that only a cache may have, by vLLM's names. An int8 cache stores a float32 scale per token and head, for key and
value, in tensors of its layout. An FP8 cache has one key scale and one value scale per layer (`AttentionSpec.k_scale`,
`v_scale`)."""
KV_DTYPE_NAMES = {**DTYPE_NAMES, **{dtype: name for name, dtype in KV_DTYPES.items()}}


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Parameters of an attention layer. Hashable: layers with equal specs share a backend instance and its plan."""

    num_heads: int
    """Number of query heads, a multiple of `num_kv_heads`. Query head h reads kv head h // group_size."""
    num_kv_heads: int
    """Number of key and value heads."""
    head_dim: int
    """Number of elements per head of query and key."""
    scale: float
    """Factor applied to q.k before the softmax. Apply it exactly once; do not assume head_dim ** -0.5."""
    dtype: torch.dtype = torch.float32
    """Element type of q, k, v and out, and of the cache unless `kv_dtype` is set."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device that the layer runs on."""
    sliding_window: int | None = None
    """Size of the window in keys, or None. Query position p sees key positions p - sliding_window + 1 .. p. A non-causal layer
    also sees p + 1 .. p + sliding_window - 1, that is |p - k| < sliding_window (ModernBERT, EmbeddingGemma)."""
    softcap: float | None = None
    """Soft cap, or None. Scores become softcap * tanh(scores / softcap), after scaling and before bias and mask (Gemma 2)."""
    alibi_slopes: tuple[float, ...] | None = None
    """One ALiBi slope per query head, or None. Adds -slope * (query position - key position) to scores (Press et al. 2022)."""
    sinks: tuple[float, ...] | None = None
    """One sink logit per query head, or None. It is added to the softmax denominator, has no value vector and is not scaled
    (GPT-OSS; Xiao et al. 2023)."""
    rule: AttentionRule | None = None
    """Rule that changes scores, mask or values, or None. Applied to scores after `softcap` and ALiBi; a query sees a key only if
    the rule's mask and the layer both allow it."""
    kv_dtype: torch.dtype | None = None
    """Element type of the cache, out of KV_DTYPES. None means `dtype`."""
    k_scale: float = 1.0
    """Key = cached key * k_scale: writers divide by it, backends multiply by it. 1 if the cache stores scales per token."""
    v_scale: float = 1.0
    """Value = cached value * v_scale."""
    invariance: Invariance = Invariance.NONE
    """Level that a token's output must keep. Set in deterministic mode."""
    v_head_dim: int = 0
    """Number of elements per head of value and output. 0 means `head_dim`."""
    value_in_key: bool = False
    """True if the value is the first `v_head_dim` elements of the key, stored once (absorbed MLA, DeepSeek-V2)."""
    dense: bool = False
    """True if the layer has no cache: it runs only in PREFILL and reads only this step's k and v. True for expanded MLA (keys and
    values per head) and for all layers of an encoder."""
    causal: bool = True
    """True if a query sees no later keys. False in encoders: queries see their whole sequence, or the window on both sides.
    Non-causal layers are `dense`."""

    def __post_init__(self) -> None:
        if self.v_head_dim == 0:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        fault = fault_of(self, self.v_head_dim, self.kv_dtype is not None)
        assert not fault, fault

    @property
    def kind(self) -> AttentionSpec:
        """The spec without per-layer numbers of the checkpoint: sinks are 0 and cache scales are 1.

        Compilation, plans and measurements depend only on the kind.
        """
        sinks = None if self.sinks is None else (0.0,) * self.num_heads
        return replace(self, sinks=sinks, k_scale=1.0, v_scale=1.0)

    @property
    def batch_invariant(self) -> bool:
        """True if a sequence's output must be bit-identical whatever else is in its step."""
        return self.invariance >= Invariance.BATCH

    @property
    def group_size(self) -> int:
        """Number of query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def cache_dtype(self) -> torch.dtype:
        """Element type of the cache."""
        return self.kv_dtype or self.dtype

    @property
    def cache_row_bytes(self) -> int:
        """Number of bytes per token in the layer's cache: key, value (unless it is part of the key), and scales per token, if
        any."""
        rows = (self.head_dim,) if self.value_in_key else (self.head_dim, self.v_head_dim)
        scale = 0 if self.cache_dtype.is_floating_point else torch.float32.itemsize
        return self.num_kv_heads * sum(elements * self.cache_dtype.itemsize + scale for elements in rows)

    @property
    def features(self) -> frozenset[str]:
        """Names of the optional fields that are set, and of a rule's features: features beyond plain attention."""
        found = {name for name in OPTIONAL if getattr(self, name) is not None}
        if self.rule is not None:
            found |= {f"rule.{name}" for name in {"blocks"} & self.rule.parts | ({"ahead"} if self.rule.ahead else set())}
        return frozenset(found)

    def __str__(self) -> str:
        dtype = DTYPE_NAMES.get(self.dtype, str(self.dtype))
        kv_dtype = KV_DTYPE_NAMES.get(self.cache_dtype, str(self.cache_dtype))
        more = f" {self.invariance.name.lower()}_invariant" if self.invariance else ""
        return describe(self, self.v_head_dim, dtype, kv_dtype, f" on {self.device.type}", more)
