"""Measured times for `auto`: read from a table file that fits, or measured briefly at the first start and then stored."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.contract.kernel import CompileAhead
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ATTENTION, OperationKind
from headway.core.contract.spec import AttentionSpec
from headway.core.select.costs import CostTable
from headway.core.select.kernels import DEFAULT_BLOCK_SIZES, VERBS, StateCandidates
from headway.core.select.request import BackendRequest, LayerSpecs
from headway.core.system.files import clean, scratch_folder
from headway.core.system.json_files import write_json
from headway.registry import Registry
from headway.registry.records import BUILTIN_OWNER
from headway.tuning.isolated.measure_in_child import can_measure_in_child, measure_in_child, third_party_files
from headway.tuning.measure.derive import derived_prior
from headway.tuning.measure.device import identify_device, rates_of
from headway.tuning.measure.find_table import TunedLayer, find_table, log_excluded, misfits, suffices, used_table
from headway.tuning.measure.kinds import MeasuredKind, kind_of, measured_kind
from headway.tuning.measure.points import Point
from headway.tuning.measure.run import BLOCK_SIZES, CrossoverOptions, run_kernel_level
from headway.tuning.measure.self_test import launch, owners, plugin_digest
from headway.tuning.measure.timing import InterleavedTimer, SharedBudget, on_device
from headway.tuning.table.convert import CORE_PHASE, to_costs
from headway.tuning.table.files import Prior, TableError, read_table, table_folder, table_path
from headway.tuning.table.schema import CrossoverTable, DeviceIdentity, SpecRecord

log = logging.getLogger("headway")

DEFAULT_BUDGET = {"cpu": 3.0, "cuda": 20.0}
"""Device type -> seconds that a start may spend on measuring."""
TIMER = InterleavedTimer(rounds=2, round_ms=2.0, host_seconds=0.005, long_ms=5.0)


@dataclass(frozen=True)
class TableRequest:
    """The user's settings for the crossover tables of `auto`."""

    paths: Sequence[Path] = ()
    """Paths of crossover tables to use. Each table applies to the layer and the device that it was measured on. Headway accepts
    or rejects these tables and never measures them again. If empty, `auto` uses the tables stored for this machine."""
    budget: float | None = None
    """Seconds that a start may spend on measuring all kinds of layers together; 0 disables measuring. None means
    $HEADWAY_AUTOTUNE_BUDGET if it is set, else DEFAULT_BUDGET."""
    tune: str | None = None
    """The user's word: idle, start or never. None means idle on a GPU, and start on a CPU or if the user named a budget."""

    def when(self, device_type: str) -> str:
        """Return the word of the option `tune` that applies on a type of device."""
        if self.tune is not None:
            return self.tune
        named = self.budget is not None or bool(os.environ.get("HEADWAY_AUTOTUNE_BUDGET", "").strip())
        if named and not self.seconds(torch.device(device_type)):
            return "never"
        return "idle" if device_type == "cuda" and not named else "start"

    def seconds(self, device: torch.device) -> float:
        """Return the seconds that a start may spend on measuring on a device.

        :raises ConfigError: if the environment variable is not a number, or is negative.
        """
        if self.tune == "never":
            return 0.0
        text = os.environ.get("HEADWAY_AUTOTUNE_BUDGET", "").strip()
        if self.budget is not None or not text:
            return self.budget if self.budget is not None else DEFAULT_BUDGET.get(device.type, 20.0)
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not seconds >= 0:  # also rejects NaN
            raise ConfigError("HEADWAY_AUTOTUNE_BUDGET", "seconds, 0 for none", repr(text))
        return seconds


