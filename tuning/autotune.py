"""The times behind `auto`: a table file that fits, or a short measurement at the first start, which is kept for the next."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.contract.kernel import CompileAhead
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ATTENTION, OperationKind
from headway.core.contract.spec import AttentionSpec
from headway.core.select.backend_request import BackendRequest
from headway.core.select.costs import CostTable
from headway.core.select.layer_specs import LayerSpecs
from headway.core.select.selector import DEFAULT_BLOCK_SIZES
from headway.core.system.files import clean
from headway.core.system.json_files import write_json
from headway.registry import Registry
from headway.tuning.isolated.measure_in_child import CRASHED, HUNG, can_measure_in_child, measure_in_child, third_party_files
from headway.tuning.measure.device import identify_device
from headway.tuning.measure.points import Point, grid
from headway.tuning.measure.prior_check import Extent, adopt, check_points
from headway.tuning.measure.run import BLOCK_SIZES, CrossoverOptions, run_kernel_level
from headway.tuning.measure.self_test import FAILED, owners, plugin_digest
from headway.tuning.measure.timing import MOST_COMPILING, InterleavedTimer, SharedBudget
from headway.tuning.table.compare import differences, remarks
from headway.tuning.table.convert import CORE_PHASE, to_costs
from headway.tuning.table.files import Prior, TableError, find_prior, read_table, table_folder, table_path
from headway.tuning.table.schema import CrossoverTable, DeviceIdentity, SpecRecord, StateTable, points

log = logging.getLogger("headway")

Measure = Callable[[Sequence[Point], float, CrossoverTable | None], CrossoverTable | None]
"""(points, seconds, the table at the path that they are added to, or None for a new one) -> the table; None where nothing could
be measured."""


def prior_for(device: DeviceIdentity, spec: SpecRecord, owners: Mapping[str, tuple[str, str]]) -> Prior | None:
    """The shipped table of a kind of layer on a kind of device; None where there is none that can be read.

    What was other where it was measured is logged. owners: as in `find_prior`.
    """
    try:
        prior = find_prior(device, spec, owners)
    except TableError as error:
        log.warning("shipped table not used: %s", error)
        return None
    if prior is not None:
        differs = f"; it differs in {'; '.join(prior.differs)}" if prior.differs else ""
        log.info("auto: %s: found the %s%s", spec, prior.record().made, differs)
    return prior


def check_prior(
    prior: Prior, wanted: Sequence[Point], available: Collection[str], path: Path, budget: float, measure: Measure
) -> CrossoverTable | None:
    """Measure a few points of a shipped table, take what agrees with them, and measure the rest as far as time allows.

    wanted: all points of the grid. available: the backends that can run here. path: where the table is kept, each time that
    `measure` adds to it, too. budget: seconds.
    """
    asked = check_points(prior.table, wanted, available)
    if not asked:
        log.warning("auto: %s has no times of what can run here: it is not used", prior.path.name)
        return measure(wanted, budget, None)
    text = "auto: checking the shipped table for %s at %d points, some seconds, once; --no-autotune does without"
    log.warning(text, prior.table.spec, len(asked))
    began = time.perf_counter()
    here = measure(asked, budget, None)
    took = time.perf_counter() - began
    if here is None:
        return None
    table = adopt(prior, here, asked, wanted)
    try:
        write_json(table, path)
    except ConfigError as error:
        log.warning("auto: the crossover table is not kept: %s", error)
        return table
    assert table.prior is not None
    for line in table.prior.disagreed:
        log.info("auto: the shipped table is not used around %s", line)
    for line in table.prior.corrected:
        log.info("auto: the shipped table is corrected around %s", line)
    known = {cell.point for cell in table.cells}
    missing = [point for point in wanted if (point.phase, point.case) not in known]
    taken = len({cell.point for cell in table.cells if cell.prior})
    log.info("auto: %d points are the shipped table's, %d were measured here, %d lack", taken, len(known) - taken, len(missing))
    # What is missing of a whole measurement takes its part of the time of one, or all that the check has left.
    left = max(budget * len(missing) / len(wanted), budget - took)
    return measure(missing, left, table) if missing else table


DEFAULT_BUDGET = {"cpu": 3.0, "cuda": 20.0}
"""Seconds of measuring in a start, by device type."""
TIMER = InterleavedTimer(rounds=2, round_ms=2.0, host_seconds=0.005, long_ms=5.0)
_NEEDED_LEVEL = 1
"""Level of the grid up to which points are needed: a table that lacks one of them is completed at the next start."""


@dataclass(frozen=True)
class TableRequest:
    """What a user said about the times behind `auto`."""

    paths: Sequence[Path] = ()
    """Tables to obey, each for the layer and the device that it was measured on; they are used or refused, never measured again.
    Empty: those that are kept for this machine."""
    budget: float | None = None
    """Seconds that a start may measure, all parts together; 0: none. None: $HEADWAY_AUTOTUNE_BUDGET, else DEFAULT_BUDGET."""

    def seconds(self, device: torch.device) -> float:
        """Seconds that a start may measure on a device.

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
    layers: LayerSpecs,
    registry: Registry,
    backend_request: BackendRequest,
    table_request: TableRequest,
    compile_ahead: CompileAhead | None = None,
    budget: SharedBudget | None = None,
) -> dict[AttentionSpec, CostTable] | None:
    """Measured times of each distinct layer; None where `auto` has to take the rank order, and the log says why.

    As `tables_for`, which see.
    """
    tables = tables_for(layers, registry, backend_request, table_request, compile_ahead, budget)
    return None if tables is None else {spec: to_costs(table, phases=layers.phases_of(spec)) for spec, table in tables.items()}


