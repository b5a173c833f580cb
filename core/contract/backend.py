"""The contract of an attention backend."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from headway.core.contract.capabilities import Capabilities
from headway.core.contract.errors import ConfigError, PluginError, making
from headway.core.contract.kernel import GraphLevel, Kernel, KernelInfo
from headway.core.contract.layout import CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES, Support


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest steps that an engine runs."""

    max_num_tokens: int
    """Most new tokens in a step."""
    max_num_seqs: int
    max_model_len: int
    """Tokens of the longest sequence."""
    max_decode_len: int = 1
    """Most query tokens per sequence in a decode: more than 1 where drafts are verified."""


class Lengths(NamedTuple):
    """The lengths of one sequence in a step, in tokens."""

    query_len: int
    context_len: int
    num_drafts: int = 0
    """Drafts that a decode verifies: one less than its query tokens."""


_MOST_PAIRS = 2**27
"""Most query tokens times context tokens of a warm-up step. Larger steps take long and choose no other kernels."""


def lattice(phase: Phase, limits: StepLimits) -> Iterator[list[Lengths]]:
    """Yield steps of a phase at and just beyond powers of two of sequences and query tokens, and at powers of the context length.

    They reach every kernel of a backend that chooses by these numbers and changes kernels at powers of two. A backend that
    chooses at other numbers lists its own steps (`AttentionBackend.warmup_steps`).
    """
    decodes = phase is Phase.DECODE
    contexts = sorted({max(limits.max_model_len - 1, 1), *((4 if decodes else 16) ** n for n in range(16))})
    contexts = [0] if phase is Phase.PREFILL else contexts
    longest = min(limits.max_decode_len if decodes else limits.max_num_tokens, limits.max_num_tokens, limits.max_model_len)
    for query_len in powers(longest):
        if phase is Phase.EXTEND and query_len == 1:  # which is a decode
            continue
        room = min(limits.max_num_seqs, limits.max_num_tokens // query_len)
        left = limits.max_num_tokens - room * query_len
        for num_seqs in powers(room) if decodes else sorted({1, room}):
            for context_len in contexts:
                if context_len + query_len > limits.max_model_len or (
                    not decodes and num_seqs * query_len * context_len > _MOST_PAIRS
                ):
                    continue
                step = [Lengths(query_len, context_len, query_len - 1 if decodes else 0)] * num_seqs
                yield step
                shorter = 1 if context_len == 0 else 2
                if not decodes and num_seqs == room < limits.max_num_seqs and left >= shorter:
                    yield [*step, Lengths(left, context_len)]  # the most work there can be beside the longest query


def fits(step: Sequence[Lengths], limits: StepLimits) -> bool:
    """Return whether a step lies within an engine's limits."""
    longest = max((query_len + context_len for query_len, context_len, _ in step), default=0)
    tokens = sum(each.query_len for each in step)
    return 0 < len(step) <= limits.max_num_seqs and tokens <= limits.max_num_tokens and longest <= limits.max_model_len


def powers(limit: int) -> list[int]:
    """Return 1, 2, 3, 4, 5, 8, 9, 16, 17, ...: the powers of two and their successors up to the limit, and the limit itself."""
    found = {limit}
    power = 1
    while power <= limit:
        found |= {power, power + 1}
        power *= 2
    return sorted(each for each in found if 1 <= each <= limit)


API_VERSION = 3
"""Version of this contract. A plugin built for one that it does not include is refused with both numbers."""

Plan = Any
"""The result of `AttentionBackend.plan`; only the same backend looks inside."""


B = TypeVar("B")


class AttentionBackend(Kernel):
    """One named way to compute attention over a paged cache; it never sees the engine or its configuration.

    A subclass sets `name` and `capabilities` and writes `plan` and one or both of `prefill` and `decode`. The engine makes one
    instance for each distinct AttentionSpec, writes k and v into the cache itself, then calls `plan` once per step and `prefill`
    or `decode` once per layer. Those two must neither synchronise with the host nor, if `graph_level` says so, allocate. For an
    instance that sets `decode_writes`, `write_and_decode` is called instead, where the step allows it.
    """

    capabilities: ClassVar[Capabilities]
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
    options: ClassVar[Mapping[str, str]] = {}
    """Options a user may set with --attn-opt NAME.key=value: key -> what it does. Others are refused."""
    decode_writes: bool = False
    """Whether this instance has `write_and_decode`, which saves a launch per layer. `__init__` may set it by spec and layout.
    (vLLM's like flag: forward_includes_kv_cache_update.)"""

    def __init__(
        self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Mapping[str, str] | None = None
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.block_size = block_size
        self.check_options(options or {})

    @classmethod
    def check_options(cls, options: Mapping[str, str]) -> None:
        """Check the names of options.

        :raises ConfigError: an option that the backend does not have.
        """
        for key in options:
            if key not in cls.options:
                known = ", ".join(f"{cls.name}.{known}" for known in cls.options) or "none"
                raise ConfigError("--attn-opt", f"an option of {cls.name} ({known})", f"{cls.name}.{key}")

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """Return whether the backend can serve a layer; extend it where `capabilities` cannot express a condition."""
        fits = layout.check(spec, block_size)
        if not fits and not cls.capabilities.reads_cache_of(spec, block_size):
            fits = Support(tuple(reason._replace(hint="") for reason in fits.reasons))
        return cls.capabilities.check(spec, layout, block_size, phase) & fits

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        """Return whether the backend can read an existing cache: asked once for each cache, before the first step."""
        if cls.capabilities.contiguous_blocks and not cache.contiguous_blocks:
            return Support.no(
                "cache", "blocks that are one piece of memory each", "strided blocks", f"another backend than {cls.name}"
            )
        return YES

    @classmethod
    def captures(cls, query_len: int = 1) -> Support:
        """Return whether an engine runs a decode of `query_len` tokens per sequence as a replay of a CUDA graph.

        Benchmarks and tests of the backend ask the same, so that they time and check what runs.
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
        """Return the name of the kernel that will run."""
        return cls.name

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Return the bytes of device memory to keep free beside the cache."""
        return 0

    def warmup_steps(self, phase: Phase, limits: StepLimits) -> Iterable[Sequence[Lengths]]:
        """Return steps of a phase that together reach every kernel which this instance may choose in a step within the limits.

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

    def plan_for_replay(self, plan: Plan, metadata: AttentionMetadata) -> None:
        """Bring a captured plan up to date before a replay, where that is more than the static tensors say.

        The metadata has the step's own host lengths. What the captured kernels read must be changed in place. Must not wait.
        """

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Compute attention of several new tokens per sequence (PREFILL, EXTEND) into `out`, causal from the bottom right.

        A layer that is not causal (`AttentionSpec.causal`, where `Capabilities.non_causal` says so) comes in PREFILL alone.

        q: [num_prefill_tokens, num_heads, head_dim]; k: [num_prefill_tokens, num_kv_heads, head_dim]; v, out: the same with
        v_head_dim, out with num_heads. k and v are this step's tokens, already written to the cache. A sequence's query i of n
        sits at position seq_len - n + i.
        lse: float32 [num_heads, num_prefill_tokens], filled with the natural logarithm of each softmax's denominator, sinks
        included; handed in only where `Capabilities.lse` says so, so that a backend without it need not have the parameter.
        """
        raise NotImplementedError(f"{self.name} declares no prefill")

    def decode(self, q: Tensor, cache: LayerCache, plan: Plan, out: Tensor, lse: Tensor | None = None) -> None:
        """Compute attention of the newest tokens over the cache into `out`.

        q: [num_decode_tokens, num_heads, head_dim]; out: [num_decode_tokens, num_heads, v_head_dim]; lse: float32 [num_heads,
        num_decode_tokens], as in `prefill`.

        Rows of padding sequences (length 0) must not disturb others; they are left alone or set to zero.
        """
        raise NotImplementedError(f"{self.name} declares no decode")

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan, out: Tensor) -> None:
        """Write k and v of one new token per sequence to the cache, and compute attention over the cache as `decode` does.

        q: [num_seqs, num_heads, head_dim]; k: [num_seqs, num_kv_heads, head_dim], for position seq_len - 1; v, out: with
        v_head_dim. The cache must hold the bits that the layout's writer would leave; a padding sequence (length 0) writes
        nothing. Called where `decode_writes` says so and the whole step is such a decode.
        """
        raise NotImplementedError(f"{self.name} does not write in decode")


Backends = Mapping[AttentionSpec, AttentionBackend]
"""The instances of one backend, by the spec that each serves."""


@dataclass(frozen=True, slots=True)
class BackendInfo(KernelInfo):
    """Registration of a backend by a plugin."""

    kind: ClassVar[str] = "attention"


def make_backend(
    kind: type[AttentionBackend],
    spec: AttentionSpec,
    layout: CacheLayout,
    block_size: int,
    options: Mapping[str, str] | None = None,
) -> AttentionBackend:
    """Return an instance of a backend, whose constructor may be a third party's.

    :raises PluginError: the constructor raises, or leaves out what every backend has.
    """
    who = f"attention backend {kind.name} ({kind.__module__}.{kind.__qualname__})"
    with making(who):
        made = kind(spec, layout, block_size, options or {})
    return check_made(who, made, AttentionBackend, ("spec", "layout", "block_size"))  # type: ignore[type-abstract]


def check_made(who: str, made: Any, base: type[B], attributes: Sequence[str]) -> B:
    """Return what a backend's constructor has made, if it is one and has the attributes that the base class sets.

    :raises PluginError: it is not.
    """
    if not isinstance(made, base):
        raise PluginError(f"{who} cannot be made: its class must make an instance of {base.__name__}, got {type(made).__name__}")
    lacking = [name for name in attributes if not hasattr(made, name)]
    if lacking:
        hint = f"its __init__ must call super().__init__({', '.join(attributes)})"
        raise PluginError(f"{who} cannot be made: it lacks {', '.join(lacking)}: {hint}")
    return made
