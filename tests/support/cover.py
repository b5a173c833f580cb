"""Which cells of the conformance grid are run: what each backend claims, thinned out to a covering set.

The full product of a backend that serves everything has some 40,000 cells. Faults of kernels sit in one value or in a pair (a
block size with a head_dim, a window with a phase), so every pair of values that the backend claims is in some cell: 50 to 60
cells a backend. On a CPU, where no kernel is compiled for a cell, every (phase, layout, feature) is there too.
HEADWAY_GRID_STRENGTH=1 asks for single values only, 3 for every triple. A value that is not claimed gets one cell that must be
refused; odd values (PROBES) are either refused or right.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

import numpy
import torch

from conformance_cases import FEATURES, HEAD_DIMS, PHASES, make_spec
from headway.bench.conformance.report import AXES
from headway.core.contract.metadata import Phase
from headway.registry import Registry, create_registry

GROUPS = (4, 1, 7, 8)
BLOCK_SIZES = frozenset({8, 16, 64, 128, 256})
DTYPES = ("bfloat16", "float16", "float32")
Value = str | int
UNKNOWN_DTYPE = "float64"
"""Claimed by nobody: must be refused by all."""

PROBES: dict[str, tuple[Value, ...]] = {"block_size": (24,), "head_dim": (72, 512), "group": (16,)}
"""Odd values tried once, with everything else plain."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One backend at one value of each axis."""

    backend: str
    phase: str
    layout: str
    block_size: int
    head_dim: int
    group: int
    dtype: str
    feature: str
    about: str = ""
    """The axis whose value must be refused; empty where the answer must be right."""

    def __str__(self) -> str:
        parts = [self.backend, self.phase, self.layout, f"b{self.block_size}", f"d{self.head_dim}", f"g{self.group}"]
        return "-".join([*parts, self.dtype, self.feature.replace(" ", "_")])

    @property
    def axes(self) -> dict[str, Value]:
        """Value of each axis."""
        return {axis: getattr(self, axis) for axis in AXES}


@cache
def registry() -> Registry:
    """The built-ins alone, whatever else is installed."""
    return create_registry(load_entry_points=False)


@cache
def backends(device_type: str) -> tuple[str, ...]:
    """Backends that are available and serve anything at all on this type of device."""
    found = registry()
    able = [name for name in found.backends if found.availability(name)]
    return tuple(name for name in able if device_type in found.backend(name).capabilities.devices)


def chosen(device_type: str) -> tuple[str, ...]:
    """Those of `backends` this process is to test: all, or those HEADWAY_GRID_ONLY names, with commas between."""
    only = os.environ.get("HEADWAY_GRID_ONLY")
    return tuple(name for name in backends(device_type) if not only or name in only.split(","))


@cache
def values(name: str) -> dict[str, tuple[Value, ...]]:
    """What each axis may be for a backend, claimed or not; the plainest first."""
    claims = registry().backend(name).capabilities
    features = [feature for feature in FEATURES if feature != "together" or len(claims.features) > 1]
    blocks = sorted({*BLOCK_SIZES, claims.block_multiple if claims.block_multiple > 1 else 8})
    return {
        "phase": tuple(PHASES),
        "layout": tuple(registry().layouts),
        "block_size": tuple(blocks),
        "head_dim": HEAD_DIMS,
        "group": GROUPS,
        "dtype": (*DTYPES, UNKNOWN_DTYPE),
        "feature": tuple(features),
    }


@cache
def claimed(name: str, device_type: str) -> numpy.ndarray:
    """int [cells, axes]: indices into `values` of every combination that the backend accepts."""
    found, axes = registry(), values(name)
    claims, accepted = found.backend(name).capabilities, []
    for d, head_dim in enumerate(axes["head_dim"]):
        for g, group in enumerate(axes["group"]):
            for t, dtype in enumerate(axes["dtype"]):
                for f, feature in enumerate(axes["feature"]):
                    spec = make_spec(int(head_dim), int(group), str(dtype), str(feature), device_type, claims.features)
                    for y, layout in enumerate(axes["layout"]):
                        for b, block in enumerate(axes["block_size"]):
                            place = found.layouts[str(layout)].layout, int(block)
                            serves = {phase for phase in Phase if found.supports(name, spec, *place, phase)}
                            cells = [p for p, phase in enumerate(axes["phase"]) if PHASES[str(phase)] <= serves]
                            accepted += [(p, y, b, d, g, t, f) for p in cells]
    return numpy.array(accepted, dtype=numpy.int64).reshape(-1, len(AXES))


