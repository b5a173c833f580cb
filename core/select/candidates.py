"""Kernels that could serve a model's layers: in which phases, over which layouts, why not; and their instances."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from headway.core.contract.backend import AttentionBackend, Backends, Plan, make_backend
from headway.core.contract.layout import CacheLayout, LayoutInfo
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ATTENTION, STATE, OperationKind
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateCache, StateLayout, StateMetadata, StateParameters, StateSpec
from headway.core.contract.state import StateBackend, make_state_backend
from headway.core.contract.support import Reason, Support
from headway.core.select.costs import NO_BLOCKS, Shape, state_shape
from headway.core.select.layer_specs import LayerSpecs
from headway.core.select.selection import L, Placement, Workload

DEFAULT_BLOCK_SIZES = (16, 64, 128, 256)
"""Tried in this order where the user names none: small blocks waste least memory."""
VERBS: Mapping[Phase, str] = {Phase.PREFILL: "scan", Phase.DECODE: "step"}
"""The phases in which layers with a state ask for a kernel, and its call. What prefills is also what extends."""

S = TypeVar("S", bound=AttentionSpec | StateSpec)
B = TypeVar("B", bound=AttentionBackend | StateBackend)


class KernelSource(Protocol):
    """The part of a `KernelRegistry` that the choice of kernels needs."""

    @property
    def entries(self) -> Mapping[str, object]:
        """Names of all kernels, in the order they were registered."""

    @property
    def layouts(self) -> Mapping[str, Any]:
        """All layouts, in the order they were registered."""

    def meant_for(self, device_type: str) -> list[str]:
        """Names of those that may serve a type of device, by their registrations."""

    def backend(self, name: str) -> type[Any]:
        """A kernel's class; raises UnknownBackendError."""

    def supports(self, name: str, spec: AttentionSpec | StateSpec, *where: Any) -> Support:
        """Whether a kernel can run here and serve this layer. where: the rest of what its class's `supports` takes."""

    def rank(self, spec: AttentionSpec | StateSpec, phase: Phase, candidates: Sequence[str]) -> list[str]:
        """Candidates, best guess first."""


class BackendSource(Protocol):
    """The part of the Registry that the choice of kernels needs."""

    def of(self, kind: OperationKind) -> KernelSource:
        """The kernels of one kind of operation."""

    def layout(self, name: str) -> LayoutInfo:
        """One layout of caches; raises ConfigError for an unknown name."""


class Candidates(ABC, Generic[S, B, L]):
    """The kernels of one kind, asked for all layers of a model that need one."""

    kind: ClassVar[OperationKind]
    options: ClassVar[str]
    """The options of the command line that ask for a request, a layout and a block size."""
    per_step: ClassVar[bool]
    """True if the kernel of a phase may change from step to step."""

    def __init__(
        self,
        source: KernelSource,
        counts: Mapping[S, int],
        specs: Mapping[Phase, Sequence[S]],
        places: Sequence[Placement[L]],
        all_places: Sequence[Placement[L]],
    ) -> None:
        self.source = source
        self.counts = counts
        """Each kind of layer that asks for kernels -> the number of layers."""
        self.specs = specs
        """Phase in which any layer asks -> the distinct layers, as they ask in it. Empty if no layer asks."""
        self.places = places
        """Those that the user's options leave, the preferred first."""
        self.all_places = all_places
        """Those that other options would leave."""

    @property
    def first(self) -> S:
        """The first layer, as it asks once it has a cache."""
        return [*self.specs.values()][-1][0]

    @abstractmethod
    def supports(self, name: str, spec: S, phase: Phase, place: Placement[L]) -> Support:
        """Whether a kernel can serve a layer in a phase."""

    @abstractmethod
    def make(self, name: str, spec: S, phase: Phase, place: Placement[L]) -> B:
        """Make an instance of a kernel that `supports` the layer."""

    @abstractmethod
    def steps(self, workload: Workload) -> list[tuple[Shape, float]]:
        """Shapes of the workload's steps, as the tables of these layers know them, and the number of steps of each."""

    def helper(self, name: str, phase: Phase, place: Placement[L]) -> str:
        """The kernel that does a part of the work for another; empty: none does."""
        return ""

    def reasons(self, name: str, phase: Phase, place: Placement[L]) -> tuple[Reason, ...]:
        """Every reason why a kernel cannot serve a phase of all layers."""
        support = Support()
        for spec in self.specs[phase]:
            support &= self.supports(name, spec, phase, place)
        return support.reasons

    def instances(self, name: str, phases: Sequence[Phase], place: Placement[L]) -> Mapping[S, B]:
        """Make a kernel for the layers, as they ask in these phases."""
        wanted: dict[S, Phase] = {}
        for phase in phases:
            wanted = dict.fromkeys(self.specs[phase], phase) | wanted
        return {spec: self.make(name, spec, phase, place) for spec, phase in wanted.items()}


