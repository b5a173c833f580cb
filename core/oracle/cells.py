"""Cells of the conformance kit (one check of a backend or layout, at one value of each axis), and outcomes of a check."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import DTYPES, AttentionSpec
from headway.core.contract.support import Support

AXES = ("layout", "memory", "block_size", "head_dim", "group", "dtype", "feature")
"""Axes of a layer and its cache, in the order of a cell's name."""
INPUTS = ("kv_heads", "scale", "scores", "work", "layer")
"""Axes that a backend cannot refuse, because any value may occur in a model or a step. A cell's name lists their values only if
they differ from the plain values."""
PHASES: dict[str, frozenset[Phase]] = {
    "prefill": frozenset({Phase.PREFILL}),
    "extend": frozenset({Phase.EXTEND}),
    "decode": frozenset({Phase.DECODE}),
    "mixed": frozenset({Phase.EXTEND, Phase.DECODE}),
    "verify": frozenset({Phase.DECODE}),
    "ragged": frozenset({Phase.DECODE}),
}
"""Kind of step -> phases that a backend must support to run such a step."""
WINDOWS = {"window": 37, "window-1": 1, "window-16": 16, "window-1024": 1024}
"""Feature -> window size in keys. The sizes are a prime (so that no tile or block ends with the window), only the query's own
key, one block, and the window of a real model."""
MODEL_WINDOWS = {"window-128": 128, "window-512": 512, "window-2047": 2047, "window-4096": 4096}
"""Feature -> window size in keys of further real models (gpt-oss, Gemma 3, Phi-3, Mistral and Gemma 2). Each window is tested
with longer sequences."""
MODEL_SOFTCAPS = {"softcap-30": 30.0, "softcap-50": 50.0}
"""Feature -> soft-cap of real models. Each soft-cap is tested with scores that reach the cap."""
BIDIRECTIONAL: dict[str, int | None] = {"bidirectional": None, "bidirectional-37": 37}
"""Feature of a layer that is not causal -> window size in keys. None means no window."""
FEATURES = (
    *("none", *WINDOWS, *MODEL_WINDOWS, "softcap", *MODEL_SOFTCAPS, "alibi", "sinks", "together"),
    *("fp8", "fp8-together", "int8", "int8-together"),
    *("v_head_dim", "longer_v", "latent", *BIDIRECTIONAL),
)
"""Features of a layer.

- together: all features that the backend claims, in one layer.
- fp8, int8: dtype of the cache.
- fp8-together, int8-together: all claimed features, with such a cache.
- v_head_dim, longer_v: values shorter or longer than keys.
- latent: values are part of keys.
- bidirectional: queries see later keys, either all of them or those within a window.
"""
RULE_LAYERS = ("rule", "rule-blocks")
"""Features of a layer with an attention rule, and of one whose rule chooses blocks."""
MEMORIES = ("own", "packed", "interleaved", "spaced", "far")
"""Kinds of memory for a cache.

- own: allocated by the layout.
- packed: K and V of a block are adjacent in foreign memory.
- interleaved: K and V of a head are adjacent, so that no block is contiguous.
- spaced: every other block is foreign, in any layout.
- far: slots above 32,768 and elements above 2**31, which overflow 16-bit and 32-bit indexes.
"""
KV_HEADS = (2, 1, 3, 8, 32)
SCALES = {"odd": 0.0, "one": 1.0, "large": 4.0}
"""Name -> factor of the scores. odd: 0.0 means 1.37 * head_dim ** -0.5, which reveals a backend that assumes a fixed scale.
Queries are drawn so that scores have the same size at any scale."""
USUAL_SCALE = "usual"
"""The scale head_dim ** -0.5, for backends that accept no other scale."""
SCORES = ("normal", "high", "low", "equal", "dominant", "alternating", "mean", "uneven")
"""Regimes of the scores.

- high, low: every score is near +200 or -200, and its exponential overflows or underflows float32.
- equal: all keys have the same weight.
- dominant: one key in 61 outweighs the others.
- alternating: scores alternate between +30 and -30.
- mean: values are far from zero.
- uneven: queries and heads alternate among normal scores, scores near +100, scores near -100, equal scores, and one dominant key.
"""
NEEDLE = "needle"
"""Regime of the scores for long sequences only: the score of one key is 10 above the scores of all other keys, which are
equal."""
WORKS = ("edges", "many", "again", "tables", "deep", "level")
"""Kinds of sequence lengths in the steps of a cell.

- edges: lengths around the ends of blocks.
- many: 65 sequences, then 300.
- again: the same lengths as in the previous step with different blocks, either all blocks or the last block of each sequence.
- tables: more than 128 blocks per sequence, in a slice of a wider table.
- deep: up to 16,384 tokens.
- level: sequences of equal length after different contexts.

With many and again, block 0 is in use, as in an engine.
"""
FEW = "few"
"""Kind of sequence lengths (axis `work`) that is used only for layers with many query heads: three or four sequences of up to 133
tokens."""
EXPANDED = "-expanded"
"""Suffix of a latent layer's index in a cell's name. It marks the layer's prompts, which have separate keys and values."""
OWN_SCALE = "own"
"""Value of the axis `scale` for a model's layer, which uses the scale of its spec."""
SCALE = 1.37
SOFTCAP = 1.5
FP8_SCALES = (0.02, 0.05)
CACHE_TYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Feature that sets the cache's dtype -> dtype of the cache."""


