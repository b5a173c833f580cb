"""For each kind of layer: a full table, a first start with a prior, and what auto loses by each at held-out points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from headway.bench.crossover.regret import LAYERS, RegretReport, judge_again, measure_regret
from headway.bench.studies.priors.results import LayerLosses, Loss, PriorsReport, StartTimes
from headway.bench.studies.priors.ship import as_text
from headway.core.contract.spec import AttentionSpec
from headway.core.select.backend_request import ALL_AUTO
from headway.core.select.layer_specs import LayerSpecs
from headway.core.select.selection import PRESETS
from headway.core.select.selector import Selector
from headway.core.system.json_files import write_bytes, write_json
from headway.core.system.provenance import Origin, command_line
from headway.core.system.terminal import Terminal
from headway.kernels.runtime.compile_ahead import compile_ahead
from headway.registry import Registry, create_registry
from headway.tuning.autotune import TableRequest, preferred_layouts, tables_for
from headway.tuning.measure.device import identify_device
from headway.tuning.measure.run import CrossoverOptions, run_kernel_level
from headway.tuning.measure.self_test import owners
from headway.tuning.measure.timing import InterleavedTimer
from headway.tuning.measure.workloads import Geometry, make_spec
from headway.tuning.table.compare import differences
from headway.tuning.table.convert import to_costs
from headway.tuning.table.files import FOLDER_VARIABLE, Prior, find_prior, prior_path, read_table
from headway.tuning.table.schema import CrossoverTable, SpecRecord

TURNS = InterleavedTimer(rounds=3, round_ms=2.0, host_seconds=0.02, long_ms=10.0)
_FULL, _FIRST = 0.55, 0.7
"""The part of a layer's seconds that its full table takes, and the part after which held-out points are begun."""
_START_SECONDS = 45.0
"""What a start in a process of its own is expected to take at most."""


