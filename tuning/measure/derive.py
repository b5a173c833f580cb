"""Times of a layer that was never measured, derived from the table of another layer or another kind of GPU.

A backend's time at a point is modelled as a launch floor plus a bound multiplied by an inefficiency. The bound is the longer of
bytes / bandwidth and operations / rate. The two limits are the best values of the table; the floor of a backend in a phase
is its shortest time less the bound there. The inefficiency follows from the measured time. It is looked up where the other layer
has the same number of programs on each SM and the same lengths, because these decide how well a kernel uses a GPU. Between
measured points it is interpolated as times are; beyond the outermost points it is constant, and the time grows as the bound does.

Launch and planning times of the host depend on the point and not on the layer's sizes. They are taken over unchanged.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.spec import AttentionSpec
from headway.core.select.costs import Leaf, Surface
from headway.core.speculation.proposers import is_captured
from headway.tuning.measure.points import PHASES, Point
from headway.tuning.table.compare import differences
from headway.tuning.table.files import Prior, TableError, read_table, shipped, stored_tables
from headway.tuning.table.noise import MOST_DRIFT, mark_ties
from headway.tuning.table.schema import (
    Cell,
    CrossoverTable,
    DeviceIdentity,
    DeviceRates,
    PhaseName,
    PriorRecord,
    SpecRecord,
)

log = logging.getLogger("headway")
_SIZES = ("num_heads", "num_kv_heads", "head_dim", "v_head_dim")
"""Fields in which the layer of a table may differ. Other differences, such as a window or a dtype, need other kernels."""
_PROVED = ("head_dim", "v_head_dim")
"""Fields in which a start accepts no difference. Times derived for another head size were never compared with measured times."""
_Axes = tuple[float, ...]
_Surfaces = dict[tuple[str, PhaseName, str | None, int | None], tuple[Surface, Surface]]
"""(kernel, phase, layout, block size) -> logarithms of the inefficiency, and of plan time and host time."""


@dataclass(frozen=True)
class Limits:
    """Limits of a GPU divided by the limits of the GPU that measured a table."""

    copy: float = 1.0
    """Ratio of the rates of a large copy."""
    gemm: float = 1.0
    """Ratio of the rates of a large GEMM."""
    clock: float = 1.0
    """Ratio of the maximum SM clocks, with which the launch floor scales."""
    sms: float = 1.0
    """Ratio of the numbers of SMs."""


SAME = Limits()
_LEAST = 1e-3
"""Smallest share of a time that is not launch floor, so that its logarithm is finite."""


def limits_between(there: CrossoverTable, here: DeviceIdentity, rates: DeviceRates | None) -> Limits:
    """Return the limits of a GPU divided by the limits of the GPU that measured a table; all are 1 if both are of one kind.

    rates: measured rates of the GPU. :raises ConfigError: if the GPUs differ, and the rates of one of them are unknown.
    """
    if here.name == there.device.name:
        return SAME
    if rates is None or there.rates is None:
        unknown = here.name if rates is None else there.device.name
        need = "the rates of both GPUs, as in a table of headway bench crossover"
        raise ConfigError(f"times of {there.device.name} for {here.name}", need, f"no rates of {unknown}")
    pairs = ((here.clock_mhz, there.device.clock_mhz), (here.sm_count, there.device.sm_count))
    clock, sms = (mine / theirs if mine and theirs else 1.0 for mine, theirs in pairs)
    return Limits(rates.copy_gbps / there.rates.copy_gbps, rates.matrix_tflops / there.rates.matrix_tflops, clock, sms)


def nearest_table(device: DeviceIdentity, record: SpecRecord, elsewhere: bool) -> tuple[Path, CrossoverTable] | None:
    """Return the table from which a layer's times can be derived, or None if there is none.

    Tables of this kind of device come first, then those with the same compute capability; among them, the table whose numbers of
    heads are closest. A table that was measured on this machine comes before a shipped one. elsewhere: True to accept shipped
    tables of other kinds of GPUs, if they contain the GPU's measured rates.
    """
    found: list[tuple[tuple[bool, bool, float, int], Path, CrossoverTable]] = []
    for number, path in enumerate([*stored_tables(), *shipped()]):
        if (table := _usable(path, record)) is None:
            continue
        here, known = table.device.name == device.name, table.attention
        if not here and not (elsewhere and table.rates is not None and table.device.type == device.type):
            continue
        same_kind = table.device.compute_capability == device.compute_capability
        found.append(((not here, not same_kind, _far(known, record), number), path, table))
    return min(found, key=lambda each: each[0])[1:] if found else None


def _usable(path: Path, record: SpecRecord) -> CrossoverTable | None:
    """Return a table with measured times of a layer that differs from `record` only in its numbers of heads, else None."""
    if "-attention-" not in path.name:
        return None
    try:
        table = read_table(path)
    except TableError:  # reported when the table is needed for its own layer
        return None
    timed = {cell.phase for cell in table.cells if cell.source == "measured" and cell.median_us is not None}
    wanted = set(PHASES[1:2] if record.dense else PHASES)
    known = table.attention
    fits = table.level == "kernel" and not table.cut_short and not table.derived and is_similar(known, record)
    fits = fits and all(getattr(known, name) == getattr(record, name) for name in _PROVED)
    return table if fits and wanted <= timed else None


def is_similar(one: SpecRecord, other: SpecRecord) -> bool:
    """Return whether two layers differ at most in sizes, so that times of one can be derived from times of the other."""
    return one.model_copy(update={name: getattr(other, name) for name in _SIZES}).key == other.key


def _far(one: SpecRecord, other: SpecRecord) -> float:
    """Return the distance between the sizes of two layers in octaves, summed over the sizes."""
    return sum(abs(math.log2(max(getattr(one, name), 1) / max(getattr(other, name), 1))) for name in _SIZES)


def derived_prior(
    device: DeviceIdentity,
    record: SpecRecord,
    wanted: Sequence[Point],
    owners: Mapping[str, tuple[str, ...]],
    measure_rates: Callable[[], DeviceRates] | None,
) -> Prior | None:
    """Return a prior for a layer without a table, or None if no table has the times of a similar layer.

    wanted: points of the table. owners: as in `differences`. measure_rates: function that measures the rates of this device,
    called if the times are another GPU's. None means that nothing may be measured, so only tables of this kind of GPU count.
    """
    nearest = nearest_table(device, record, elsewhere=measure_rates is not None)
    if nearest is None:
        return None
    path, source = nearest
    other = measure_rates is not None and source.device.name != device.name
    limits = limits_between(source, device, measure_rates() if other and measure_rates else None)
    table = derive(source, record, wanted, limits=limits)
    assert table.prior is not None
    reasons = differences(source, device, owners=owners)
    table.prior.differs += [f"{reason.what}: {reason.need} there, {reason.got} here" for reason in reasons]
    return Prior(path, table, tuple(table.prior.differs))


def derive(
    source: CrossoverTable,
    record: SpecRecord,
    wanted: Sequence[Point],
    names: Collection[str] | None = None,
    limits: Limits = SAME,
) -> CrossoverTable:
    """Return a table for a layer with times derived from the times of `source`, which may be for another layer or GPU.

    wanted: points of the table; the points that refine the grid of `source` are added. names: kernels to include; None means all
    that `source` could use. A kernel gets no time at points around which it has none in `source`.
    """
    model = _Model(source, record, limits)
    grid = {cell.point for cell in source.cells if not cell.between}
    between = [Point(*place) for place in dict.fromkeys(_place(cell) for cell in source.cells if cell.between)]
    todo = {point.key: point for point in [*wanted, *(point for point in between if point.key not in grid)]}
    known = {point.key for point in wanted}
    usable = [each.name for each in source.kernels if each.usable and (names is None or each.name in names)]
    cells = [cell for key, point in todo.items() for cell in mark_ties(list(model.cells(point, usable, key not in known)))]
    made = PriorRecord(
        device=source.device,
        origin=source.origin,
        date=source.date,
        layer=str(source.spec),
        limits={} if limits == SAME else {name: round(ratio, 4) for name, ratio in vars(limits).items()},
    )
    whole = {cell.point for cell in cells} >= known
    return source.model_copy(update={"spec": record, "cells": cells, "prior": made, "complete": whole})


def _steady_us(cell: Cell) -> float | None:
    """Return a cell's time. If other work disturbed some of its rounds, the time of the fastest rounds is used."""
    return cell.p20_us if cell.median_us is not None and (cell.drift or 0.0) > MOST_DRIFT else cell.median_us