def costs_for(
    layers: LayerSpecs,
    registry: Registry,
    backend_request: BackendRequest,
    table_request: TableRequest,
    compile_ahead: CompileAhead | None = None,
    budget: SharedBudget | None = None,
    kind: OperationKind = ATTENTION,
) -> dict[Any, CostTable] | None:
    """Return the measured times of each distinct layer, or None if `auto` must use the rank order; the log gives the reason.

    compile_ahead: context manager in which the kernels of a first measurement are compiled in parallel; None compiles them one by
    one. budget: measuring time shared with other parts of a start; each kind of layer takes one part. None means the budget of
    `table_request`. kind: kind of layers to measure, attention or state layers. Both specs of a latent (MLA) layer are measured,
    each in the phases that use it. Tables that the user named apply to attention. They apply to state layers only if one of the
    tables is for state layers.

    A stored table that is faulty or stale never ends a start: the difference is logged, and the table is measured again.

    :raises ConfigError: if the budget is not a number, a named file does not exist, or none of them can be used on this machine.
    """
    for path in table_request.paths:
        if not path.exists():
            found_none = f"{path}, which does not exist"
            raise ConfigError("crossover_table", "a table file", found_none, "headway bench crossover makes one")
    specs: list[Any] = list(layers.counts) if kind is ATTENTION else list(dict.fromkeys(layers.states))
    free = layers.auto_phases(backend_request) if kind is ATTENTION else backend_request.auto_phases
    if not free or not specs:
        return None
    device_type = layers.device.type
    available = registry.able(layers.device) if kind is ATTENTION else registry.states.all_able(device_type)
    device = identify_device(layers.device)
    named = _read(table_request.paths, kind, device, owners(registry, kind))
    only_named = bool(table_request.paths) and (kind is ATTENTION or any(table.kind == kind.name for _, table in named))
    if not only_named and not _has_choice(registry, specs, available):
        return None
    if budget is None:
        budget = SharedBudget(0.0 if only_named else table_request.seconds(layers.device), len(specs))
    clean(table_folder())
    found: dict[Any, CostTable] = {}
    phases = {spec: layers.phases_of(spec) if kind is ATTENTION else tuple(Phase) for spec in specs}
    tuned = [
        RegisteredLayer.of(registry, spec, device, available, phases[spec], compile_ahead, table_request.when(device.type))
        for spec in specs
    ]
    if compile_ahead is not None and len(specs) > 1 and not only_named:
        with torch.no_grad(), on_device(layers.device), compile_ahead():
            for layer in tuned:
                layer.compile_self_test()
    for spec, layer in zip(specs, tuned, strict=True):
        with budget.part() as seconds:
            table = layer.named(named) if only_named else find_table(layer, seconds)
        if table is None:
            return None
        found[spec] = to_costs(table, phases=phases[spec])
    return found


def _has_choice(registry: Registry, specs: Sequence[Any], available: Sequence[str]) -> bool:
    """Return whether at least two kernels can run here. For state layers, return whether two kernels support the same phase of
    every layer."""
    if kind_of(specs[0]) is ATTENTION:
        return len(available) > 1
    able = StateCandidates(registry.states, specs)
    serving = (
        [name for name in available if any(not able.reasons(name, phase, place) for place in able.places)] for phase in VERBS
    )
    return any(len(each) > 1 for each in serving)


