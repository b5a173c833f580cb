"""Inputs of the kernel selection: the layers, the kernels that the user named, and the workload."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import Phase
from headway.core.contract.model import Model, latent_layers, state_layers
from headway.core.contract.spec import KV_DTYPES, AttentionSpec
from headway.core.contract.state import StateSpec
from headway.core.select.costs import Shape
from headway.core.system.text import shown

AUTO = "auto"
"""Value of a backend option that lets the selector choose."""


@dataclass(frozen=True)
class BackendRequest:
    """A user's choice of backend for each phase: a name, or auto."""

    prefill: str = AUTO
    """Backend for PREFILL and EXTEND."""
    decode: str = AUTO
    text: str = field(default="", compare=False)
    """Text of the request as the user wrote it. If empty, it is derived from the names."""

    def __post_init__(self) -> None:
        pair = f"prefill={self.prefill},decode={self.decode}"
        object.__setattr__(self, "text", self.text or (self.prefill if self.prefill == self.decode else pair))

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: object, option: str = "attn_backend") -> BackendRequest:
        """Parse "auto", "NAME" or "prefill=NAME,decode=NAME". A phase that is not mentioned is auto.

        A request is returned unchanged, and the result of dataclasses.asdict for a request is accepted.

        option: name of the option, for the error.

        :raises ConfigError: if the value is not text in this format.
        """
        if isinstance(text, BackendRequest):
            return text
        if isinstance(text, Mapping):
            text = text.get("text")
        if not isinstance(text, str):
            raise ConfigError(option, "a text", shown(text))
        text = text.strip()
        if text and "=" not in text and "," not in text:
            return cls(text, text)
        names: dict[str, str] = {}
        for part in text.split(","):
            key, _, name = (text_part.strip() for text_part in part.partition("="))
            if key not in ("prefill", "decode") or not name or key in names:
                raise ConfigError(option, "auto, NAME, or prefill=NAME,decode=NAME", repr(text))
            names[key] = name
        return cls(names.get("prefill", AUTO), names.get("decode", AUTO), text)

    @classmethod
    def for_backend(cls, name: str, phases: Iterable[Phase]) -> BackendRequest:
        """Return the request that uses a backend for the phases in its capabilities, and auto for the others."""
        served = set(phases)
        prompts = {Phase.PREFILL, Phase.EXTEND} <= served
        if Phase.DECODE not in served and prompts:
            return cls(prefill=name)
        return cls(decode=name) if Phase.DECODE in served and not prompts else cls(name, name)

    def name_for(self, phase: Phase) -> str:
        """Return the name of the backend for a phase, or auto."""
        return self.decode if phase is Phase.DECODE else self.prefill

    @property
    def names(self) -> Sequence[str]:
        """Distinct names of backends in the request, excluding auto."""
        return [name for name in dict.fromkeys((self.prefill, self.decode)) if name != AUTO]

    @property
    def auto_phases(self) -> Sequence[Phase]:
        """Phases for which the selector chooses the backend."""
        return [phase for phase in Phase if self.name_for(phase) == AUTO]


ALL_AUTO = BackendRequest()
"""Request of a user who names no backend."""


