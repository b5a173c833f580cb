"""Times of a layer that was never measured, derived from tables of other layers or of another kind of GPU.

A backend's time at a point is modelled as a launch floor plus a bound multiplied by an inefficiency. The bound is the longer of
bytes / bandwidth and operations / rate. The two limits are the best values of the table; the floor of a backend in a phase
is its shortest time less the bound there. The inefficiency follows from the measured time. It is looked up where the other layer
has the same number of programs on each SM and the same lengths, because these decide how well a kernel uses a GPU. Between
measured points it is interpolated as times are; beyond the outermost points it is constant, and the time grows as the bound does.

The times from several tables are combined in a weighted geometric mean. A table's weight halves with each unit of `distance`.
Launch times of the host depend on the kernel and the phase: the median over all points removes what other processes delayed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headway.core.contract.errors import ConfigError
from headway.core.select.costs import Leaf, Surface
from headway.core.speculation.proposers import is_captured
from headway.core.system.files import read_text
from headway.tuning.measure.points import PHASES, Point
from headway.tuning.table.compare import differences
from headway.tuning.table.files import Prior, TableError, read_table, shipped, stored_tables
from headway.tuning.table.noise import MOST_DRIFT, launch_us, mark_ties
from headway.tuning.table.schema import Cell, CrossoverTable, DeviceIdentity, DeviceRates, PriorRecord, SpecRecord, slug

_MOST_TABLES = 3
"""Maximum number of tables of this kind of GPU, and of other kinds, from which one layer's times are derived."""
_UNITS = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "v_head_dim": 1}
"""Size -> distance between layers per factor of two. A head size changes a kernel's tiles, a number of heads does not: with these
units, times derived for each H200 table from the others lose least."""
_FEATURE = 2
"""Distance between layers per difference in dtype, cache dtype, window, soft-cap, slopes and sinks."""
_BEYOND = 8
"""Distance per factor of two by which query rows of verification are more than a table's: a kernel may need another tile."""
_REACH = 3
"""Distance beyond the nearest table at which a table's weight, an eighth, is left out."""
_TILE = 128
"""Query rows of a prompt's tile. A tile reads the keys in the windows of all its queries."""
_Axes = tuple[float, ...]
_Key = tuple[str, str, str | None, int | None]
"""(kernel, phase, layout, block size)."""


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


def near_tables(
    device: DeviceIdentity, record: SpecRecord, kernels: Collection[str] | None = None, *, elsewhere: bool = False
) -> list[tuple[Path, CrossoverTable]]:
    """Return the tables from which a layer's times can be derived, nearest first; empty if there are none.

    Tables of this kind of GPU come first. A table that was measured on this machine replaces the shipped one of its layer.
    kernels: names of the kernels that need times. elsewhere: True to add tables of other kinds of GPUs that contain the GPU's
    rates, if one of `kernels` is in no table of this kind. Tables of GPUs with the same compute capability then come first.
    """
    ranked: list[tuple[bool, float, int, Path]] = []
    for number, path in enumerate([*stored_tables(), *shipped()]):
        if named := re.match(r"(.*)-attention-(\d+)-(\d+)-(\d+)-", path.name):
            sizes = dict(zip(_UNITS, map(int, named.groups()[1:]), strict=False))
            ranked.append((named[1] != slug(device.name), distance(record.model_copy(update=sizes), record), number, path))
    found: dict[str, tuple[tuple[bool, bool, float], Path, CrossoverTable]] = {}
    known: set[str] = set()
    for away, *_, path in sorted(ranked):
        if path.name in found or (away and (not elsewhere or (known and known >= set(kernels or ())))):
            continue
        if sum(key[0] is away for key, *_ in found.values()) == _MOST_TABLES or (table := _usable(path, record)) is None:
            continue
        there = table.device
        if away == (there.name == device.name) or (away and (table.rates is None or there.type != device.type)):
            continue
        key = away, there.compute_capability != device.compute_capability, distance(table.attention, record)
        found[path.name] = key, path, table
        known |= set() if away else {each.name for each in table.kernels if each.usable}
    return [each[1:] for each in sorted(found.values(), key=lambda each: each[0])]