def one_of(values: Iterable[object]) -> str:
    """Return a regular expression that matches exactly these values."""
    return "|".join(re.escape(str(value)) for value in values)


@dataclass(frozen=True, slots=True)
class KitCell:
    """Check of a kernel at one value of each axis that the kernel's operation has."""

    mark: ClassVar[str] = ""
    """Second part of a cell's name, which identifies the cell's kind. Empty if cells of this class have no such part."""
    prefixes: ClassVar[Mapping[str, str]] = {}
    """Axis -> prefix of the axis's value in a cell's name."""
    inputs: ClassVar[tuple[str, ...]] = ()
    """Axes at the end of a cell's name, such as `kv_heads=8`, which appear only if their values are not the plain values."""
    known: ClassVar[Mapping[str, str]] = {}
    """Axis -> regular expression for its values. Other axes accept any text, or any number above 0."""
    check: str

    def __str__(self) -> str:
        plain = {field.name: field.default for field in fields(self)}
        always = [f"{self.prefixes.get(name, '')}{getattr(self, name)}" for name in plain if name not in self.inputs]
        odd = [f"{name}={value}" for name in self.inputs if (value := getattr(self, name)) != plain[name]]
        return ":".join([always[0], *([self.mark] if self.mark else []), *always[1:], *odd])

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the cell with this name.
        :raises ConfigError: if the text is not the name of a cell."""
        check, *parts = text.split(":")
        axes = {field.name: field.default for field in fields(cls) if field.name != "check"}
        always = [name for name in axes if name not in cls.inputs]
        try:
            if cls.mark and parts.pop(0) != cls.mark:
                raise ValueError
            found = dict(zip(always, parts[: len(always)], strict=True))
            found = {name: value.removeprefix(cls.prefixes.get(name, "")) for name, value in found.items()}
            for part in parts[len(always) :]:
                name, _, value = part.partition("=")
                if name not in cls.inputs:
                    raise ValueError
                found[name] = value
            for name, value in found.items():
                pattern = cls.known.get(name, r"[1-9]\d*" if isinstance(axes[name], int) else ".*")
                if re.fullmatch(pattern, value) is None:
                    raise ValueError
            values: dict[str, Any] = {n: int(v) if isinstance(axes[n], int) else v for n, v in found.items()}
            return cls(check, **values)
        except (ValueError, IndexError):
            raise ConfigError("--cell", "a cell's name as `headway check` prints it", repr(text)) from None

    def plain(self, check: str, about: str = "-", **changes: Any) -> Self:
        """Return a cell with the same layer and a different check."""
        return self.having({"check": check, "about": about, **changes})

    def having(self, values: Mapping[str, Any]) -> Self:
        """Return a copy of the cell with different values of some axes."""
        return replace(self, **values)

    @property
    def axes(self) -> dict[str, Any]:
        """Axes of a result, by the field names of `CellResult`."""
        return {}


@dataclass(frozen=True, slots=True)
class CheckCell(KitCell):
    """Cell of an attention backend or a layout."""

    prefixes: ClassVar = {"block_size": "b", "head_dim": "d", "group": "g"}
    inputs: ClassVar = INPUTS
    known: ClassVar = {
        "phase": one_of(("-", "long", *PHASES)),
        "memory": one_of(MEMORIES),
        "dtype": one_of((*DTYPES, "float64")),
        "feature": one_of((*FEATURES, *RULE_LAYERS)),
        "scale": one_of((*SCALES, USUAL_SCALE)),
        "scores": one_of((*SCORES, NEEDLE)),
        "work": one_of((*WORKS, FEW)),
        "layer": rf"\d+({EXPANDED})?",
    }
    phase: str = "-"
    """Name in PHASES, or "-" if the check runs several phases."""
    layout: str = "-"
    memory: str = "own"
    block_size: int = 16
    head_dim: int = 64
    group: int = 4
    """Number of query heads per kv head."""
    dtype: str = "float32"
    feature: str = "none"
    about: str = "-"
    """Further distinction between cells of one check: the axis of a refusal, or an option's name."""
    kv_heads: int = 2
    scale: str = "odd"
    """Factor of the scores: a name in SCALES, or USUAL_SCALE or OWN_SCALE."""
    scores: str = "normal"
    """Regime of the scores: one of SCORES, or NEEDLE."""
    work: str = "edges"
    """Kind of sequence lengths: one of WORKS, or FEW."""
    layer: str = ""
    """Index of the model's layer whose spec is used. Empty for a layer of the kit."""

    @property
    def axes(self) -> dict[str, Any]:
        """Values of the phase and of each axis, including inputs."""
        own: dict[str, str | int] = {"scale": OWN_SCALE} if self.layer else {}
        return {axis: getattr(self, axis) for axis in ("phase", *AXES, *INPUTS)} | own


