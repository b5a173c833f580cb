"""Layers whose times depend on one count (rows, tokens or bytes): each kernel is checked and timed at each count, smallest
first."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.kernel import Kernel
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
from headway.tuning.table.files import table_path
from headway.tuning.table.noise import mark_ties, noise_of
from headway.tuning.table.schema import Cell, CrossoverTable, DeviceIdentity, KernelRecord, LayerRecord

log = logging.getLogger("headway")
INTERLEAVED = InterleavedTimer(rounds=2, round_ms=2.0)
_TOO_SLOW = 3.0
"""Ratio to the fastest time. A kernel above this ratio for which `gets_slower` is true is skipped at larger counts."""
Times = dict[str, list[float | None]]
"""Kernel -> microseconds per call, for each measured count. None means not measured."""


TRIED = (1, 2, 5, 16, 33, 130)
"""Numbers of rows or tokens at which a third-party kernel is checked at each start; they give complete and incomplete tiles."""


def max_error(kernel: Kernel, dtype: torch.dtype, limit: float, third_party: bool) -> float:
    """Return the largest accepted error, relative to the norm of the correct answer.

    A third-party kernel may have an error of four times its declared tolerance, because the tolerance is measured in a different
    norm.
    """
    return min(limit, max(4 * kernel.tolerance.get(dtype, limit), 1e-3)) if third_party else limit


@dataclass(frozen=True)
class CountedLayer(TunedLayer):
    """A layer that is measured along one axis, on a torch device."""

    on: torch.device
    timer: InterleavedTimer
    registry: Registry | None
    """Registry of third-party kernels. None means that there are no third-party kernels."""

    @cached_property
    def records(self) -> list[KernelRecord]:
        """Records of the kernels for a table: name and owner, and for third-party kernels a digest of the plugin's files."""
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
        """Return the names of the kernels that support `count` rows or tokens."""

    @abstractmethod
    def check(self, name: str, count: int) -> None:
        """Compare a kernel's answer with the answer of torch's operations.

        :raises ArithmeticError: if the answers differ. Other exceptions of the kernel are not caught.
        """

    @abstractmethod
    def call(self, name: str, count: int) -> Callable[[], object]:
        """Return a call that runs a kernel over `layers(count)` layers."""

    @abstractmethod
    def layers(self, count: int) -> int:
        """Return the number of layers that one call runs."""

    def ready(self, counts: Collection[int]) -> AbstractContextManager[object]:
        """Return a context manager that compiles kernels and repacks weights for the counts that are timed within it."""
        return nullcontext()

    def time(self, calls: Sequence[Callable[[], object]]) -> list[Timing | Exception]:
        """Time calls in alternating rounds. An exception of a call is returned as its result."""
        return self.timer.time(calls, self.on)

    def gets_slower(self, name: str) -> bool:
        """Return whether a kernel that is much slower than the fastest becomes relatively slower as the number of rows grows."""
        return False

    def times(self, table: CrossoverTable, axis: CountAxis) -> AxisTimes:
        """Return the times of all kernels in a table from `find_table`."""
        us = to_times(table, axis.counts)
        return AxisTimes(axis, {name: us[name] for name in self.kernels}, source_of(table))

    def measure(self, wanted: Sequence[Point], seconds: float, old: CrossoverTable | None, *, resume: bool) -> CrossoverTable:
        """Measure points, smallest count first. When a table is completed, its points are not measured again."""
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
            count, what = point.batch, _named(self.record)
            if (clock.left or 0.0) <= 0.0:
                log.warning("%s: the time budget ended before %d %s; from there on a heuristic chooses", what, count, point.phase)
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
                    log.warning("%s: skipping %s from %d %s on: %s", what, name, count, point.phase, out[name])
                    cells.append(failure(point, name, None, raised))
            us: dict[str, float] = {}
            layers = self.layers(count)
            for name, timing in zip(calls, self.time(list(calls.values())), strict=True):
                if isinstance(timing, Exception):
                    log.warning("%s: skipping %s with %d %s: %s", what, name, count, point.phase, timing)
                    cells.append(failure(point, name, None, timing))
                    continue
                us[name] = timing.median_us / layers
                low, high = timing.p20_us / layers, timing.p80_us / layers
                cells.append(new_cell(point, name, None, "ok", median_us=us[name], p20_us=low, p80_us=high, drift=timing.drift))
            best = min(us.values(), default=0.0)
            slow = {name: time / best for name, time in us.items() if time > _TOO_SLOW * best and self.gets_slower(name)}
            out |= {name: f"{ratio:.1f} times the fastest with {count} {point.phase}" for name, ratio in slow.items()}
            yield from mark_ties(cells)


def timed_table(
    record: LayerRecord, device: DeviceIdentity, kernels: Sequence[KernelRecord], cells: Sequence[Cell]
) -> CrossoverTable:
    """Return a table of measured cells."""
    table = new_table(record, device, kernels)
    table.cells = list(cells)
    table.noise = noise_of(table.cells)
    return table


def save_table(table: CrossoverTable) -> None:
    """Store a table in the table folder; log a warning if it cannot be written."""
    try:
        write_json(table, table_path(table.device, table.spec), "HEADWAY_CACHE")
    except ConfigError as error:
        log.warning("%s: the times are not saved: %s", _named(table.spec), error)


def _named(record: LayerRecord) -> str:
    """Return a layer's name for the log, beginning with its kind."""
    return f"{record.kind} {str(record).removeprefix(f'{record.kind} ')}"