class AttentionCandidates(Candidates[AttentionSpec, AttentionBackend, CacheLayout]):
    """Attention backends, asked for the layers of a model that attend."""

    kind = ATTENTION
    options = "--attn-backend {} --kv-layout {} --block-size {}"
    per_step = True

    def __init__(
        self,
        source: BackendSource,
        layers: LayerSpecs,
        kv_layout: str,
        block_size: int | None,
        options: Mapping[str, Mapping[str, str]] | None,
    ) -> None:
        """kv_layout: auto or a name. block_size: None: one of DEFAULT_BLOCK_SIZES. options: backend -> option -> value.

        :raises HeadwayError: an unknown layout or option.
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
        """Whether a backend can serve a layer in a phase, over the chosen layout or that which suits the layer."""
        return self.source.supports(name, spec, self.layout_of(spec, place.layout), place.block_size, phase)

    def make(self, name: str, spec: AttentionSpec, phase: Phase, place: Placement[CacheLayout]) -> AttentionBackend:
        """Make a backend, with the options that the user gave it."""
        kind, layout = self.source.backend(name), self.layout_of(spec, place.layout)
        return make_backend(kind, spec, layout, place.block_size, self._options.get(name))

    def steps(self, workload: Workload) -> list[tuple[Shape, float]]:
        """The steps of the phases in which layers ask; if no layer has a cache, no part of a prompt is cached."""
        asked = workload if Phase.EXTEND in self.specs else replace(workload, cached_len=0)
        return [(shape, count) for shape, count in asked.steps() if shape.phase in self.specs]

    def layout_of(self, spec: AttentionSpec, chosen: CacheLayout) -> CacheLayout:
        """The layout of a layer's cache: the chosen one, or where that cannot hold its values the first registered that can.

        There are two kinds of layers: those whose value lies in the key, and those with a value of its own.
        """
        kinds = {each.value_in_key for each in (*self._layers.distinct, spec)}
        if len(kinds) == 1 or spec.value_in_key is not chosen.has_value:
            return chosen
        return next((other for other in self._layouts if other.has_value is not spec.value_in_key), chosen)

    def gathering(self, name: str, place: Placement[CacheLayout]) -> Backends:
        """Instances that attend to the context of latent layers after that was gathered and expanded, where a backend can."""
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
    """A layer whose convolution one backend applies and whose recurrence another."""

    def __init__(self, spec: StateSpec, layout: StateLayout, convolution: StateBackend, recurrence: StateBackend) -> None:
        super().__init__(spec, layout)
        self.name = recurrence.name  # type: ignore[misc]
        self._convolution = convolution
        self._recurrence = recurrence
        self.graph_level = min(convolution.graph_level, recurrence.graph_level)  # type: ignore[misc]

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Return the bytes of both, and of what one hands to the other."""
        between = max_num_tokens * self.spec.conv_channels * self.spec.dtype.itemsize
        parts = (self._convolution, self._recurrence)
        return between + sum(part.workspace_bytes(max_num_tokens, max_num_seqs) for part in parts)

    def plan(self, metadata: StateMetadata) -> Plan:
        """Plan both."""
        return _ComposedPlan(self._convolution.plan(metadata), self._recurrence.plan(metadata))

    def plan_for_capture(self, metadata: StateMetadata) -> Plan:
        """Plan both for a graph."""
        return _ComposedPlan(self._convolution.plan_for_capture(metadata), self._recurrence.plan_for_capture(metadata))

    def scan(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: Plan, out: Tensor
    ) -> None:
        """Convolve, then run the recurrence over what comes of it."""
        convolved = x.new_empty(x.shape)
        self._convolution.scan(x, (), parameters, cache.convolution, plan.convolution, convolved)
        self._recurrence.scan(convolved, gates, parameters, cache.recurrence, plan.recurrence, out)

    def step(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: Plan, out: Tensor
    ) -> None:
        """Convolve, then run the recurrence over what comes of it."""
        convolved = x.new_empty(x.shape)
        self._convolution.step(x, (), parameters, cache.convolution, plan.convolution, convolved)
        self._recurrence.step(convolved, gates, parameters, cache.recurrence, plan.recurrence, out)