PLAIN_INPUTS: dict[str, str | int] = {name: getattr(CheckCell("answer"), name) for name in INPUTS}


def make_spec(cell: CheckCell, device: torch.device, claims: frozenset[str], v_head_dim: int = 0) -> AttentionSpec:
    """Return the spec of a cell's layer. claims: features in the backend's `Capabilities`, used by the feature "together".
    v_head_dim: 0 means the default."""
    latent, head_dim = cell.feature == "latent", cell.head_dim
    kv_heads = 1 if latent else cell.kv_heads
    heads = cell.group * kv_heads
    features: dict[str, object] = {
        "sliding_window": WINDOWS["window"],
        "softcap": SOFTCAP,
        "alibi_slopes": tuple(2.0 ** -(1 + 8 * head / heads) for head in range(heads)),
        "sinks": decisive_sinks(heads),
    }
    together = {name: features[name] for name in sorted(claims & features.keys())}
    caches: dict[str, dict[str, Any]] = {name: {"kv_dtype": dtype} for name, dtype in CACHE_TYPES.items()}
    caches["fp8"] |= {"k_scale": FP8_SCALES[0], "v_scale": FP8_SCALES[1]}
    inside = 1 << ((head_dim - 1).bit_length() - 1)  # as in DeepSeek's 576 and 512: the rest belongs only to the key
    changes: dict[str, dict[str, Any]] = {
        "none": {},
        **{name: {"sliding_window": keys} for name, keys in (WINDOWS | MODEL_WINDOWS).items()},
        **{name: {"softcap": softcap} for name, softcap in MODEL_SOFTCAPS.items()},
        "softcap": {"softcap": SOFTCAP},
        "alibi": {"alibi_slopes": features["alibi_slopes"]},
        "sinks": {"sinks": features["sinks"]},
        "together": together,
        **{name: {"causal": False, "dense": True, "sliding_window": window} for name, window in BIDIRECTIONAL.items()},
        **caches,
        **{f"{name}-together": {**cache, **together} for name, cache in caches.items()},
        "v_head_dim": {"v_head_dim": v_head_dim or max(8, head_dim // 9 * 8)},
        "longer_v": {"v_head_dim": v_head_dim or head_dim + max(8, head_dim // 2)},
        "latent": {"v_head_dim": v_head_dim or inside, "value_in_key": True},
    }
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=SCALES.get(cell.scale) or (1.0 if cell.scale == USUAL_SCALE else SCALE) * head_dim**-0.5,
        dtype=DTYPES.get(cell.dtype, torch.float64),
        device=device,
        **changes[cell.feature],
    )


def sibling_of(spec: AttentionSpec) -> AttentionSpec:
    """Return a spec with the same sizes and features but different parameters, like the next layer of a model."""
    window, softcap, slopes, sinks = spec.sliding_window, spec.softcap, spec.alibi_slopes, spec.sinks
    scaled = 1.0 if (spec.k_scale, spec.v_scale) == (1.0, 1.0) else 2.0
    return replace(
        spec,
        scale=0.7 * spec.scale,
        sliding_window=None if window is None else window + 5,
        softcap=None if softcap is None else 2 * softcap,
        alibi_slopes=None if slopes is None else slopes[::-1],
        sinks=None if sinks is None else tuple(1.0 - sink for sink in sinks),
        k_scale=scaled * spec.k_scale,
        v_scale=scaled * spec.v_scale,
    )


def decisive_sinks(heads: int) -> tuple[float, ...]:
    """Return one sink logit per query head; adjacent heads have different values."""
    return tuple((0.3, -1.0, 2.0, 0.0, 1.0)[head % 5] for head in range(heads))


class Finding(Exception):
    """Violation of the contract by the backend, layout or option under test."""

    def __init__(self, what: str, *, guess: str = "", error: float | None = None, tolerance: float | None = None) -> None:
        """what: expected behaviour and actual behaviour. guess: likely cause. error: relative error, compared with
        `tolerance`."""
        super().__init__(what)
        self.guess = guess
        self.error = error
        self.tolerance = tolerance


class Skipped(Exception):
    """Outcome of a check that does not apply: the backend's refusal is correct, or the machine cannot run the check."""

    @classmethod
    def refused(cls, support: Support) -> Skipped:
        """Return a `Skipped` with the backend's reasons for its refusal."""
        return cls(str(support).removeprefix("no: "))


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Prefix the text of findings raised in the context with a location, such as the number of a step."""
    try:
        yield
    except Finding as finding:
        finding.args = (f"{where}: {finding}",)
        raise


def check_refusal(support: Support, need: str = "a refusal says what was looked at, what is needed and what was got") -> None:
    """Check that a refusal's reasons are complete. :raises Finding: if a reason does not say what was checked, what is needed, or
    what was given."""
    for reason in support.reasons:
        if not (reason.what and reason.need and reason.got):
            raise Finding(f"{need}: {reason!r}")
