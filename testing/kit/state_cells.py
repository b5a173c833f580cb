"""A cell of the kit for layers with a state: one check at one kind, layout, element types, sizes and convolution."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.spec import DTYPES
from headway.core.contract.state import CONV, GATED_DELTA, KDA, LIGHTNING, MAMBA1, STATE_KINDS, StateSpec
from headway.core.oracle.cells import CheckCell
from headway.core.oracle.state_cases import MILD, REGIMES

STATE_AXES = ("kind", "layout", "dtype", "state_dtype", "heads", "key_dim", "value_dim", "conv")
"""What makes up a layer and its states, in the order of a cell's name."""
HEADS = ("4/2", "3/3", "10/2")
"""Heads of the state and key heads; of `mamba1`, whose heads are channels, eight times as many."""
CONVOLUTIONS = ("silu", "bare", "short", "none")
"""silu: four taps, a bias and silu; bare: three taps, a bias and nothing after them; short: two taps and silu without a bias;
none: no convolution."""
WORK = ("edges", "many", "long")
"""edges: a few sequences whose lengths lie around the ends of chunks; many: sequences by the dozen; long: more than a thousand
tokens."""
_PREFIX = {"heads": "h", "key_dim": "k", "value_dim": "v"}
_MARK = "states"
_CHANNELS = 24


@dataclass(frozen=True, slots=True)
class StateCell:
    """One check at one value of each axis."""

    check: str
    phase: str = "-"
    """A name out of PHASES, or "-" where the check runs several."""
    kind: str = GATED_DELTA
    layout: str = "key_value"
    dtype: str = "float32"
    state_dtype: str = "float32"
    heads: str = HEADS[0]
    """Out of HEADS."""
    key_dim: int = 16
    value_dim: int = 16
    conv: str = CONVOLUTIONS[0]
    """Out of CONVOLUTIONS."""
    decays: str = MILD
    """Out of REGIMES."""
    work: str = WORK[0]
    """Out of WORK."""
    about: str = "-"
    """The axis of a refusal."""
    layer: ClassVar[str] = ""
    """No layer of a model's: these are the kit's."""

    def __str__(self) -> str:
        values = [f"{_PREFIX.get(field.name, '')}{getattr(self, field.name)}" for field in fields(self)]
        return ":".join([values[0], _MARK, *values[1:]])

    @classmethod
    def parse(cls, text: str) -> StateCell:
        """Read a cell's name.

        :raises ConfigError: the text is no cell's name.
        """
        parts = text.split(":")
        del parts[1]
        names = [field.name for field in fields(cls)]
        try:
            values: dict[str, str | int] = dict(zip(names, parts, strict=True))
            for name, prefix in _PREFIX.items():
                values[name] = str(values[name]).removeprefix(prefix)
            for name in ("key_dim", "value_dim"):
                values[name] = int(values[name])
            cell = cls(**values)  # type: ignore[arg-type]
            known = (
                cell.kind in STATE_KINDS,
                cell.conv in CONVOLUTIONS,
                cell.decays in REGIMES,
                cell.work in WORK,
                cell.key_dim > 0,
                cell.value_dim > 0,
            )
            [int(part) for part in cell.heads.split("/", 1)]
            if not all(known):
                raise ValueError
            return cell
        except ValueError:
            raise ConfigError("--cell", "a cell's name as `headway check` prints it", repr(text)) from None

    def plain(self, check: str, about: str = "-", **changes: str | int) -> StateCell:
        """Return the same layer in another check."""
        return replace(self, check=check, about=about, **changes)  # type: ignore[arg-type]

    @property
    def axes(self) -> dict[str, str | int]:
        """Fields of a result: the kind stands for the feature, key_dim for the head's size."""
        heads, _, key_heads = self.heads.partition("/")
        return {
            "phase": self.phase,
            "layout": self.layout,
            "dtype": self.dtype,
            "feature": self.kind,
            "head_dim": self.key_dim,
            "group": int(heads) // int(key_heads),
            "work": self.work,
            "state": f"{self.state_dtype} states, {self.value_dim} values, convolution {self.conv}, {self.decays} decays",
        }


def parse_cell(text: str) -> CheckCell | StateCell:
    """Read the name of a cell of either kit.

    :raises ConfigError: the text is no cell's name.
    """
    return StateCell.parse(text) if text.split(":")[1:2] == [_MARK] else CheckCell.parse(text)


def make_state_spec(cell: StateCell, device: torch.device) -> StateSpec:
    """Build the layer of a cell."""
    heads, key_heads = (int(part) for part in cell.heads.split("/"))
    key_dim, value_dim = cell.key_dim, cell.value_dim
    if cell.kind == MAMBA1:
        heads, key_heads, value_dim = 8 * heads, 1, 1
    channels = heads if cell.kind == MAMBA1 else 2 * key_heads * key_dim + heads * value_dim
    if cell.kind == CONV:
        heads = key_heads = key_dim = value_dim = 0
        channels = _CHANNELS
    normed = cell.kind in (GATED_DELTA, KDA) and (cell.conv != "none" or heads != key_heads)  # the engine's helper may convolve
    return StateSpec(
        cell.kind,
        heads,
        key_heads,
        key_dim,
        value_dim,
        conv_channels=0 if cell.conv == "none" else channels,
        conv_width={"silu": 4, "bare": 3, "short": 2, "none": 0}[cell.conv],
        activation="none" if cell.conv == "bare" else "silu",
        dtype=DTYPES.get(cell.dtype, torch.float64),
        device=device,
        state_dtype=DTYPES.get(cell.state_dtype, torch.float64),
        scale=1.37 * key_dim**-0.5 if cell.kind in (GATED_DELTA, KDA, LIGHTNING) else 1.0,
        qk_norm=normed,
        beta_scale=2.0 if normed and cell.conv != "silu" else 1.0,
        dt_limits=(0.05, 2.0) if cell.conv == "bare" else (0.0, float("inf")),
    )