@dataclass(frozen=True)
class RegisteredLayer(TunedLayer):
    """A layer whose kernels are backends of the registry."""

    measured: MeasuredKind
    compile_ahead: CompileAhead | None
    tune: str
    """Word of the option `tune` that applies."""

    @classmethod
    def of(
        cls,
        registry: Registry,
        spec: Any,
        device: DeviceIdentity,
        kernels: Sequence[str],
        phases: Collection[Phase] = tuple(Phase),
        ahead: CompileAhead | None = None,
        tune: str = "start",
    ) -> Self:
        """Return a layer with the usual points of its device in the given phases."""
        measured = measured_kind(registry, spec)
        if measured.kind is ATTENTION:  # a backend that supports no step of the layer would make tables without it stale
            kernels = [name for name in kernels if _serves(registry, name, spec, preferred_layouts(registry, kernels, spec))]
        wanted = [point for point in measured.grid if CORE_PHASE[point.phase] in phases]
        return cls(measured.record, device, kernels, wanted, measured, ahead, tune)

    @property
    def registry(self) -> Registry:
        """The registry of the layer's kernels."""
        return self.measured.registry

    @cached_property
    def owners(self) -> Mapping[str, tuple[str, ...]]:
        return owners(self.registry, self.measured.kind)

    @property
    def checks_later(self) -> bool:
        """True for attention on a GPU, unless the user asked for measurements at the start. A CPU measures in three seconds."""
        return self.measured.kind is ATTENTION and self.device.type == "cuda" and self.tune != "start"

    def derived(self, seconds: float) -> Prior | None:
        if not self.checks_later:
            return None
        assert isinstance(self.record, SpecRecord)
        spec = self.measured.spec
        rates = partial(rates_of, spec.device, spec.dtype) if seconds > 0 else None
        return derived_prior(self.device, self.record, self.wanted, self.owners, rates, kernels=self.kernels)

    def must_measure(self, names: Collection[str]) -> list[str]:
        entries = self.registry.of(self.measured.kind).entries
        return [name for name in names if entries[name].owner != BUILTIN_OWNER]

    def compile_self_test(self) -> None:
        """Compile the built-in kernels of the self-test that the start will run, together with those of other layers."""
        if self.checks_later and self.stored is None:
            names = [name for name in self.kernels if name not in self.must_measure(self.kernels)]
            pairs = self.measured.pairs(preferred_layouts(self.registry, self.kernels, self.measured.spec), BLOCK_SIZES)
            launch(self.registry, names, self.measured.spec, pairs)

    def repaired(self, table: CrossoverTable) -> list[str]:
        failed = {record.name for record in table.kernels if record.available and record.reason}
        failed |= {cell.kernel for cell in table.cells if cell.status in ("error", "incorrect")}
        before = {record.name: record.digest for record in table.kernels if record.name in failed}
        now = {name: plugin_digest(self.registry, name, self.measured.kind) for name in self.kernels if name in before}
        return [name for name, digest in now.items() if digest and digest != before[name]]

    def missed(self, unknown: Collection[str]) -> list[str]:
        kernels = self.registry.of(self.measured.kind)
        ranks = [kernels.rank(self.measured.spec, phase, self.kernels) for phase in Phase]
        known = [next((place for place, name in enumerate(rank) if name not in unknown), len(rank)) for rank in ranks]
        return [name for name in unknown if any(rank.index(name) < first for rank, first in zip(ranks, known, strict=True))]

    def named(self, tables: Sequence[tuple[Path, CrossoverTable]]) -> CrossoverTable | None:
        """Return the first of the user's tables that fits the layer; if none fits, log why and return None."""
        refused = [(path, table, misfits(table, self.device, self.record, self.owners)) for path, table in tables]
        for path, table, reasons in refused:
            if not reasons:
                return used_table(self, table, path)
        of_layer = [refusal for refusal in refused if refusal[1].spec.key == self.record.key]
        for path, _, reasons in of_layer:  # other tables are for other layers
            log.warning("crossover table %s not used: %s", path, "; ".join(reasons))
        if refused and not of_layer:
            got = " and ".join(f"one for {table.spec}" for _, table, _ in refused)
            log.warning("auto: using the rank order; crossover_table needs a table for %s, got %s", self.measured.spec, got)
        return None

    def _without_missing(self, table: CrossoverTable, path: Path) -> CrossoverTable:
        """Remove the backends that can no longer run here from a table and from its file, before the missing points are
        measured."""
        here = set(self.kernels)
        if all(record.name in here for record in table.kernels):
            return table
        gone = [f"{record.name} of {record.owner}" for record in table.kernels if record.usable and record.name not in here]
        if gone:  # the other backends never ran here, or failed
            log.warning("crossover table %s: %s can no longer run here; completing the table without it", path, ", ".join(gone))
        backends = [record for record in table.kernels if record.name in here]
        cells = [cell for cell in table.cells if cell.kernel in here]
        left = table.model_copy(update={"kernels": backends, "cells": cells})
        write_json(left, path)
        return left

    def measure(
        self, wanted: Sequence[Point], seconds: float, old: CrossoverTable | None, *, resume: bool
    ) -> CrossoverTable | None:
        measured, path = self.measured, table_path(self.device, self.record)
        kind, spec = measured.kind, measured.spec
        started = time.perf_counter()
        layouts = preferred_layouts(self.registry, self.kernels, spec) if kind is ATTENTION else None
        options = CrossoverOptions(
            spec=spec,
            backends=self.kernels,
            layouts=layouts,
            grid=wanted,
            timer=TIMER,
            budget=seconds,
            resume=resume,
            interruptible=False,
            command=f"autotune {seconds:g} s",
            compile_ahead=self.compile_ahead,
        )
        try:
            if resume and old is not None:
                old = self._without_missing(old, path)
                # A backend that failed would fail again. It is tried again once its plugin has another version or other files.
                failed = {record.name: record.reason for record in old.kernels if record.name in self.kernels and record.reason}
                options = replace(options, excluded=failed)
            arguments = (self.registry, self.kernels, kind)
            in_child = third_party_files(*arguments) and can_measure_in_child(*arguments)
            run = measure_in_child if in_child else run_kernel_level
            with nullcontext(path.parent) if wanted else scratch_folder(path) as folder:  # the self-test's table is not kept
                table = run(replace(options, output=folder / path.name), self.registry)
        except (HeadwayError, OSError) as error:
            instead = "using the rank order" if old is None else "using the old table as it is"
            log.warning("auto: measuring a crossover table failed, %s: %s", instead, _without_option(error))
            return old
        log_excluded(self, table)
        if not wanted:
            return table
        log.info("auto: %d cells in %.1f s, saved in %s", len(table.cells), time.perf_counter() - started, path)
        if not suffices(table, replace(self, wanted=wanted)):
            log.info("auto: the time budget ended before all required points were measured; the next start continues")
        return table


