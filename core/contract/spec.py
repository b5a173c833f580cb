"""AttentionSpec: all that a backend may know of an attention layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from headway.core.contract.layer import OPTIONAL, describe, fault_of

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "int8_per_token_head": torch.int8}
"""Element types only a cache may have, by vLLM's names. An int8 cache has a float32 scale for each token and head of key and
value, in tensors of its layout; an fp8 cache has one number for a layer (`AttentionSpec.k_scale`, `v_scale`)."""
KV_DTYPE_NAMES = {**DTYPE_NAMES, **{dtype: name for name, dtype in KV_DTYPES.items()}}


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One kind of attention layer. Hashable: layers with equal specs share a backend instance and its plan."""

    num_heads: int
    """Query heads; a multiple of `num_kv_heads`. Query head h reads kv head h // group_size."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Elements of one head of query and key."""
    scale: float
    """Multiplies q.k before the softmax; never applied twice, never assumed to be head_dim ** -0.5."""
    dtype: torch.dtype = torch.float32
    """Element type of q, k, v and out, and of the cache unless `kv_dtype` says otherwise."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the layer runs."""
    sliding_window: int | None = None
    """Keys a query may see, itself included: query position p sees positions p - sliding_window + 1 .. p; where the layer is not
    causal also p + 1 .. p + sliding_window - 1, so that |p - k| < sliding_window (ModernBERT, EmbeddingGemma)."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap), after scaling and before bias and mask (Gemma 2)."""
    alibi_slopes: tuple[float, ...] | None = None
    """One slope per query head; adds -slope * (query position - key position) to the scores (Press et al. 2022)."""
    sinks: tuple[float, ...] | None = None
    """One logit per query head that joins the softmax's denominator and has no value (GPT-OSS; Xiao et al. 2023); never
    scaled."""
    kv_dtype: torch.dtype | None = None
    """Element type of the cache where it is not `dtype`: one out of KV_DTYPES."""
    k_scale: float = 1.0
    """Key = cached key * k_scale: the writer divides, a backend multiplies. 1 where the cache keeps scales of its own."""
    v_scale: float = 1.0
    """Value = cached value * v_scale."""
    batch_invariant: bool = False
    """A sequence's output must have the same bits whatever else is in its step: asked for by a model that keeps the bits of its
    rows everywhere else."""
    v_head_dim: int = 0
    """Elements of one head of value and output; 0, the default, becomes `head_dim`."""
    value_in_key: bool = False
    """The value is the first `v_head_dim` elements of the key, stored once (DeepSeek-V2's absorbed latent attention)."""
    dense: bool = False
    """There is no cache: the layer is asked for in PREFILL alone, and this step's k and v are all that may be read (the expanded
    form of latent attention, and every layer of an encoder)."""
    causal: bool = True
    """Whether a query sees no later key. An encoder's layer is not: its queries see their whole sequence, or the window on both
    sides of them. Such a layer is `dense`."""

    def __post_init__(self) -> None:
        if self.v_head_dim == 0:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        fault = fault_of(self, self.v_head_dim, self.kv_dtype is not None)
        assert not fault, fault

    @property
    def kind(self) -> AttentionSpec:
        """The spec without the numbers that a checkpoint has for each layer: sinks are 0, and scales of the cache 1.

        What is compiled, planned and measured depends on it alone.
        """
        sinks = None if self.sinks is None else (0.0,) * self.num_heads
        return replace(self, sinks=sinks, k_scale=1.0, v_scale=1.0)

    @property
    def group_size(self) -> int:
        """Query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def cache_dtype(self) -> torch.dtype:
        """Element type of the cache."""
        return self.kv_dtype or self.dtype

    @property
    def cache_row_bytes(self) -> int:
        """Bytes that a token takes in the layer's cache: key, value unless that lies in the key, and scales of their own."""
        rows = (self.head_dim,) if self.value_in_key else (self.head_dim, self.v_head_dim)
        scale = 0 if self.cache_dtype.is_floating_point else torch.float32.itemsize
        return self.num_kv_heads * sum(elements * self.cache_dtype.itemsize + scale for elements in rows)

    @property
    def features(self) -> frozenset[str]:
        """Names of the optional fields that are set: what the layer asks for beyond plain attention."""
        return frozenset(name for name in OPTIONAL if getattr(self, name) is not None)

    def __str__(self) -> str:
        dtype = DTYPE_NAMES.get(self.dtype, str(self.dtype))
        kv_dtype = KV_DTYPE_NAMES.get(self.cache_dtype, str(self.cache_dtype))
        more = " batch_invariant" if self.batch_invariant else ""
        return describe(self, self.v_head_dim, dtype, kv_dtype, f" on {self.device.type}", more)