def tables_for(
    layers: LayerSpecs,
    registry: Registry,
    backend_request: BackendRequest,
    table_request: TableRequest,
    compile_ahead: CompileAhead | None = None,
    budget: SharedBudget | None = None,
) -> dict[AttentionSpec, CrossoverTable] | None:
    """The table of each distinct layer; None where `auto` has to take the rank order, and the log says why.

    compile_ahead: what the kernels of a first measuring are compiled in; None: one by one. budget: seconds that are shared with
    other parts of a start, each kind of layer being a part; None: those of the request. Of a latent layer both specs are
    measured, each in the phases that ask for it.

    A faulty or stale table never ends a start: it is logged with the line or the difference, and left alone or measured again.

    :raises ConfigError: a budget that is no number, or a file that was named and is not there.
    """
    for named in table_request.paths:
        if not named.exists():
            found_none = f"{named}, which does not exist"
            raise ConfigError("crossover_table", "a table file", found_none, "headway bench crossover makes one")
    if not backend_request.auto_phases or not layers.cached:
        return None
    available = registry.able(layers.device)
    if not table_request.paths and len(available) < 2:
        return None  # nothing to choose from
    named_tables = [(path, table) for path in table_request.paths if (table := _read(path)) is not None]
    tables = _Tables(registry, available, identify_device(layers.device), table_request, named_tables, compile_ahead)
    if budget is None:
        budget = SharedBudget(0.0 if table_request.paths else table_request.seconds(layers.device), len(layers.counts))
    clean(table_folder())
    found: dict[AttentionSpec, CrossoverTable] = {}
    for spec in layers.counts:
        with budget.part() as seconds:
            table = tables.find(spec, layers.phases_of(spec), seconds)
        if table is None:
            return None
        found[spec] = table
    return found


def mended(
    table: CrossoverTable | StateTable, registry: Registry, available: Sequence[str], kind: OperationKind = ATTENTION
) -> list[str]:
    """Backends that failed in a table, or in some cell of it, and whose plugin has other files now (and the same version)."""
    failed = {record.name for record in table.backends if record.available and record.reason}
    failed |= {cell.backend for cell in table.cells if cell.status in ("error", "incorrect")}
    digests = {name: plugin_digest(registry, name, kind) for name in available if name in failed}
    records = {record.name: record for record in table.backends}
    return [name for name, digest in digests.items() if digest and digest != records[name].digest]


