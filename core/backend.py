"""The contract of an attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import Tensor

from headway.core.errors import ConfigError
from headway.core.layout import CacheLayout, LayerCache
from headway.core.metadata import AttentionMetadata, Phase
from headway.core.spec import DTYPE_NAMES, KV_DTYPE_NAMES, AttentionSpec
from headway.core.support import YES, Reason, Support

API_VERSION = 1
"""Version of this contract. A plugin built for another one is refused with both numbers."""

ALL_PHASES = frozenset(Phase)
FEATURES = frozenset({"sliding_window", "softcap", "alibi_slopes", "sinks"})
"""Optional fields of AttentionSpec; a backend lists those it computes, and is refused for the others."""

Plan = Any
"""Whatever `plan` returns; only the same backend looks inside."""


class GraphLevel(IntEnum):
    """Which steps a backend can run inside a captured CUDA graph."""

    NONE = 0
    DECODE = 1
    """One query token a sequence."""
    UNIFORM = 2
    """The same number of query tokens in every sequence."""
    ANY = 3


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend claims. Checked in one place, shown by `headway backends`, and tested both ways."""

    phases: frozenset[Phase]
    layouts: tuple[CacheLayout, ...] | None = None
    """Layouts it reads, preferred first; None: every one, because it reads through `LayerCache.gather`."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    kv_dtypes: tuple[torch.dtype, ...] = ()
    """Cache element types it reads besides the layer's own dtype."""
    devices: tuple[str, ...] = ("cuda",)
    """Device types, as in torch.device.type."""
    block_multiple: int = 1
    """block_size must be a multiple of this."""
    head_dims: tuple[int, ...] | None = None
    """Accepted head_dim; None: any."""
    max_group_size: int | None = None
    """Most query heads that may share a kv head; None: any."""
    features: frozenset[str] = frozenset()
    """Out of FEATURES."""
    dense_prefill: bool = False
    """PREFILL reads this step's k and v and not the cache, so `layouts` and `block_multiple` do not bind it."""
    reads_whole_blocks: bool = False
    """It may load every slot of a sequence's last block and mask the scores of those past the end. Those slots must be finite:
    0 * NaN is NaN. The pool keeps that promise (zeroed when allocated, and a freed block keeps the finite rows it held), so a
    test poisons unused slots with a large number for such a backend, and with NaN for any other."""

    batch_invariant: bool = False
    """Where a layer asks for it (`AttentionSpec.batch_invariant`), the bits of a sequence's output do not depend on what else is
    in the step: no split, tile or grouping is chosen by the number of sequences or another's length, nor by the phase, which is
    EXTEND as soon as one sequence's is. Said of one new token a sequence in decode."""

    def check(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """Every reason why this combination is outside the claim."""
        reasons = []

        def need(ok: bool, what: str, need: str, got: object, hint: str = "") -> None:
            if not ok:
                reasons.append(Reason(what, need, str(got), hint))

        phases = " or ".join(p.value for p in Phase if p in self.phases)
        need(phase in self.phases, "phase", phases, phase.value, f"name another backend for {phase.value}")
        need(spec.device.type in self.devices, "device", " or ".join(self.devices), spec.device.type)
        dtypes = " or ".join(DTYPE_NAMES.get(dtype, str(dtype)) for dtype in self.dtypes)
        need(
            spec.dtype in self.dtypes,
            "dtype",
            dtypes,
            DTYPE_NAMES.get(spec.dtype, spec.dtype),
            "choose another --dtype",
        )
        kv_dtype = spec.cache_dtype
        need(
            kv_dtype == spec.dtype or kv_dtype in self.kv_dtypes,
            "kv_cache_dtype",
            " or ".join(["the layer's dtype", *(KV_DTYPE_NAMES.get(dtype, str(dtype)) for dtype in self.kv_dtypes)]),
            KV_DTYPE_NAMES.get(kv_dtype, kv_dtype),
        )
        paged = not (self.dense_prefill and phase is Phase.PREFILL)
        if self.layouts is not None and paged:
            names = " or ".join(known.name for known in self.layouts)
            need(layout in self.layouts, "kv_layout", names, layout.name, f"--kv-layout {self.layouts[0].name}")
        if self.head_dims is not None:
            need(spec.head_dim in self.head_dims, "head_dim", " or ".join(map(str, self.head_dims)), spec.head_dim)
        multiple = self.block_multiple
        need(
            not paged or block_size % multiple == 0,
            "block_size",
            f"a multiple of {multiple}",
            block_size,
            f"--block-size {multiple}",
        )
        if self.max_group_size is not None:
            need(
                spec.group_size <= self.max_group_size,
                "query heads a kv head",
                f"at most {self.max_group_size}",
                spec.group_size,
            )
        need(
            self.batch_invariant or not spec.batch_invariant,
            "batch_invariant",
            "a backend that declares it",
            "one that does not",
        )
        for feature in sorted(spec.features - self.features):
            need(False, feature, "a backend that computes it", f"{feature}={getattr(spec, feature)}")
        return Support(tuple(reasons))


class AttentionBackend(ABC):
    """One named way to compute attention over a paged cache; it never sees the engine or its configuration.

    A subclass sets `name` and `capabilities` and writes `plan` and one or both of `prefill` and `decode`. The engine makes one
    instance for each distinct AttentionSpec, writes k and v into the cache itself, then calls `plan` once a step and `prefill`
    or `decode` once a layer. Those two must neither synchronise with the host nor, if `graph_level` says so, allocate. An
    instance that sets `decode_writes` gets `write_and_decode` instead, where it can.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    graph_level: ClassVar[GraphLevel] = GraphLevel.NONE
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
    """Largest accepted ||out - reference|| / ||reference|| against float64, by dtype."""
    options: ClassVar[Mapping[str, str]] = {}
    """Options a user may set with --attn-opt NAME.key=value: key -> what it does. Others are refused."""
    decode_writes: bool = False
    """Whether this instance has `write_and_decode`, which saves a launch a layer; `__init__` may set it for its spec and layout.
    (vLLM's flag for the like: forward_includes_kv_cache_update.)"""

    def __init__(
        self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Mapping[str, str] | None = None
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.block_size = block_size
        self.check_options(options or {})

    @classmethod
    def check_options(cls, options: Mapping[str, str]) -> None:
        """:raises ConfigError: an option that the backend does not have."""
        for key in options:
            if key not in cls.options:
                known = ", ".join(f"{cls.name}.{known}" for known in cls.options) or "none"
                raise ConfigError("--attn-opt", f"an option of {cls.name} ({known})", f"{cls.name}.{key}")

    @classmethod
    def available(cls) -> Support:
        """Whether it can run on this machine at all: libraries, driver, compiler, device. Found by probing, not by versions."""
        return YES

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """Whether it can serve this layer; the only place where that is decided. Extend it where a claim needs more words."""
        return cls.capabilities.check(spec, layout, block_size, phase) & layout.check(spec.head_dim, spec.cache_dtype)

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        """Name of the kernel that will really run."""
        return cls.name

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Device memory to keep free beside the cache."""
        return 0

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> Plan:
        """Prepare one step's view (all prefill or extend, or all decode). Host work and allocation are allowed."""

    def plan_for_capture(self, metadata: AttentionMetadata) -> Plan:
        """Plan a decode that is captured in a CUDA graph and replayed for many steps.

        The metadata's tensors are static: each replay finds that step's values in them. Its host lengths are the longest that
        may come, so a grid fixed here is large enough for all; rows of length 0 are padding.
        """
        return self.plan(metadata)

    def plan_for_replay(self, plan: Plan, metadata: AttentionMetadata) -> None:  # noqa: B027 -- most have nothing to do
        """Bring a captured plan up to date before a replay, where that is more than the static tensors say.

        The metadata has the step's own host lengths. What the captured kernels read must be changed in place. Must not wait.
        """

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan, out: Tensor) -> None:
        """Attention of several new tokens a sequence, PREFILL and EXTEND, causal from the bottom right.

        q, out: [num_prefill_tokens, num_heads, head_dim]; k, v: [num_prefill_tokens, num_kv_heads, head_dim], this step's
        tokens, already written to the cache. A sequence's query i of n sits at position seq_len - n + i.
        """
        raise NotImplementedError(f"{self.name} declares no prefill")

    def decode(self, q: Tensor, cache: LayerCache, plan: Plan, out: Tensor) -> None:
        """Attention of the newest tokens over the cache. q, out: [num_decode_tokens, num_heads, head_dim].

        Rows of padding sequences (length 0) must not disturb others; what is written to them is not read.
        """
        raise NotImplementedError(f"{self.name} declares no decode")

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan, out: Tensor) -> None:
        """As `decode` of one token a sequence, whose k and v are not in the cache yet: puts them there as well.

        q, out: [num_seqs, num_heads, head_dim]; k, v: [num_seqs, num_kv_heads, head_dim], for position seq_len - 1. The cache
        must hold the bits that the layout's writer would leave; a padding sequence (length 0) writes nothing. Called where
        `decode_writes` says so and the whole step is such a decode.
        """
        raise NotImplementedError(f"{self.name} does not write in decode")


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """How a plugin registers a backend: cheap to list, loaded only when somebody asks for it."""

    name: str
    summary: str
    """One line for the table."""
    load: Callable[[], type[AttentionBackend]]
    """Imports the kernel library; may raise ImportError."""
    extra: str = ""
    """What installs it: an extra of headway or a package."""
    api_version: int = field(kw_only=True)
    """Version of the contract the backend was written for, as a number: a constant of ours would agree with any release."""