def cover(rows: numpy.ndarray, sets: list[tuple[int, ...]]) -> list[int]:
    """Numbers of few rows that hold every combination that occurs in the columns of each set: greedy, in a fixed order."""
    if not len(rows):
        return []
    order = numpy.random.default_rng(0).permutation(len(rows))
    sizes = rows.max(axis=0) + 1
    codes, left = [], []
    for columns in sets:
        code = numpy.zeros(len(rows), dtype=numpy.int64)
        for column in columns:
            code = code * int(sizes[column]) + rows[:, column]
        codes.append(code[order])
        missing = numpy.zeros(int(code.max()) + 1, dtype=numpy.int8)
        missing[code] = 1
        left.append(missing)
    chosen = []
    while any(missing.any() for missing in left):
        gains = sum(missing[code] for missing, code in zip(left, codes, strict=True))
        best = int(numpy.argmax(gains))
        chosen.append(int(order[best]))
        for missing, code in zip(left, codes, strict=True):
            missing[code[best]] = 0
    return chosen


def strength() -> int:
    """How many axes are crossed with each other."""
    return int(os.environ.get("HEADWAY_GRID_STRENGTH", "2"))


@cache
def answers(name: str, device_type: str) -> tuple[Cell, ...]:
    """Cells whose answer must be right."""
    rows = claimed(name, device_type)
    if not len(rows):
        return ()
    sets = list(combinations(range(len(AXES)), strength()))
    if device_type == "cpu" and strength() == 2:
        sets.append(tuple(AXES.index(axis) for axis in ("phase", "layout", "feature")))
    odd = [cell for cell, axis in _probes(name, device_type) if accepts(cell, device_type)]
    return (*(_cell(name, rows[number]) for number in sorted(cover(rows, sets))), *odd)


def accepts(cell: Cell, device_type: str) -> bool:
    """Whether the backend claims the cell."""
    claims = registry().backend(cell.backend).capabilities.features
    spec = make_spec(cell.head_dim, cell.group, cell.dtype, cell.feature, device_type, claims)
    layout = registry().layouts[cell.layout].layout
    return all(registry().supports(cell.backend, spec, layout, cell.block_size, phase) for phase in PHASES[cell.phase])


def _probes(name: str, device_type: str) -> list[tuple[Cell, str]]:
    """Cells with one odd value, and its axis."""
    plain = first(name, device_type)
    if plain is None:
        return []
    return [(replace(plain, **{axis: value}), axis) for axis, odd in PROBES.items() for value in odd]


def refusals(name: str, device_type: str) -> tuple[Cell, ...]:
    """One cell a phase for every value that is accepted nowhere in it, everything else being accepted."""
    everything, cells = claimed(name, device_type), []
    for phase in range(len(PHASES)):
        rows = everything[everything[:, 0] == phase]
        if not len(rows) and len(everything):
            cells.append(_cell(name, _changed(everything[0], 0, phase), about="phase"))
        for column, axis in list(enumerate(AXES))[1:] if len(rows) else []:
            for number in range(len(values(name)[axis])):
                if not (rows[:, column] == number).any():
                    cells.append(_cell(name, _changed(rows[0], column, number), about=axis))
    odd = [replace(cell, about=axis) for cell, axis in _probes(name, device_type) if not accepts(cell, device_type)]
    return (*cells, *odd)


def first(name: str, device_type: str, **wanted: Value) -> Cell | None:
    """The plainest accepted cell with these values; None where there is none."""
    rows = claimed(name, device_type)
    for axis, value in wanted.items():
        options = values(name)[axis]
        rows = rows[rows[:, AXES.index(axis)] == (options.index(value) if value in options else -1)]
    return _cell(name, rows[0]) if len(rows) else None


def each_value(name: str, device_type: str, phase: str) -> tuple[Cell, ...]:
    """Cells of one phase in which every accepted value of every other axis occurs."""
    rows = claimed(name, device_type)
    rows = rows[rows[:, 0] == values(name)["phase"].index(phase)]
    return tuple(_cell(name, rows[number]) for number in cover(rows, [(column,) for column in range(len(AXES))]))


def _changed(row: numpy.ndarray, column: int, number: int) -> numpy.ndarray:
    changed = row.copy()
    changed[column] = number
    return changed


def _cell(name: str, row: numpy.ndarray, about: str = "") -> Cell:
    picked = {axis: values(name)[axis][int(number)] for axis, number in zip(AXES, row, strict=True)}
    return Cell(backend=name, about=about, **picked)


def device_of(device_type: str) -> torch.device:
    """The device cells of this type run on."""
    return torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