@dataclass(frozen=True)
class _Tables:
    """The tables of one start: the one that was named, or those that are kept for this machine."""

    registry: Registry
    available: Sequence[str]
    """Names of the backends that can run here."""
    device: DeviceIdentity
    request: TableRequest
    named: Sequence[tuple[Path, CrossoverTable]]
    """The tables of the request that can be read."""
    compile_ahead: CompileAhead | None

    def find(self, spec: AttentionSpec, phases: Collection[Phase], budget: float) -> CrossoverTable | None:
        """The table of a kind of layer, measured or completed where needed and the budget allows; None where there is none.

        phases: those in which layers ask for the spec. budget: seconds that may be measured.
        """
        if self.request.paths:
            return self._named(spec)
        path = table_path(self.device, SpecRecord.of(spec))
        table = self._kept(path, spec)
        wanted = [point for point in grid(spec.device.type) if CORE_PHASE[point.phase] in phases]
        repaired = mended(table, self.registry, self.available) if table is not None and budget > 0 else []
        if table is not None and not table.cut_short and not repaired and _suffices(table, wanted, spec.device.type):
            return self._used(path, table)
        if table is None:
            return self._first(spec, wanted, path, budget)
        if repaired:
            text = "crossover table %s: %s failed in it, and its plugin's files are others now: it is measured again"
            log.warning(text, path, ", ".join(repaired))
        if budget > 0:
            _announce(spec, budget, None if repaired else table)
            return self._measure(spec, wanted, path, budget, table, resume=not repaired)
        return self._used(path, table)

    def _first(self, spec: AttentionSpec, wanted: Sequence[Point], path: Path, budget: float) -> CrossoverTable | None:
        """The table of a kind of layer of which nothing is kept: a shipped one that was checked, or one measured in full."""
        prior = prior_for(self.device, SpecRecord.of(spec), owners(self.registry))
        if budget <= 0:
            if prior is None:
                return None
            missed = self._missed(spec, prior.unknown(self.available))
            if missed:
                log.info("auto: the shipped table is not used unchecked: %s not in it", ", ".join(missed))
            return None if missed else prior.unchecked()
        if prior is not None:

            def measure(points: Sequence[Point], seconds: float, known: CrossoverTable | None) -> CrossoverTable | None:
                if known is not None:
                    return self._measure(spec, points, path, seconds, known, resume=True)
                return self._measure(spec, points, path, seconds, None, resume=False, prior=prior)

            return check_prior(prior, wanted, self.available, path, budget, measure)
        _announce(spec, budget, None)
        return self._measure(spec, wanted, path, budget, None, resume=False)

    def _missed(self, spec: AttentionSpec, unknown: Collection[str]) -> list[str]:
        """Which of the backends that a table does not know a start without a table might choose, by rank."""
        ranks = [self.registry.rank(spec, phase, self.available) for phase in Phase]
        known = [next((place for place, name in enumerate(rank) if name not in unknown), len(rank)) for rank in ranks]
        return [name for name in unknown if any(rank.index(name) < first for rank, first in zip(ranks, known, strict=True))]

    def _named(self, spec: AttentionSpec) -> CrossoverTable | None:
        """The first of the tables that the user named that fits a layer; the log says why none does."""
        refused = [(path, table, self._reasons(table, spec)) for path, table in self.named]
        for path, table, reasons in refused:
            if not reasons:
                return self._used(path, table)
        kind = SpecRecord.of(spec).kind
        of_layer = [refusal for refusal in refused if refusal[1].spec.kind == kind]
        for path, _, reasons in of_layer:  # the others are meant for other layers
            log.warning("crossover table %s not used: %s", path, "; ".join(reasons))
        if refused and not of_layer:
            got = " and ".join(f"one for {table.spec}" for _, table, _ in refused)
            log.warning("auto takes the rank order: crossover_table needs a table for %s, got %s", spec, got)
        return None

    def _kept(self, path: Path, spec: AttentionSpec) -> CrossoverTable | None:
        """The table at a path if it can be used here; the log says why not."""
        if not os.path.exists(path):  # a folder that may not be read counts as empty
            return None
        table = _read(path)
        if table is None:
            return None
        reasons = self._reasons(table, spec)
        known = {record.name for record in table.backends if record.available}
        new = [name for name in self.available if name not in known]
        if new:  # a backend installed since then: the table would never let it be chosen
            reasons.append(f"backends: {', '.join(new)} not in it")
        if reasons:
            log.warning("crossover table %s not used: %s", path, "; ".join(reasons))
            return None
        return table

    def _reasons(self, table: CrossoverTable, spec: AttentionSpec) -> list[str]:
        """Why a table's times are not those of a layer here."""
        found = differences(table, self.device, SpecRecord.of(spec), owners(self.registry))
        reasons = [f"{reason.what}: the table has {reason.need}, here is {reason.got}" for reason in found]
        return reasons if table.level == "kernel" else [*reasons, "level: auto needs a table of level kernel"]

    def _used(self, path: Path, table: CrossoverTable) -> CrossoverTable:
        """A table that is used as it is; the log says what is worth knowing of it."""
        self._tell_left_out(table, kept=True)
        for line in remarks(table, self.device, self.available):
            log.info("crossover table %s: %s", path, line)
        if table.cut_short:
            log.warning("crossover table %s was cut short, and is used as it is; headway bench crossover --resume goes on", path)
        return table

    def _tell_left_out(self, table: CrossoverTable, kept: bool = False) -> None:
        """Log which backends that can run here take no part.

        kept: the table was measured by an earlier start: those that failed are told of at each, those that do not serve the layer
        once.
        """
        for record in table.backends:
            failed = record.reason.startswith((CRASHED, HUNG, FAILED))
            if record.name in self.available and not record.usable and (failed or not kept):
                log.warning("auto leaves out %s: %s", record.name, record.reason)

    def _without_missing(self, table: CrossoverTable, path: Path) -> CrossoverTable:
        """A table that is about to be completed, and its file, without the backends that cannot run here any more."""
        here = set(self.available)
        if all(record.name in here for record in table.backends):
            return table
        gone = [f"{record.name} of {record.owner}" for record in table.backends if record.usable and record.name not in here]
        if gone:  # others have never run here, or have failed
            log.warning("crossover table %s is completed without what is not here any more: %s", path, ", ".join(gone))
        backends = [record for record in table.backends if record.name in here]
        cells = [cell for cell in table.cells if cell.backend in here]
        left = table.model_copy(update={"backends": backends, "cells": cells})
        write_json(left, path)
        return left

    def _measure(
        self,
        spec: AttentionSpec,
        wanted: Sequence[Point],
        path: Path,
        budget: float,
        old: CrossoverTable | None,
        *,
        resume: bool,
        prior: Prior | None = None,
    ) -> CrossoverTable | None:
        """Measure a table in `budget` seconds.

        old: the table that is at `path` and fits: it is returned as it is where nothing can be measured. resume: complete it.
        prior: what the points are to check; None: nothing, and all backends are measured, refined between points.
        """
        started = time.perf_counter()
        layouts = preferred_layouts(self.registry, self.available, spec)
        options = CrossoverOptions(
            spec=spec,
            backends=self.available,
            layouts=layouts,
            grid=wanted,
            turns=TIMER,
            budget=budget,
            output=path,
            resume=resume,
            interruptible=False,
            command=f"autotune {budget:g} s",
            compile_ahead=self.compile_ahead,
        )
        if prior is not None:
            pairs = [(self.registry.layout(name).layout, size) for size in BLOCK_SIZES for name in layouts]
            extent = Extent.of(prior.table, pairs, self.available)
            options = replace(options, refine=0, layouts=extent.layouts, block_sizes=extent.block_sizes, given_up=extent.given_up)
        try:
            if resume and old is not None:
                old = self._without_missing(old, path)
                # What failed fails again: it is tried when its plugin has another version, or other files.
                failed = {
                    record.name: record.reason for record in old.backends if record.name in self.available and record.reason
                }
                options = replace(options, excluded=failed)
            apart = third_party_files(self.registry, self.available) and can_measure_in_child(self.registry, self.available)
            table = (measure_in_child if apart else run_kernel_level)(options, self.registry)
        except (HeadwayError, OSError) as error:
            instead = "rank order instead" if old is None else "the old one is used as it is"
            log.warning("auto: no crossover table could be measured, %s: %s", instead, _without_option(error))
            return old
        self._tell_left_out(table)
        log.info("auto: %d cells in %.1f s, kept in %s", len(table.cells), time.perf_counter() - started, path)
        if not _suffices(table, wanted, spec.device.type):
            log.info(
                "auto: the time did not suffice for every point that the choice needs; the next start goes on with the others"
            )
        return table