@dataclass(frozen=True)
class LayerSpecs:
    """Specs of a model's layers: one per layer's cache, and the non-absorbed specs of latent (MLA) layers."""

    cached: Sequence[AttentionSpec]
    """Spec of each layer's cache, in layer order."""
    expanded: Mapping[AttentionSpec, AttentionSpec] = field(default_factory=dict)
    """Spec of a latent layer's cache -> spec with which the layer computes prompts without context."""
    states: Sequence[StateSpec] = ()
    """Spec of each state layer, in layer order."""
    placed: torch.device | None = None
    """Device of a model that has neither attention nor state layers. None for other models, since the specs of their layers name
    the device."""

    @classmethod
    def of(cls, model: Model, kv_cache_dtype: str = "auto", kv_scales: Sequence[tuple[float, float]] | None = None) -> LayerSpecs:
        """Return the specs of a model's layers with the dtype that the user chose for their caches.

        kv_cache_dtype: auto, which keeps the model's choice, or a name in KV_DTYPES. kv_scales: (k_scale, v_scale) of each
        layer's FP8 cache, from the checkpoint. None keeps the scales in the model's specs, which are 1 unless the model itself
        uses an FP8 cache. An int8 cache stores its own scales.
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
        """Device that all layers run on."""
        devices = [*(spec.device for spec in self.cached[:1]), *(spec.device for spec in self.states[:1])]
        found = devices[0] if devices else self.placed
        assert found is not None, "a model without layers of attention or with a state says its device"
        return found

    @cached_property
    def distinct(self) -> Sequence[AttentionSpec]:
        """Distinct specs of the layers' caches, in layer order."""
        return list(dict.fromkeys(self.cached))

    @cached_property
    def counts(self) -> Mapping[AttentionSpec, int]:
        """Kind of layer that backends must support (`AttentionSpec.kind`) -> number of layers. Non-absorbed kinds of latent
        layers are included."""
        specs = [*self.cached, *(self.expanded[spec] for spec in self.cached if spec in self.expanded)]
        return Counter(spec.kind for spec in specs)

    @cached_property
    def value_head_dims(self) -> Sequence[int]:
        """Number of elements per head in the attention output of each layer."""
        return [self.expanded.get(spec, spec).v_head_dim for spec in self.cached]

    def in_phase(self, spec: AttentionSpec, phase: Phase) -> AttentionSpec:
        """Return the spec that a layer's backend must support in a phase. spec: spec of the layer's cache."""
        return self.expanded.get(spec, spec) if phase is Phase.PREFILL else spec

    @cached_property
    def phases(self) -> Sequence[Phase]:
        """Phases in which any layer needs a backend: only PREFILL if no layer has a cache. Empty if the model has no attention
        layers."""
        asked = frozenset[Phase]().union(*map(self.phases_of, self.counts))
        return [phase for phase in Phase if phase in asked]

    def phases_of(self, spec: AttentionSpec) -> frozenset[Phase]:
        """Return the phases in which layers use a spec or a kind of spec. spec: spec of a cache, or a non-absorbed spec."""
        if spec.dense:
            return frozenset({Phase.PREFILL})
        latent = any(spec.kind == cached.kind for cached in self.expanded)
        return frozenset(Phase) - {Phase.PREFILL} if latent else frozenset(Phase)


_CHUNK = 2048
"""Assumed number of prompt tokens per step of a workload."""
_MOST = 1 << 24
"""Maximum number of requests, and of tokens per request. Real workloads are far smaller, and a workload of this size is still
evaluated fast."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Expected workload: equal requests, with `batch` requests running at a time."""

    batch: int
    input_len: int
    output_len: int
    cached_len: int = 0
    """Number of input tokens that are prefix cache hits."""

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Parse "chat", "long", "batch", or BATCHxINPUT+OUTPUT such as 16x1024+256.

        :raises ConfigError: if the text is in any other format.
        """
        if text in PRESETS:
            return PRESETS[text]
        match = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text.strip())
        sizes = [int(number) for number in match.groups()] if match else [0]
        if min(sizes) < 1 or max(sizes) > _MOST:
            need = f"{', '.join(PRESETS)}, or BATCHxINPUT+OUTPUT in tokens such as 16x1024+256, each at most {_MOST:,}"
            raise ConfigError("workload", need, repr(text))
        return cls(*sizes)

    def steps(self) -> list[tuple[Shape, float]]:
        """Return the attention steps of all requests: (shape, number of steps)."""
        steps: list[tuple[Shape, float]] = [
            (Shape(Phase.DECODE, self.batch, 1, self.input_len + self.output_len // 2), float(self.output_len))
        ]
        new = self.input_len - self.cached_len
        if new <= _CHUNK:
            together = min(self.batch, max(1, _CHUNK // new))
            phase = Phase.EXTEND if self.cached_len else Phase.PREFILL
            return [(Shape(phase, together, new, self.input_len), self.batch / together), *steps]
        ends = range(self.cached_len + _CHUNK, self.input_len + 1, _CHUNK)
        phases = [Phase.of(_CHUNK, end - _CHUNK) for end in ends]
        chunks = [(Shape(phase, 1, _CHUNK, end), float(self.batch)) for phase, end in zip(phases, ends, strict=True)]
        return chunks + steps

    def __str__(self) -> str:
        name = next((name for name, preset in PRESETS.items() if preset == self), None)
        return name or f"{self.batch}x{self.input_len}+{self.output_len}"


PRESETS = {
    "chat": Workload(16, 1280, 256, cached_len=1024),
    "long": Workload(4, 16384, 512),
    "batch": Workload(256, 512, 512),
}
"""Workloads by name. chat: turns of conversations. long: long documents. batch: many short offline requests."""
