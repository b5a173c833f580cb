"""The choice at start: a cache layout, a block size, and a backend for each phase; or why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.layout import CacheLayout, LayoutInfo
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Reason, Support
from headway.core.select.backend_request import ALL_AUTO, AUTO, BackendRequest
from headway.core.select.costs import CostTable
from headway.core.select.layer_specs import LayerSpecs
from headway.core.select.per_step import StepChooser
from headway.core.select.selection import NO_ATTENTION, MeasuredChoice, Selection, Workload

DEFAULT_BLOCK_SIZES = (16, 64, 128, 256)
"""Tried in this order where the user names none: small blocks waste least memory."""


class BackendSource(Protocol):
    """The part of the Registry that the choice of backends needs."""

    @property
    def backends(self) -> Mapping[str, object]:
        """Names of all backends, in the order they were registered."""

    @property
    def layouts(self) -> Mapping[str, LayoutInfo]:
        """All layouts, in the order they were registered."""

    def layout(self, name: str) -> LayoutInfo:
        """One layout; raises ConfigError for an unknown name."""

    def backend(self, name: str) -> type[AttentionBackend]:
        """A backend's class; raises UnknownBackendError."""

    def supports(self, name: str, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """Whether a backend can run here and serve this layer."""

    def rank(self, spec: AttentionSpec, phase: Phase, candidates: Sequence[str]) -> list[str]:
        """Candidates, best guess first."""


def check_names(source: BackendSource, request: BackendRequest, kv_layout: str, options: Mapping[str, object]) -> None:
    """Check every name a user gave, before anything slow begins.

    :raises HeadwayError: an unknown backend or layout.
    """
    for name in (*request.names, *options):
        if name not in source.backends:
            source.backend(name)  # raises; one that exists is loaded later, where a refusal carries its hint and a fix
    if kv_layout != "auto":
        source.layout(kv_layout)


class StartupChoice:
    """Finds a layout and a block size over which every phase of every layer is served as the user asked.

    With a crossover table `auto` takes those of least expected cost over the workload. Without one it takes, for each phase, the
    first backend of the rank hook's order that supports every layer.
    """

    def __init__(
        self,
        source: BackendSource,
        layers: LayerSpecs,
        request: BackendRequest,
        costs: Mapping[AttentionSpec, CostTable] | None,
        workload: Workload,
    ) -> None:
        self._source = source
        self._layers = layers
        self._request = request
        self._measured: MeasuredChoice | None = None
        self._free = [phase for phase in request.auto_phases if phase in layers.phases]
        """The phases that are auto."""
        if costs and self._free:
            parts = [(costs[spec], count) for spec, count in layers.counts.items()]
            self._measured = MeasuredChoice(parts, workload, self._free, layers.phases)

    def select(self, kv_layout: str, block_size: int | None) -> tuple[Selection, StepChooser | None]:
        """Make the choice; returns it and what chooses among its backends in each step, None where no measured times decided.

        A model without a layer of attention asks no backend; pages of its cache take no memory, and only count tokens.

        :raises UnsupportedError: nothing serves the request; with every reason, and the nearest request that would be served.
        """
        choices = self._choices(kv_layout, block_size)
        if not self._layers.cached:
            return Selection(*choices[0], dict.fromkeys(Phase, NO_ATTENTION), "no layer has attention"), None
        measured = self._measured.select(choices, self._able) if self._measured is not None else None
        if measured is not None:
            return measured
        found = self._search(self._request, choices)
        if found is None:
            raise self._refusal(choices)
        return found, None

    def why_not(self, phase: Phase, chosen: Selection) -> dict[str, tuple[Reason, ...]]:
        """Each backend that was considered for a phase -> why the phase is refused over the chosen layout; (): it can.

        Empty if no layer has attention.
        """
        names = self._candidates(self._request, phase) if self._layers.cached else ()
        found = {name: self._reasons(name, phase, chosen.layout, chosen.block_size) for name in names}
        failed = self._failed if self._request.name_for(phase) == AUTO else {}
        return found | {name: (Reason(name, "to pass its self-test", why),) for name, why in failed.items()}

    def layout_of(self, spec: AttentionSpec, chosen: CacheLayout) -> CacheLayout:
        """The layout of a layer's cache: the chosen one, or where that cannot hold its values the first registered that can.

        There are two kinds of layers: those whose value lies in the key, and those with a value of its own.
        """
        kinds = {each.value_in_key for each in (*self._layers.distinct, spec)}
        if len(kinds) == 1 or spec.value_in_key is not chosen.has_value:
            return chosen
        others = (info.layout for info in self._source.layouts.values())
        return next((other for other in others if other.has_value is not spec.value_in_key), chosen)

    @property
    def _failed(self) -> Mapping[str, str]:
        """Backends that failed their self-test -> what failed."""
        return self._measured.excluded if self._measured is not None else {}

    def _able(self, phase: Phase, layout: CacheLayout, block_size: int) -> list[str]:
        """Backends that can serve a phase of every layer, in rank order."""
        names = self._candidates(self._request, phase)
        return [name for name in names if not self._reasons(name, phase, layout, block_size)]

    def _choices(self, kv_layout: str = "auto", block_size: int | None = None) -> list[tuple[CacheLayout, int]]:
        infos = list(self._source.layouts.values()) if kv_layout == "auto" else [self._source.layout(kv_layout)]
        sizes = DEFAULT_BLOCK_SIZES if block_size is None else (block_size,)
        return [(info.layout, size) for size in sizes for info in infos]

    def _search(self, request: BackendRequest, choices: Sequence[tuple[CacheLayout, int]]) -> Selection | None:
        """The first layout and block size over which the request covers every phase."""
        for layout, size in choices:
            names = {phase: self._first(request, phase, layout, size) for phase in self._layers.phases}
            served = {phase: name for phase, name in names.items() if name is not None}
            if len(served) == len(names):
                return Selection(layout, size, served, self._why() if self._free else "asked for")
        return None

    def _why(self) -> str:
        if self._measured is None:
            return "auto: no crossover table, rank order"
        return f"auto: {self._measured.parts[0][0].source} has no times for this layout and block size, rank order"

    def _first(self, request: BackendRequest, phase: Phase, layout: CacheLayout, block_size: int) -> str | None:
        """The best candidate of a phase that supports every layer, or None."""
        candidates = self._candidates(request, phase)
        return next((name for name in candidates if not self._reasons(name, phase, layout, block_size)), None)

    def _candidates(self, request: BackendRequest, phase: Phase) -> Sequence[str]:
        if (name := request.name_for(phase)) != AUTO:
            return (name,)
        candidates = [name for name in self._source.backends if name not in self._failed]
        return self._source.rank(self._layers.distinct[0], phase, candidates)

    def _reasons(self, name: str, phase: Phase, layout: CacheLayout, block_size: int) -> tuple[Reason, ...]:
        support = Support()
        for spec in (self._layers.in_phase(spec, phase) for spec in self._layers.distinct):
            support &= self._source.supports(name, spec, self.layout_of(spec, layout), block_size, phase)
        return support.reasons

    def _refusal(self, choices: Sequence[tuple[CacheLayout, int]]) -> UnsupportedError:
        """Explain the layout and block size that came nearest, and name what would work."""

        def unserved(choice: tuple[CacheLayout, int]) -> list[Phase]:
            return [phase for phase in self._layers.phases if self._first(self._request, phase, *choice) is None]

        layout, size = nearest = min(choices, key=lambda choice: len(unserved(choice)))
        reasons: list[Reason] = []
        for phase in unserved(nearest):
            for name in self._candidates(self._request, phase):
                label = f"{name}, " if self._request.name_for(phase) == AUTO else ""
                found = self._reasons(name, phase, layout, size)
                reasons += [reason._replace(what=f"{label}{reason.what}") for reason in found]
        asked = ", ".join(self._request.names) or AUTO
        where = f"attention backend {asked} (kv_layout={layout.name}, block_size={size}, {self._layers.distinct[0]})"
        return UnsupportedError(where, list(dict.fromkeys(reasons)), self._fix(unserved(nearest)))

    def _fix(self, unserved: Sequence[Phase]) -> str:
        """The smallest change of the request that would be served, found by trying; empty: there is none."""
        kept = BackendRequest(
            AUTO if {Phase.PREFILL, Phase.EXTEND} & set(unserved) else self._request.prefill,
            AUTO if Phase.DECODE in unserved or Phase.DECODE not in self._layers.phases else self._request.decode,
        )
        for request in (self._request, *([kept] if kept.names else ()), ALL_AUTO):
            found = self._search(request, self._choices())
            if found is not None:
                return f"--attn-backend {request} --kv-layout {found.layout.name} --block-size {found.block_size}"
        return ""
