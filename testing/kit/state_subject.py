"""What is tested of layers with states: a backend on one device, the layers that it serves, and the names of cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import combinations, product
from types import ModuleType
from typing import Any, ClassVar

import numpy
import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import DTYPE_NAMES, DTYPES
from headway.core.contract.state import (
    CONV,
    GATED_DELTA,
    KDA,
    LIGHTNING,
    MAMBA1,
    STATE_KINDS,
    StateBackend,
    StateCapabilities,
    StateLayout,
    StateSpec,
    make_state_backend,
)
from headway.core.contract.support import Support
from headway.core.oracle.cells import PHASES, CheckCell
from headway.core.oracle.state_cases import MILD, REGIMES
from headway.registry import Registry, create_registry
from headway.registry.plugin_sources import ClassPlugin, StateClassPlugin, has_hooks
from headway.testing.kit.covering import greedy

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
            values: dict[str, Any] = dict(zip(names, parts, strict=True))
            for name, prefix in _PREFIX.items():
                values[name] = str(values[name]).removeprefix(prefix)
            for name in ("key_dim", "value_dim"):
                values[name] = int(values[name])
            cell = cls(**values)
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

    def plain(self, check: str, about: str = "-", **changes: Any) -> StateCell:
        """Return the same layer in another check."""
        return replace(self, check=check, about=about, **changes)

    def having(self, values: Mapping[str, Any]) -> StateCell:
        """Return the same check at other values of some axes."""
        return replace(self, **values)

    @property
    def axes(self) -> dict[str, Any]:
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


_KEY_DIMS, _VALUE_DIMS = (16, 7, 72), (16, 5, 136)
"""A whole tile; less than one; and a part of one after others."""
_MOST_DIMS = 4
ODD_LAYOUT = StateLayout("kit_odd", ("slot", "value", "head", "key"), ("slot", "time", "channel"))
"""A layout that nobody has registered, for backends that take every one, and for refusals."""


@dataclass(frozen=True)
class StateSubject:
    """A registered backend for layers with a state on one device."""

    registry: Registry
    name: str
    device: torch.device
    file: str = ""
    """See `Subject.file`."""

    @property
    def plugin(self) -> tuple[str, str, str] | None:
        """See `Subject.plugin`; a plugin that is named by what it registers is not looked for."""
        return (self.name, self.file, self.file) if self.file else None

    @property
    def backend(self) -> type[StateBackend]:
        """The backend's class."""
        return self.registry.states.backend(self.name)

    @property
    def claims(self) -> StateCapabilities:
        """What the subject says it serves."""
        return self.backend.capabilities

    @cached_property
    def layouts(self) -> dict[str, StateLayout]:
        """Every registered layout by name, and one more."""
        return {**self.registry.states.layouts, ODD_LAYOUT.name: ODD_LAYOUT}

    def spec(self, cell: StateCell) -> StateSpec:
        """Build the layer of a cell."""
        return make_state_spec(cell, self.device)

    def make(self, cell: StateCell) -> StateBackend:
        """Make an instance for a cell's layer."""
        return make_state_backend(self.backend, self.spec(cell), self.layouts[cell.layout])

    def supports(self, cell: StateCell, phase: Phase) -> Support:
        """Ask whether the subject serves a cell's layer in a phase."""
        return self.registry.states.supports(self.name, self.spec(cell), self.layouts[cell.layout], phase)

    def phases(self, cell: StateCell) -> frozenset[str]:
        """Ask in which of PHASES the subject serves a cell's layer."""
        served = {phase for phase in Phase if self.supports(cell, phase)}
        return frozenset(name for name, needed in PHASES.items() if needed <= served)

    @cached_property
    def values(self) -> dict[str, tuple[str | int, ...]]:
        """The values of each axis that the subject claims, the plainest first."""
        claims = self.claims
        claimed = claims.layouts or tuple(self.layouts.values())
        return {
            "kind": tuple(kind for kind in STATE_KINDS if kind in claims.kinds),
            "layout": tuple(name for name, layout in self.layouts.items() if layout in claimed),
            "dtype": tuple(DTYPE_NAMES[dtype] for dtype in claims.dtypes if dtype in DTYPE_NAMES),
            "state_dtype": tuple(DTYPE_NAMES[dtype] for dtype in claims.state_dtypes if dtype in DTYPE_NAMES) or ("float32",),
            "heads": HEADS,
            "key_dim": _some(claims.key_dims) or _KEY_DIMS,
            "value_dim": _some(claims.value_dims) or _VALUE_DIMS,
            "conv": CONVOLUTIONS,
        }

    @cached_property
    def rows(self) -> list[tuple[StateCell, frozenset[str]]]:
        """Every layer of these values that is accepted, and in which phases."""
        found: dict[StateCell, frozenset[str]] = {}
        for chosen in product(*self.values.values()):
            cell = self.whole(StateCell("answer").having(dict(zip(STATE_AXES, chosen, strict=True))))
            if cell is not None and cell not in found:
                found[cell] = self.phases(cell)
        return [(cell, phases) for cell, phases in found.items() if phases]

    def whole(self, cell: StateCell) -> StateCell | None:
        """Return the cell with the axes that its kind has no use for at their plainest; None where there is no such layer."""
        plain = {axis: values[0] for axis, values in self.values.items()}
        if cell.kind == CONV:
            if cell.conv == "none":
                return None
            return cell.having({axis: plain[axis] for axis in ("state_dtype", "heads", "key_dim", "value_dim")})
        return cell.having({"value_dim": plain["value_dim"]}) if cell.kind == MAMBA1 else cell

    def refusal_of(self, kind: str) -> str:
        """Return the reasons why the plainest layer of a kind is refused in every phase."""
        plain = {axis: values[0] for axis, values in self.values.items()} | {"kind": kind}
        cell = self.whole(StateCell("answer").having(plain))
        assert cell is not None
        return "; ".join(dict.fromkeys(str(self.supports(cell, phase)).removeprefix("no: ") for phase in Phase))

    def cover(self, quick: bool) -> list[tuple[StateCell, frozenset[str]]]:
        """Return few layers that hold, in every phase, each pair of accepted values; quick: each pair of a kind and a value.

        The layers of a kind are dealt the regimes in turn.
        """
        if not self.rows:
            return []
        numbers = {axis: {value: n for n, value in enumerate(self.values[axis])} for axis in STATE_AXES}
        order = numpy.random.default_rng(0).permutation(len(self.rows))
        rows = [self.rows[number] for number in order]
        table = numpy.array([[numbers[axis][getattr(cell, axis)] for axis in STATE_AXES] for cell, _ in rows])
        served = numpy.array([[phase in phases for phase in PHASES] for _, phases in rows])
        pairs: list[tuple[int, ...]] = list(combinations(range(len(STATE_AXES)), 2))
        pairs = [pair for pair in pairs if not quick or STATE_AXES[pair[0]] == "kind"]
        found, dealt = [], Counter[str]()
        for row in greedy(table, served, pairs):
            cell, phases = rows[row]
            dealt[cell.kind] += 1
            found.append((cell.plain("answer", decays=REGIMES[dealt[cell.kind] % len(REGIMES)]), phases))
        return found

    def largest(self, kind: str) -> tuple[StateCell, frozenset[str]] | None:
        """Return the layer of a kind with the largest states, of those that are served in the most phases."""
        fitting = [row for row in self.rows if row[0].kind == kind]
        return max(fitting, key=lambda row: (len(row[1]), row[0].key_dim * row[0].value_dim), default=None)

    def plainest(self, *kinds: str) -> tuple[StateCell, frozenset[str]] | None:
        """Return the plainest layer of one of some kinds, or of all, that is served in the most phases."""
        fitting = [row for row in self.rows if not kinds or row[0].kind in kinds]
        return max(fitting, key=lambda row: len(row[1]), default=None)


