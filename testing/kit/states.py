"""State backends in the kit: the cells of a backend, its layers and its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, cycle, islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from headway.core.contract.kernel import GraphLevel
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
from headway.core.oracle.cells import PHASES, KitCell, one_of
from headway.core.oracle.state_cases import MILD, REGIMES, StateCase, make_state_case, run_states
from headway.testing.kit.stage import Grid
from headway.testing.kit.subject import Subject

HEADS = ("4/2", "3/3", "10/2")
"""(number of state heads)/(number of key heads). `mamba1`, whose heads are channels, has eight times as many heads."""
CONVOLUTIONS = ("silu", "bare", "short", "none")
"""Kinds of convolution. silu: four taps, bias and SiLU. bare: three taps and bias, without activation. short: two taps and SiLU,
without bias. none: no convolution."""
WORK = ("edges", "many", "long")
"""Kinds of steps. edges: a few sequences with lengths near chunk boundaries. many: dozens of sequences. long: over a thousand
tokens."""
_CHANNELS = 24


@dataclass(frozen=True, slots=True)
class StateCell(KitCell):
    """Cell of a state backend: a check, a phase and the axes of a layer."""

    mark: ClassVar = "states"
    prefixes: ClassVar = {"heads": "h", "key_dim": "k", "value_dim": "v"}
    known: ClassVar = {
        "kind": one_of(STATE_KINDS),
        "heads": r"[1-9]\d*/[1-9]\d*",
        "conv": one_of(CONVOLUTIONS),
        "decays": one_of(REGIMES),
        "work": one_of(WORK),
    }
    phase: str = "-"
    """Name in PHASES, or "-" if the check runs several phases."""
    kind: str = GATED_DELTA
    layout: str = "key_value"
    dtype: str = "float32"
    state_dtype: str = "float32"
    heads: str = HEADS[0]
    """Numbers of state heads and key heads, one of HEADS."""
    key_dim: int = 16
    value_dim: int = 16
    conv: str = CONVOLUTIONS[0]
    """Kind of convolution, one of CONVOLUTIONS."""
    decays: str = MILD
    """Regime of the decays, one of REGIMES."""
    work: str = WORK[0]
    """Kind of step, one of WORK."""
    about: str = "-"
    """Axis whose value must be refused; "-" for checks other than `refuse`."""

    @property
    def axes(self) -> dict[str, Any]:
        """Fields of the cell's result. The kind is stored as the feature, key_dim as the head dimension."""
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


def make_state_spec(cell: StateCell, device: torch.device) -> StateSpec:
    """Return the spec of a cell's layer."""
    heads, key_heads = (int(part) for part in cell.heads.split("/"))
    key_dim, value_dim = cell.key_dim, cell.value_dim
    if cell.kind == MAMBA1:
        heads, key_heads, value_dim = 8 * heads, 1, 1
    channels = heads if cell.kind == MAMBA1 else 2 * key_heads * key_dim + heads * value_dim
    if cell.kind == CONV:
        heads = key_heads = key_dim = value_dim = 0
        channels = _CHANNELS
    # another backend may run the convolution
    normed = cell.kind in (GATED_DELTA, KDA) and (cell.conv != "none" or heads != key_heads)
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
"""Key and value dimensions to test by default. They fill a tile, are smaller than a tile, or end with a partial tile."""
_MOST_DIMS = 4
ODD_LAYOUT = StateLayout("kit_odd", ("slot", "value", "head", "key"), ("slot", "time", "channel"))
"""Unregistered layout, for backends that accept every layout, and for refusals."""


