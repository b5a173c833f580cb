"""`headway bench crossover --level engine`: whole generations, one process a backend: a crash or an OOM costs one cell."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from headway.bench.cases import parse_case
from headway.bench.crossover.cells import mark_ties, new_cell, noise_of
from headway.bench.crossover.grid import Point
from headway.bench.crossover.schema import BackendRecord, Cell, CrossoverTable, SpecRecord, points
from headway.bench.crossover.worker import MARK
from headway.bench.device import identify_device
from headway.bench.kernel import progress_bar
from headway.bench.results import write_json
from headway.core.errors import ConfigError, UnsupportedError
from headway.core.support import Reason
from headway.registry import Registry

AUTO = "auto"
"""Takes part like a backend: each step's choice by the kernel-level table."""
SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "cuda": ((1, 2, 4, 8, 16, 32, 64), (512, 1024, 2048)),
    "cpu": ((1, 4), (16, 64)),
}
"""Batch sizes and input lengths by device type."""


@dataclass(frozen=True)
class EngineOptions:
    """What to generate."""

    device: torch.device
    llm: Mapping[str, Any]
    """Arguments of headway.LLM, without attn_backend."""
    cases: Sequence[str]
    """In the grammar of headway.bench.cases: query_len is the input's length, kv_len that of input and output."""
    backends: Sequence[str] | None = None
    """None: all that are available here, and `auto`."""
    repeat: int = 1
    cell_limit: float = 120.0
    """Seconds after which a generation is given up, with all that are no smaller."""
    seed: int = 0
    budget: float | None = None
    output: Path | None = None
    command: str = ""


@dataclass
class _Run:
    """One backend's way through the cases."""

    todo: list[Point]
    cells: list[Cell] = field(default_factory=list)
    spec: SpecRecord | None = None
    reason: str = ""
    """Why it took no part at all."""


def cases(batches: Sequence[int], lens: Sequence[int]) -> list[str]:
    """As many tokens out as in, for each batch size and input length."""
    return [f"{batch}q{n}s{2 * n}" for batch in batches for n in lens]


def run_engine_level(options: EngineOptions, registry: Registry, console: Console | None = None) -> CrossoverTable:
    """Generate every case through every backend. Whatever goes wrong is in the table; Ctrl-C keeps what is done.

    :raises HeadwayError: an unknown backend, a case that is no generation, or no backend that could start.
    """
    date = datetime.now(UTC).isoformat(timespec="seconds")
    names = list(options.backends) if options.backends else [*_available(registry), AUTO]
    for name in names:
        if name != AUTO:
            registry.backend(name)  # raises, naming all that are registered
    todo = [_point(case) for case in options.cases]
    ends = None if options.budget is None else time.monotonic() + options.budget
    runs: dict[str, _Run] = {}
    with progress_bar(console) as progress:
        task = progress.add_task("crossover", total=len(names) * len(todo))
        for name in names:
            runs[name] = run = _Run(list(todo))
            try:
                for cell in _measure(name, run, options, ends):
                    run.cells.append(cell)
                    progress.update(task, advance=1, description=f"{name} {cell.case}")
                    _save(_table(runs, options, registry, date), options.output)
            except KeyboardInterrupt:
                break
    table = _table(runs, options, registry, date)
    if table is None:
        raise UnsupportedError("generations", [Reason(name, "a backend that starts", run.reason) for name, run in runs.items()])
    _save(table, options.output)
    return table


def _available(registry: Registry) -> list[str]:
    return [name for name in registry.backends if registry.availability(name)]


def _point(case: str) -> Point:
    """A generation as a point: means where its requests are not alike.

    :raises ConfigError: not of the grammar, or nothing to write.
    """
    requests = parse_case(case)
    if any(total <= query_len for query_len, total in requests):
        raise ConfigError("generation", "groups such as 8q512s1024: 512 tokens in, 512 out", repr(case))
    query_len, total = (round(fmean(lens)) for lens in zip(*requests, strict=True))
    return Point("generate", len(requests), query_len, total, mixed=case if len(set(requests)) > 1 else "")


