"""`headway bench crossover --level engine`: end-to-end generation, with one process per backend, so that a crash or OOM affects
only one cell."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from headway.bench.crossover.worker_protocol import events
from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.contract.support import Reason
from headway.core.oracle.cases import parse_case
from headway.core.select.kernels import check_names
from headway.core.select.request import BackendRequest
from headway.core.system.child import Child, python_command
from headway.core.system.json_files import write_json
from headway.core.system.provenance import Origin, command_line
from headway.core.system.terminal import progress_bar
from headway.registry import Registry
from headway.tuning.measure.device import identify_device
from headway.tuning.measure.measure_point import new_cell
from headway.tuning.measure.points import Point
from headway.tuning.table.compare import differences
from headway.tuning.table.files import read_table
from headway.tuning.table.noise import mark_ties, noise_of
from headway.tuning.table.schema import Cell, CrossoverTable, KernelRecord, SpecRecord, points

AUTO = "auto"
"""Name of an entry that is measured like a backend and chooses each step's backend by the kernel-level table."""
SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "cuda": ((1, 2, 4, 8, 16, 32, 64), (512, 1024, 2048)),
    "cpu": ((1, 4), (16, 64)),
}
"""Device type -> default batch sizes and input lengths."""


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine-level run."""

    device: torch.device
    llm: Mapping[str, Any]
    """Arguments of headway.LLM, without attn_backend."""
    cases: Sequence[str]
    """Cases in the grammar of headway.core.oracle.cases. query_len is the input length, kv_len the input plus output length."""
    backends: Sequence[str] | None = None
    """Backend requests, as for `LLM`. None means all available backends (combined with auto for missing phases) and
    `auto`."""
    repeat: int = 1
    cell_limit: float = 120.0
    """Seconds after which a generation is abandoned, together with all generations that are at least as large."""
    seed: int = 0
    budget: float | None = None
    output: Path | None = None
    resume: bool = False
    """True to keep the cells that are already in `output`."""
    command: str = ""


@dataclass
class _Run:
    """Progress of one backend through the cases."""

    todo: list[Point]
    cells: list[Cell] = field(default_factory=list)
    spec: SpecRecord | None = None
    reason: str = ""
    """Reason why no case could run; "" if at least one case could run."""


def cases(batches: Sequence[int], lens: Sequence[int]) -> list[str]:
    """Return a case for each batch size and input length, with an output as long as the input."""
    return [f"{batch}q{n}s{2 * n}" for batch in batches for n in lens]


def run_engine_level(options: EngineOptions, registry: Registry, console: Console | None = None) -> CrossoverTable:
    """Generate every case with every backend. Failures are recorded in the table; Ctrl-C keeps finished cells.
    :raises HeadwayError: if a backend is unknown, a case generates nothing, or no backend could start.
    """
    date = datetime.now(UTC).isoformat(timespec="seconds")
    names = list(dict.fromkeys(options.backends)) if options.backends else [*_available(registry, options.device), AUTO]
    for name in names:
        check_names(registry, BackendRequest.parse(name))
    todo = [_point(case) for case in dict.fromkeys(options.cases)]
    old = _old_table(options)
    ends = None if options.budget is None else time.monotonic() + options.budget
    runs: dict[str, _Run] = {}
    with progress_bar(console) as progress:
        task = progress.add_task("crossover", total=len(names) * len(todo))
        for name in names:
            runs[name] = run = _begin(name, todo, old)
            progress.update(task, advance=len(run.cells))
            try:
                for cell in _measure(name, run, options, ends):
                    run.cells.append(cell)
                    progress.update(task, advance=1, description=f"{name} {cell.case}")
                    save(_table(runs, options, registry, date), options.output)
            except KeyboardInterrupt:
                break
    table = _table(runs, options, registry, date)
    if table is None:
        raise UnsupportedError("generations", [Reason(name, "a backend that starts", run.reason) for name, run in runs.items()])
    save(table, options.output)
    return table


def _old_table(options: EngineOptions) -> CrossoverTable | None:
    """Return the table to resume, or None.
    :raises ConfigError: if there is no output file. :raises UnsupportedError: if the table is for a different machine, level or
    model.
    """
    if not options.resume:
        return None
    if options.output is None:
        raise ConfigError("--resume", "the file to go on with", "none", "name it with --output")
    if not options.output.exists():
        return None
    old = read_table(options.output)
    reasons = differences(old, identify_device(options.device), old.attention)
    model = str(options.llm.get("model", ""))
    for what, here, there in (("level", "engine", old.level), ("model", model, old.model)):
        if here != there:
            reasons.append(Reason(what, there, here))
    if reasons:
        raise UnsupportedError(
            f"--resume {options.output}: the table", reasons, "measure anew without --resume, or into another file"
        )
    return old


def _begin(name: str, todo: Sequence[Point], old: CrossoverTable | None) -> _Run:
    """Return a backend's run, with its cells from the old table."""
    if old is None:
        return _Run(list(todo))
    cells = [cell for cell in old.cells if cell.kernel == name and cell.case in {point.case for point in todo}]
    done = {cell.case for cell in cells}
    reason = next((record.reason for record in old.kernels if record.name == name), "")
    return _Run([point for point in todo if point.case not in done], cells, old.attention, reason)


