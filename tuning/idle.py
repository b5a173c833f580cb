"""Tuning while an engine is idle: measures the times that matter most for the steps that ran, and takes faster kernels.

A child process measures, so that nothing of it affects the engine: it compiles with low priority, and it is stopped as soon as a
request arrives and continued when no request is left. Its times replace shipped or derived times in the stored table.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Thread

from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.loop import EngineLoop
from headway.core.select.costs import CostTable
from headway.core.system.child import Child
from headway.core.system.files import scratch_folder
from headway.core.system.json_files import write_json
from headway.registry.records import BUILTIN_OWNER
from headway.tuning.autotune import TIMER, RegisteredLayer, preferred_layouts
from headway.tuning.isolated.measure_in_child import measure_in_child, third_party_files
from headway.tuning.measure.points import Point
from headway.tuning.measure.run import BLOCK_SIZES, CrossoverOptions, slower_candidates
from headway.tuning.table.convert import CORE_PHASE, to_costs
from headway.tuning.table.files import table_path
from headway.tuning.table.noise import noise_of
from headway.tuning.table.schema import CrossoverTable, PhaseName, PointKey, points

log = logging.getLogger("headway")

QUIET = 2.0
"""Seconds without a request before measuring begins or continues."""
_SLICES = 24, 96
"""Number of points that the first child process measures, and each later one. The next one starts with the points that matter
most by then; the first one is to help soon."""
_WINDOW = 2.0
"""Seconds in which the child process runs for the allowed share."""
_POLL = 0.2
"""Seconds between two looks at a child process that may run all the time."""
_LEAST_GAIN = 0.01
"""Minimum share of attention's time that other kernels must save before they are taken."""
_NICENESS = 10
_TOLD_AFTER = 600.0
"""Seconds without an idle moment after which the log says that nothing is measured."""


