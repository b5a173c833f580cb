"""Registered kernels of each kind of operation: owners, availability on this machine, and supported layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, Backends, Plan, make_backend
from headway.core.contract.errors import ConfigError, PluginError, UnknownBackendError
from headway.core.contract.experts import ExpertsKernel
from headway.core.contract.kernel import Kernel, KernelInfo
from headway.core.contract.layout import CacheLayout, LayoutInfo
from headway.core.contract.linear import LinearKernel
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ALL_REDUCE, ATTENTION, EXPERTS, LINEAR, STATE, OperationKind
from headway.core.contract.ranks import AllReduceKernel
from headway.core.contract.spec import KV_DTYPE_NAMES, AttentionSpec
from headway.core.contract.state import (
    StateBackend,
    StateCache,
    StateLayout,
    StateMetadata,
    StateParameters,
    StateSpec,
    make_state_backend,
)
from headway.core.contract.support import YES, Reason, Support
from headway.core.select.costs import NO_BLOCKS, Shape, state_shape
from headway.core.select.request import ALL_AUTO, AUTO, KINDS, PHASES, BackendRequest, LayerSpecs, Workload
from headway.core.system.logs import log_traceback, warn_once

K = TypeVar("K", bound=Kernel)
T = TypeVar("T")
S = TypeVar("S", bound=AttentionSpec | StateSpec)
B = TypeVar("B", bound=AttentionBackend | StateBackend)
L = TypeVar("L", bound=CacheLayout | StateLayout)

Check = Callable[[Any, OperationKind, str, str], Any]
"""Function that maps (result of `load`, kind, name, owner) to a kernel class. It raises PluginError if the class is invalid."""


class RankHook(NamedTuple):
    """A plugin's hook that orders kernels for layers without measured times."""

    plugin: str
    owner: str
    function: Callable[..., object]
    takes: Sequence[str]
    """Names of the function's parameters, a subset of spec, phase and candidates."""

    def order(self, spec: AttentionSpec | StateSpec, phase: Phase, candidates: Sequence[str]) -> list[str] | None:
        """Return the candidates, best first, or None to leave the order to the next plugin.

        Exceptions that the plugin raises are passed on.

        :raises PluginError: if the result is not a permutation of the candidates.
        """
        given = {"spec": spec, "phase": phase, "candidates": tuple(candidates)}
        answer = self.function(**{name: given[name] for name in self.takes})
        if answer is None:
            return None
        with suppress(TypeError):  # raised for answers that cannot be hashed
            if isinstance(answer, (list, tuple)) and Counter(answer) == Counter(candidates):
                return list(answer)
        raise PluginError(f"it must return an order of {list(candidates)}, got {answer!r}")


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """A registered kernel and its owner."""

    info: KernelInfo
    owner: str
    """"built-in", or the name of the distribution (or object) that registered the kernel."""