def _usable(path: Path, record: SpecRecord) -> CrossoverTable | None:
    """Return a table with measured times from which times for a layer can be derived, else None."""
    try:
        if '"source": "derived"' in read_text(path):  # its times are no evidence, and reading it would take as long as deriving
            return None
        table = read_table(path)
    except (TableError, OSError, UnicodeDecodeError):  # reported when the table is needed for its own layer
        return None
    timed = {cell.phase for cell in table.cells if cell.source == "measured" and cell.median_us is not None}
    wanted = set(PHASES[1:2] if record.dense else PHASES)
    fits = table.level == "kernel" and not table.cut_short and is_similar(table.attention, record)
    return table if fits and wanted <= timed else None


def is_similar(known: SpecRecord, wanted: SpecRecord) -> bool:
    """Return whether times of one layer can be derived from times of another: both use tensor cores or neither does, both or
    neither have values inside the keys, both are causal or neither is, and neither has an attention rule. A dense layer has only
    prefill, as all layers have."""
    kinds = [(layer.dtype == "float32", layer.value_in_key, layer.causal) for layer in (known, wanted)]
    return kinds[0] == kinds[1] and (wanted.dense or not known.dense) and known.rule is wanted.rule is None


def distance(one: SpecRecord, other: SpecRecord) -> float:
    """Return how far two layers are from each other, see `_UNITS` and `_FEATURE`. 0 if their times are the same."""
    pairs = ((getattr(one, name) or one.head_dim, getattr(other, name) or other.head_dim) for name in _UNITS)
    far = (unit * abs(math.log2(a / b)) for unit, (a, b) in zip(_UNITS.values(), pairs, strict=True))
    return math.fsum(far) + _FEATURE * sum(a != b for a, b in zip(one.key[-6:], other.key[-6:], strict=True))


def derived_prior(
    device: DeviceIdentity,
    record: SpecRecord,
    wanted: Sequence[Point],
    owners: Mapping[str, tuple[str, ...]],
    measure_rates: Callable[[], DeviceRates] | None,
    *,
    kernels: Collection[str] | None = None,
) -> Prior | None:
    """Return a prior for a layer without a table, or None if no table has the times of a similar layer.

    wanted: points of the table. owners: as in `differences`. measure_rates: function that measures the rates of this device,
    called if times are another GPU's. None means that nothing may be measured, so only tables of this kind of GPU count.
    kernels: names of the kernels that can run here. None means all in the tables of this kind of GPU.
    """
    found = near_tables(device, record, kernels, elsewhere=measure_rates is not None)
    if not found:
        return None
    rates = next((table.rates for _, table in found if table.rates and table.device.name == device.name), None)
    if rates is None and measure_rates is not None and any(table.device.name != device.name for _, table in found):
        rates = measure_rates()
    sources = [(table, limits_between(table, device, rates)) for _, table in found]
    table, (path, nearest) = derive(sources, record, wanted, kernels), found[0]
    assert table.prior is not None
    reasons = differences(nearest, device, owners=owners)
    table.prior.differs += [f"{reason.what}: {reason.need} there, {reason.got} here" for reason in reasons]
    return Prior(path, table, tuple(table.prior.differs))


