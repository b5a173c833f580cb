"""Inputs of the kernel selection: the layers, the kernels that the user named, and the workload."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.layer import Invariance
from headway.core.contract.metadata import Phase
from headway.core.contract.model import Model, latent_layers, state_layers
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.contract.rule import AttentionRule, check_rule
from headway.core.contract.spec import KV_DTYPES, AttentionSpec
from headway.core.contract.state import StateSpec
from headway.core.select.costs import Shape
from headway.core.system.text import shown

log = logging.getLogger("headway")
AUTO = "auto"
"""Value of a backend option that lets the selector choose."""


KINDS = ("rule", "latent", "wide", "window", "full", "encoder", "state", "draft")
"""Names of kinds of layers, most specific first. `rule` layers have an attention rule; `state` layers have a state instead of
attention; `draft` means all layers of a draft model."""
_WIDE = 256
"""Largest head_dim of a layer that is not `wide`."""
PHASES = ("prefill", "decode")
"""Names of phases in options. Prefill includes extend, and decode includes verify."""


def kinds_of(spec: AttentionSpec) -> tuple[str, ...]:
    """Return the names of an attention layer's kinds, most specific first, out of KINDS."""
    holds = {
        "rule": spec.rule is not None,
        "latent": spec.value_in_key,
        "wide": spec.head_dim > _WIDE and not spec.value_in_key,
        "window": spec.sliding_window is not None,
        "full": spec.sliding_window is None,
        "encoder": spec.dense,
    }
    return tuple(kind for kind in KINDS if holds.get(kind))


def parse_by_kind(option: str, given: object, forms: str, phases: Sequence[str] = ()) -> dict[tuple[str, str], str]:
    """Return (kind, phase) -> value of an option that takes VALUE, or KIND=VALUE, PHASE=VALUE and KIND:PHASE=VALUE with commas.

    A kind or phase "" means all of them. A mapping such as {"window:decode": "triton"} is accepted too. forms: description of
    valid texts, for the error. phases: valid phases; empty if the value does not depend on the phase.

    :raises ConfigError: if the value is not in this format, or a kind or a phase is unknown.
    """
    if isinstance(given, Mapping):
        for key, value in given.items():
            if not isinstance(value, str) or not value.strip() or set(value) & {",", "="}:
                raise ConfigError(option, "a name for each kind of layer", f"{shown(value)} for {shown(key)}")
        given = ",".join(f"{key}={value}" for key, value in given.items())
    if not isinstance(given, str):
        raise ConfigError(option, "a text or a mapping", shown(given))
    text = given.strip()
    kind, colon, _ = text.partition(":")
    if text and not set(text) & {"=", ","} and not (colon and kind in KINDS):
        return {("", ""): text}
    found: dict[tuple[str, str], str] = {}
    for part in text.split(","):
        word, _, value = (each.strip() for each in part.partition("="))
        kind, colon, phase = ("", "", word) if word in phases else map(str.strip, word.partition(":"))
        if colon and kind not in KINDS:
            raise ConfigError(option, f"a kind of layer: {', '.join(KINDS)}", repr(kind))
        if colon and phase not in phases:
            need = f"a phase: {' or '.join(phases)}" if phases else "kinds of layers without a phase"
            raise ConfigError(option, need, repr(word), "prefill includes extend, decode includes verify" if phases else "")
        if (kind, phase) in found:
            raise ConfigError(option, "each kind and phase once", repr(text))
        if (kind and kind not in KINDS) or not word or not value:
            raise ConfigError(option, forms, repr(text))
        found[kind, phase] = value
    return found