def _measure(name: str, run: _Run, options: EngineOptions, ends: float | None) -> Iterator[Cell]:
    """Cells of a backend; a process that dies is started again for what is left."""
    while run.todo and (ends is None or time.monotonic() < ends):
        current: Point | None = None
        with _Worker(name, run.todo, options) as worker:
            for event in worker.events(options.cell_limit):
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
                    current = None
                    break
            else:
                if run.todo:  # it ended by itself with work left
                    lost, run.todo = ([current], [p for p in run.todo if p != current]) if current else (run.todo, [])
                    run.reason = run.reason if current else worker.last_words
                    yield from (new_cell(point, name, None, "error", reason=worker.last_words) for point in lost)


def _cell(name: str, point: Point, event: Mapping[str, Any]) -> Cell:
    if event["event"] != "done":
        return new_cell(point, name, None, event["status"], reason=event["reason"])
    times = sorted(event["times_us"])
    served = ", ".join(f"{backend} {steps}" for backend, steps in event["served"].items())
    middle = times[len(times) // 2]
    return new_cell(point, name, None, "ok", median_us=middle, p20_us=times[0], p80_us=times[-1], kernel=served)


def _table(runs: Mapping[str, _Run], options: EngineOptions, registry: Registry, date: str) -> CrossoverTable | None:
    spec = next((run.spec for run in runs.values() if run.spec is not None), None)
    if spec is None:
        return None
    cells = [cell for run in runs.values() for cell in run.cells]
    marked = [cell for rivals in points(cells).values() for cell in mark_ties(rivals)]
    owners = {name: entry.owner for name, entry in registry.backends.items()} | {AUTO: "headway"}
    return CrossoverTable(
        level="engine",
        date=date,
        command=options.command or " ".join(sys.argv),
        complete=all(not run.todo for run in runs.values()),
        model=str(options.llm.get("model", "")),
        device=identify_device(options.device),
        spec=spec,
        noise=noise_of(marked),
        backends=[
            BackendRecord(name=name, owner=owners[name], available=not run.reason, reason=run.reason)
            for name, run in runs.items()
        ],
        cells=marked,
    )


def _save(table: CrossoverTable | None, path: Path | None) -> None:
    if table is not None and path is not None:
        write_json(table, path)


class _Worker:
    """The process of one backend, its events, and what it said last."""

    def __init__(self, name: str, todo: Sequence[Point], options: EngineOptions) -> None:
        longest = max(kv_len for point in todo for _, kv_len in parse_case(point.case))
        most = max(point.batch for point in todo)
        llm = {
            "max_model_len": longest,
            "max_num_seqs": most,
            "enable_prefix_caching": False,
            **options.llm,
            "attn_backend": name,
        }
        self._request = {"llm": llm, "cases": [p.case for p in todo], "repeat": options.repeat, "seed": options.seed}
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (closed by __exit__)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Worker:
        command = [sys.executable, "-P", "-m", "headway.bench.crossover.worker"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._said, encoding="utf-8", errors="replace")
        threading.Thread(target=self._read, daemon=True).start()
        assert self._process.stdin is not None
        try:
            json.dump(self._request, self._process.stdin)
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once: its last words say why
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._said.close()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._lines.put(line[len(MARK) :])
        self._lines.put(None)

    def events(self, cell_limit: float) -> Iterator[dict[str, Any]]:
        """What the process says, until it ends; "late" when a case took longer than `cell_limit` seconds."""
        running = False
        while True:
            try:
                line = self._lines.get(timeout=cell_limit if running else None)
            except queue.Empty:
                yield {"event": "late"}
                return
            if line is None:
                return
            event: dict[str, Any] = json.loads(line)
            running = event["event"] == "begin"
            yield event

    @property
    def last_words(self) -> str:
        """How the process ended, and the end of what it printed."""
        assert self._process is not None
        code = self._process.wait()
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the process {how}" + (f": {lines[-1][:300]}" if lines else "")