class KernelRegistry(Generic[K, T]):
    """Registered kernels of one kind of operation, and the layouts of their caches or states."""

    def __init__(self, kind: OperationKind, check: Check, failures: Sequence[object]) -> None:
        """check: validates the object that a registration loads. failures: reports of plugins that were excluded."""
        self.kind = kind
        self._word = kind.word
        self._check = check
        self._failures = failures
        self._classes: dict[str, type[K]] = {}
        self._support: dict[str, Support] = {}
        self.entries: dict[str, KernelEntry] = {}
        self.layouts: dict[str, T] = {}
        self.rank_hooks: Sequence[RankHook] = ()
        """Rank hooks, in call order."""

    def backend(self, name: str, layers: str = "") -> type[K]:
        """Load and return a backend's class. layers: layers that the backend was requested for, as words for the error.

        :raises UnknownBackendError: if the name is not registered.
        :raises PluginError: if its module does not load, or the loaded object is not a backend.
        """
        if name not in self._classes:
            if name not in self.entries:
                found = {known: self.availability(known) for known in self.entries}
                states = {known: "available" if ok else f"unavailable: {ok.brief}" for known, ok in found.items()}
                word = self._word if " " in self._word else f"{self.kind.name} {self._word}"
                raise UnknownBackendError(name, states, [str(failure) for failure in self._failures], word + layers)
            entry = self.entries[name]
            where = f"{self._word} {name} of {entry.owner}"
            try:
                loaded = entry.info.load()
            except (Exception, SystemExit) as error:
                log_traceback(f"{where} does not load", error)
                raise PluginError(f"{where} does not load: {type(error).__name__}: {error}") from error
            self._classes[name] = self._check(loaded, self.kind, name, where)
        return self._classes[name]

    def availability(self, name: str) -> Support:
        """Return whether this machine can run a backend. The backend is loaded and probed only once.

        :raises UnknownBackendError: if the name is not registered.
        """
        if name not in self._support:
            try:
                self._support[name] = _support(self.backend(name).available(), "available")
            except UnknownBackendError:
                raise
            except (Exception, SystemExit) as error:
                log_traceback(f"available() of {self._word} {name}", error)
                info = self.entries[name].info
                hint = f"pip install '{info.extra}'" if info.extra else ""
                missing = error.__cause__ if isinstance(error, PluginError) else error
                if isinstance(missing, ModuleNotFoundError) and missing.name:
                    package = missing.name.partition(".")[0]
                    self._support[name] = Support.no("import", f"the package {package}", "not installed", hint)
                else:
                    self._support[name] = Support.no("import", "a backend that loads and answers", error, hint)
        return self._support[name]

    def able(self, name: str, device_type: str) -> Support:
        """Return whether a backend supports a type of device and can run on this machine.

        A CPU-only backend is not probed for a GPU, because probing may run a compiler.
        """
        try:
            devices = self.backend(name).capabilities.devices
        except PluginError:  # `availability` reports why it does not load
            return self.availability(name)
        probed = self.availability(name) if device_type in devices or "cuda" in devices else YES
        if probed and device_type not in devices:
            return Support.no("device", " or ".join(devices), device_type)
        return probed

    def meant_for(self, device_type: str) -> list[str]:
        """Return the names of kernels whose registration does not exclude a type of device. No kernel is imported."""
        return [name for name, entry in self.entries.items() if device_type in (entry.info.devices or (device_type,))]

    def all_able(self, device_type: str) -> list[str]:
        """Return the names of kernels that support a type of device and can run on this machine."""
        return [name for name in self.meant_for(device_type) if self.able(name, device_type)]

    def classes(self, device_type: str) -> list[type[K]]:
        """Return the classes of the kernels that `all_able` names."""
        return [self.backend(name) for name in self.all_able(device_type)]

    def supports(self, name: str, *asked: Any) -> Support:
        """Return whether a kernel can run on this machine and supports a layer.

        asked: arguments of the `supports` method of the kernel's class, beginning with the layer's spec.
        """
        able = self.able(name, asked[0].device.type)
        if not able:
            return able
        try:
            kernel: Any = self.backend(name)  # its `supports` has the signature of its kind of operation
            found = _support(kernel.supports(*asked), "supports")
        except (Exception, SystemExit) as error:
            log_traceback(f"supports() of {self._word} {name}", error)
            return Support.no("supports()", "an answer", f"{type(error).__name__}: {error}")
        return found if found else Support(tuple(map(self._with_known_layout, found.reasons)))

    def _with_known_layout(self, reason: Reason) -> Reason:
        """Replace a hint that recommends an unregistered layout: a backend may support layouts that only a different plugin
        registers."""
        option, _, layout = reason.hint.partition(" ")
        if option != "--kv-layout" or layout in self.layouts:
            return reason
        return reason._replace(hint=f"nobody has registered layout {layout}; headway plugins lists the plugins")

    def rank(self, spec: AttentionSpec | StateSpec, phase: Phase, candidates: Sequence[str]) -> list[str]:
        """Return the candidates ordered by the rank hooks, best guess first; third-party hooks come before the built-in one.

        A hook that raises, or does not return a permutation of the candidates, is logged and skipped.
        """
        for hook in self.rank_hooks:
            try:
                answer = hook.order(spec, phase, candidates)
            except (Exception, SystemExit) as error:
                who = f"{self.kind.rank_hook}() of plugin {hook.plugin!r} of {hook.owner}"
                log_traceback(who, error)
                raised = str(error) if isinstance(error, PluginError) else f"it raised {type(error).__name__}: {error}"
                warn_once(f"{who} is skipped: {raised}")
                continue
            if answer is not None:
                return answer
        return list(candidates)


