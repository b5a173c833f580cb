"""The specs of a model's layers, made once and handed on to whatever chooses, measures, allocates or plans for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from headway.core.contract.metadata import Phase
from headway.core.contract.model import Model, latent_layers, state_layers
from headway.core.contract.spec import KV_DTYPES, AttentionSpec
from headway.core.contract.state import StateSpec


@dataclass(frozen=True)
class LayerSpecs:
    """The specs for which a model's layers ask a backend: that of each layer's cache, and those that latent layers expand to."""

    cached: Sequence[AttentionSpec]
    """The spec of each layer's cache, in the order of the layers."""
    expanded: Mapping[AttentionSpec, AttentionSpec] = field(default_factory=dict)
    """The spec of a latent layer's cache -> the spec with which its prompts without context are computed."""
    states: Sequence[StateSpec] = ()
    """The spec of each layer with a state, in the order of the layers."""
    placed: torch.device | None = None
    """Device of a model that has no layers of either kind; None if it has any, which know it."""

    @classmethod
    def of(cls, model: Model, kv_cache_dtype: str = "auto", kv_scales: Sequence[tuple[float, float]] | None = None) -> LayerSpecs:
        """Give a model's layers the element type that the user asked for their caches.

        kv_cache_dtype: auto, which leaves what the model asks for, or a name in KV_DTYPES.
        kv_scales: k_scale and v_scale of each layer's fp8 cache, as the checkpoint has them; None: 1, or what a layer brings that
        has such a type by itself. A cache of whole numbers has scales of its own.
        """
        cached = list(model.attention_specs)
        if kv_cache_dtype != "auto":
            dtype = KV_DTYPES[kv_cache_dtype]
            cached = [replace(spec, kv_dtype=dtype) for spec in cached]
            if not dtype.is_floating_point:
                cached = [replace(spec, k_scale=1.0, v_scale=1.0) for spec in cached]
            elif kv_scales is not None:
                cached = [replace(spec, k_scale=k, v_scale=v) for spec, (k, v) in zip(cached, kv_scales, strict=True)]
        expanded = {cached[number]: latent.expanded for number, latent in latent_layers(model).items()}
        return cls(cached, expanded, [layer.spec for layer in state_layers(model)], getattr(model, "device", None))

    @property
    def device(self) -> torch.device:
        """Device that all layers are on."""
        devices = [*(spec.device for spec in self.cached[:1]), *(spec.device for spec in self.states[:1])]
        found = devices[0] if devices else self.placed
        assert found is not None, "a model without layers of attention or with a state says its device"
        return found

    @cached_property
    def distinct(self) -> Sequence[AttentionSpec]:
        """Each kind of layer once: the distinct specs of caches, in the order of the layers."""
        return list(dict.fromkeys(self.cached))

    @cached_property
    def counts(self) -> Mapping[AttentionSpec, int]:
        """Every kind of layer that backends must serve (`AttentionSpec.kind`), expanded ones included -> the number of layers."""
        specs = [*self.cached, *(self.expanded[spec] for spec in self.cached if spec in self.expanded)]
        return Counter(spec.kind for spec in specs)

    @cached_property
    def value_head_dims(self) -> Sequence[int]:
        """Elements of one head of what each layer's attention returns."""
        return [self.expanded.get(spec, spec).v_head_dim for spec in self.cached]

    def in_phase(self, spec: AttentionSpec, phase: Phase) -> AttentionSpec:
        """The spec for which a layer asks a backend in a phase. spec: of its cache."""
        return self.expanded.get(spec, spec) if phase is Phase.PREFILL else spec

    @cached_property
    def phases(self) -> Sequence[Phase]:
        """The phases in which any layer asks a backend: only PREFILL if no layer has a cache, none if none attends."""
        asked = frozenset[Phase]().union(*map(self.phases_of, self.counts))
        return [phase for phase in Phase if phase in asked]

    def phases_of(self, spec: AttentionSpec) -> frozenset[Phase]:
        """The phases in which layers ask for a spec or a kind, of a cache or expanded."""
        if spec.dense:
            return frozenset({Phase.PREFILL})
        latent = any(spec.kind == cached.kind for cached in self.expanded)
        return frozenset(Phase) - {Phase.PREFILL} if latent else frozenset(Phase)
