"""Check of one subject: a child process lists the cells, child processes run them, and the results become a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.layer import Invariance
from headway.core.system.provenance import Origin
from headway.registry.isolation import Trial
from headway.registry.plugin_sources import find_source
from headway.testing.kit.checks.answers import level_text
from headway.testing.kit.checks.claims import CELL, try_plugin
from headway.testing.kit.kit import list_cells, make_kit, run_cell, words_of_checks
from headway.testing.kit.report import CellResult, CheckReport, machine_of, now
from headway.testing.kit.runner import CellProcess, CellRun, Listed, Sanitizer, cell_timeout
from headway.testing.kit.subject import BASELINE
from headway.tuning.isolated.passport import KernelRecords, Passport, kernel_name, known_times
from headway.tuning.measure.device import identify_device


@dataclass(frozen=True)
class Wanted:
    """Options of a run of the kit."""

    target: str = ""
    """Name of a backend, broken:NAME or FILE.py:CLASS. A prefix (states:, linear:, experts:) selects a kind of operation other
    than attention."""
    device: str = "cpu"
    quick: bool = False
    layout: str = ""
    """Name of a layout whose writer, check and gather are tested instead of a backend."""
    only: str = ""
    """Names of checks, separated by commas; "" means all."""
    cell: str = ""
    """Name of the only cell to run; "" means all cells."""
    in_process: bool = False
    """True to run the cell in this process, where its output is visible and a debugger works. A crash ends the process."""
    jobs: int = 1
    timeout: float = 0.0
    """Time limit per cell in seconds; 0 means the result of `cell_timeout`."""
    plugins: tuple[str, ...] = ()
    """Plugin files to register in addition to the installed plugins."""
    sanitizer: str = ""
    """Path of compute-sanitizer, under which the cells run; "" means no sanitizer."""
    model: str = ""
    """Path of a config.json, or name of a model, whose layers replace the kit's own; "" means the kit's own."""
    rule: str = ""
    """Attention rule of the layers, as FILE.py:CLASS or a plugin's name; "" means none. Without `model`, the layers are a few of
    the kit's own."""
    stop_at_failure: bool = False
    """True to end the run at the first cell that fails."""
    guesses: bool = True
    """True if failures include a likely cause. Finding the cause may take longer than running the cell."""


def brought_kernels(plugins: Sequence[str], device: str = "cpu") -> list[str]:
    """Return the targets of all kernels that plugin files register. A child process imports the files.

    :raises ConfigError: if a file does not load, or registers no kernel.
    """
    found = CellProcess("", device, 1, cell_timeout(device), tuple(plugins)).brought()
    if not found:
        raise ConfigError("--plugin", "a file that brings kernels", ", ".join(plugins))
    return found


def check(
    wanted: Wanted,
    start: Callable[[int], None] = lambda count: None,
    tell: Callable[[CellResult], None] = lambda result: None,
    trial: Trial | None = None,
) -> CheckReport:
    """Run a check and return its report. Ctrl-C ends the run, and the report has the results so far.

    start: called with the number of cells. tell: called with each result. trial: function that tries plugins as a start does,
    for the check `process`; None skips this check.

    :raises HeadwayError: if the subject, check, layout or cell does not exist.
    """
    if wanted.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "a CUDA GPU", "none that torch can use", "--device cpu")
    if wanted.in_process and not wanted.cell:
        raise ConfigError("--in-process", "one cell: --cell CELL", "none")
    started = time.monotonic()
    listed, results, left = _here(wanted, trial) if wanted.in_process else _in_children(wanted, start, tell, trial)
    return CheckReport(
        target=wanted.target or f"layout {wanted.layout}",
        subject=f"layout {wanted.layout}" if wanted.layout else listed.subject,
        plugins=list(wanted.plugins),
        digest=listed.digest,
        kind=listed.kind,
        plugin=listed.plugin,
        model=wanted.model,
        rule=wanted.rule,
        origin=Origin.here(),
        version=Origin.here().version if listed.owner == "built-in" else listed.owner,
        date=now(),
        quick=wanted.quick,
        machine=machine_of(torch.device(wanted.device)),
        unavailable=listed.unavailable,
        seconds=round(time.monotonic() - started, 1),
        not_run=left,
        cells=results,
    )


def _here(wanted: Wanted, trial: Trial | None) -> tuple[Listed, list[CellResult], int]:
    kit = make_kit(wanted.target or BASELINE, wanted.device, wanted.plugins, wanted.model, wanted.rule)
    listed = Listed(**list_cells(kit, True, wanted.layout, wanted.cell))
    results = _tried(listed.cells, listed, trial) or [run_cell(kit, cell, guesses=wanted.guesses) for cell in listed.cells]
    return listed, results, 0


