"""Selection of a layer's table at a start: a stored table that fits, else a shipped or derived one, else a new measurement.

All kinds of operations use this module. A faulty or stale table never ends a start: the faulty line or the difference is logged.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from headway.core.contract.errors import ConfigError
from headway.core.system.files import one_process
from headway.core.system.json_files import write_json
from headway.tuning.measure.points import Point
from headway.tuning.measure.timing import MOST_COMPILING
from headway.tuning.table.compare import differences, remarks
from headway.tuning.table.files import Prior, TableError, as_adopted, find_prior, stored_table, table_path
from headway.tuning.table.schema import CRASHED, FAILED, HUNG, CountedRecord, CrossoverTable, DeviceIdentity, LayerRecord, points

log = logging.getLogger("headway")
_LONGEST_WAIT = 120.0
"""Seconds of waiting for another process that measures, in addition to the time that measuring takes."""
_NEEDED_LEVEL = {"attention": 1, "state": 0}
"""Kind of operation -> highest level of required grid points. A table that lacks a required point is completed at the next
start."""


@dataclass(frozen=True)
class TunedLayer(ABC):
    """A layer whose kernels are measured, and the identity that its table must match."""

    record: LayerRecord
    device: DeviceIdentity
    kernels: Sequence[str]
    """Names of the kernels that can run here."""
    wanted: Sequence[Point]
    """Grid points to measure."""

    @property
    def owners(self) -> Mapping[str, tuple[str, ...]]:
        """(distribution, version, digest) of each registered kernel, for `differences`."""
        return {}

    @cached_property
    def stored(self) -> CrossoverTable | None:
        """The stored table, or None if no stored table can be used here; the log says why."""
        return usable_table(self.record, self.device, self.kernels, self.owners)

    @cached_property
    def prior(self) -> Prior | None:
        """The shipped table (prior) if it can be used here, else None. The log lists the differences of the machine that measured
        it.

        Along a single axis, a shipped table is used only if it contains all kernels.
        """
        try:
            prior = find_prior(self.device, self.record, self.owners)
        except TableError as error:
            log.warning("shipped table not used: %s", error)
            return None
        if prior is None:
            return None
        unknown = prior.unknown(self.kernels) if isinstance(self.record, CountedRecord) else []
        if unknown:
            log.info("auto: %s: the %s does not contain %s; it is not used", self.record, prior.record().made, ", ".join(unknown))
            return None
        differs = f"; it differs in {'; '.join(prior.differs)}" if prior.differs else ""
        log.info("auto: %s: found the %s%s", self.record, prior.record().made, differs)
        return prior

    @property
    def checks_later(self) -> bool:
        """True if a start uses shipped or derived times unchecked: they are checked while the engine is idle, or never."""
        return False

    def derived(self, seconds: float) -> Prior | None:
        """Return a prior whose times are derived from a table of another layer or GPU, or None if no such table exists, or if
        `checks_later` is false. seconds: time that may be spent on measuring; without it, nothing of another GPU is used."""
        return None

    def must_measure(self, names: Collection[str]) -> list[str]:
        """Return the kernels of `names`, without times in a prior, for which a start measures all the same: those that the user
        has installed."""
        return list(names)

    @abstractmethod
    def measure(
        self, wanted: Sequence[Point], seconds: float, old: CrossoverTable | None, *, resume: bool
    ) -> CrossoverTable | None:
        """Measure points, then store and return the table; None if nothing could be measured. Without points, run only the
        self-test, and return a table without times, which is not stored.

        old: stored table that fits; it is returned if nothing can be measured. resume: True to complete `old`.
        """

    def missed(self, unknown: Collection[str]) -> list[str]:
        """Return the kernels of `unknown` whose absence from a shipped table means that the table must not be used unchecked."""
        return list(unknown)

    def repaired(self, table: CrossoverTable) -> list[str]:
        """Return the kernels that failed when a table was measured and whose plugin files have changed since then."""
        return []


def find_table(layer: TunedLayer, seconds: float) -> CrossoverTable | None:
    """Return the table of a layer, measured or completed if needed, or None if none exists.

    If another process measures the same table, this process waits and reads its result.

    seconds: time that may be spent on measuring; 0 disables measuring.
    """
    if seconds <= 0:
        return _find(layer, seconds)
    path, longest = table_path(layer.device, layer.record), _LONGEST_WAIT + (1 + MOST_COMPILING) * seconds
    with one_process(path, longest, f"measuring {layer.record.kernels} for {layer.record}") as waited:
        if waited:
            vars(layer).pop("stored", None)  # the other process may have stored a table
        return _find(layer, seconds)


def _find(layer: TunedLayer, seconds: float) -> CrossoverTable | None:
    table, path = layer.stored, table_path(layer.device, layer.record)
    if table is None:
        return _first(layer, seconds)
    repaired = layer.repaired(table) if seconds > 0 else []
    if table.derived and (layer.prior is not None or not layer.checks_later):
        log.info("auto: %s has only derived times and is replaced", path)
        return _first(layer, seconds)
    if seconds <= 0 or (layer.checks_later and not repaired) or (not table.cut_short and not repaired and suffices(table, layer)):
        return used_table(layer, table, path)
    if repaired:
        text = "crossover table %s: %s failed in it, and its plugin's files have changed; measuring again"
        log.warning(text, path, ", ".join(repaired))
    _announce(layer, seconds, None if repaired else table)
    return layer.measure(layer.wanted, seconds, table, resume=not repaired)


def usable_table(
    record: LayerRecord, device: DeviceIdentity, kernels: Sequence[str], owners: Mapping[str, tuple[str, ...]] | None = None
) -> CrossoverTable | None:
    """Return the stored table of a layer, or None if it cannot be used here; the log says why. Arguments as in `TunedLayer`."""
    try:
        table = stored_table(device, record)
    except TableError as error:
        log.warning("crossover table not used: %s", error)
        return None
    if table is None:
        return None
    reasons = misfits(table, device, record, owners)
    known = {each.name for each in table.kernels if each.available}
    new = [name for name in kernels if name not in known]
    if new:  # installed after the measurement: with this table it would never be chosen
        reasons.append(f"{record.kernels}: {', '.join(new)} not in it")
    if reasons:
        log.warning("crossover table %s not used: %s", table_path(device, record), "; ".join(reasons))
    return None if reasons else table


def misfits(
    table: CrossoverTable, device: DeviceIdentity, record: LayerRecord, owners: Mapping[str, tuple[str, ...]] | None = None
) -> list[str]:
    """Return the reasons why a table's times do not apply to a layer on this machine."""
    found = differences(table, device, record, owners)
    reasons = [f"{reason.what}: measured with {reason.need}, here is {reason.got}" for reason in found]
    return reasons if table.level == "kernel" else [*reasons, "level: auto needs a table of level kernel"]