def _serves(registry: Registry, name: str, spec: AttentionSpec, layouts: Sequence[str]) -> bool:
    """Return whether a backend supports a step of a layer in one of the layouts."""
    return any(
        registry.supports(name, spec, registry.layouts[layout].layout, size, phase)
        for layout in layouts
        for size in BLOCK_SIZES
        for phase in Phase
    )


def preferred_layouts(registry: Registry, available: Sequence[str], spec: AttentionSpec) -> list[str]:
    """Return the registry's first layout (a built-in) and the first layout that each backend lists, without duplicates.

    A plugin's own layout is thus compared with a built-in layout. Layouts that cannot hold the layer's keys and values are
    skipped. available: names of the backends that can run here.
    """
    claimed = [registry.backend(name).capabilities.layouts or () for name in available]
    every = [[info.layout for info in registry.layouts.values()], *claimed]
    fitting = [[layout for layout in layouts if layout.check(spec, DEFAULT_BLOCK_SIZES[0])] for layouts in every]
    return list(dict.fromkeys(layouts[0].name for layouts in fitting if layouts))


def _without_option(error: Exception) -> str:
    """Return the error's text for a user who did not name an output file."""
    if isinstance(error, ConfigError) and error.reason.what == "--output":
        return f"{error.reason.got}; HEADWAY_CACHE names another folder"
    return str(error)


def _read(
    paths: Sequence[Path], kind: OperationKind, device: DeviceIdentity, here: Mapping[str, tuple[str, ...]]
) -> list[tuple[Path, CrossoverTable]]:
    """Return the user's tables, and log those that cannot be read. here: result of `owners`.

    :raises ConfigError: if none of the tables can be used on this machine for any layer.
    """
    found, refused = dict[Path, CrossoverTable](), dict[Path, str]()
    for path in paths:
        try:
            found[path] = table = read_table(path, kind=None)
            why = misfits(table, device, table.spec, here) if table.kind == kind.name else []
            refused |= {path: "; ".join(why) or "it has no times"} if why or not table.cells else {}
        except TableError as error:
            refused[path] = str(error)
    if paths and not set(paths) - refused.keys():
        got = "; ".join(f"{path}: {why}" for path, why in refused.items())
        raise ConfigError("crossover_table", "a table that applies to this machine", got, "headway bench crossover makes one")
    for path in refused.keys() - found.keys():
        log.warning("crossover table not used: %s", refused[path])
    return list(found.items())