def _in_children(
    wanted: Wanted, start: Callable[[int], None], tell: Callable[[CellResult], None], trial: Trial | None
) -> tuple[Listed, list[CellResult], int]:
    """Return the listing of the subject, the results, and the number of cells that were not run because of an interruption."""
    target, timeout = wanted.target or BASELINE, wanted.timeout or cell_timeout(wanted.device, bool(wanted.sanitizer))
    watches = [Sanitizer(wanted.sanitizer) if wanted.sanitizer else None for _ in range(max(1, wanted.jobs))]
    children = [
        CellProcess(target, wanted.device, 1, timeout, wanted.plugins, wanted.model, wanted.guesses, watch, wanted.rule)
        for watch in watches
    ]
    try:
        listed = children[0].list(quick=wanted.quick, layout=wanted.layout, only_cell=wanted.cell)
        whole = trial is not None and listed.plugin and not wanted.layout and not wanted.cell
        cells = _picked([str(CELL), *listed.cells] if whole else listed.cells, wanted) if not listed.unavailable else []
        start(len(cells))
        try:
            tried = _tried(cells, listed, trial)  # runs without other cells: the trial has a time limit
        except KeyboardInterrupt:
            return listed, [], len(cells)
        for result in tried:
            tell(result)
        failed = wanted.stop_at_failure and any(result.status == "failed" for result in tried)
        run = CellRun(children[: max(1, len(cells))], tell, wanted.stop_at_failure)
        results = [] if failed else run.all(cells[len(tried) :])
        return listed, tried + results, len(cells) - len(tried) - len(results)
    finally:
        for child in children:
            child.stop()


def _tried(cells: Sequence[str], listed: Listed, trial: Trial | None) -> list[CellResult]:
    """Return a list with the result of the check `process` if this check is the first cell and there is a plugin to try; else an
    empty list."""
    if trial is None or not listed.plugin or cells[:1] != [str(CELL)]:
        return []
    return [try_plugin(find_source(*listed.plugin), trial)]


def _picked(cells: Sequence[str], wanted: Wanted) -> list[str]:
    if wanted.cell or not wanted.only:
        return list(cells)
    only, known = wanted.only.split(","), dict.fromkeys(cell.partition(":")[0] for cell in cells)
    refused = "serves" in known and known.keys() <= {"process", "serves"}  # no layer is supported: `serves` says why
    for name in only:
        if name not in known and not (refused and name in words_of_checks()):
            raise ConfigError("--only", f"checks of this subject: {', '.join(known)}", repr(name))
    only = only if known.keys() & {*only} else ["serves"]
    return [cell for cell in cells if cell.partition(":")[0] in only]


def passport_of(reports: Sequence[CheckReport]) -> tuple[Passport, Path]:
    """Return the passport of a plugin, and the path at which a start looks for it. reports: reports of the plugin's kernels.

    :raises ConfigError: if a kernel is not a plugin's, or a report is not complete.
    """
    first = reports[0]
    source = find_source(*first.plugin) if first.plugin else None
    if source is None or source.passport is None:
        raise ConfigError("--passport", "a kernel of a plugin, whose files it describes", first.target)
    device, kernels = identify_device(torch.device(first.machine.device)), []
    for report in reports:
        if report.unavailable or report.not_run or not report.cells:
            got = report.unavailable or f"{report.not_run} cells that were not run"
            raise ConfigError("--passport", "a kernel whose cells have all been run", got)
        invariant = {cell.status for cell in report.cells if cell.check == "invariant"} - {"skipped"}
        reasons = {cell.reason for cell in report.cells if cell.check == "invariant"}
        most = next((level for level in reversed(Invariance) if level_text(level) in reasons), Invariance.BATCH)
        levels = [level.name.lower() for level in Invariance if Invariance.NONE < level <= most]
        record = {
            "name": kernel_name(report.subject),
            "kind": report.kind,
            "quick": report.quick,
            "cells": [
                {"name": cell.cell, "verdict": cell.status, "error": cell.relative_error, "tolerance": cell.tolerance}
                for cell in report.cells
            ],
            "determinism": dict.fromkeys(levels if invariant else [], invariant == {"passed"}),
            "times": known_times(report.subject, report.kind, source.digest(), device),
        }
        kernels.append(KernelRecords.model_validate(record))
    made = Passport(
        digest=source.content_digest(), library=source.owner, origin=first.origin, date=first.date, device=device, kernels=kernels
    )
    return made, source.passport
