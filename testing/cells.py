"""A cell of the conformance kit: one check of one backend or layout at one value of each axis; and how a check ends."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cache

import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import DTYPES, AttentionSpec
from headway.core.contract.support import Support

AXES = ("layout", "memory", "block_size", "head_dim", "group", "dtype", "feature")
"""What makes up a layer and its cache, in the order of a cell's name."""
PHASES: dict[str, frozenset[Phase]] = {
    "prefill": frozenset({Phase.PREFILL}),
    "extend": frozenset({Phase.EXTEND}),
    "decode": frozenset({Phase.DECODE}),
    "mixed": frozenset({Phase.EXTEND, Phase.DECODE}),
    "verify": frozenset({Phase.DECODE}),
    "ragged": frozenset({Phase.DECODE}),
}
"""Name of a step's shape -> the phases a backend must serve for it."""
FEATURES = ("none", "window", "window-1", "softcap", "alibi", "sinks", "together", "fp8", "v_head_dim", "latent")
"""together: every feature the backend claims, in one layer; v_head_dim: values shorter than keys; latent: values inside keys."""
MEMORIES = ("own", "packed", "interleaved")
"""own: as the layout allocates; packed: K and V of a block side by side in foreign memory; interleaved: a head's K and V side by
side, so that no block is one piece of memory."""
NUM_KV_HEADS = 2
WINDOW = 37
"""Window of the windowed layers: a prime, so that no tile or block of a kernel ends with it."""
SCALE = 1.37
"""Scale of every layer, times head_dim ** -0.5: a backend that assumes its own scale shows everywhere."""
SOFTCAP = 1.5
FP8_SCALES = (0.02, 0.05)


@dataclass(frozen=True, slots=True)
class CheckCell:
    """One check at one value of each axis."""

    check: str
    phase: str = "-"
    """A name out of PHASES, or "-" where the check runs several."""
    layout: str = "-"
    memory: str = "own"
    block_size: int = 16
    head_dim: int = 64
    group: int = 4
    """Query heads that share a kv head."""
    dtype: str = "float32"
    feature: str = "none"
    about: str = "-"
    """What else tells cells of one check apart: the axis of a refusal, an option's name."""

    def __str__(self) -> str:
        values = asdict(self)
        values |= {"block_size": f"b{self.block_size}", "head_dim": f"d{self.head_dim}", "group": f"g{self.group}"}
        return ":".join(str(values[field.name]) for field in fields(self))

    @classmethod
    def parse(cls, text: str) -> CheckCell:
        """The cell of a name.

        :raises ConfigError: the text is no cell's name.
        """
        parts: list[str] = text.split(":")
        names = [field.name for field in fields(cls)]
        values: dict[str, str | int] = dict(zip(names, parts, strict=False))
        try:
            if len(parts) != len(names):
                raise ValueError
            for name in ("block_size", "head_dim", "group"):
                values[name] = int(str(values[name])[1:])
                if int(values[name]) < 1:
                    raise ValueError
            return cls(**values)  # type: ignore[arg-type]
        except ValueError:
            raise ConfigError("--cell", "a cell's name as `headway check` prints it", repr(text)) from None

    def plain(self, check: str, about: str = "-", **changes: str | int) -> CheckCell:
        """The same layer and cache in another check."""
        return replace(self, check=check, about=about, **changes)  # type: ignore[arg-type]

    @property
    def axes(self) -> dict[str, str | int]:
        """Value of the phase and of each axis."""
        return {axis: getattr(self, axis) for axis in ("phase", *AXES)}


@cache
def make_spec(
    head_dim: int, group: int, dtype: str, feature: str, device: torch.device, claims: frozenset[str], v_head_dim: int = 0
) -> AttentionSpec:
    """The layer of a cell. claims: Capabilities.features of the backend, for "together"; v_head_dim: 0, as `feature` has it."""
    kv_heads = 1 if feature == "latent" else NUM_KV_HEADS
    heads = group * kv_heads
    features: dict[str, object] = {
        "sliding_window": WINDOW,
        "softcap": SOFTCAP,
        "alibi_slopes": tuple(2.0 ** -(1 + 8 * head / heads) for head in range(heads)),
        "sinks": tuple((0.3, -1.0, 2.0, 0.0, 1.0)[head % 5] for head in range(heads)),
    }
    shorter = v_head_dim or max(8, head_dim // 9 * 8)
    inside = v_head_dim or 1 << ((head_dim - 1).bit_length() - 1)  # as in DeepSeek's 576 and 512: what follows is the key's alone
    changes: dict[str, dict[str, object]] = {
        "none": {},
        "window": {"sliding_window": WINDOW},
        "window-1": {"sliding_window": 1},
        "softcap": {"softcap": SOFTCAP},
        "alibi": {"alibi_slopes": features["alibi_slopes"]},
        "sinks": {"sinks": features["sinks"]},
        "together": {name: features[name] for name in sorted(claims & features.keys())},
        "fp8": {"kv_dtype": torch.float8_e4m3fn, "k_scale": FP8_SCALES[0], "v_scale": FP8_SCALES[1]},
        "v_head_dim": {"v_head_dim": shorter},
        "latent": {"v_head_dim": inside, "value_in_key": True},
    }
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=SCALE * head_dim**-0.5,
        dtype=DTYPES.get(dtype, torch.float64),
        device=device,
        **changes[feature],  # type: ignore[arg-type]
    )


class Finding(Exception):
    """The backend, layout or option under test breaks the contract."""

    def __init__(self, what: str, *, guess: str = "", error: float | None = None, tolerance: float | None = None) -> None:
        """what: what was expected and what came; guess: what it looks like; error: relative, against the declared tolerance."""
        super().__init__(what)
        self.guess = guess
        self.error = error
        self.tolerance = tolerance


class Skipped(Exception):
    """The check does not apply: the backend refuses, rightly, or the machine has not what it needs."""

    @classmethod
    def refused(cls, support: Support) -> Skipped:
        """A skip with the backend's own reasons."""
        return cls(str(support).removeprefix("no: "))