class IdleTuner:
    """Measures the kernels of an engine's attention layers while no request runs. Only the engine's thread calls it."""

    def __init__(self, engine: EngineLoop, layers: Mapping[AttentionSpec, RegisteredLayer], share: float, take: bool) -> None:
        """layers: each distinct layer. share: maximum share of the idle time to measure. take: True to take faster kernels at
        once, False if only the next start may take them."""
        self._engine = engine
        self._layers = layers
        self._tables = {spec: table for spec, layer in layers.items() if (table := layer.stored) is not None}
        self._take = take
        self._used = self._costs()
        self.share = share
        """Maximum share of the idle time to measure."""
        stored = ((spec, cell) for spec, table in self._tables.items() for cell in table.cells)
        self.tried = {(spec, cell.point) for spec, cell in stored if cell.source == "measured"}
        """(layer, point) that need no measurement any more."""
        self.thread: Thread | None = None
        """Thread that waits for the child process. None while nothing is measured."""
        self.child: Child | None = None
        self._found: list[tuple[AttentionSpec, Sequence[Point], CrossoverTable | None]] = []
        self._began = self._idle_since = time.monotonic()
        self._busy = self._told = self._closed = self._saved = False
        self._judged = (0, 0)  # Numbers of counted steps and measured points when the choices were last compared

    def idle(self) -> float | None:
        """Start or continue measuring. Called while no request runs. Return the seconds until the next call; None if nothing is
        left to do before the next request."""
        now = time.monotonic()
        if self._busy:
            self._busy = False
            self._idle_since = now
        if (rest := self._idle_since + QUIET - now) > 0:
            return rest
        while self._found:
            self._merge(*self._found.pop(0))
            self.thread = self.child = None
        if self.thread is None:
            chosen = self.next_slice()
            if chosen is None:
                self._judge()
                return None
            self._judge()
            self.thread = Thread(target=self.measure, args=chosen, name="headway-idle-tuning", daemon=True)
            self.thread.start()
        place = (now - self._idle_since) % _WINDOW
        runs = place < self.share * _WINDOW
        if self.child is not None:
            self.child.hold(not runs)
        return _POLL if self.share >= 1 else (self.share * _WINDOW if runs else _WINDOW) - place + 1e-3

    def busy(self) -> None:
        """Stop measuring, because a request has arrived. Called before each step, so it takes no time."""
        if not self._busy:
            self._busy = True
            if self.child is not None:
                self.child.hold(True)
        elif not self._told and time.monotonic() - self._began > _TOLD_AFTER:
            self._told = True
            if self._engine.stats.tuned_points or not self.num_unmeasured:
                return
            text = "auto: %d points have shipped or derived times that were not checked, because requests left no idle time"
            log.info(text, self.num_unmeasured)

    def run(self, seconds: float) -> None:
        """Measure for at most this many seconds, in a program that has no requests in the meantime."""
        until, before = time.monotonic() + seconds, self._engine.stats.tuned_points
        self._idle_since = time.monotonic() - QUIET
        self._busy = False
        while (left := until - time.monotonic()) > 0 and (pause := self.idle()) is not None:
            time.sleep(min(pause, left, _POLL))
        self.busy()
        count = self._engine.stats.tuned_points - before
        saved = " and saved the times" if count and self._saved else ", whose times are not saved" if count else ""
        later = "" if self.thread is None else "; the measurement in progress goes on at the next call"
        log.info("auto: tune() measured %d points%s; %d points are left%s", count, saved, self.num_unmeasured, later)

    def close(self) -> None:
        """End the child process."""
        self._closed = True
        if self.child is not None:
            self.child.stop()

    @property
    def num_unmeasured(self) -> int:
        """Number of points of all tables whose times were not measured here."""
        return sum(len(self._left(spec)) for spec in self._layers)

    def _left(self, spec: AttentionSpec) -> list[Point]:
        return [point for point in self._layers[spec].wanted if (spec, point.key) not in self.tried]

    def next_slice(self) -> tuple[AttentionSpec, Sequence[Point]] | None:
        """Return the layer and the points to measure next: those around the steps that took the most time come first."""
        ranked, most = [], _SLICES[self._engine.stats.tuned_points > 0]
        for spec in self._layers:
            weights = self._weights(spec)
            left = sorted(self._left(spec), key=lambda point: (-weights.get(point.key, 0.0), point.level))
            if left:
                total = sum(weights.get(point.key, 0.0) for point in left)
                ranked.append((total, len(left), spec, left[:most]))
        return max(ranked, key=lambda each: each[:2])[2:] if ranked else None

    def _weights(self, spec: AttentionSpec) -> dict[PointKey, float]:
        """Return grid point -> microseconds of the layer in the steps that ran near the point."""
        layer, selector, weights = self._layers[spec], self._engine.executor.selector, dict[PointKey, float]()
        for step, count in selector.steps.items():
            near = corners([point for point in layer.wanted if CORE_PHASE[point.phase] is step[0]], step[1:])
            for point in near:
                weights[point.key] = weights.get(point.key, 0.0) + count * selector.step_us(*step) / len(near)
        return weights

    def measure(self, spec: AttentionSpec, todo: Sequence[Point]) -> None:
        """Measure points in a child process. Runs in a thread."""
        layer, table = self._layers[spec], self._tables.get(spec)
        files, cells = third_party_files(layer.registry, layer.kernels), [] if table is None else table.cells
        usable = layer.kernels if table is None else [record.name for record in table.kernels if record.usable]
        entries = layer.registry.backends
        names = [name for name in usable if entries[name].owner == BUILTIN_OWNER or name in files]
        known = {cell.kernel for cell in cells if cell.source != "measured"} or set(names)
        measured = [cell for cell in cells if cell.source == "measured"]
        layouts = list(dict.fromkeys(cell.layout for cell in cells if cell.layout))
        given_up: dict[PhaseName, Mapping[str, str]] = {
            phase: {name: why for name, why in slower_candidates(measured, phase, names).items() if name not in known}
            for phase in {cell.phase for cell in measured}
        }
        path = table_path(layer.device, layer.record)
        options = CrossoverOptions(
            spec=spec,
            backends=names,
            layouts=layouts or preferred_layouts(layer.registry, names, spec),
            block_sizes=sorted({cell.block_size for cell in cells if cell.block_size}) or BLOCK_SIZES,
            grid=[*todo],
            refine=0,
            timer=TIMER,
            interruptible=False,
            given_up=given_up,
            command="idle tuning",
        )
        log.info("auto: measuring %d points of %s while idle", len(todo), layer.record)
        found = None
        try:
            with scratch_folder(path) as folder:
                found = measure_in_child(replace(options, output=folder / path.name), layer.registry, self._started)
        except Exception as error:  # also of a child process that `close` ends meanwhile
            if not self._closed:
                log.warning("auto: measuring while idle failed: %s", error)
        self._found.append((spec, todo, found))

    def _started(self, child: Child) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, child.process.pid, _NICENESS)
        self.child = child
        if self._closed:
            child.stop()
        else:
            child.hold(self._busy)

    def _merge(self, spec: AttentionSpec, todo: Sequence[Point], found: CrossoverTable | None) -> None:
        """Replace the times of the measured points in the layer's table, and store the table."""
        self.tried |= {(spec, point.key) for point in todo}
        if found is None:
            return
        new = {key: cells for key, cells in points(found.cells).items() if all(cell.status != "oom" for cell in cells)}
        failed = {record.name: record for record in found.kernels if record.reason}
        wrong = {cell.kernel: cell for cells in new.values() for cell in cells if cell.status in ("incorrect", "error")}
        for cell in wrong.values():
            text = "auto: %s has no time at points where it failed, such as %s %s: %s"
            log.warning(text, cell.kernel, cell.phase, cell.case, cell.reason)
        table = self._tables.get(spec) or found.model_copy(update={"cells": [], "complete": False})
        cells = [cell for cell in table.cells if cell.point not in new and cell.kernel not in failed]
        cells += [cell for each in new.values() for cell in each]
        prior = table.prior
        if prior is not None:
            checked = dict.fromkeys([*prior.checked, *(" ".join(key) for key in new)])
            prior = prior.model_copy(update={"checked": list(checked)})
        more = {"cells": cells, "prior": prior, "kernels": [failed.get(each.name, each) for each in table.kernels]}
        table = table.model_copy(update={**more, "noise": noise_of(cells), "date": found.date})
        self._tables[spec] = table
        self._engine.stats.tuned_points += len(new)
        try:
            write_json(table, table_path(self._layers[spec].device, self._layers[spec].record))
            self._saved = True
        except ConfigError as error:
            self._saved = False
            log.warning("auto: the crossover table is not saved: %s", error)
        text = "auto: measured %d points of %s while idle; %d points are left"
        log.info(text, len(new), self._layers[spec].record, self.num_unmeasured)

    def _judge(self) -> None:
        """Take the kernels that the new times prefer, if they would have saved time in the steps that ran."""
        selector = self._engine.executor.selector
        known = (selector.steps.total(), self._engine.stats.tuned_points)
        if known == self._judged or 0 in known:
            return
        self._judged = known
        costs = self._costs()
        if not self._take or costs is None:
            return
        now, then = selector.compare(costs)
        if not then < (1 - _LEAST_GAIN) * now:
            return
        began = time.perf_counter()
        try:
            self._engine.retune(costs)
        except Exception as error:  # the engine must go on with the kernels that it had
            log.warning("auto: other kernels cannot be taken before the next start: %s", error)
            self._take = False
            self._engine.retune(self._used)
            return
        self._used = costs
        self._engine.stats.tuning_changes += 1
        self._engine.stats.tuning_saved_seconds += 1e-6 * (now - then) if math.isfinite(now) else 0.0
        text = (
            "auto: took other kernels in %.1f s: attention of the steps so far would have taken %.2f of the time; attention: %s"
        )
        log.warning(text, time.perf_counter() - began, then / now, self._engine.selection)

    def _costs(self) -> dict[AttentionSpec, CostTable] | None:
        """Return the times of all layers, or None if a layer has no table yet."""
        if len(self._tables) < len(self._layers):
            return None
        found: dict[AttentionSpec, CostTable] = {}
        for spec, table in self._tables.items():
            phases = {CORE_PHASE[point.phase] for point in self._layers[spec].wanted}
            found[spec] = to_costs(table, phases=tuple(phase for phase in Phase if phase in phases))
        return found


def corners(found: Sequence[Point], place: Sequence[int]) -> list[Point]:
    """Return the grid points around (batch, query_len, kv_len): on each axis, the nearest value below and the nearest above."""
    near = list(found)
    for axis in (1, 0, 2):  # verification has batch sizes of its own
        value = place[axis]
        places = sorted({_place(point)[axis] for point in near})
        below, above = [each for each in places if each <= value], [each for each in places if each >= value]
        ends = {*below[-1:], *above[:1]}
        near = [point for point in near if _place(point)[axis] in ends]
    return near


def _place(point: Point) -> tuple[int, int, int]:
    return point.batch, point.query_len, point.kv_len