def derive(
    sources: Sequence[tuple[CrossoverTable, Limits]],
    record: SpecRecord,
    wanted: Sequence[Point],
    names: Collection[str] | None = None,
) -> CrossoverTable:
    """Return a table for a layer with times derived from the times of other layers or GPUs.

    sources: tables, nearest first, and the limits of this GPU divided by those of the table's GPU. A kernel's times come from
    the tables of the first GPU that has the kernel. wanted: points of the table; the points that refine the grid of the first
    source are added. names: kernels to include; None means all. A kernel gets no time at points around which it has none.
    """
    nearest, limits = sources[0]
    known = {point.key: point for point in wanted}
    phases = {point.phase for point in wanted}
    usable: dict[str, list[_Model]] = {}
    for model in (built := [_Model(each, record, phases) for each in sources]):
        for name in model.kernels if names is None else filter(names.__contains__, model.kernels):
            if not usable.get(name) or usable[name][0].table.device.name == model.table.device.name:
                usable.setdefault(name, []).append(model)
    usable = {name: [each for each in group if each.exact] or group for name, group in usable.items()}
    models: dict[_Key, list[_Model]] = {}
    for name, group in usable.items():
        for key in dict.fromkeys(key for each in group for key in each.cells if key[0] == name):
            models[key] = [each for each in group if key in each.cells]
    cells = [cell for key, group in models.items() for each in group for _, cell, _ in each.cells[key]]
    replaying, launches = {cell.kernel for cell in cells if cell.graph}, launch_us(cells)
    between = {point.key: point for found in built[0].cells.values() for point, cell, _ in found if cell.between}
    layer, made = _Layer(record), []
    for point in (known | between | known).values():
        decodes = point.phase == "decode" or (point.phase == "verify" and is_captured(point.batch, point.query_len))
        place = {name: getattr(point, name) for name in ("phase", "case", "batch", "query_len", "kv_len")}
        place |= {"status": "ok", "source": "derived", "between": point.key not in known}
        rivals = []
        for (kernel, phase, layout, block_size), group in models.items():
            key, graph = (kernel, phase, layout, block_size), decodes and kernel in replaying
            if phase == point.phase and (times := _times(layer.work(point), layer.axes(point), key, group)) is not None:
                times |= {"host_us": None if graph else launches.get((kernel, phase)), "graph": graph}
                rivals.append(Cell(**place | times | {"kernel": kernel, "layout": layout, "block_size": block_size}))
        made += mark_ties(rivals)
    prior = PriorRecord(
        device=nearest.device,
        origin=nearest.origin,
        date=nearest.date,
        layer=str(nearest.spec),
        limits={} if limits == SAME else {name: round(ratio, 4) for name, ratio in vars(limits).items()},
        sources={name: [f"{each.table.title}, {each.table.date[:10]}" for each in group] for name, group in usable.items()},
    )
    kernels = {each.name: each for table, _ in reversed(sources) for each in table.kernels if each.name in usable}
    kernels = {each.name: each for each in nearest.kernels} | kernels
    changes = {"spec": record, "cells": made, "prior": prior, "complete": {cell.point for cell in made} >= set(known)}
    return nearest.model_copy(update=changes | {"kernels": list(kernels.values())})


def _steady_us(cell: Cell) -> float | None:
    """Return a cell's time. If other work disturbed some of its rounds, the time of the fastest rounds is used."""
    return cell.p20_us if cell.median_us is not None and (cell.drift or 0.0) > MOST_DRIFT else cell.median_us


def _padded(rows: float) -> int:
    """Return the rows of the tile that a decode kernel uses for a number of query rows: a power of two, at least 16."""
    return int(max(16, 2 ** math.ceil(math.log2(rows))))


class _Layer:
    """Work of an attention layer, and the coordinates that decide how well a kernel uses a GPU."""

    def __init__(self, record: SpecRecord) -> None:
        self.spec = spec = record.to_spec(torch.device("cpu"))
        self._wide = spec if spec.sliding_window is None else replace(spec, sliding_window=spec.sliding_window + _TILE - 1)
        self._works: dict[tuple[str, int, int], tuple[float, float]] = {}

    def work(self, point: Point) -> tuple[float, float]:
        """Return the bytes read and written, and the operations of a step."""
        place = point.phase, point.query_len, point.kv_len
        if place not in self._works:
            spec = self.spec if point.phase in ("decode", "verify") else self._wide
            work = replace(point, batch=1).work(spec)
            row = spec.num_heads * (spec.head_dim + spec.v_head_dim) * spec.dtype.itemsize
            written = 0 if point.phase == "prefill" else work.write_bytes
            self._works[place] = work.kv_bytes + work.num_tokens * row + written, work.flops
        moved, operations = self._works[place]
        return point.batch * moved, point.batch * operations

    def axes(self, point: Point) -> _Axes:
        """Return the coordinates of a point: programs, rows of queries, visible keys. Decode splits work over KV heads, whose
        query heads share a tile; prompts split it over query heads."""
        spec = self.spec
        if point.phase == "prefill":
            return point.batch * spec.num_heads, point.query_len
        keys = min(point.kv_len, (spec.sliding_window or point.kv_len) + point.query_len - 1)
        if point.phase == "extend":
            return point.query_len, point.batch * spec.num_heads, keys
        return point.query_len * (spec.group_size if point.phase == "verify" else 1), point.batch * spec.num_kv_heads, keys


