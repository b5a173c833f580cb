"""Layers whose times depend on one number (rows, tokens, bytes): each kernel is checked and timed at each, fewest first."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.operation import ALL_KINDS
from headway.core.select.costs import AxisTimes, CountAxis
from headway.core.system.json_files import write_json
from headway.registry import Registry
from headway.registry.records import BUILTIN_OWNER
from headway.tuning.measure.contender import failed
from headway.tuning.measure.device import new_table
from headway.tuning.measure.find_table import TunedLayer
from headway.tuning.measure.measure_point import failure, new_cell
from headway.tuning.measure.points import Point
from headway.tuning.measure.self_test import record_of
from headway.tuning.measure.timing import Budget, InterleavedTimer, Timing, on_device
from headway.tuning.table.convert import source_of, to_times
from headway.tuning.table.files import Prior, table_path
from headway.tuning.table.noise import mark_ties, noise_of
from headway.tuning.table.schema import Cell, CrossoverTable, DeviceIdentity, KernelRecord, LayerRecord

log = logging.getLogger("headway")
TURNS = InterleavedTimer(rounds=2, round_ms=2.0)
_BEHIND = 3.0
"""Times as slow as the fastest: a kernel that falls further behind with more rows takes no part for them."""
Times = dict[str, list[float | None]]
"""Kernel -> microseconds for each number that is measured; None where it has no time."""


@dataclass(frozen=True)
class CountedLayer(TunedLayer):
    """A layer of one axis on a device of torch."""

    on: torch.device
    timer: InterleavedTimer
    registry: Registry | None
    """Where third parties' kernels are registered; None: there are none."""

    @cached_property
    def records(self) -> list[KernelRecord]:
        """The kernels as a table names them: whose each is and, of a third party's, the digest of its plugin's files."""
        kind = next(kind for kind in ALL_KINDS if kind.name == self.record.kind)
        entries = {} if self.registry is None else self.registry.of(kind).entries
        found = []
        for label in self.kernels:
            name, record = label.partition(" ")[0], KernelRecord(name=label, owner=BUILTIN_OWNER, available=True)
            if self.registry is not None and name in entries and entries[name].owner != BUILTIN_OWNER:
                record = record_of(self.registry, name, True, "", kind).model_copy(update={"name": label})
            found.append(record)
        return found

    @property
    def owners(self) -> Mapping[str, tuple[str, ...]]:
        return {record.name: (record.owner, record.version, record.digest) for record in self.records}

    @abstractmethod
    def able(self, count: int) -> list[str]:
        """Return the names of the kernels that support this number of rows or tokens."""

    @abstractmethod
    def check(self, name: str, count: int) -> None:
        """Hold a kernel's answer to that of torch's operations.

        :raises ArithmeticError: it is another; or whatever the kernel raises.
        """

    @abstractmethod
    def call(self, name: str, count: int) -> Callable[[], object]:
        """Return a call that runs a kernel over `layers(count)` layers."""

    @abstractmethod
    def layers(self, count: int) -> int:
        """Return the number of layers in one call."""

    def ready(self, counts: Collection[int]) -> AbstractContextManager[object]:
        """Compile kernels and arrange weights for some numbers, before anything is timed."""
        return nullcontext()

    def time(self, calls: Sequence[Callable[[], object]]) -> list[Timing | Exception]:
        """Time calls in turns; return what a call raises as its result."""
        return self.timer.time(calls, self.on)

    def falls_behind(self, name: str) -> bool:
        """Return whether a kernel that is far behind is further behind with more rows."""
        return False

    def times(self, table: CrossoverTable, axis: CountAxis) -> AxisTimes:
        """Return the times of all kernels in a table of `find_table`."""
        us = to_times(table, axis.counts)
        return AxisTimes(axis, {name: us[name] for name in self.kernels}, source_of(table))

    def measure(
        self, wanted: Sequence[Point], seconds: float, old: CrossoverTable | None, *, resume: bool, prior: Prior | None = None
    ) -> CrossoverTable:
        """Measure points, fewest rows or tokens first; a table that is completed keeps the points that it has."""
        done = {cell.point for cell in old.cells} if resume and old is not None else set()
        wanted = [point for point in wanted if point.key not in done]
        with on_device(self.on), torch.inference_mode(), self.ready([point.batch for point in wanted]):
            cells = list(self._cells(wanted, Budget(seconds)))
        table = timed_table(self.record, self.device, self.records, cells)
        if resume and old is not None:
            table.cells = [*old.cells, *table.cells]
            table.prior = old.prior
        table.complete = {point.key for point in self.wanted} <= {cell.point for cell in table.cells}
        save_table(table)
        return table

    def _cells(self, wanted: Sequence[Point], clock: Budget) -> Iterator[Cell]:
        out: dict[str, str] = {}
        for point in sorted(wanted, key=lambda point: point.batch):
            count, what = point.batch, f"{self.record.kind} {self.record}"
            if (clock.left or 0.0) <= 0.0:
                log.warning("%s: the time did not suffice for %d %s and more, where a rule chooses", what, count, point.phase)
                return
            cells: list[Cell] = []
            calls: dict[str, Callable[[], object]] = {}
            for name in self.able(count):
                if name in out:
                    cells.append(new_cell(point, name, None, "dropped", reason=out[name]))
                    continue
                try:
                    self.check(name, count)
                    calls[name] = self.call(name, count)
                except Exception as raised:
                    out[name] = failed(raised).reason
                    log.warning("%s: %s is left out from %d %s on: %s", what, name, count, point.phase, out[name])
                    cells.append(failure(point, name, None, raised))
            us: dict[str, float] = {}
            layers = self.layers(count)
            for name, timing in zip(calls, self.time(list(calls.values())), strict=True):
                if isinstance(timing, Exception):
                    log.warning("%s: %s with %d %s is left out: %s", what, name, count, point.phase, timing)
                    cells.append(failure(point, name, None, timing))
                    continue
                us[name] = timing.median_us / layers
                low, high = timing.p20_us / layers, timing.p80_us / layers
                cells.append(new_cell(point, name, None, "ok", median_us=us[name], p20_us=low, p80_us=high, drift=timing.drift))
            best = min(us.values(), default=0.0)
            slow = {name: time / best for name, time in us.items() if time > _BEHIND * best and self.falls_behind(name)}
            out |= {name: f"{ratio:.1f} times the fastest with {count} {point.phase}" for name, ratio in slow.items()}
            yield from mark_ties(cells)


def timed_table(
    record: LayerRecord, device: DeviceIdentity, kernels: Sequence[KernelRecord], cells: Sequence[Cell]
) -> CrossoverTable:
    """Return a table of the times of kernels."""
    table = new_table(record, device, kernels)
    table.cells = list(cells)
    table.noise = noise_of(table.cells)
    return table


def save_table(table: CrossoverTable) -> None:
    """Store a table where a start looks for it; a warning says if it cannot be written."""
    try:
        write_json(table, table_path(table.device, table.spec), "HEADWAY_CACHE")
    except ConfigError as error:
        log.warning("%s %s: the times are not kept: %s", table.kind, table.spec, error)