@dataclass(frozen=True)
class BackendRequest:
    """A user's choice of backend for each phase: a name, or auto. Kinds of layers may differ."""

    prefill: str = AUTO
    """Backend for PREFILL and EXTEND."""
    decode: str = AUTO
    text: str = field(default="", compare=False)
    """Text of the request as the user wrote it. If empty, it is derived from the names."""
    kinds: tuple[tuple[str, str, str], ...] = ()
    """(kind, phase, name) of kinds of layers with their own choice. A phase "" means both."""

    def __post_init__(self) -> None:
        pair = f"prefill={self.prefill},decode={self.decode}"
        text = self.prefill if self.prefill == self.decode else pair
        if self.kinds:
            named = [f"{phase}={name}" for phase, name in zip(PHASES, (self.prefill, self.decode), strict=True) if name != AUTO]
            text = ",".join([*named, *(f"{kind}{phase and ':'}{phase}={name}" for kind, phase, name in self.kinds)])
        object.__setattr__(self, "text", self.text or text)

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: object, option: str = "attn_backend") -> BackendRequest:
        """Parse "auto", "NAME", "prefill=NAME,decode=NAME" or "KIND:PHASE=NAME"; see `parse_by_kind`. What is not mentioned is
        auto.

        A request is returned unchanged, and the result of dataclasses.asdict for a request is accepted.

        option: name of the option, for the error. Only attn_backend takes kinds of layers.

        :raises ConfigError: if the value is not in this format.
        """
        if isinstance(text, BackendRequest):
            return text
        if isinstance(text, Mapping) and "text" in text:
            text = text["text"]
        by_kind = option == "attn_backend"
        forms = "auto, NAME, or prefill=NAME,decode=NAME" + f", each also by KIND ({', '.join(KINDS)})" * by_kind
        found = parse_by_kind(option, text, forms, PHASES)
        if not by_kind and any(kind for kind, _ in found):
            raise ConfigError(option, forms, repr(text), "attn_backend takes kinds of layers, such as state=NAME")
        base = found.get(("", ""), AUTO)
        kinds = tuple((kind, phase, name) for (kind, phase), name in found.items() if kind)
        words = text.strip() if isinstance(text, str) else ""
        return cls(found.get(("", "prefill"), base), found.get(("", "decode"), base), words, kinds)

    @classmethod
    def for_backend(cls, name: str, phases: Iterable[Phase]) -> BackendRequest:
        """Return the request that uses a backend for the phases in its capabilities, and auto for the others."""
        served = set(phases)
        prompts = {Phase.PREFILL, Phase.EXTEND} <= served
        if Phase.DECODE not in served and prompts:
            return cls(prefill=name)
        return cls(decode=name) if Phase.DECODE in served and not prompts else cls(name, name)

    def for_layer(self, kinds: Sequence[str]) -> BackendRequest:
        """Return the choice for layers of these kinds, given most specific first.

        The most specific kind that the request names for a phase decides, and a choice for KIND:PHASE precedes one for KIND. If
        no kind is named, the choice without a kind applies.
        """
        if not self.kinds:
            return self
        found = {(kind, phase): name for kind, phase, name in self.kinds}

        def chosen(phase: str, base: str) -> str:
            keys = [key for kind in kinds for key in ((kind, phase), (kind, ""))]
            return next((found[key] for key in keys if key in found), base)

        return BackendRequest(chosen("prefill", self.prefill), chosen("decode", self.decode))

    def names_kind(self, kind: str) -> bool:
        """Return whether the request has a choice for a kind of layer."""
        return any(each[0] == kind for each in self.kinds)

    def for_draft(self) -> BackendRequest:
        """Return the choice for a draft model: that of the kind `draft` if the request names it, else that without a kind."""
        return self.for_layer(["draft"]) if self.kinds else self

    def for_states(self, other: BackendRequest) -> BackendRequest:
        """Return the choice for state layers: that of the kind `state` if the request names it, else `other`."""
        return self.for_layer(["state"]) if self.names_kind("state") else other

    def without(self, kind: str) -> BackendRequest:
        """Return the request with auto for a kind of layer."""
        kept = tuple(each for each in self.kinds if each[0] != kind)
        return BackendRequest(self.prefill, self.decode, kinds=(*kept, (kind, "", AUTO)))

    def pinned(self, name: str, instead_of: Collection[str] = (AUTO,)) -> BackendRequest:
        """Return the request with a backend's name, or auto, instead of other names."""
        kinds = tuple((kind, phase, name if each in instead_of else each) for kind, phase, each in self.kinds)
        prefill, decode = (name if each in instead_of else each for each in (self.prefill, self.decode))
        return BackendRequest(prefill, decode, kinds=kinds)

    def name_for(self, phase: Phase) -> str:
        """Return the name of the backend for a phase, or auto, of layers whose kind the request does not name."""
        return self.decode if phase is Phase.DECODE else self.prefill

    @property
    def names(self) -> Sequence[str]:
        """Distinct names of attention backends for the model's own layers, excluding auto."""
        kinds = [name for kind, _, name in self.kinds if kind not in ("state", "draft")]
        return [name for name in dict.fromkeys((self.prefill, self.decode, *kinds)) if name != AUTO]

    def layers_of(self, name: str) -> str:
        """Return " for KIND layers" of the first kind with a choice if it is this backend, or "" if no kind has chosen it."""
        return next((f" for {kind} layers" for kind, _, each in self.kinds if each == name), "")

    @property
    def auto_phases(self) -> Sequence[Phase]:
        """Phases for which the selector chooses the backend of layers whose kind the request does not name."""
        return [phase for phase in Phase if self.name_for(phase) == AUTO]