class _Model:
    """Inefficiencies of all kernels of a table, and the bounds of the GPU for which times are derived."""

    def __init__(self, source: tuple[CrossoverTable, Limits], record: SpecRecord, phases: Collection[str]) -> None:
        table, limits = source
        self.table = table
        self._limits = limits
        self.kernels = [each.name for each in table.kernels if each.usable]
        self._distance = distance(table.attention, record)
        self.exact = self._distance == 0 and limits == SAME
        self._layer = _Layer(table.attention)
        self.cells: dict[_Key, list[tuple[Point, Cell, float | None]]] = {}
        self._surfaces: dict[_Key, tuple[Surface, list[float]]] = {}
        self._bytes_per_us = self._operations_per_us = 0.0
        shortest: dict[tuple[str, str], tuple[float, Point]] = {}
        for cell in table.cells:
            if cell.phase not in phases or cell.kernel not in self.kernels:
                continue
            point = Point(cell.phase, cell.batch, cell.query_len, cell.kv_len)
            us, key = _steady_us(cell), (cell.kernel, cell.phase)
            self.cells.setdefault((*key, cell.layout, cell.block_size), []).append((point, cell, us))
            if us is not None:
                moved, operations = self._layer.work(point)
                self._bytes_per_us = max(self._bytes_per_us, moved / us)
                self._operations_per_us = max(self._operations_per_us, operations / us)
                shortest[key] = min(shortest.get(key, (us, point)), (us, point), key=lambda each: each[0])
        self.cells = {key: cells for key, cells in self.cells.items() if any(us for _, _, us in cells)}
        self._floors = {key: us - self._bound(self._layer.work(point), SAME) for key, (us, point) in shortest.items()}

    def _bound(self, work: tuple[float, float], limits: Limits) -> float:
        """Return the shortest time in microseconds that the limits allow, without a launch."""
        return max(work[0] / (self._bytes_per_us * limits.copy), work[1] / (self._operations_per_us * limits.gemm))

    def _surface(self, key: _Key) -> tuple[Surface, list[float]]:
        """Return the logarithms of a kernel's inefficiency and plan time, and the values on their first axis."""
        if key not in self._surfaces:
            found: tuple[dict[Any, Leaf], dict[Any, Leaf]] = {}, {}
            for point, cell, us in self.cells[key]:
                bound = self._bound(self._layer.work(point), SAME)
                lost = math.inf if us is None else math.log(max(us - self._floors[key[:2]], _LEAST * us) / bound)
                found[cell.between][self._layer.axes(point)] = lost, math.log(max(cell.plan_us or 0.0, 1e-3))
            self._surfaces[key] = Surface(*found), sorted({axes[0] for axes in found[0] or found[1]})
        return self._surfaces[key]

    def far(self, key: _Key, axes: _Axes) -> float:
        """Return the distance of a kernel's times from those at a point of the wanted layer. axes: the point's coordinates."""
        if key[1] != "verify":
            return self._distance
        most = self._surface(key)[1][-1]
        return self._distance + _BEYOND * max(0.0, math.log2(_padded(axes[0]) / _padded(most)))

    def at(self, key: _Key, axes: _Axes, work: tuple[float, float]) -> tuple[float, float]:
        """Return the logarithms of a kernel's device and plan time at a point, infinite without times around it."""
        surface, lines = self._surface(key)
        place = list(axes)
        if key[1] == "verify":  # a tile's time depends little on how many of its rows are used
            place[0] = next((line for line in lines if line >= axes[0] and _padded(line) == _padded(axes[0])), axes[0])
        place[key[1] != "prefill"] /= self._limits.sms
        lost, plan = surface.at(place)
        us = self._floors[key[:2]] / self._limits.clock + self._bound(work, self._limits) * math.exp(lost)
        return math.log(us), plan


def _times(work: tuple[float, float], axes: _Axes, key: _Key, models: Sequence[_Model]) -> dict[str, Any] | None:
    """Return the times of a kernel's cell, or None if no model has a time around the point. work, axes: a point's values."""
    far = [model.far(key, axes) for model in models]
    near = [(2.0**-away, model.at(key, axes, work)) for away, model in zip(far, models, strict=True) if away < min(far) + _REACH]
    found = [(weight, times) for weight, times in near if math.isfinite(times[0])]
    if not found:
        return None
    total = sum(weight for weight, _ in found)
    us, plan_us = (math.exp(sum(weight * times[at] for weight, times in found) / total) for at in (0, 1))
    return {"median_us": us, "p20_us": us, "p80_us": us, "plan_us": plan_us}
