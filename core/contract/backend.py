"""The contract of an attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import Tensor

from headway.core.contract.capabilities import Capabilities
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES, Support
from headway.core.contract.warmup import Lengths, StepLimits, lattice

API_VERSION = 2
"""Version of this contract. A plugin built for another one is refused with both numbers."""

Plan = Any
"""Whatever `plan` returns; only the same backend looks inside."""


class GraphLevel(IntEnum):
    """Which steps a backend can run inside a captured CUDA graph."""

    NONE = 0
    DECODE = 1
    """One query token a sequence."""
    UNIFORM = 2
    """The same number of query tokens in every sequence: drafts, and a single prompt. A prompt is planned by `plan`, replayed at
    the captured length, and finds its slots and blocks in the metadata's tensors, which a plan must keep as they are."""
    ANY = 3


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
    def origin(cls) -> str:
        """Where its library was found, of a backend that looks in several places; empty: nothing needs to be said."""
        return ""

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """Whether it can serve this layer; the only place where that is decided. Extend it where a claim needs more words."""
        return cls.capabilities.check(spec, layout, block_size, phase) & layout.check(spec, block_size)

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        """Whether it can read a cache that is there: asked once for each cache, before the first step."""
        if cls.capabilities.contiguous_blocks and not cache.contiguous_blocks:
            return Support.no(
                "cache", "blocks that are one piece of memory each", "strided blocks", f"another backend than {cls.name}"
            )
        return YES

    @classmethod
    def captures(cls, query_len: int = 1) -> Support:
        """Whether an engine runs its decode of `query_len` tokens a sequence as a replay of a CUDA graph; whoever times or checks
        the backend asks the same, so that what is timed is what runs.
        """
        needed = GraphLevel.DECODE if query_len == 1 else GraphLevel.UNIFORM
        hint = "--enforce-eager says that this is meant"
        if cls.graph_level < needed:
            return Support.no("graph_level", f"{needed.name} or higher", cls.graph_level.name, hint)
        if cls.capabilities.exact_host_lengths:
            return Support.no("exact_host_lengths", "a plan that needs no exact lengths on the host", "one that does", hint)
        return YES

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        """Name of the kernel that will really run."""
        return cls.name

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Device memory to keep free beside the cache."""
        return 0

    def warmup_steps(self, phase: Phase, limits: StepLimits) -> Iterable[Sequence[Lengths]]:
        """Steps of a phase that between them reach every kernel which this instance may choose in a step within the limits.

        The engine runs each once before it is ready, a decode also beside a prompt, so that what is compiled or loaded at first
        sight delays no request; what comes later all the same is counted (`EngineStats.compilations`). Override it where kernels
        are chosen at other numbers than powers of two.
        """
        return lattice(phase, limits)

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

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attention of several new tokens a sequence, PREFILL and EXTEND, causal from the bottom right.

        q: [num_prefill_tokens, num_heads, head_dim]; k: [num_prefill_tokens, num_kv_heads, head_dim]; v, out: the same with
        v_head_dim, out with num_heads. k and v are this step's tokens, already written to the cache. A sequence's query i of n
        sits at position seq_len - n + i.
        lse: float32 [num_heads, num_prefill_tokens], filled with the natural logarithm of each softmax's denominator, sinks
        included; handed in only where `Capabilities.lse` says so, so that a backend without it need not have the parameter.
        """
        raise NotImplementedError(f"{self.name} declares no prefill")

    def decode(self, q: Tensor, cache: LayerCache, plan: Plan, out: Tensor, lse: Tensor | None = None) -> None:
        """Attention of the newest tokens over the cache.

        q: [num_decode_tokens, num_heads, head_dim]; out: [num_decode_tokens, num_heads, v_head_dim]; lse: float32 [num_heads,
        num_decode_tokens], as in `prefill`.

        Rows of padding sequences (length 0) must not disturb others; what is written to them is not read.
        """
        raise NotImplementedError(f"{self.name} declares no decode")

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan, out: Tensor) -> None:
        """As `decode` of one token a sequence, whose k and v are not in the cache yet: puts them there as well.

        q: [num_seqs, num_heads, head_dim]; k: [num_seqs, num_kv_heads, head_dim], for position seq_len - 1; v, out: with
        v_head_dim. The cache must hold the bits that the layout's writer would leave; a padding sequence (length 0) writes
        nothing. Called where `decode_writes` says so and the whole step is such a decode.
        """
        raise NotImplementedError(f"{self.name} does not write in decode")


Backends = Mapping[AttentionSpec, AttentionBackend]
"""The instances of one backend, by the spec that each serves."""


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