ALL_AUTO = BackendRequest()
"""Request of a user who names no backend."""


def parse_cache_dtypes(given: object) -> dict[str, str]:
    """Return kind of layer -> dtype of its cache: auto, or a name in KV_DTYPES. The kind "" means all other layers.

    :raises ConfigError: if the option kv_cache_dtype does not have this form.
    """
    need = f"auto or {' or '.join(KV_DTYPES)}"
    found = parse_by_kind("kv_cache_dtype", given, f"{need}, or KIND=DTYPE with commas ({', '.join(KINDS)})")
    for (kind, _), name in found.items():
        if name not in (AUTO, *KV_DTYPES):
            hint = f"{name} is a kind of layer: {name}=DTYPE" if name in KINDS else ""
            raise ConfigError("kv_cache_dtype", need, repr(f"{kind}={name}" if kind else name), hint)
    return {kind: name for (kind, _), name in found.items()}


def draft_cache_dtype(given: object) -> str:
    """Return the cache dtype of a draft model: that of the kind `draft` if the option kv_cache_dtype names it, else that without
    a kind."""
    found = parse_cache_dtypes(given)
    return found.get("draft", found.get("", AUTO))


def _with_cache(spec: AttentionSpec, wanted: Mapping[str, str], scales: tuple[float, float] | None) -> AttentionSpec:
    """Return the spec of a layer with the dtype that the user chose for its kind. wanted: result of `parse_cache_dtypes`. scales:
    (k_scale, v_scale) of an FP8 cache; None keeps the scales in the spec."""
    kind = next((kind for kind in kinds_of(spec) if kind in wanted), "")
    name = wanted.get(kind, AUTO)
    if name == AUTO:
        return spec
    dtype = KV_DTYPES[name]
    got = f"{kind}={name}" if kind else name
    if spec.dense:
        raise ConfigError("kv_cache_dtype", "auto for encoder layers, which have no cache", got)
    if kind and spec.value_in_key and not dtype.is_floating_point:
        raise ConfigError("kv_cache_dtype", "auto or fp8_e4m3 for latent layers, whose values lie in the keys", got)
    if not dtype.is_floating_point:
        scales = 1.0, 1.0
    if scales is None:
        return replace(spec, kv_dtype=dtype)
    return replace(spec, kv_dtype=dtype, k_scale=scales[0], v_scale=scales[1])


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
    def of(
        cls, model: Model, kv_cache_dtype: str | Mapping[str, str] = AUTO, kv_scales: Sequence[tuple[float, float]] | None = None
    ) -> LayerSpecs:
        """Return the specs of a model's layers with the dtypes that the user chose for their caches; see `with_cache`."""
        cached, states = list(model.attention_specs), [layer.spec for layer in state_layers(model)]
        expanded = {cached[number]: latent.expanded for number, latent in latent_layers(model).items()}
        return cls(cached, expanded, states, getattr(model, "device", None)).with_cache(kv_cache_dtype, kv_scales)

    def with_cache(
        self, kv_cache_dtype: str | Mapping[str, str], kv_scales: Sequence[tuple[float, float]] | None = None
    ) -> LayerSpecs:
        """Return the layers with other dtypes of their caches.

        kv_cache_dtype: auto, which keeps a layer's dtype, or a name in KV_DTYPES; see `parse_cache_dtypes`. kv_scales: (k_scale,
        v_scale) of each layer's FP8 cache, from the checkpoint. None keeps the scales in the specs, which are 1 unless the model
        itself uses an FP8 cache. An int8 cache stores its own scales.

        :raises ConfigError: if the model has no layers of a kind, or a kind of layer cannot hold its dtype.
        """
        wanted = parse_cache_dtypes(kv_cache_dtype)
        self.check_kinds("kv_cache_dtype", wanted)
        if wanted.get("state", AUTO) != AUTO:
            raise ConfigError(
                "kv_cache_dtype", "auto for state layers, whose states keep their dtype", f"state={wanted['state']}"
            )
        scales: Sequence[tuple[float, float] | None] = kv_scales or [None] * len(self.cached)
        cached = [_with_cache(spec, wanted, scale) for spec, scale in zip(self.cached, scales, strict=True)]
        expanded = {new: self.expanded[old] for old, new in zip(self.cached, cached, strict=True) if old in self.expanded}
        return replace(self, cached=cached, expanded=expanded)

    def invariant(self, level: Invariance) -> LayerSpecs:
        """Return the layers with a level that the bits of their results must keep."""
        expanded = {replace(old, invariance=level): replace(new, invariance=level) for old, new in self.expanded.items()}
        cached = [replace(spec, invariance=level) for spec in self.cached]
        return replace(self, cached=cached, expanded=expanded, states=[replace(spec, invariance=level) for spec in self.states])

    def with_rules(
        self, rules: Mapping[str, AttentionRule], numbers: Sequence[int], longest: int, ranks: Ranks = ONE_RANK
    ) -> LayerSpecs:
        """Return the layers with attention rules, which are checked by running them.

        rules: "all", a kind of layers, layers.N or layers.N-M -> rule. The most specific key of a layer decides. numbers: number
        of each layer in the model, from 0. longest: maximum length of a sequence in tokens. ranks: a rule is for the heads of all
        ranks, and a layer has those of this rank.

        :raises ConfigError: if a key names no layer, or a rule does not pass its check or cannot be applied to its layers.
        """
        if not rules:
            return self
        chosen = list[AttentionRule | None]([None] * len(self.cached))
        for key in sorted(rules, key=lambda key: 0 if key == "all" else 2 if key.startswith("layers.") else 1):
            places = [place for place, spec in enumerate(self.cached) if _names_layer(key, spec, numbers[place])]
            if not places or ((named := _layer_range(key)) and named[1] > max(numbers)):
                need = f"all, layers.N or layers.N-M of {len(numbers)} attention layers, or a kind: {', '.join(self.kinds)}"
                raise ConfigError("attention_rules", need, repr(key))
            for place in places:
                chosen[place] = rules[key]
        made = cache(partial(self._ruled, longest=longest, ranks=ranks))  # equal layers are checked once
        cached, expanded = list[AttentionSpec](), dict[AttentionSpec, AttentionSpec]()
        for spec, rule in zip(self.cached, chosen, strict=True):
            found = spec if rule is None else made(spec, rule)
            cached.append(found)
            if spec in self.expanded:
                expanded[found] = replace(self.expanded[spec], rule=found.rule)
        return replace(self, cached=cached, expanded=expanded)

    def _ruled(self, spec: AttentionSpec, rule: AttentionRule, longest: int, ranks: Ranks) -> AttentionSpec:
        """Return the spec of a layer with a rule, on this rank."""
        who, heads = f"attention rule {rule.name}", spec.num_heads * ranks.size
        if spec.dense:
            raise ConfigError(who, "a layer with a cache", "a layer of an encoder")
        if spec.value_in_key and "blocks" in rule.parts:
            raise ConfigError(f"{who}, blocks", "layers with keys for each head", "latent layers (MLA)")
        if spec.sliding_window is not None and "blocks" in rule.parts:
            raise ConfigError(
                f"{who}, blocks", "layers without a window, which forget keys", f"a window of {spec.sliding_window}"
            )
        if rule.ahead and self.states:
            raise ConfigError(f"{who}, ahead", "a model of attention layers", "one with state layers, which see no later tokens")
        if longest > rule.max_len:
            hint = f"--max-model-len {rule.max_len}"
            raise ConfigError("max_model_len", f"at most {rule.max_len}, the max_len of {who}", longest, hint)
        log.info("%s: calling its functions", who)
        check_rule(rule, heads, spec.num_kv_heads * ranks.size, spec.head_dim, longest)
        return replace(spec, rule=rule if ranks.size == 1 else rule.for_heads(spec.num_heads * ranks.rank, spec.num_heads))

    @property
    def ahead(self) -> int:
        """Number of a prompt's first tokens that one step computes, because a rule lets them see each other."""
        return max((spec.rule.ahead for spec in self.cached if spec.rule is not None), default=0)

    @cached_property
    def groups(self) -> Mapping[str, LayerSpecs]:
        """Most specific kind -> specs of the attention layers of this kind, in layer order. Each of these groups has its own
        backends."""
        found: dict[str, list[AttentionSpec]] = {}
        for spec in self.cached:
            found.setdefault(kinds_of(spec)[0], []).append(spec)
        return {
            kind: LayerSpecs(specs, {spec: self.expanded[spec] for spec in dict.fromkeys(specs) if spec in self.expanded})
            for kind, specs in found.items()
        }

    @property
    def kinds(self) -> Sequence[str]:
        """Names of the kinds that the model's layers are, most specific first."""
        found = {kind for spec in self.distinct for kind in kinds_of(spec)} | ({"state"} if self.states else set())
        return [kind for kind in KINDS if kind in found]

    def check_kinds(self, option: str, asked: Iterable[str]) -> None:
        """Check that the model has layers of these kinds. `draft` and "" are skipped: they do not name layers of the model.

        :raises ConfigError: if it has not.
        """
        for kind in asked:
            if kind not in ("", "draft", *self.kinds):
                raise ConfigError(option, f"a kind of layer that the model has: {', '.join(self.kinds) or 'none'}", repr(kind))

    def requests(self, request: BackendRequest) -> Mapping[str, BackendRequest]:
        """Return the choice of backends for each of `groups`, by kind. If no layer has attention, the kind is "".

        :raises ConfigError: if the model has no layers of a kind that the request names.
        """
        self.check_kinds("attn_backend", [kind for kind, _, _ in request.kinds])
        return {kind: request.for_layer(kinds_of(part.cached[0])) for kind, part in self.groups.items()} or {"": request}

    def auto_phases(self, request: BackendRequest) -> Sequence[Phase]:
        """Return the phases for which the selector chooses the backend of at least one group. Raises the errors of `requests`."""
        free = {phase for each in self.requests(request).values() for phase in each.auto_phases}
        return [phase for phase in Phase if phase in free]

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


def _names_layer(key: str, spec: AttentionSpec, number: int) -> bool:
    """Return whether a key of the option attention_rules names a layer. number: the layer's number in the model."""
    if named := _layer_range(key):
        return named[0] <= number <= named[1]
    return key in ("all", *kinds_of(spec))


def _layer_range(key: str) -> tuple[int, int] | None:
    """Return the first and the last layer of the key layers.N or layers.N-M, or None for other keys."""
    match = re.fullmatch(r"layers\.(\d+)(?:-(\d+))?", key)
    return (int(match[1]), int(match[2] or match[1])) if match else None


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


PRESETS = {"chat": Workload(16, 1280, 256, cached_len=1024), "long": Workload(4, 16384, 512), "batch": Workload(256, 512, 512)}
"""Workloads by name. chat: turns of conversations. long: long documents. batch: many short offline requests."""