def _available(registry: Registry, device: torch.device) -> list[str]:
    phases = {name: registry.backend(name).capabilities.phases for name in registry.able(device)}
    return [BackendRequest.for_backend(name, served).text for name, served in phases.items()]


def _point(case: str) -> Point:
    """Return a case as a point, with mean lengths if the lengths of its requests differ.
    :raises ConfigError: if the case is invalid or has no output.
    """
    requests = parse_case(case)
    if any(total <= query_len for query_len, total in requests):
        raise ConfigError("generation", "groups such as 8q512s1024: 512 tokens in, 512 out", repr(case))
    query_len, total = (round(fmean(lens)) for lens in zip(*requests, strict=True))
    return Point("generate", len(requests), query_len, total, mixed=case if len(set(requests)) > 1 else "")


def _measure(name: str, run: _Run, options: EngineOptions, ends: float | None) -> Iterator[Cell]:
    """Yield the cells of a backend, restarting its process after a crash for the remaining cases."""
    while run.todo and (ends is None or time.monotonic() < ends):
        current: Point | None = None
        with Child(python_command("headway.bench.crossover.worker")) as child:
            for event in events(child, _request(name, run.todo, options), options.cell_limit):
                kind = event["event"]
                if kind == "ready":
                    run.spec = SpecRecord.model_validate(event["spec"])
                elif kind == "begin":
                    current = next(point for point in run.todo if point.case == event["case"])
                elif kind in ("done", "failed") and current is not None:
                    run.todo.remove(current)
                    yield _cell(name, current, event)
                    current = None
                    if ends is not None and time.monotonic() > ends:
                        return
                elif kind == "fatal":
                    run.reason = event["reason"]
                    yield from (_cell(name, point, event) for point in run.todo)
                    run.todo = []
                elif kind == "late" and current is not None:
                    given_up = [p for p in run.todo if p.batch >= current.batch and p.kv_len >= current.kv_len]
                    reason = f"{current.case} took longer than {options.cell_limit:.0f} s"
                    run.todo = [point for point in run.todo if point not in given_up]
                    yield from (new_cell(point, name, None, "dropped", reason=reason) for point in given_up)
                elif kind == "ended" and run.todo:
                    lost, run.todo = ([current], [p for p in run.todo if p != current]) if current else (run.todo, [])
                    run.reason = run.reason if current else event["reason"]
                    yield from (new_cell(point, name, None, "error", reason=event["reason"]) for point in lost)


def _cell(name: str, point: Point, event: Mapping[str, Any]) -> Cell:
    if event["event"] != "done":
        return new_cell(point, name, None, event["status"], reason=event["reason"])
    times = sorted(event["times_us"])
    served = ", ".join(f"{backend} {steps}" for backend, steps in event["served"].items())
    middle = times[len(times) // 2]
    return new_cell(point, name, None, "ok", median_us=middle, p20_us=times[0], p80_us=times[-1], variant=served)


def _table(runs: Mapping[str, _Run], options: EngineOptions, registry: Registry, date: str) -> CrossoverTable | None:
    spec = next((run.spec for run in runs.values() if run.spec is not None), None)
    if spec is None:
        return None
    cells = [cell for run in runs.values() for cell in run.cells]
    marked = [cell for rivals in points(cells).values() for cell in mark_ties(rivals)]
    return CrossoverTable(
        level="engine",
        date=date,
        command=options.command or command_line(),
        origin=Origin.here(),
        complete=all(not run.todo for run in runs.values()),
        model=str(options.llm.get("model", "")),
        device=identify_device(options.device),
        spec=spec,
        noise=noise_of(marked),
        kernels=[
            KernelRecord(name=name, owner=_owner(name, registry), available=not run.reason, reason=run.reason)
            for name, run in runs.items()
        ],
        cells=marked,
    )


def _owner(request: str, registry: Registry) -> str:
    """Return the distributions that provide the backends of a request; auto counts as Headway's."""
    requested = BackendRequest.parse(request)
    names = (requested.prefill, requested.decode)
    return ", ".join(dict.fromkeys("headway" if name == AUTO else registry.backends[name].owner for name in names))


def save(table: CrossoverTable | None, path: Path | None) -> None:
    """Write the results so far to a file, if one was requested."""
    if table is not None and path is not None:
        write_json(table, path)


def _request(name: str, todo: Sequence[Point], options: EngineOptions) -> dict[str, Any]:
    """Return the request for a worker, which asks for an engine just large enough for the remaining cases."""
    llm = {
        "max_model_len": max(kv_len for point in todo for _, kv_len in parse_case(point.case)),
        "max_num_seqs": max(point.batch for point in todo),
        "enable_prefix_caching": False,
        **options.llm,
        "attn_backend": name,
    }
    return {"llm": llm, "cases": [point.case for point in todo], "repeat": options.repeat, "seed": options.seed}