def _place(cell: Cell) -> tuple[PhaseName, int, int, int]:
    return cell.phase, cell.batch, cell.query_len, cell.kv_len


@dataclass(frozen=True)
class _Layer:
    """Work of an attention layer, and the coordinates that decide how well a kernel uses a GPU."""

    spec: AttentionSpec
    sms: float = 1.0
    """Number of SMs, as a ratio to the GPU that measured the table."""

    def work(self, point: Point) -> tuple[float, float]:
        """Return the bytes read and written, and the operations of a step."""
        work, spec = point.work(self.spec), self.spec
        row = spec.num_heads * (spec.head_dim + spec.v_head_dim) * spec.dtype.itemsize
        written = 0 if point.phase == "prefill" else work.write_bytes
        return work.kv_bytes + work.num_tokens * row + written, work.flops

    def axes(self, point: Point) -> _Axes:
        """Return the coordinates of a point. Decode splits work over KV heads, whose query heads share a tile; prompts split it
        over query heads."""
        heads = self.spec.num_kv_heads if point.phase in ("decode", "verify") else self.spec.num_heads
        programs = point.batch * heads / self.sms
        rows = point.query_len * self.spec.num_heads // self.spec.num_kv_heads if point.phase == "verify" else point.query_len
        return (programs, rows) if point.phase == "prefill" else (rows, programs, point.kv_len)