def _support(answer: object, method: str) -> Support:
    if not isinstance(answer, Support):
        raise PluginError(f"{method}() must return a Support, got {answer!r}")
    return answer


class Kernels:
    """Registered kernels of all kinds, filled by `headway.registry`."""

    def __init__(self, check: Check, failures: Sequence[object]) -> None:
        """check, failures: as in `KernelRegistry`."""
        self.attention: KernelRegistry[AttentionBackend, LayoutInfo] = KernelRegistry(ATTENTION, check, failures)
        self.states: KernelRegistry[StateBackend, StateLayout] = KernelRegistry(STATE, check, failures)
        self.linear: KernelRegistry[LinearKernel, None] = KernelRegistry(LINEAR, check, failures)
        self.experts: KernelRegistry[ExpertsKernel, None] = KernelRegistry(EXPERTS, check, failures)
        self.all_reduce: KernelRegistry[AllReduceKernel, None] = KernelRegistry(ALL_REDUCE, check, failures)
        self.kinds = (self.attention, self.states, self.linear, self.experts, self.all_reduce)
        self.backends = self.attention.entries
        self.layouts = self.attention.layouts

    def of(self, kind: OperationKind) -> KernelRegistry[Any, Any]:
        """Return the kernels of a kind of operation."""
        return next(kernels for kernels in self.kinds if kernels.kind is kind)

    def layout(self, name: str) -> LayoutInfo:
        """Return a layout by name.

        :raises ConfigError: if the name is not registered.
        """
        if name not in self.layouts:
            raise ConfigError("kv_layout", f"auto or one of {', '.join(self.layouts)}", repr(name))
        return self.layouts[name]

    def backend(self, name: str) -> type[AttentionBackend]:
        """Load and return an attention backend's class; see `KernelRegistry.backend`."""
        return self.attention.backend(name)

    def availability(self, name: str) -> Support:
        """Return whether this machine can run an attention backend. The backend is loaded and probed only once."""
        return self.attention.availability(name)

    def able(self, device: torch.device) -> list[str]:
        """Return the names of the attention backends that support the device's type and can run on this machine; see
        `KernelRegistry.all_able`."""
        return self.attention.all_able(device.type)

    def supports(self, name: str, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """Return whether a backend can run on this machine and supports a layer in a phase."""
        return self.attention.supports(name, spec, layout, block_size, phase)


class Placement(NamedTuple, Generic[L]):
    """Layout and block size of the memory that kernels read and write."""

    layout: L
    block_size: int
    """Number of tokens per block. NO_BLOCKS for state layers."""

    def __str__(self) -> str:
        layout, size = self.layout.name, self.block_size
        return f"state_layout={layout}" if size == NO_BLOCKS else f"kv_layout={layout}, block_size={size}"


DEFAULT_BLOCK_SIZES = (16, 64, 128, 256)
"""Block sizes to try, in this order, if the user sets none. Small blocks come first because they waste least memory."""
VERBS: Mapping[Phase, str] = {Phase.PREFILL: "scan", Phase.DECODE: "step"}
"""Phase in which state layers need a kernel -> name of the kernel method for the phase. PREFILL includes EXTEND."""


@dataclass(eq=False)
class Candidates(ABC, Generic[S, B, L]):
    """Kernels of one kind that are candidates for a model's layers."""

    kind: ClassVar[OperationKind]
    options: ClassVar[str]
    """Command-line options of the choice, as a format string: the backend request and, for attention, the layout and the block
    size."""
    per_step: ClassVar[bool]
    """True if the kernel of a phase may change from step to step."""
    source: KernelRegistry[B, Any]
    counts: Mapping[S, int]
    """Kind of layer that needs kernels -> number of layers of this kind."""
    specs: Mapping[Phase, Sequence[S]]
    """Phase -> distinct specs of the layers in the phase. Phases in which no layer needs a kernel are missing."""
    places: Sequence[Placement[L]]
    """Placements that the user's options allow, preferred first."""
    all_places: Sequence[Placement[L]]
    """Placements that could be allowed by other options: every registered layout with each default block size."""

    @property
    def first(self) -> S:
        """Spec of the first layer in the last phase. If the layer has a cache, this is the spec of the cache."""
        return [*self.specs.values()][-1][0]

    @abstractmethod
    def supports(self, name: str, spec: S, phase: Phase, place: Placement[L]) -> Support:
        """Return whether a kernel supports a layer in a phase."""

    @abstractmethod
    def make(self, name: str, spec: S, phase: Phase, place: Placement[L]) -> B:
        """Make an instance of a kernel that supports the layer."""

    @abstractmethod
    def steps(self, workload: Workload) -> list[tuple[Shape, float]]:
        """Return the workload's steps as (shape, number of steps), with shapes as in these layers' cost tables."""

    @abstractmethod
    def describe(self, phase: Phase) -> tuple[int, str, str]:
        """Return the number of layers in a phase, their heads, and the element type of their cache or state, as texts."""

    def helper(self, name: str, phase: Phase, place: Placement[L]) -> str:
        """Return the name of the kernel that runs some of the work for the kernel `name`, or "" if there is none."""
        return ""

    def reasons(self, name: str, phase: Phase, place: Placement[L]) -> tuple[Reason, ...]:
        """Return all reasons why a kernel cannot run a phase for all layers, or () if it can."""
        support = Support()
        for spec in self.specs[phase]:
            support &= self.supports(name, spec, phase, place)
        return support.reasons

    def instances(self, name: str, phases: Sequence[Phase], place: Placement[L]) -> Mapping[S, B]:
        """Return spec -> instance of a kernel for the layers in these phases."""
        wanted: dict[S, Phase] = {}
        for phase in phases:
            wanted = dict.fromkeys(self.specs[phase], phase) | wanted
        return {spec: self.make(name, spec, phase, place) for spec, phase in wanted.items()}


class AttentionCandidates(Candidates[AttentionSpec, AttentionBackend, CacheLayout]):
    """Attention backends that are candidates for a model's attention layers."""

    kind = ATTENTION
    options = "--attn-backend {} --kv-layout {} --block-size {}"
    per_step = True

    def __init__(
        self,
        source: Kernels,
        layers: LayerSpecs,
        kv_layout: str,
        block_size: int | None,
        options: Mapping[str, Mapping[str, str]] | None,
    ) -> None:
        """kv_layout: a name, or auto. block_size: tokens per block; None tries DEFAULT_BLOCK_SIZES. options: backend -> option ->
        value.

        :raises HeadwayError: if a layout or an option is unknown.
        """
        kernels = source.of(ATTENTION)
        self._layers = layers
        self._options = options or {}
        self._layouts = [info.layout for info in kernels.layouts.values()]
        for name, chosen in self._options.items():
            kernels.backend(name).check_options(chosen)
        layouts = self._layouts if kv_layout == "auto" else [source.layout(kv_layout).layout]
        sizes = DEFAULT_BLOCK_SIZES if block_size is None else (block_size,)
        super().__init__(
            kernels,
            layers.counts,
            {phase: [layers.in_phase(spec, phase) for spec in layers.distinct] for phase in layers.phases},
            [Placement(layout, size) for size in sizes for layout in layouts],
            [Placement(layout, size) for size in DEFAULT_BLOCK_SIZES for layout in self._layouts],
        )

    def supports(self, name: str, spec: AttentionSpec, phase: Phase, place: Placement[CacheLayout]) -> Support:
        """Return whether a backend supports a layer in a phase."""
        return self.source.supports(name, spec, self._layout_of(spec, place.layout), place.block_size, phase)

    def make(self, name: str, spec: AttentionSpec, phase: Phase, place: Placement[CacheLayout]) -> AttentionBackend:
        """Make an instance of a backend, with the user's options for the backend."""
        layout = self._layout_of(spec, place.layout)
        return make_backend(self.source.backend(name), spec, layout, place.block_size, self._options.get(name))

    def steps(self, workload: Workload) -> list[tuple[Shape, float]]:
        """Return the steps of the phases in which layers need a kernel. If no layer has a cache, no part of a prompt is
        cached."""
        asked = workload if Phase.EXTEND in self.specs else replace(workload, cached_len=0)
        return [(shape, count) for shape, count in asked.steps() if shape.phase in self.specs]

    def _layout_of(self, spec: AttentionSpec, chosen: CacheLayout) -> CacheLayout:
        """Return the layout to check and make a backend with: the chosen one. For the non-absorbed form of a latent layer, which
        reads no cache, it is the first registered layout that could hold its values."""
        kinds = {each.value_in_key for each in (*self._layers.distinct, spec)}
        if len(kinds) == 1 or spec.value_in_key is not chosen.has_value:
            return chosen
        return next((other for other in self._layouts if other.has_value is not spec.value_in_key), chosen)

    def describe(self, phase: Phase) -> tuple[int, str, str]:
        """Return the number of layers in a phase, their heads, and the element type of their cache."""
        specs = dict.fromkeys(spec.kind for spec in self.specs[phase])
        sizes = (
            (spec, f"{spec.head_dim}" if spec.head_dim == spec.v_head_dim else f"{spec.head_dim}/{spec.v_head_dim}")
            for spec in specs
        )
        rules = {spec: "" if spec.rule is None else f" {spec.rule}" for spec in specs}
        heads = dict.fromkeys(f"{spec.num_heads}/{spec.num_kv_heads} x {size}{rules[spec]}" for spec, size in sizes)
        types = dict.fromkeys(
            "-" if spec.dense else KV_DTYPE_NAMES.get(spec.cache_dtype, str(spec.cache_dtype)) for spec in specs
        )
        return sum(self.counts[spec] for spec in specs), ", ".join(heads), ", ".join(types)

    def gathering(self, name: str, place: Placement[CacheLayout]) -> Backends:
        """Return spec -> instance for attention over a latent (MLA) layer's gathered, up-projected context. Specs that the
        backend does not support are missing."""
        found = {}
        for spec, dense in self._layers.expanded.items():
            cached = replace(dense, dense=False)
            if self.supports(name, cached, Phase.EXTEND, place):
                found[spec] = self.make(name, cached, Phase.EXTEND, place)
        return found


class _ComposedPlan(NamedTuple):
    convolution: Plan
    recurrence: Plan


class ComposedState(StateBackend):
    """A state layer whose convolution and recurrence run on different backends."""

    def __init__(self, spec: StateSpec, layout: StateLayout, convolution: StateBackend, recurrence: StateBackend) -> None:
        super().__init__(spec, layout)
        self.name = recurrence.name  # type: ignore[misc]
        self._convolution = convolution
        self._recurrence = recurrence
        self.graph_level = min(convolution.graph_level, recurrence.graph_level)  # type: ignore[misc]

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Return the total workspace size, in bytes: the workspaces of both backends, and the tensor passed between them."""
        between = max_num_tokens * self.spec.conv_channels * self.spec.dtype.itemsize
        parts = (self._convolution, self._recurrence)
        return between + sum(part.workspace_bytes(max_num_tokens, max_num_seqs) for part in parts)

    def plan(self, metadata: StateMetadata) -> Plan:
        """Return a plan that contains the plans of the two backends."""
        return _ComposedPlan(self._convolution.plan(metadata), self._recurrence.plan(metadata))

    def plan_for_capture(self, metadata: StateMetadata) -> Plan:
        """Return a plan for a CUDA graph that contains the plans of the two backends."""
        return _ComposedPlan(self._convolution.plan_for_capture(metadata), self._recurrence.plan_for_capture(metadata))

    def scan(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: Plan, out: Tensor
    ) -> None:
        """Run the convolution, then the recurrence on its output."""
        convolved = x.new_empty(x.shape)
        self._convolution.scan(x, (), parameters, cache.convolution, plan.convolution, convolved)
        self._recurrence.scan(convolved, gates, parameters, cache.recurrence, plan.recurrence, out)

    def step(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: Plan, out: Tensor
    ) -> None:
        """Run the convolution, then the recurrence on its output."""
        convolved = x.new_empty(x.shape)
        self._convolution.step(x, (), parameters, cache.convolution, plan.convolution, convolved)
        self._recurrence.step(convolved, gates, parameters, cache.recurrence, plan.recurrence, out)


class StateCandidates(Candidates[StateSpec, StateBackend, StateLayout]):
    """State backends that are candidates for a model's state layers, in the phases of VERBS."""

    kind = STATE
    options = "--state-backend {}"
    per_step = False

    def __init__(
        self, source: KernelRegistry[StateBackend, StateLayout], specs: Sequence[StateSpec], decode_len: int = 1
    ) -> None:
        """specs: spec of each layer. decode_len: number of tokens per sequence in a decode, including draft tokens."""
        self._decode_len = decode_len
        places = [Placement(layout, NO_BLOCKS) for layout in source.layouts.values()]
        counts = Counter(specs)
        super().__init__(source, counts, {phase: list(counts) for phase in VERBS}, places, places)

    def supports(self, name: str, spec: StateSpec, phase: Phase, place: Placement[StateLayout]) -> Support:
        """Return whether a backend supports a layer, if necessary with a second backend for the layer's convolution."""
        whole = self._support_without_helper(name, spec, phase, place)
        if not whole and spec.recurrent and spec.conv_channels and any(True for _ in self._helpers(spec, phase, place)):
            return self._support_without_helper(name, spec.recurrence, phase, place)
        return whole

    def make(self, name: str, spec: StateSpec, phase: Phase, place: Placement[StateLayout]) -> StateBackend:
        """Make an instance of a backend, with a second backend for the convolution if necessary."""
        if self._support_without_helper(name, spec, phase, place):
            return make_state_backend(self.source.backend(name), spec, place.layout)
        recurrence = make_state_backend(self.source.backend(name), spec.recurrence, place.layout)
        helper = self.source.backend(next(self._helpers(spec, phase, place)))
        return ComposedState(spec, place.layout, make_state_backend(helper, spec.convolution, place.layout), recurrence)

    def steps(self, workload: Workload) -> list[tuple[Shape, float]]:
        """Return the workload's steps with shapes that omit the context. Decodes include draft tokens."""
        found = []
        for shape, count in workload.steps():
            query_len = self._decode_len if shape.phase is Phase.DECODE else shape.query_len
            found.append((state_shape(shape.phase, shape.batch, query_len), count))
        return found

    def describe(self, phase: Phase) -> tuple[int, str, str]:
        """Return the number of layers, their heads, and the element type of their states."""
        heads = dict.fromkeys(f"{spec.num_heads}/{spec.num_key_heads} x {spec.value_dim}" for spec in self.counts)
        types = dict.fromkeys(KV_DTYPE_NAMES.get(spec.state_dtype, str(spec.state_dtype)) for spec in self.counts)
        return sum(self.counts.values()), ", ".join(heads), ", ".join(types)

    def helper(self, name: str, phase: Phase, place: Placement[StateLayout]) -> str:
        """Return the name of the backend that runs convolutions for the backend `name`, or "" if it needs none."""
        lacking = [spec for spec in self.counts if not self._support_without_helper(name, spec, phase, place)]
        return next(self._helpers(lacking[0], phase, place)) if lacking else ""

    def _support_without_helper(self, name: str, spec: StateSpec, phase: Phase, place: Placement[StateLayout]) -> Support:
        support = Support()
        for each in (phase,) if phase is Phase.DECODE else (Phase.PREFILL, Phase.EXTEND):
            support &= self.source.supports(name, spec, place.layout, each)
        if support and phase is Phase.DECODE:
            most = self.source.backend(name).capabilities.max_draft_tokens
            if self._decode_len - 1 > most:
                hint = f"--num-speculative-tokens {most}" if most else "leave --speculate out"
                support = Support.no("max_draft_tokens", f"at most {most} drafts of a sequence", self._decode_len - 1, hint)
        return support

    def _helpers(self, spec: StateSpec, phase: Phase, place: Placement[StateLayout]) -> Iterator[str]:
        """Yield the names of the backends that can run a layer's convolution separately."""
        return (name for name in self.source.entries if self._support_without_helper(name, spec.convolution, phase, place))


def check_names(
    source: Kernels, request: BackendRequest, kv_layout: str = AUTO, more: Iterable[str] = (), states: BackendRequest = ALL_AUTO
) -> None:
    """Check all names of backends and layouts that a user gave, before slow work begins. more: further attention backends.

    :raises HeadwayError: if a name is unknown.
    """
    asked = {ATTENTION: [*request.names, *request.for_draft().names, *more], STATE: states.names}
    for kernels, name in ((source.of(kind), name) for kind, names in asked.items() for name in names):
        if name in kernels.entries:
            continue  # existing kernels are loaded later, where errors include a hint and a fix
        if kernels.kind is ATTENTION and name in (*KINDS, *PHASES):
            raise ConfigError("attn_backend", f"{name}=NAME, as no backend is called {name}", repr(name))
        kernels.backend(name, request.layers_of(name) if kernels.kind is ATTENTION else "")  # raises
    if kv_layout != AUTO:
        source.layout(kv_layout)