@dataclass
class PriorsStudy:
    """A run: its folder, the clock that it keeps to, and what it has found so far."""

    device: torch.device
    folder: Path
    geometries: Sequence[str]
    until: float
    """When the study ends, by time.perf_counter."""
    points: int
    """Held-out points of each seed and layer."""
    report: PriorsReport
    registry: Registry
    console: Console
    turns: InterleavedTimer = TURNS

    @classmethod
    def begin(
        cls, device: torch.device, folder: Path, geometries: Sequence[str], seconds: float, points: int, seeds: Sequence[int]
    ) -> PriorsStudy:
        """Start the clock. geometries: such as 32/8/128, in bfloat16 on a GPU and in float32 on a CPU."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        identity, origin = identify_device(device), Origin.here()
        command = command_line("python", "-m", "headway.bench.studies.priors")
        report = PriorsReport(command=command, origin=origin, date=date, device=identity, seeds=list(seeds))
        until = time.perf_counter() + seconds
        return cls(device, folder, geometries, until, points, report, create_registry(), Terminal(stderr=True))

    def run(self, model: str | None) -> None:
        """Measure every layer, and then starts of a model with the default geometry; None: of no model."""
        starts = 0.0 if model is None else 2 * _START_SECONDS
        for number, geometry in enumerate(self.geometries):
            left = self.until - starts - time.perf_counter()
            share = left / (len(self.geometries) - number)
            if share <= 1.0:
                self._skip(f"layer {geometry}")
                continue
            self._layer(geometry, share)
        if model is not None:
            self._starts(model)

    def _say(self, text: str) -> None:
        left = self.until - time.perf_counter()
        self.console.print(Text(f"[{left:4.0f} s left] {text}"), soft_wrap=True)

    def _skip(self, what: str) -> None:
        self._say(f"skipped: {what}")
        self.report.skipped.append(what)
        self._save()

    def _save(self) -> None:
        write_json(self.report, self.folder / "priors.json")

    def _layer(self, geometry: str, seconds: float) -> None:
        """One kind of layer, in so many seconds."""
        began = time.perf_counter()
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        spec = make_spec(Geometry.parse(geometry), dtype, None, self.device)
        name = geometry.replace("/", "-")
        shipped = find_prior(self.report.device, SpecRecord.of(spec), owners(self.registry))
        self._say(f"{geometry}: a full table, {_FULL * seconds:.0f} s; prior: {_named(shipped)}")
        full = self._full(spec, self.folder / f"crossover-{name}.json", _FULL * seconds)
        took = {"full": time.perf_counter() - began}
        self._say(f"{geometry}: {len(full.cells)} cells, {'complete' if full.complete else 'not complete'}; a first start")
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as made, _as_prior(full if shipped is None else None, Path(made)):
            first = self._first_start(spec)
        took["first start"] = time.perf_counter() - begun
        tables = {"full": full}
        if first is not None:
            write_json(first, self.folder / f"first-start-{name}.json")
            tables["first start"] = first
        if shipped is not None:
            tables["prior"] = shipped.unchecked()
        self._say(f"{geometry}: the first start took {took['first start']:.1f} s; held-out points")
        until = max(began + seconds, time.perf_counter() + (1 - _FIRST) * seconds)
        losses = self._judge(name, spec, tables, until, took)
        record = None if first is None else first.prior
        self.report.layers.append(
            LayerLosses(
                geometry=geometry,
                prior=_named(shipped),
                checked=0 if record is None else len(record.checked),
                disagreed=[] if record is None else record.disagreed,
                losses=losses,
            )
        )
        self._save()
        told = ", ".join(f"{label} {loss.geometric_mean:.3f} (worst {loss.worst:.2f})" for label, loss in losses.items())
        self._say(f"{geometry}: {told}")

    def _full(self, spec: AttentionSpec, path: Path, budget: float) -> CrossoverTable:
        """The table of the whole grid; one that an earlier run of the same sources has left is taken, or gone on with."""
        resume = self._goes_on(spec, path)
        if resume and (known := read_table(path)).complete:
            return known
        available = self.registry.able(self.device)
        options = CrossoverOptions(
            spec=spec,
            backends=available,
            layouts=preferred_layouts(self.registry, available, spec),
            turns=self.turns,
            budget=budget,
            output=path,
            resume=resume,
            command=command_line(),
            compile_ahead=compile_ahead(self.device),
        )
        return run_kernel_level(options, self.registry, self.console)

    def _goes_on(self, spec: AttentionSpec, path: Path) -> bool:
        if not path.exists():
            return False
        old = read_table(path)
        same = not differences(old, self.report.device, SpecRecord.of(spec), owners(self.registry))
        return same and old.origin == self.report.origin and not self.report.origin.modified

    def _first_start(self, spec: AttentionSpec) -> CrossoverTable | None:
        """What a start would measure on a machine that has kept nothing."""
        with tempfile.TemporaryDirectory() as cache, _variable("HEADWAY_CACHE", cache):
            layers = LayerSpecs([spec] * LAYERS)
            found = tables_for(layers, self.registry, ALL_AUTO, TableRequest(), compile_ahead(self.device))
        return None if found is None else found[spec]

    def _judge(
        self, name: str, spec: AttentionSpec, tables: Mapping[str, CrossoverTable], until: float, took: Mapping[str, float]
    ) -> dict[str, Loss]:
        """Measure held-out points once, over what each table chooses, and judge every table by them."""
        workload = PRESETS["chat"]
        chosen = []
        for table in tables.values():
            selector = Selector(self.registry, LayerSpecs([spec] * LAYERS), costs={spec: to_costs(table)}, workload=workload)
            chosen.append((selector.selection.layout.name, selector.selection.block_size))
        seeds = self.report.seeds
        measured = measure_regret(
            tables["full"],
            self.registry,
            self.device,
            self.points,
            seeds,
            workload,
            console=self.console,
            others=chosen,
            until=until,
            turns=self.turns,
        )
        losses = {}
        for label, table in tables.items():
            report: RegretReport = measured if label == "full" else judge_again(measured, table, workload)
            kind = "" if label == "full" else f"{label.replace(' ', '-')}-"
            write_json(report, self.folder / f"regret-{kind}{name}.json")
            losses[label] = Loss(
                points=len(report.trials), geometric_mean=report.geometric_mean, worst=report.worst, seconds=took.get(label)
            )
        return losses

    def _starts(self, model: str) -> None:
        """A process that starts from nothing, and one that finds what the first has kept."""
        with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as cache:
            spec = make_spec(Geometry.parse(self.geometries[0]), torch.bfloat16, None, self.device)
            path = self.folder / f"crossover-{self.geometries[0].replace('/', '-')}.json"
            shipped = find_prior(self.report.device, SpecRecord.of(spec), owners(self.registry))
            table = read_table(path) if shipped is None and path.exists() else None
            kept = {"HEADWAY_CACHE": cache, "TRITON_CACHE_DIR": str(Path(cache) / "triton")}
            with _as_prior(table, Path(made)):
                for name in ("cold", "warm"):
                    left = self.until - time.perf_counter()
                    if left < 0.5 * _START_SECONDS:
                        self._skip(f"the {name} start of {model}")
                        continue
                    self._say(f"a {name} start of {model}")
                    self._start(name, model, {**os.environ, **kept}, left)

    def _start(self, name: str, model: str, environment: dict[str, str], left: float) -> None:
        command = [sys.executable, "-P", "-m", "headway.bench.studies.priors", "first-token", model]
        try:
            ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=left, check=True)
            found = StartTimes(name=name, **json.loads(ended.stdout.splitlines()[-1]))
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            self._skip(f"the {name} start of {model}: {error}")
            return
        self.report.starts.append(found)
        self._save()
        self._say(
            f"{name}: first token after {found.seconds:.1f} s, {found.before:.1f} s of them before the engine: {found.parts}"
        )


def _named(prior: Prior | None) -> str:
    return "of this run" if prior is None else prior.record().made


@contextmanager
def _as_prior(table: CrossoverTable | None, folder: Path) -> Iterator[None]:
    """Have a table stand in a folder for those that ship; None: leave those that ship."""
    if table is None:
        yield
        return
    with _variable(FOLDER_VARIABLE, str(folder)):
        write_bytes(as_text(table).encode(), prior_path(table.device, table.spec))
        yield


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Have an environment variable inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