class _Model:
    """Inefficiencies of all kernels of a table, and the bounds of the layer whose times are derived."""

    def __init__(self, source: CrossoverTable, record: SpecRecord, limits: Limits) -> None:
        cpu = torch.device("cpu")
        self._source = source
        self._there = _Layer(source.attention.to_spec(cpu))
        self._here = _Layer(record.to_spec(cpu), limits.sms)
        self._limits = limits
        shortest: dict[tuple[str, PhaseName], tuple[float, tuple[PhaseName, int, int, int]]] = {}
        works: dict[tuple[PhaseName, int, int, int], tuple[float, float]] = {}
        self._bytes_per_us = self._operations_per_us = 0.0
        for cell in source.cells:
            us = _steady_us(cell)
            if us is None or cell.phase not in PHASES:
                continue
            place, key = _place(cell), (cell.kernel, cell.phase)
            moved, operations = works[place] = works.get(place) or self._there.work(Point(*place))
            self._bytes_per_us = max(self._bytes_per_us, moved / us)
            self._operations_per_us = max(self._operations_per_us, operations / us)
            if us < shortest.get(key, (math.inf,))[0]:
                shortest[key] = us, place
        self._works = works
        self._floors = {key: us - self._bound(works[place], SAME) for key, (us, place) in shortest.items()}
        self._replaying = {cell.kernel for cell in source.cells if cell.graph}

    def _bound(self, work: tuple[float, float], limits: Limits) -> float:
        """Return the shortest time in microseconds that the limits allow, without a launch."""
        return max(work[0] / (self._bytes_per_us * limits.copy), work[1] / (self._operations_per_us * limits.gemm))

    @cached_property
    def _surfaces(self) -> _Surfaces:
        groups: dict[tuple[str, PhaseName, str | None, int | None], list[Cell]] = {}
        for cell in self._source.cells:
            if cell.phase in PHASES:
                groups.setdefault((cell.kernel, cell.phase, cell.layout, cell.block_size), []).append(cell)
        return {key: self._surface_pair(cells) for key, cells in groups.items() if any(cell.median_us for cell in cells)}

    def _surface_pair(self, cells: Iterable[Cell]) -> tuple[Surface, Surface]:
        device: tuple[dict[Any, Leaf], dict[Any, Leaf]] = {}, {}
        host: tuple[dict[Any, Leaf], dict[Any, Leaf]] = {}, {}
        for cell in cells:
            place, us = _place(cell), _steady_us(cell)
            point = Point(*place)
            if us is None:
                lost, plan, launch = math.inf, math.inf, math.inf
            else:
                bound = self._bound(self._works[place], SAME)
                lost = math.log(max(us - self._floors[cell.kernel, cell.phase], _LEAST * us) / bound)
                plan, launch = math.log(max(cell.plan_us or 0.0, 1e-3)), math.log(cell.host_us or us)
            device[cell.between][self._there.axes(point)] = (lost,)
            host[cell.between][_host_axes(point)] = plan, launch
        return Surface(*device), Surface(*host)

    def cells(self, point: Point, names: Collection[str], between: bool) -> Iterable[Cell]:
        """Yield the cells of all kernels at a point."""
        work = self._here.work(point)
        for (kernel, phase, layout, block_size), (device, host) in self._surfaces.items():
            if phase != point.phase or kernel not in names:
                continue
            (lost,), (plan, launch) = device.at(self._here.axes(point)), host.at(_host_axes(point))
            if not math.isfinite(lost + plan + launch):
                continue
            us = self._floors[kernel, phase] / self._limits.clock + self._bound(work, self._limits) * math.exp(lost)
            decodes = phase == "decode" or (phase == "verify" and is_captured(point.batch, point.query_len))
            graph = kernel in self._replaying and decodes
            yield Cell(
                phase=phase,
                case=point.case,
                batch=point.batch,
                query_len=point.query_len,
                kv_len=point.kv_len,
                kernel=kernel,
                layout=layout,
                block_size=block_size,
                status="ok",
                graph=graph,
                median_us=us,
                p20_us=us,
                p80_us=us,
                plan_us=math.exp(plan),
                host_us=None if graph else math.exp(launch),
                between=between,
                source="derived",
            )


def _host_axes(point: Point) -> _Axes:
    return (point.batch, point.query_len) if point.phase == "prefill" else (point.query_len, point.batch, point.kv_len)
