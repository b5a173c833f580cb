"""The times behind `--state-backend auto`: a table of states that fits, or a short measurement at the first start."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headway.core.contract.errors import HeadwayError
from headway.core.contract.kernel import CompileAhead
from headway.core.contract.operation import STATE
from headway.core.contract.state import StateSpec
from headway.core.select.backend_request import BackendRequest
from headway.core.select.costs import CostTable
from headway.core.select.state_candidates import VERBS, StateCandidates
from headway.core.system.files import clean
from headway.registry import Registry
from headway.tuning.autotune import TIMER, TableRequest, mended
from headway.tuning.isolated.measure_in_child import STATES, can_measure_in_child, measure_in_child, third_party_files
from headway.tuning.measure.device import identify_device
from headway.tuning.measure.points import state_grid
from headway.tuning.measure.self_test import owners
from headway.tuning.measure.state_run import StateOptions, run_state_level
from headway.tuning.measure.timing import SharedBudget
from headway.tuning.table.compare import differences
from headway.tuning.table.convert import to_costs
from headway.tuning.table.files import TableError, stored_table, table_path
from headway.tuning.table.schema import CrossoverTable, DeviceIdentity, StateSpecRecord

log = logging.getLogger("headway")


def state_costs_for(
    specs: Sequence[StateSpec],
    registry: Registry,
    backend_request: BackendRequest,
    table_request: TableRequest,
    compile_ahead: CompileAhead | None = None,
    budget: SharedBudget | None = None,
) -> dict[StateSpec, CostTable] | None:
    """Measured times of each distinct layer with a state; None where `auto` has nothing to choose from, or no times.

    budget: seconds that are shared with other parts of a start, each kind of layer being a part; None: those of the request.
    Tables are kept beside those of attention; a faulty or stale one is logged, and measured again where the budget allows it.

    :raises ConfigError: a budget that is no number.
    """
    distinct = list(dict.fromkeys(specs))
    if not distinct or not backend_request.auto_phases:
        return None
    available = registry.states.all_able(distinct[0].device.type)
    if not _rivals(registry, distinct, available):
        return None
    tables = _StateTables(registry, available, identify_device(distinct[0].device), compile_ahead)
    if budget is None:
        budget = SharedBudget(table_request.seconds(distinct[0].device), len(distinct))
    found: dict[StateSpec, CostTable] = {}
    for spec in distinct:
        with budget.part() as seconds:
            table = tables.find(spec, seconds)
        if table is None:
            return None
        found[spec] = to_costs(table)
    return found


def _rivals(registry: Registry, specs: Sequence[StateSpec], names: Sequence[str]) -> bool:
    """Whether two backends can serve some phase of every layer."""
    able, layouts = StateCandidates(registry.states, specs), registry.states.layouts.values()
    serving = ([name for name in names if any(able.serves(name, layout, phase) for layout in layouts)] for phase in VERBS)
    return any(len(each) > 1 for each in serving)


@dataclass(frozen=True)
class _StateTables:
    registry: Registry
    available: Sequence[str]
    """Names of the backends that can run here."""
    device: DeviceIdentity
    compile_ahead: CompileAhead | None

    def find(self, spec: StateSpec, budget: float) -> CrossoverTable | None:
        """The table of a kind of layer, measured or completed where needed and the budget allows; None where there is none.

        budget: seconds that may be measured.
        """
        path = table_path(self.device, StateSpecRecord.of(spec))
        clean(path.parent)
        table = self._kept(path, spec)
        if (table is not None and _suffices(table, spec)) or budget <= 0:
            if table is not None:
                self._tell_left_out(table)
            return table
        return self._measure(spec, path, budget, table)

    def _tell_left_out(self, table: CrossoverTable) -> None:
        """Log which backends that can run here failed when the table was measured, at every start: nothing else says so."""
        for record in table.kernels:
            if record.name in self.available and record.available and record.reason:
                log.warning("auto leaves out state backend %s: %s", record.name, record.reason)

    def _kept(self, path: Path, spec: StateSpec) -> CrossoverTable | None:
        """The table at a path if it can be used here; the log says why not."""
        try:
            table = stored_table(self.device, StateSpecRecord.of(spec))
        except TableError as error:
            log.warning("table of states not used: %s", error)
            return None
        if table is None:
            return None
        found = differences(table, self.device, StateSpecRecord.of(spec), owners(self.registry, STATE))
        reasons = [f"{reason.what}: the table has {reason.need}, here is {reason.got}" for reason in found]
        known = {record.name for record in table.kernels if record.available}
        new = [name for name in self.available if name not in known]
        reasons += [f"backends: {', '.join(new)} not in it"] if new else []
        others = mended(table, self.registry, self.available, STATE)
        reasons += [f"{name} failed in it, and its plugin's files are others now" for name in others]
        if reasons:
            log.warning("table of states %s not used: %s", path, "; ".join(reasons))
        return None if reasons else table

    def _measure(self, spec: StateSpec, path: Path, budget: float, old: CrossoverTable | None) -> CrossoverTable | None:
        """Measure a table in `budget` seconds, or complete the old one, which is returned where nothing can be measured."""
        log.warning("auto: measuring the state backends for %s, about %.0f s, once; --no-autotune does without", spec, budget)
        started = time.perf_counter()
        options = StateOptions(
            spec=spec,
            backends=self.available,
            turns=TIMER,
            budget=budget,
            output=path,
            resume=old is not None,
            command=f"autotune {budget:g} s",
            compile_ahead=self.compile_ahead,
        )
        if old is not None:  # what failed fails again
            failed = {record.name: record.reason for record in old.kernels if record.available and record.reason}
            options = replace(options, excluded={name: why for name, why in failed.items() if name in self.available})
        names = self.available
        try:
            if third_party_files(self.registry, names, STATES) and can_measure_in_child(self.registry, names, STATES):
                table = measure_in_child(options, self.registry, STATES)
            else:
                table = run_state_level(options, self.registry)
        except (HeadwayError, OSError) as error:
            instead = "rank order instead" if old is None else "the old one is used as it is"
            log.warning("auto: no table of states could be measured, %s: %s", instead, error)
            return old
        self._tell_left_out(table)
        log.info("auto: states: %d cells in %.1f s, kept in %s", len(table.cells), time.perf_counter() - started, path)
        return table


def _suffices(table: CrossoverTable, spec: StateSpec) -> bool:
    """Whether a table holds the points that the choice cannot do without."""
    measured = {cell.point for cell in table.cells}
    return table.complete or all(point.key in measured for point in state_grid(spec.device.type) if point.level == 0)