Lens = list[tuple[int, int]]
LENS: dict[str, dict[str, Lens]] = {
    "edges": {
        "prefill": [(1, 1), (150, 150), (7, 7), (64, 64), (65, 65), (2, 2), (33, 33), (128, 128)],
        "extend": [(130, 140), (9, 10), (64, 200), (20, 21), (63, 300), (1, 9), (2, 5), (3, 40)],
        "decode": [(1, 2), (1, 30), (1, 9), (1, 70), (1, 5)],
        "verify": [(4, 9), (4, 5), (4, 30), (4, 12)],
        "ragged": [(1, 4), (8, 20), (3, 30), (5, 6), (1, 2)],
        "mixed": [(70, 70), (9, 12), (64, 100), (1, 1), (1, 7), (4, 9), (1, 30)],
    },
    "many": {
        "prefill": [(1 + n % 9, 1 + n % 9) for n in range(70)],
        "decode": [(1, 2 + n) for n in range(120)],
        "ragged": [(1 + n % 4, 9 + n) for n in range(70)],
    },
    "long": {
        "prefill": [(1090, 1090), (3, 3)],
        "extend": [(520, 3000), (513, 514), (2, 5)],
    },
}
"""Kind of step -> phase -> (query_len, kv_len) of each sequence of the step."""
_SCANS = ("prefill", "extend")
_PADDED = ("decode", "verify", "ragged", "mixed")
MOST_DRAFTS = 7
_RECURRENT = tuple(kind for kind in STATE_KINDS if kind != CONV)
_UNCLAIMED: dict[str, tuple[str | int, tuple[str, ...]]] = {
    "dtype": ("float64", STATE_KINDS),
    "state_dtype": ("float64", _RECURRENT),
    "key_dim": (24, _RECURRENT),
    "value_dim": (24, tuple(kind for kind in _RECURRENT if kind != MAMBA1)),
    "conv": (CONVOLUTIONS[0], _RECURRENT),
}
"""Axis -> (value that a backend need not claim, kinds whose layers have the axis)."""
StateRow = tuple[StateCell, frozenset[str]]


