"""The contract of attention backends: the class `AttentionBackend`, and what the engine passes to it."""

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

Options = Mapping[str, str] | None
"""Option name -> value from `--attn-opt`, for one backend. None means that no option is given."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Upper limits of the steps that an engine runs."""

    max_num_tokens: int
    """Maximum number of new tokens in a step."""
    max_num_seqs: int
    """Maximum number of sequences in a step."""
    max_model_len: int
    """Maximum length of a sequence, in tokens."""
    max_decode_len: int = 1
    """Maximum number of query tokens per sequence in a decode. More than 1 if draft tokens are verified."""


class Lengths(NamedTuple):
    """Lengths of one sequence in a step, in tokens."""

    query_len: int
    context_len: int
    num_drafts: int = 0
    """Number of draft tokens that a decode verifies: one less than `query_len`."""


_MAX_PAIRS = 2**27
"""Maximum number of query tokens times context tokens in a warm-up step. Larger steps are slow and select no other kernels."""


def lattice(phase: Phase, limits: StepLimits) -> Iterator[list[Lengths]]:
    """Yield steps of a phase, with sizes that are powers of two or just above.

    The number of query tokens per sequence is a value of `powers`. So is the number of sequences in decodes; prefill and extend
    steps have one sequence or as many as fit. Context lengths are powers of 4 (decode) or 16 (extend), and the maximum. These
    steps reach every kernel of a backend that selects kernels by these numbers and switches at powers of two. A backend that
    switches elsewhere overrides `AttentionBackend.warmup_steps`.
    """
    decodes = phase is Phase.DECODE
    contexts = sorted({max(limits.max_model_len - 1, 1), *((4 if decodes else 16) ** n for n in range(16))})
    contexts = [0] if phase is Phase.PREFILL else contexts
    longest = min(limits.max_decode_len if decodes else limits.max_num_tokens, limits.max_num_tokens, limits.max_model_len)
    for query_len in powers(longest):
        if phase is Phase.EXTEND and query_len == 1:  # this is a decode
            continue
        room = min(limits.max_num_seqs, limits.max_num_tokens // query_len)
        left = limits.max_num_tokens - room * query_len
        for num_seqs in powers(room) if decodes else sorted({1, room}):
            for context_len in contexts:
                if context_len + query_len > limits.max_model_len or (
                    not decodes and num_seqs * query_len * context_len > _MAX_PAIRS
                ):
                    continue
                step = [Lengths(query_len, context_len, query_len - 1 if decodes else 0)] * num_seqs
                yield step
                shorter = 1 if context_len == 0 else 2
                if not decodes and num_seqs == room < limits.max_num_seqs and left >= shorter:
                    yield [*step, Lengths(left, context_len)]  # fill the step's token limit with one more sequence


def fits(step: Sequence[Lengths], limits: StepLimits) -> bool:
    """Return whether a step is within the limits."""
    longest = max((query_len + context_len for query_len, context_len, _ in step), default=0)
    tokens = sum(each.query_len for each in step)
    return 0 < len(step) <= limits.max_num_seqs and tokens <= limits.max_num_tokens and longest <= limits.max_model_len


def powers(limit: int) -> list[int]:
    """Return the powers of two and their successors up to `limit`, and `limit` itself: 1, 2, 3, 4, 5, 8, 9, 16, 17, ..."""
    found = {limit}
    power = 1
    while power <= limit:
        found |= {power, power + 1}
        power *= 2
    return sorted(each for each in found if 1 <= each <= limit)


API_VERSION = 3
"""Version of this contract. A plugin built for an unsupported version is refused, and the error names both versions."""

Plan = Any
"""Result of `AttentionBackend.plan`. Only the backend that made it knows its type."""


B = TypeVar("B")


class AttentionBackend(Kernel):
    """A named implementation of attention over a paged KV cache. It sees neither the engine nor the engine's configuration.

    A subclass sets `name` and `capabilities`, and implements `plan` and at least one of `prefill` and `decode`. The engine makes
    one instance per distinct `AttentionSpec`. In each step, the engine calls `plan` once; then, for each layer, it writes k and v
    to the cache and calls `prefill` or `decode`. `prefill` and `decode` must not synchronise with the host. If `graph_level`
    allows their capture, they must not allocate memory either. If an instance sets `decode_writes`, the engine calls
    `write_and_decode` instead of writing k and v and calling `decode`, in steps that allow this.
    """

    capabilities: ClassVar[Capabilities]
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
    options: ClassVar[Mapping[str, str]] = {}
    """Options that a user may set with --attn-opt NAME.key=value: key -> description. Other keys are refused."""
    decode_writes: bool = False
    """True if this instance implements `write_and_decode`, which saves one launch per layer. `__init__` may set it according to
    spec and layout. (vLLM's equivalent: `forward_includes_kv_cache_update`.)"""

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        self.spec = spec
        self.layout = layout
        self.block_size = block_size
        self.check_options(options or {})

    @classmethod
    def count_option(cls, options: Options, name: str, most: int | None = None) -> int | None:
        """Return the integer of an option, or None if the option is not given.

        :raises ConfigError: if the value is not an integer between 1 and `most`.
        """
        value = (options or {}).get(name)
        if value is None:
            return None
        text, limit = str(value), most or 10**9
        if not (text.isascii() and text.isdecimal() and len(text) <= 10 and 1 <= int(text) <= limit):
            need = f"an integer {'of at least 1' if most is None else f'from 1 to {most}'}: {cls.options.get(name, name)}"
            raise ConfigError(f"--attn-opt {cls.name}.{name}", need, repr(text[:20]))
        return int(text)

    @classmethod
    def check_options(cls, options: Mapping[str, str]) -> None:
        """Check that the backend has every option in `options`.

        :raises ConfigError: if the backend lacks one of the options.
        """
        for key in options:
            if key not in cls.options:
                known = ", ".join(f"{cls.name}.{known}" for known in cls.options) or "none"
                raise ConfigError("--attn-opt", f"an option of {cls.name} ({known})", f"{cls.name}.{key}")

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """Return whether the backend supports a layer in a phase. Override it for conditions that `capabilities` cannot
        express."""
        fits = layout.check(spec, block_size)
        if not fits and not cls.capabilities.reads_cache_of(spec, block_size):
            fits = Support(tuple(reason._replace(hint="") for reason in fits.reasons))
        return cls.capabilities.check(spec, layout, block_size, phase) & fits

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        """Return whether the backend can read an existing cache. The engine calls this once per cache, before the first step."""
        if cls.capabilities.contiguous_blocks and not cache.contiguous_blocks:
            return Support.no(
                "cache", "blocks that are one piece of memory each", "strided blocks", f"another backend than {cls.name}"
            )
        return YES

    @classmethod
    def captures(cls, query_len: int = 1) -> Support:
        """Return whether a decode of `query_len` tokens per sequence runs as a CUDA graph replay.

        The engine, benchmarks and tests all use this method, so the benchmarks and tests run the mode that the engine runs.
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
        """Return the name of the kernel that runs for a layer and phase."""
        return cls.name

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Return the number of bytes of device memory that the backend needs in addition to the KV cache."""
        return 0

    def warmup_steps(self, phase: Phase, limits: StepLimits) -> Iterable[Sequence[Lengths]]:
        """Return steps of a phase that together reach every kernel that this instance may select within the limits.

        The engine runs each step once before it is ready, and each decode step also together with a prompt, so that no request
        waits for a kernel to be compiled or loaded. `EngineStats.compilations` counts later compilations. Override this method if
        the backend switches kernels at sizes other than powers of two.
        """
        return lattice(phase, limits)

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> Plan:
        """Return the plan for one view of a step, which contains only sequences in PREFILL or EXTEND, or only sequences in
        DECODE. Host work and allocation are allowed."""

    def plan_for_capture(self, metadata: AttentionMetadata) -> Plan:
        """Return the plan for a decode that is captured in a CUDA graph and replayed in many steps.

        The metadata's tensors are static: before each replay, the engine writes that step's values into them. The host lengths
        are upper bounds for all replays, so a grid that is fixed here must be large enough for them. Rows of length 0 are
        padding.
        """
        return self.plan(metadata)

    def plan_for_replay(self, plan: Plan, metadata: AttentionMetadata) -> None:
        """Update a captured plan before a replay, if the plan depends on more than the static tensors.

        The metadata has this step's host lengths. Change in place the tensors that the captured kernels read, without waiting for
        the device.
        """

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Compute attention for several new tokens per sequence (PREFILL, EXTEND) into `out`, with a causal mask aligned to the
        bottom right: query i of a sequence's n queries has position seq_len - n + i.

        Non-causal layers (`AttentionSpec.causal` is False) are passed only in PREFILL, and only if the backend sets
        `Capabilities.non_causal`.

        q: [num_prefill_tokens, num_heads, head_dim]
        k: [num_prefill_tokens, num_kv_heads, head_dim]: keys of this step's tokens, already written to the cache.
        v: [num_prefill_tokens, num_kv_heads, v_head_dim]: values of this step's tokens, already written to the cache.
        out: [num_prefill_tokens, num_heads, v_head_dim]
        lse: float32 [num_heads, num_prefill_tokens]: the backend fills it with the natural logarithm of each softmax denominator,
        sinks included. It is passed only if the backend sets `Capabilities.lse`; other backends may omit the parameter.
        """
        raise NotImplementedError(f"{self.name} declares no prefill")

    def decode(self, q: Tensor, cache: LayerCache, plan: Plan, out: Tensor, lse: Tensor | None = None) -> None:
        """Compute attention of the newest tokens over the cache into `out`.

        q: [num_decode_tokens, num_heads, head_dim]
        out: [num_decode_tokens, num_heads, v_head_dim]
        lse: float32 [num_heads, num_decode_tokens], as in `prefill`.

        Padding sequences (length 0) must not affect other rows. Their own rows of `out` may be left unchanged or set to zero.
        """
        raise NotImplementedError(f"{self.name} declares no decode")

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan, out: Tensor) -> None:
        """Write k and v of one new token per sequence to the cache, and compute attention over the cache as `decode` does.

        q: [num_seqs, num_heads, head_dim]
        k: [num_seqs, num_kv_heads, head_dim]: key of position seq_len - 1.
        v: [num_seqs, num_kv_heads, v_head_dim]
        out: [num_seqs, num_heads, v_head_dim]

        The cache must end up bit-identical to the result of the layout's writer. Padding sequences (length 0) write nothing.
        Called only if `decode_writes` is set and the whole step is a decode of one token per sequence.
        """
        raise NotImplementedError(f"{self.name} does not write in decode")


Backends = Mapping[AttentionSpec, AttentionBackend]
"""Instances of one backend, keyed by the spec that each was made for."""


@dataclass(frozen=True, slots=True)
class BackendInfo(KernelInfo):
    """A plugin's registration of an attention backend."""

    kind: ClassVar[str] = "attention"


def make_backend(
    kind: type[AttentionBackend],
    spec: AttentionSpec,
    layout: CacheLayout,
    block_size: int,
    options: Mapping[str, str] | None = None,
) -> AttentionBackend:
    """Return a new instance of a backend, which may come from a plugin.

    :raises PluginError: if the constructor raises, or the instance lacks an attribute of the base class.
    """
    who = f"attention backend {kind.name} ({kind.__module__}.{kind.__qualname__})"
    with making(who):
        made = kind(spec, layout, block_size, options or {})
    return check_made(who, made, AttentionBackend, ("spec", "layout", "block_size"))  # type: ignore[type-abstract]


def check_made(who: str, made: Any, base: type[B], attributes: Sequence[str]) -> B:
    """Return `made`, the result of a plugin's constructor, after checking its type and attributes.

    :raises PluginError: if `made` is not a `base`, or lacks one of `attributes`, which the base class's constructor sets.
    """
    if not isinstance(made, base):
        raise PluginError(f"{who} cannot be made: its class must make an instance of {base.__name__}, got {type(made).__name__}")
    lacking = [name for name in attributes if not hasattr(made, name)]
    if lacking:
        hint = f"its __init__ must call super().__init__({', '.join(attributes)})"
        raise PluginError(f"{who} cannot be made: it lacks {', '.join(lacking)}: {hint}")
    return made