def preferred_layouts(registry: Registry, available: Sequence[str], spec: AttentionSpec) -> list[str]:
    """The registry's first layout, a built-in, and the first that each backend names: a plugin's own is compared with it.

    Layouts that cannot hold the layer's keys and values are passed over. available: the backends that can run here.
    """
    claimed = [registry.backend(name).capabilities.layouts or () for name in available]
    every = [[info.layout for info in registry.layouts.values()], *claimed]
    fitting = [[layout for layout in layouts if layout.check(spec, DEFAULT_BLOCK_SIZES[0])] for layouts in every]
    return list(dict.fromkeys(layouts[0].name for layouts in fitting if layouts))


def _without_option(error: Exception) -> str:
    """What went wrong, to somebody who has named no file for the table."""
    if isinstance(error, ConfigError) and error.reason.what == "--output":
        return f"{error.reason.got}; HEADWAY_CACHE names another folder"
    return str(error)


def _read(path: Path) -> CrossoverTable | None:
    """The table at a path; None where it is faulty, and the log says where."""
    try:
        return read_table(path)
    except TableError as error:
        log.warning("crossover table not used: %s", error)
        return None


def _suffices(table: CrossoverTable, wanted: Sequence[Point], device_type: str) -> bool:
    """Return whether later starts measure nothing more: what the choice needs is there, or, on a CPU, some of each phase.

    A CPU's first start measures for its budget and no later one does, however few points a busy machine reached.
    """
    measured = {cell.point for cell in table.cells}
    if device_type == "cpu":
        return table.complete or {phase for phase, _ in measured} >= {point.phase for point in wanted}
    needed = [point for point in wanted if point.level <= _NEEDED_LEVEL]
    return table.complete or all((point.phase, point.case) in measured for point in needed)


def _announce(spec: AttentionSpec, budget: float, old: CrossoverTable | None) -> None:
    lacks = "was cut short" if old is not None and old.cut_short else "lacks others"
    what = "measuring" if old is None else f"the crossover table has {len(points(old.cells))} points and {lacks}: measuring"
    compiling = f", and up to {MOST_COMPILING * budget:.0f} s more where kernels must be compiled"
    text = "auto: %s the attention backends for %s, about %.0f s%s, once; --no-autotune does without"
    log.warning(text, what, spec, budget, compiling if spec.device.type == "cuda" else "")