class StateStage(Grid[Subject, StateCell]):
    """State backend under test, with its layers and steps."""

    cell = StateCell
    phases = tuple(PHASES)

    @property
    def claims(self) -> StateCapabilities:
        """Capabilities of the subject."""
        claims: StateCapabilities = self.subject.claims
        return claims

    @cached_property
    def layouts(self) -> dict[str, StateLayout]:
        """All registered layouts and ODD_LAYOUT, keyed by name."""
        return {**self.subject.registry.states.layouts, ODD_LAYOUT.name: ODD_LAYOUT}

    def spec(self, cell: StateCell) -> StateSpec:
        """Return the spec of a cell's layer."""
        return make_state_spec(cell, self.subject.device)

    def make(self, cell: StateCell) -> StateBackend:
        """Return an instance of the subject for a cell's layer."""
        return make_state_backend(self.subject.backend, self.spec(cell), self.layouts[cell.layout])

    def supports(self, cell: StateCell, phase: Phase) -> Support:
        """Return the subject's support for a cell's layer in a phase."""
        return self.subject.registry.states.supports(self.subject.name, self.spec(cell), self.layouts[cell.layout], phase)

    def answers(self, cell: StateCell) -> list[Support]:
        """Return the subject's support in the cell's phase or, if the cell has no phase, in each claimed phase."""
        asked = [phase for phase in Phase if (phase in self.claims.phases if cell.phase == "-" else cell.phase == phase.value)]
        return [self.supports(cell, phase) for phase in asked]

    def served(self, cell: StateCell) -> frozenset[str]:
        """Return the phases (names in PHASES) in which the subject supports a cell's layer."""
        served = {phase for phase in Phase if self.supports(cell, phase)}
        return frozenset(name for name, needed in PHASES.items() if needed <= served)

    @cached_property
    def values(self) -> dict[str, tuple[str | int, ...]]:
        """Values of each axis that the subject claims, the simplest first."""
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

    def whole(self, cell: StateCell) -> StateCell | None:
        """Return the cell in which each axis that its kind does not use has the simplest value; None if no such layer exists."""
        plain = {axis: values[0] for axis, values in self.values.items()}
        if cell.kind == CONV:
            if cell.conv == "none":
                return None
            return cell.having({axis: plain[axis] for axis in ("state_dtype", "heads", "key_dim", "value_dim")})
        return cell.having({"value_dim": plain["value_dim"]}) if cell.kind == MAMBA1 else cell

    def refusal_of(self, kind: str) -> str:
        """Return the reasons why the simplest layer of a kind is refused in every phase."""
        plain = {axis: values[0] for axis, values in self.values.items()} | {"kind": kind}
        cell = self.whole(self.having(plain))
        assert cell is not None
        return "; ".join(dict.fromkeys(str(self.supports(cell, phase)).removeprefix("no: ") for phase in Phase))

    def cells(self, quick: bool = False) -> list[StateCell]:
        """Return the cells of the subject. quick: True to cover each value with each kind instead of each pair of values, and
        each layer only in every second phase."""
        found = [StateCell("claims")]
        plain = self.widest()
        if plain is None:
            return found
        found += self._refusals(plain[0])
        found += [plain[0].plain("tolerance", dtype=str(dtype)) for dtype in self.values["dtype"]]
        # Square states of each layout: only with these, a transposed state raises no error.
        squares = [row for row in self.rows if row[0] == plain[0].plain("answer", layout=row[0].layout)]
        for number, (cell, phases) in enumerate([*squares, *self._covering(quick)]):
            tried = self.phases[number % 2 :: 2] if quick and number >= len(squares) else self.phases
            found += [cell.plain("answer", phase=phase) for phase in tried if phase in phases]
        found += self._at_work(quick)
        graphs = {"decode": GraphLevel.DECODE, "verify": GraphLevel.UNIFORM}
        captured = [phase for phase, level in graphs.items() if self.subject.backend.graph_level >= level]
        for cell, phases in (row for kind in STATE_KINDS if (row := self.widest(kind=kind)) is not None):
            found.append(cell.plain("session"))
            found += [cell.plain("graph", phase=phase) for phase in captured if phase in phases]
            scans = [phase for phase in ("extend", "ragged") if phase in phases]
            found += [cell.plain(check, phase=phase) for check in ("repeat", "sync") for phase in scans]
        found += [plain[0].plain("memory")]
        return list(dict.fromkeys(found))

    def _covering(self, quick: bool) -> list[StateRow]:
        """Return a small set of layers that contains, in every phase, each pair of accepted values. quick: True to cover only
        pairs of a kind and a value.

        The layers of a kind alternate between the regimes of decays.
        """
        dealt = Counter[str]()
        found = []
        for cell, phases in self.cover([pair for pair in combinations(self.values, 2) if not quick or pair[0] == "kind"]):
            dealt[cell.kind] += 1
            found.append((cell.plain("answer", decays=REGIMES[dealt[cell.kind] % len(REGIMES)]), phases))
        return found

    def _at_work(self, quick: bool) -> list[StateCell]:
        """Return cells with many sequences and cells with long sequences, to test kernels that run in several parts. Each kind is
        tested with its largest states or, if `quick`, with its simplest layer."""

        def size(row: StateRow) -> tuple[int, int]:
            return len(row[1]), 0 if quick else row[0].key_dim * row[0].value_dim

        of_kinds = [[row for row in self.rows if row[0].kind == kind] for kind in STATE_KINDS]
        return [
            cell.plain("answer", phase=phase, work=work)
            for cell, phases in [max(rows, key=size) for rows in of_kinds if rows]
            for work, lens in LENS.items()
            for phase in lens
            if work != WORK[0] and phase in phases
        ]

    def _refusals(self, plain: StateCell) -> list[StateCell]:
        """Return the `refuse` cells: one unclaimed value of each axis, in a layer that is otherwise accepted."""
        claims, found = self.claims, []
        claimed: dict[str, object] = {
            "dtype": torch.float64 in claims.dtypes,
            "state_dtype": torch.float64 in claims.state_dtypes,
            "key_dim": claims.key_dims is None or 24 in claims.key_dims,
            "value_dim": claims.value_dims is None or 24 in claims.value_dims,
            "conv": claims.convolution,
        }
        for axis, (value, kinds) in _UNCLAIMED.items():
            fitting = [row for row in self.rows if row[0].kind in kinds and not claimed[axis]]
            if fitting:
                cell, _ = max(fitting, key=lambda row: len(row[1]))
                found.append(cell.plain("refuse", axis).having({axis: value}))
        for kind in (kind for kind in STATE_KINDS if kind not in claims.kinds):
            asked = plain.plain("refuse", "kind", kind=kind, conv=CONVOLUTIONS[0] if kind == CONV else plain.conv)
            found += [each] if (each := self.whole(asked)) is not None else []
        other = next((name for name, layout in self.layouts.items() if claims.layouts and layout not in claims.layouts), "")
        found += [plain.plain("refuse", "layout", layout=other)] if other else []
        found += [plain.plain("refuse", "phase", phase=phase.value) for phase in Phase if phase not in claims.phases]
        return found

    def case(self, cell: StateCell, *, padding: int = 2, seed: int = 0, **how: Any) -> StateCase:
        """Return a step of a cell. padding: number of padding rows, which are added only if the engine pads steps of this phase.
        how: arguments of `make_state_case`."""
        most = self.claims.max_draft_tokens + 1
        wanted = LENS[cell.work][cell.phase]
        decodes = cell.phase not in _SCANS
        lens = [(min(new, most), kv) if decodes and kv > new and new <= MOST_DRAFTS + 1 else (new, kv) for new, kv in wanted]
        rows, seed = (padding if cell.phase in _PADDED else 0), seed + len(str(cell))
        spec, layout = self.spec(cell), self.layouts[cell.layout]
        return make_state_case(lens, spec, layout, padding_rows=rows, seed=seed, regime=cell.decays, decodes=decodes, **how)

    def once(self, cell: StateCell) -> Callable[[], list[Tensor]]:
        """Return a function that runs a cell's step in new memory, and returns the output and all states."""
        backend = self.make(cell)

        def run() -> list[Tensor]:
            case = self.case(cell)
            out, step = run_states(backend, case), case.metadata.step
            real = torch.repeat_interleave(case.metadata.slots_cpu >= 0, torch.tensor(step.query_lens)).to(out.device)
            return [out[real], *case.cache.tensors.values()]

        return run

    def many(self, cell: StateCell) -> Callable[[int], None]:
        """Return a function that runs N steps, in rotation over all supported phases."""
        backend = self.make(cell)
        cases = cycle([self.case(cell.plain("memory", phase=phase)) for phase in sorted(self.served(cell))])

        def steps(count: int) -> None:
            for case in islice(cases, count):
                with torch.inference_mode():
                    run_states(backend, case)

        return steps

    def launches(self, cell: StateCell) -> tuple[str, Callable[[], object]]:
        """Return the names of the backend's calls, and a function that runs the parts of a step that has already been planned."""
        backend, case = self.make(cell), self.case(cell)
        out = run_states(backend, case).contiguous()  # compiles
        n, metadata, calls = case.metadata.step.num_prefill_tokens, case.metadata, []
        if metadata.prefill is not None:
            calls.append((backend.scan, slice(0, n), backend.plan(metadata.prefill)))
        if metadata.decode is not None:
            calls.append((backend.step, slice(n, None), backend.plan(metadata.decode)))

        def launch() -> None:
            for call, rows, plan in calls:
                call(case.x[rows], [gate[rows] for gate in case.gates], case.parameters, case.cache, plan, out[rows])

        return "scan and step", launch


def _some(sizes: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return a few of the sizes, including the smallest and the largest."""
    known = sorted(set(sizes or ()))
    return tuple(dict.fromkeys((*known[: _MOST_DIMS - 1], *known[-1:])))