def suffices(table: CrossoverTable, layer: TunedLayer) -> bool:
    """Return whether later starts need no more measurements. This is the case if the table is complete or has every required
    point or, for attention on a CPU, at least one point of each phase.

    On a CPU, only the first start measures attention, even if it reaches few points on a busy machine.
    """
    measured = {cell.point for cell in table.cells}
    if layer.device.type == "cpu" and table.kind == "attention":
        return table.complete or {phase for phase, _ in measured} >= {point.phase for point in layer.wanted}
    most = _NEEDED_LEVEL.get(table.kind, 0)
    return table.complete or all(point.key in measured for point in layer.wanted if point.level <= most)


def log_excluded(layer: TunedLayer, table: CrossoverTable, stored: bool = False) -> None:
    """Log the kernels that can run here but are excluded from the choice.

    stored: True if an earlier start measured the table. Kernels that failed are then still logged at each start; kernels that do
    not support the layer are logged only when the table is measured.
    """
    for record in table.kernels:
        failed = record.reason.startswith((CRASHED, HUNG, FAILED))
        if record.name in layer.kernels and not record.usable and (failed or not stored):
            log.warning("auto: excluding %s: %s", record.name, record.reason)


def used_table(layer: TunedLayer, table: CrossoverTable, path: Path) -> CrossoverTable:
    """Log remarks about a table and return it unchanged."""
    log_excluded(layer, table, stored=True)
    for line in remarks(table, layer.device, layer.kernels):
        log.info("crossover table %s: %s", path, line)
    if table.cut_short:
        log.warning("crossover table %s was cut short and is used as it is; headway bench crossover --resume completes it", path)
    return table


def _first(layer: TunedLayer, seconds: float) -> CrossoverTable | None:
    """Return the table of a layer that has no stored table: a shipped table, a table derived from those of other layers or GPUs,
    or a table measured in full."""
    prior = layer.prior or layer.derived(seconds)
    if prior is not None and (seconds <= 0 or isinstance(layer.record, CountedRecord)):
        missed = layer.missed(prior.unknown(layer.kernels))
        if not missed:
            return prior.unchecked()
        log.info("auto: the %s does not contain %s and is not used unchecked", prior.record().made, ", ".join(missed))
    if prior is not None and layer.checks_later and (table := _tested(layer, prior)) is not None:
        return table
    if seconds <= 0:
        return None
    _announce(layer, seconds, None)
    return layer.measure(layer.wanted, seconds, None, resume=False)


def _tested(layer: TunedLayer, prior: Prior) -> CrossoverTable | None:
    """Run the self-test of all kernels, and return the prior's times of those that pass. Return None if all must be measured: a
    kernel that the user installed passes, but has no times.

    The table is stored, so that later starts skip the self-test.
    """
    record = prior.record()
    word = "derived from" if record.derived else "those of"
    log.info("auto: times for %s are %s the %s; they are checked while the engine is idle", layer.record, word, record.made)
    if record.derived and record.differs:
        log.info("auto: the machine that measured that table differs in %s", "; ".join(record.differs))
    tested = layer.measure([], 0.0, None, resume=False)
    if tested is None:
        return None
    usable = [each.name for each in tested.kernels if each.usable]
    if unknown := layer.must_measure(prior.unknown(usable)):
        log.warning("auto: these times are not used, because they do not contain %s", ", ".join(unknown))
        return None
    cells = [as_adopted(cell) for cell in prior.table.cells if cell.kernel in usable]
    whole = {point.key for point in layer.wanted} <= {cell.point for cell in cells}
    more = {"graph_len": prior.table.graph_len, "noise": prior.table.noise, "prior": record, "cells": cells, "complete": whole}
    table = tested.model_copy(update=more)
    try:
        write_json(table, table_path(layer.device, layer.record))
    except ConfigError as error:
        log.warning("auto: the crossover table is not saved: %s", error)
    return table


def _announce(layer: TunedLayer, seconds: float, old: CrossoverTable | None) -> None:
    lacks = "was cut short" if old is not None and old.cut_short else "is not complete"
    what = "measuring" if old is None else f"the crossover table has {len(points(old.cells))} points and {lacks}: measuring"
    if isinstance(layer.record, CountedRecord):  # measures a few points, and ends long before its share of the budget
        took, compiling = "a few seconds", ", more to compile"
    else:
        took, compiling = f"about {max(seconds, 1):.0f} s", f", up to {MOST_COMPILING * seconds:.0f} s more to compile"
    took += compiling if layer.device.type == "cuda" else ""
    log.warning("auto: %s %s for %s (%s); --no-autotune skips it", what, layer.record.kernels, layer.record, took)
