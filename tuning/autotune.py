"""The times behind `auto`: a table file that is there and fits, or a short measurement at the first start, kept for the next."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.core.contract.compiled import CompileAhead
from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.contract.latent import Expanded, phases_of
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.select.costs import CostTable
from headway.core.select.request import parse_backend_request
from headway.core.system.files import clean
from headway.registry import Registry
from headway.tuning import store
from headway.tuning.apart import TOOK_ALONG, all_found_apart, guests, measure_apart
from headway.tuning.budget import MOST_COMPILING
from headway.tuning.compare import differences, remarks
from headway.tuning.convert import to_costs
from headway.tuning.device import identify_device
from headway.tuning.files import TableError, read_table
from headway.tuning.identity import DeviceIdentity
from headway.tuning.points import CORE_PHASE, Point, grid
from headway.tuning.run import CrossoverOptions, run_kernel_level
from headway.tuning.schema import CrossoverTable, SpecRecord, points
from headway.tuning.selftest import owners
from headway.tuning.timing import Turns

log = logging.getLogger("headway")

DEFAULT_BUDGET = {"cpu": 10.0, "cuda": 20.0}
"""Seconds a kind of layer, by device type."""
_TURNS = Turns(rounds=2, round_ms=2.0, host_seconds=0.005, long_ms=5.0)
_NEEDED_LEVEL = 1
"""Of the grid: a table that was cut short before these points is completed at the next start."""


@dataclass(frozen=True)
class TableRequest:
    """What a user said about the times behind `auto`."""

    path: Path | None = None
    """A table to obey; it is used or refused, never measured again. None: the one that is kept for this machine."""
    budget: float | None = None
    """Seconds a kind of layer to measure where there is none; 0: never. None: $HEADWAY_AUTOTUNE_BUDGET, else DEFAULT_BUDGET."""

    def seconds(self, device: torch.device) -> float:
        """The budget that holds on a device.

        :raises ConfigError: the environment variable is no number, or below 0.
        """
        text = os.environ.get("HEADWAY_AUTOTUNE_BUDGET", "").strip()
        if self.budget is not None or not text:
            return self.budget if self.budget is not None else DEFAULT_BUDGET.get(device.type, 20.0)
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not seconds >= 0:  # NaN is refused, too
            raise ConfigError("HEADWAY_AUTOTUNE_BUDGET", "seconds, 0 for none", repr(text))
        return seconds


def costs_for(
    specs: Iterable[AttentionSpec],
    registry: Registry,
    attn_backend: str,
    request: TableRequest,
    compile_ahead: CompileAhead | None = None,
    expanded: Expanded | None = None,
) -> dict[AttentionSpec, CostTable] | None:
    """Measured times of each distinct layer; None where `auto` has to take the rank order, and the log says why.

    compile_ahead: what the kernels of a first measuring are compiled in; None: one by one. expanded: of the latent layers among
    them, whose two specs are measured in the phases that ask for them.

    A faulty or stale table never ends a start: it is logged with the line or the difference, and left alone or measured again.

    :raises ConfigError: a budget that is no number, or a file that was named and is not there.
    """
    if request.path is not None and not request.path.exists():
        raise ConfigError(
            "crossover_table", "a table file", f"{request.path}, which does not exist", "headway bench crossover makes one"
        )
    if "auto" not in parse_backend_request(attn_backend).values():
        return None
    expanded = expanded or {}
    kinds = list(dict.fromkeys([*specs, *expanded.values()]))
    available = [name for name in registry.backends if registry.availability(name)]
    if request.path is None and len(available) < 2:
        return None  # nothing to choose from
    device = identify_device(kinds[0].device)
    clean(store.folder())
    found: dict[AttentionSpec, CostTable] = {}
    for spec in kinds:
        costs = _costs(spec, phases_of(spec, expanded), registry, available, device, request, compile_ahead)
        if costs is None:
            return None
        found[spec] = costs
    return found


def _costs(
    spec: AttentionSpec,
    phases: Collection[Phase],
    registry: Registry,
    available: Sequence[str],
    device: DeviceIdentity,
    request: TableRequest,
    compile_ahead: CompileAhead | None,
) -> CostTable | None:
    record = SpecRecord.of(spec)
    path = request.path or store.table_path(device, record)
    table = _fitting(path, device, record, registry, available, explicit=request.path is not None)
    wanted = [point for point in grid(spec.device.type) if CORE_PHASE[point.phase] in phases]
    budget = request.seconds(spec.device) if request.path is None else 0.0
    if table is not None and table.cut_short and budget <= 0:
        log.warning("crossover table %s was cut short, and is used as it is; headway bench crossover --resume goes on", path)
    if request.path is None and (table is None or table.cut_short or not _suffices(table, wanted)):
        table = _measure(spec, wanted, registry, available, path, budget, table, compile_ahead) if budget > 0 else table
    return None if table is None else to_costs(table, phases=phases)


def _suffices(table: CrossoverTable, wanted: Sequence[Point]) -> bool:
    """Whether a table holds the points that the choice cannot do without: the corners and middles of the grid."""
    measured = {cell.point for cell in table.cells}
    needed = [point for point in wanted if point.level <= _NEEDED_LEVEL]
    return table.complete or all((point.phase, point.case) in measured for point in needed)


def _fitting(
    path: Path, device: DeviceIdentity, spec: SpecRecord, registry: Registry, available: Sequence[str], explicit: bool
) -> CrossoverTable | None:
    """The table at a path if it can be used here; why not is logged."""
    if not explicit and not os.path.exists(path):  # a folder that may not be read counts as empty
        return None
    try:
        table = read_table(path)
    except TableError as error:
        log.warning("crossover table not used: %s", error)
        return None
    found = differences(table, device, spec, owners(registry))
    reasons = [f"{reason.what}: the table has {reason.need}, here is {reason.got}" for reason in found]
    if table.level != "kernel":
        reasons.append("level: auto needs a table of level kernel")
    new = [name for name in available if name not in {record.name for record in table.backends if record.available}]
    if new and not explicit:  # a backend installed since then: the table would never let it be chosen
        reasons.append(f"backends: {', '.join(new)} not in it")
    if reasons:
        log.warning("crossover table %s not used: %s", path, "; ".join(reasons))
        return None
    for line in remarks(table, device, available):
        log.info("crossover table %s: %s", path, line)
    return table


def _measure(
    spec: AttentionSpec,
    wanted: Sequence[Point],
    registry: Registry,
    available: Sequence[str],
    path: Path,
    budget: float,
    old: CrossoverTable | None,
    compile_ahead: CompileAhead | None,
) -> CrossoverTable | None:
    """A table measured in `budget` seconds over the layouts that the backends prefer.

    old: one that fits and lacks points; it is completed, and kept where that cannot be.
    """
    started = time.perf_counter()
    lacks = "was cut short" if old is not None and old.cut_short else "lacks others"
    what = "measuring" if old is None else f"the crossover table has {len(points(old.cells))} points and {lacks}: measuring"
    compiling = (
        f", and up to {MOST_COMPILING * budget:.0f} s more where kernels must be compiled" if spec.device.type == "cuda" else ""
    )
    text = "auto: %s the attention backends for %s, about %.0f s%s, once; --no-autotune does without"
    log.warning(text, what, spec, budget, compiling)
    options = CrossoverOptions(
        spec=spec,
        backends=available,
        layouts=_preferred(spec, registry, available),
        grid=wanted,
        turns=_TURNS,
        budget=budget,
        output=path,
        resume=old is not None,
        interruptible=False,
        excluded={record.name: record.reason for record in old.backends if record.reason.startswith(TOOK_ALONG)} if old else {},
        command=f"autotune {budget:g} s",
        compile_ahead=compile_ahead,
    )
    try:
        apart = guests(registry, available) and all_found_apart(registry, available)
        table = (measure_apart if apart else run_kernel_level)(options, registry)
    except (HeadwayError, OSError) as error:
        instead = "rank order instead" if old is None else "the old one is used as it is"
        log.warning("auto: no crossover table could be measured, %s: %s", instead, error)
        return old
    for record in table.backends:
        if not record.usable:
            log.warning("auto leaves out %s: %s", record.name, record.reason)
    log.info("auto: %d cells in %.1f s, kept in %s", len(table.cells), time.perf_counter() - started, path)
    if not _suffices(table, wanted):
        log.info("auto: the time did not suffice for every point that the choice needs; the next start goes on with the others")
    return table


def _preferred(spec: AttentionSpec, registry: Registry, available: Sequence[str]) -> list[str]:
    """The registry's first layout, a built-in, and the first that each backend names: a plugin's own has it to compare with.

    Those, that is, in which the layer's keys and values can lie.
    """
    claimed = [registry.backend(name).capabilities.layouts or () for name in available]
    every = [[info.layout for info in registry.layouts.values()], *claimed]
    fitting = [[layout for layout in layouts if layout.has_value is not spec.value_in_key] for layouts in every]
    return list(dict.fromkeys(layouts[0].name for layouts in fitting if layouts))


def describe(costs: Mapping[AttentionSpec, CostTable] | None) -> str:
    """Where the times come from, in words."""
    return "no crossover table" if not costs else next(iter(costs.values())).source