class StateCandidates(Candidates[StateSpec, StateBackend, StateLayout]):
    """State backends, asked for the layers of a model that keep a state. They ask in the phases of VERBS."""

    kind = STATE
    options = "--state-backend {}"
    per_step = False

    def __init__(self, source: KernelSource, specs: Sequence[StateSpec], decode_len: int = 1) -> None:
        """specs: that of each layer. decode_len: tokens of a sequence in a decode, with its drafts."""
        self._decode_len = decode_len
        places = [Placement(layout, NO_BLOCKS) for layout in source.layouts.values()]
        counts = Counter(specs)
        super().__init__(source, counts, {phase: list(counts) for phase in VERBS}, places, places)

    def supports(self, name: str, spec: StateSpec, phase: Phase, place: Placement[StateLayout]) -> Support:
        """Whether a backend can serve a layer, with the help of another for its convolution if it needs one."""
        whole = self._alone(name, spec, phase, place)
        if not whole and spec.recurrent and spec.conv_channels and any(True for _ in self._helpers(spec, phase, place)):
            return self._alone(name, spec.recurrence, phase, place)
        return whole

    def make(self, name: str, spec: StateSpec, phase: Phase, place: Placement[StateLayout]) -> StateBackend:
        """Make a backend, and another for the convolution if it needs one."""
        if self._alone(name, spec, phase, place):
            return make_state_backend(self.source.backend(name), spec, place.layout)
        recurrence = make_state_backend(self.source.backend(name), spec.recurrence, place.layout)
        helper = self.source.backend(next(self._helpers(spec, phase, place)))
        return ComposedState(spec, place.layout, make_state_backend(helper, spec.convolution, place.layout), recurrence)

    def steps(self, workload: Workload) -> list[tuple[Shape, float]]:
        """The steps without what came before them, decodes with their drafts."""
        found = []
        for shape, count in workload.steps():
            query_len = self._decode_len if shape.phase is Phase.DECODE else shape.query_len
            found.append((state_shape(shape.phase, shape.batch, query_len), count))
        return found

    def helper(self, name: str, phase: Phase, place: Placement[StateLayout]) -> str:
        """The backend that applies convolutions for another; empty: it needs none."""
        lacking = [spec for spec in self.counts if not self._alone(name, spec, phase, place)]
        return next(self._helpers(lacking[0], phase, place)) if lacking else ""

    def _alone(self, name: str, spec: StateSpec, phase: Phase, place: Placement[StateLayout]) -> Support:
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
        """Backends that apply a layer's convolution by itself."""
        return (name for name in self.source.entries if self._alone(name, spec.convolution, phase, place))
