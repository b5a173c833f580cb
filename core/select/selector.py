"""Which backend serves which phase, over which cache layout and block size; and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from headway.core.contract.backend import AttentionBackend, Backends
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.latent import Expanded, spec_in
from headway.core.contract.layout import CacheLayout, LayoutInfo
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Reason, Support
from headway.core.select.chooser import Chooser
from headway.core.select.costs import CostTable, Shape, StepCosts
from headway.core.select.request import BackendRequest, parse_backend_request
from headway.core.select.selection import Measured, Selection
from headway.core.select.workload import PRESETS, Workload

DEFAULT_BLOCK_SIZES = (16, 64, 128, 256)
"""Tried in this order where the user names none: small blocks waste least memory."""


class BackendSource(Protocol):
    """What the selector asks of the Registry."""

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
        """Whether it can run here and serve this layer."""

    def rank(self, spec: AttentionSpec, phase: Phase, candidates: Sequence[str]) -> list[str]:
        """Candidates, best guess first."""


def check_names(source: BackendSource, request: str, kv_layout: str, options: Mapping[str, object]) -> None:
    """Check every name a user gave, before anything slow is done for it.

    :raises HeadwayError: a request of another form, an unknown backend or layout.
    """
    for name in (*parse_backend_request(request).values(), *options):
        if name != "auto" and name not in source.backends:
            source.backend(name)  # raises; one that exists is loaded later, where a refusal carries its hint and a fix
    if kv_layout != "auto":
        source.layout(kv_layout)


class Selector:
    """Chooses once at start, then answers each step's question with a dict get.

    With a crossover table `auto` takes the layout and block size of least expected cost over the workload, and then in each step
    the fastest backend. Without one it takes, for each phase, the first of the rank hook's order that supports every layer.
    """

    def __init__(
        self,
        source: BackendSource,
        specs: Sequence[AttentionSpec],
        request: str = "auto",
        kv_layout: str = "auto",
        block_size: int | None = None,
        options: Mapping[str, Mapping[str, str]] | None = None,
        costs: Mapping[AttentionSpec, CostTable] | None = None,
        workload: Workload = PRESETS["chat"],
        expanded: Expanded | None = None,
    ) -> None:
        """costs: measured times of each distinct layer, expanded ones too; None: there are none. expanded: of latent layers.

        :raises HeadwayError: an unknown name, or an explicit request that cannot be served, with every reason.
        """
        self._source = source
        self._expanded = expanded or {}
        every = [*specs, *(self._expanded[spec] for spec in specs if spec in self._expanded)]
        self._specs = list(dict.fromkeys(specs))
        self._times: Measured | None = None
        self._chooser: Chooser | None = None
        self._options = options or {}
        self._request_text = request
        self._request = parse_backend_request(request)
        check_names(source, request, kv_layout, self._options)
        for name, chosen in self._options.items():
            source.backend(name).check_options(chosen)
        free = [phase for phase, name in self._request.items() if name == "auto"]
        if costs and free:
            parts = [(costs[spec], every.count(spec)) for spec in dict.fromkeys(every)]
            self._times = Measured(parts, workload, free)
        self.selection = self._select(kv_layout, block_size)
        others = [name for names in self.selection.others.values() for name in names]
        self._instances = {name: self._make(name) for name in dict.fromkeys([*self.selection.names.values(), *others])}
        self.gathering = self._gathering()
        """By the spec of a latent layer's cache, what attends to its context after that was gathered and expanded: the backend of
        its prompts. A layer that this backend cannot serve so is missing."""

    def backends_for(self, phase: Phase, batch: int | None = None, query_len: int = 1, kv_len: int = 1) -> Backends:
        """The instances, by spec, that serve a phase in this step.

        batch: sequences of that part of the step (of a graph: those it is captured for); None: the phase's usual backend.
        query_len, kv_len: of each sequence, new tokens and cached plus new ones; where they differ see `Shape.of`.
        """
        name = None
        if batch is not None and self._chooser is not None and phase in self.selection.others:
            name = self._chooser.choose(phase, batch, query_len, kv_len)
        return self._instances[name or self.selection.names[phase]]

    def candidates_for(self, phase: Phase, batch: int) -> list[str]:
        """Backends between which `backends_for` chooses in steps of this phase and batch size. Asking changes nothing."""
        if phase is Phase.DECODE:
            return self.decode_candidates(batch)
        return [self.selection.names[phase], *self.selection.others.get(phase, ())]

    def why_not(self, phase: Phase) -> dict[str, tuple[Reason, ...]]:
        """Each backend that was looked at for a phase -> why it cannot serve it, over the selection's layout; (): it can."""
        chosen = self.selection
        found = {
            name: self._reasons(name, phase, chosen.layout, chosen.block_size) for name in self._candidates(self._request, phase)
        }
        failed = self._times.excluded if self._times is not None and self._request[phase] == "auto" else {}
        return found | {name: (Reason(name, "to pass its self-test", why),) for name, why in failed.items()}

    def decode_candidates(self, batch: int) -> list[str]:
        """Backends that `backends_for` may name for decodes of this batch size: those worth a captured graph, at most two."""
        if self._chooser is None or Phase.DECODE not in self.selection.others:
            return [self.selection.names[Phase.DECODE]]
        return self._chooser.decode_candidates(batch) or [self.selection.names[Phase.DECODE]]

    def decode_us(self, batch: int, query_len: int, kv_len: int) -> float:
        """Microseconds of the attention of a decode step with the fastest backend; infinite where nothing was measured."""
        if self.costs is None:
            return math.inf
        names = [self.selection.names[Phase.DECODE], *self.selection.others.get(Phase.DECODE, ())]
        return min(self.costs.step_us(name, Shape(Phase.DECODE, batch, query_len, kv_len)) for name in names)

    def forget(self) -> None:
        """Choose the next step's backends as if it were the first."""
        if self._chooser is not None:
            self._chooser.forget()

    def instances_of(self, name: str) -> Backends:
        """The instances of one of the selection's backends, by spec."""
        return self._instances[name]

    @property
    def costs(self) -> StepCosts | None:
        """Measured times over the selection's layout and block size; None where they did not decide."""
        return self._chooser.costs if self._chooser is not None else None

    @property
    def instances(self) -> list[Backends]:
        """Of every backend that may be called, its instances by spec."""
        return list(self._instances.values())

    def _make(self, name: str) -> Backends:
        """Instances for the specs of the phases in which a backend may be called."""
        chosen = self.selection
        phases = [phase for phase in Phase if name in (chosen.names[phase], *chosen.others.get(phase, ()))]
        specs = dict.fromkeys(spec_in(phase, spec, self._expanded) for phase in phases for spec in self._specs)
        return {spec: self._instance(name, spec) for spec in specs}

    def _instance(self, name: str, spec: AttentionSpec) -> AttentionBackend:
        backend, options = self._source.backend(name), self._options.get(name)
        return backend(spec, self.layout_of(spec), self.selection.block_size, options)

    def _gathering(self) -> Backends:
        name, size = self.selection.names[Phase.PREFILL], self.selection.block_size
        found = {}
        for spec, dense in self._expanded.items():
            cached = replace(dense, dense=False)
            if self._source.supports(name, cached, self.layout_of(cached), size, Phase.EXTEND):
                found[spec] = self._instance(name, cached)
        return found

    def layout_of(self, spec: AttentionSpec) -> CacheLayout:
        """The layout of a layer's cache: the selection's, or that of the layer's group where it does not fit."""
        return self._layout_for(spec, self.selection.layout)

    def _layout_for(self, spec: AttentionSpec, layout: CacheLayout) -> CacheLayout:
        """Beside `layout`, a layer of another kind takes the first registered layout of that kind.

        There are two kinds: layers whose value lies in the key, and layers with a value of its own.
        """
        kinds = {each.value_in_key for each in (*self._specs, spec)}
        if len(kinds) == 1 or spec.value_in_key is not layout.has_value:
            return layout
        others = (info.layout for info in self._source.layouts.values())
        return next((other for other in others if other.has_value is not spec.value_in_key), layout)

    def _select(self, kv_layout: str, block_size: int | None) -> Selection:
        choices = self._choices(kv_layout, block_size)
        found = self._measured(choices) or self._search(self._request, choices)
        if found is None:
            raise self._refusal(choices)
        return found

    def _measured(self, choices: Sequence[tuple[CacheLayout, int]]) -> Selection | None:
        """The choice by measured times; None without a table that has any for these layouts and block sizes."""
        if self._times is None:
            return None
        found = self._times.select(choices, self._able)
        if found is None:
            return None
        selection, self._chooser = found
        return selection

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
            names = {phase: self._first(request, phase, layout, size) for phase in Phase}
            served = {phase: name for phase, name in names.items() if name is not None}
            if len(served) == len(Phase):
                return Selection(layout, size, served, self._why() if "auto" in request.values() else "asked for")
        return None

    def _why(self) -> str:
        if self._times is None:
            return "auto: no crossover table, rank order"
        return f"auto: {self._times.parts[0][0].source} has no times for this layout and block size, rank order"

    def _first(self, request: BackendRequest, phase: Phase, layout: CacheLayout, block_size: int) -> str | None:
        """The best candidate of a phase that supports every layer, or None."""
        candidates = self._candidates(request, phase)
        return next((name for name in candidates if not self._reasons(name, phase, layout, block_size)), None)

    def _candidates(self, request: BackendRequest, phase: Phase) -> Sequence[str]:
        if request[phase] != "auto":
            return (request[phase],)
        failed = self._times.excluded if self._times is not None else ()
        return self._source.rank(self._specs[0], phase, [name for name in self._source.backends if name not in failed])

    def _reasons(self, name: str, phase: Phase, layout: CacheLayout, block_size: int) -> tuple[Reason, ...]:
        support = Support()
        for spec in (spec_in(phase, spec, self._expanded) for spec in self._specs):
            support &= self._source.supports(name, spec, self._layout_for(spec, layout), block_size, phase)
        return support.reasons

    def _refusal(self, choices: Sequence[tuple[CacheLayout, int]]) -> UnsupportedError:
        """Explain the layout and block size that came nearest, and name what would work."""

        def unserved(choice: tuple[CacheLayout, int]) -> list[Phase]:
            return [phase for phase in Phase if self._first(self._request, phase, *choice) is None]

        layout, size = nearest = min(choices, key=lambda choice: len(unserved(choice)))
        reasons: list[Reason] = []
        for phase in unserved(nearest):
            for name in self._candidates(self._request, phase):
                label = "" if self._request[phase] != "auto" else f"{name}, "
                found = self._reasons(name, phase, layout, size)
                reasons += [reason._replace(what=f"{label}{reason.what}") for reason in found]
        asked = ", ".join(dict.fromkeys(name for name in self._request.values() if name != "auto")) or "auto"
        where = f"attention backend {asked} (kv_layout={layout.name}, block_size={size}, {self._specs[0]})"
        return UnsupportedError(where, list(dict.fromkeys(reasons)), self._fix(unserved(nearest)))

    def _fix(self, unserved: Sequence[Phase]) -> str:
        """The smallest change of the request that this selector would honour, found by trying it."""
        kept = {phase: "auto" if phase in unserved else name for phase, name in self._request.items()}
        if kept[Phase.EXTEND] == "auto":  # one name covers both
            kept[Phase.PREFILL] = "auto"
        pair = f"prefill={kept[Phase.PREFILL]},decode={kept[Phase.DECODE]}"
        pairs = [] if set(kept.values()) == {"auto"} else [pair]
        for text in (self._request_text, *pairs, "auto"):
            found = self._search(parse_backend_request(text), self._choices())
            if found is not None:
                return f"--attn-backend {text} --kv-layout {found.layout.name} --block-size {found.block_size}"
        return ""