def state_subject_of(
    found: type[StateBackend],
    device: torch.device,
    target: str = "a class",
    module: ModuleType | None = None,
    plugins: tuple[str, ...] = (),
) -> StateSubject:
    """Register a class under its own name or, where that is taken, under its target's; and the layouts it brings."""
    registry, name = registered(found, StateClassPlugin, target, module, plugins)
    return StateSubject(registry, name, device)


def registered(
    found: Any, plugin: type[ClassPlugin | StateClassPlugin], target: str, module: ModuleType | None, plugins: Sequence[str]
) -> tuple[Registry, str]:
    """Return a registry with a class, and its name there: see `state_subject_of`. plugin: of classes of its kind."""
    beside: list[object] = [*plugins, *([module] if module is not None and has_hooks(module) else [])]
    registry = create_registry(beside, load_entry_points=module is not None)
    states = plugin is StateClassPlugin
    taken = found.name in (registry.states.entries if states else registry.backends)
    if taken and (registry.states.backend if states else registry.backend)(found.name) is found:
        return registry, found.name
    name = f"{found.name}-{found.__name__}" if taken else found.name
    loaded = type(found.__name__, (found,), {"name": name, "__module__": found.__module__}) if taken else found
    layouts: Any = registry.states.layouts if states else registry.layouts
    registry.add_plugin(f"check {name}", target, plugin(loaded, layouts))
    return registry, name


def _some(sizes: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return a few of many sizes, the smallest and the largest among them."""
    known = sorted(set(sizes or ()))
    return tuple(dict.fromkeys((*known[: _MOST_DIMS - 1], *known[-1:])))
