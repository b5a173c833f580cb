"""`headway check`: test a kernel or a cache layout against the contract, with the calls that the engine makes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.options import PluginFiles
from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal

if TYPE_CHECKING:
    from headway.testing.kit.checking import Wanted
    from headway.testing.kit.report import CellResult, CheckReport


def check(
    target: Annotated[
        str, typer.Argument(help="Kernel to test: NAME, FILE.py:CLASS, or broken:NAME (wrong on purpose).", show_default=False)
    ] = "",
    kind: Annotated[
        str, typer.Option(help="Kind of the kernel: attention, state, linear or experts.", show_default="attention")
    ] = "",
    device: Annotated[str, typer.Option(help="Device for the backend: cpu or cuda.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Test each value once instead of each pair of values.")] = False,
    layout: Annotated[str, typer.Option(help="Cache layout to check: its writer, check() and gather().")] = "",
    plugin: PluginFiles = None,
    states: Annotated[bool, typer.Option("--states", help="Alternative to --kind state.")] = False,
    model: Annotated[
        str, typer.Option(help="Model whose layers to test: a config.json, its folder, or a name such as llama-3-8b.")
    ] = "",
    rule: Annotated[
        str, typer.Option(help="Attention rule to test, as FILE.py:CLASS; without a kernel, with every backend that supports it.")
    ] = "",
    only: Annotated[str, typer.Option(help="Checks to run: names from the scorecard, comma-separated.")] = "",
    cell: Annotated[str, typer.Option(help="Single cell to run, by the name in a failure report.")] = "",
    stop_at_failure: Annotated[bool, typer.Option("-x", "--stop-at-failure", help="Stop at the first cell that fails.")] = False,
    no_guess: Annotated[bool, typer.Option("--no-guess", help="Do not diagnose failures, which may take long.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="Compare two result files; exit with 1 if B is worse."),
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Run the cell in this process, for print and breakpoint(). A crash ends it.")
    ] = False,
    sanitize: Annotated[bool, typer.Option("--sanitize", help="Report the first error of compute-sanitizer. Slow.")] = False,
    jobs: Annotated[
        int, typer.Option(min=0, max=1024, help="Number of processes that run cells in parallel. 0 means one per core, up to 4.")
    ] = 0,
    timeout: Annotated[
        float,
        typer.Option(min=0.0, max=86_400.0, help="Maximum seconds per cell. 0 means 60 on a CPU, 240 on a GPU, 600 interpreted."),
    ] = 0.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every cell's result to this JSON file.")] = None,
    passport: Annotated[Path | None, typer.Option(help="Write a passport for the kernel's plugin to this file.")] = None,
    badge_file: Annotated[Path | None, typer.Option("--badge", help="Write an SVG badge with the outcome to this file.")] = None,
) -> None:
    """Test a backend against the contract.

    The exit code is 1 if anything fails, and 2 if nothing was checked. Ctrl-C shows the results so far.

    The backend runs in child processes, so that a crash, a hang or an exit is reported as a failure.
    """
    from headway.core.system.json_files import write_json
    from headway.registry.registry import builtin_registry
    from headway.testing.kit.checking import Wanted, passport_of
    from headway.testing.kit.runner import find_sanitizer
    from headway.tuning.isolated.trial import try_installed

    if compare is not None:
        _compare(*compare)
        return
    if not target and not layout and not plugin and not rule:
        need = "a backend: NAME or FILE.py:CLASS, or --layout NAME, --plugin FILE or --rule FILE.py:CLASS"
        raise ConfigError("headway check", need, "none of them")
    target = _with_kind(target, kind or ("state" if states else ""))
    if device not in ("cpu", "cuda"):
        raise ConfigError("--device", "cpu or cuda", repr(device))
    if (model or rule) and layout:
        raise ConfigError("--model" if model else "--rule", "a backend to try its layers with", f"--layout {layout}")
    if passport and (only or cell or layout or model or rule or target.startswith("broken:")):
        got = "--only, --cell, --layout, --model, --rule or broken:NAME"
        raise ConfigError("--passport", "all cells of one kernel of a plugin", got)
    if passport and ".py" not in target and any(target.rpartition(":")[2] in each.entries for each in builtin_registry().kinds):
        raise ConfigError("--passport", "a kernel of a plugin, whose files it describes", f"{target}, which is built-in")
    if sanitize and in_process:
        raise ConfigError("--sanitize", "child processes, which it watches", "--in-process")
    sanitizer = find_sanitizer(device) if sanitize else ""
    try_installed()  # plugins other than the tested one could crash the processes that test it
    children = jobs or min(4, os.cpu_count() or 1)
    wanted = Wanted(
        *(target, device, quick, layout, only, cell, in_process, children, timeout, tuple(plugin or ()), sanitizer, model),
        stop_at_failure=stop_at_failure,
        guesses=not no_guess,
        rule=rule,
    )
    reports = [_checked(each, json_file, badge_file) for each in _each(wanted, kind, json_file or badge_file)]
    if passport is not None:
        made, place = passport_of(reports)
        write_json(made, passport, "--passport")
        if passport.resolve() != place.resolve():
            print(f"A start looks for the passport of this plugin in {place}.")
    if any(report.not_run and not (stop_at_failure and report.failed) for report in reports):
        raise KeyboardInterrupt  # handled like an interrupt: it ends the command
    if any(report.failed for report in reports):
        raise typer.Exit(1)
    if not any(report.tested for report in reports):
        raise typer.Exit(2)


def _with_kind(target: str, kind: str) -> str:
    """Return a target with the prefix of a kind. kind: empty if the target already has a prefix. :raises ConfigError: if no such
    kind exists."""
    from headway.core.contract.operation import kind_of
    from headway.testing.kit.subject import PREFIXES

    prefix = PREFIXES.get(kind_of(kind, "--kind").name, "") if kind else ""
    named = not target or target.startswith(("broken:", prefix)) if prefix else True
    return target if named else prefix + target


def _each(wanted: Wanted, kind: str, file: Path | None) -> list[Wanted]:
    """Return one request per kernel: for the named kernel, or for each kernel in the plugins' files.
    kind: the kind of kernels to include; "" means all. file: result file, which can hold only one report."""
    from headway.testing.kit.checking import brought_kernels
    from headway.testing.kit.subject import PREFIXES

    if wanted.target or wanted.layout:
        return [wanted]
    if wanted.rule:
        from headway.testing.kit.kit import kernels_for

        found = kernels_for(wanted.rule, wanted.model, wanted.device, wanted.plugins)
        print(f"backends that support the rule: {', '.join(found)}")
        return [replace(wanted, target=each) for each in found]
    found = brought_kernels(wanted.plugins, wanted.device)
    if kind:
        prefix = PREFIXES.get(kind, "")
        others = tuple(each for each in PREFIXES.values() if each != prefix)
        found = [each for each in found if each.startswith(prefix) and not each.startswith(others)]
    if not found or (len(found) > 1 and (file or wanted.cell)):
        raise ConfigError("headway check", "the name of one kernel", ", ".join(found) or f"none of kind {kind}")
    return [replace(wanted, target=each) for each in found]


def _checked(wanted: Wanted, json_file: Path | None, badge_file: Path | None) -> CheckReport:
    """Check one kernel, print its scorecard, and write its files."""
    from headway.core.system.json_files import write_bytes
    from headway.testing.diagnosis.scorecard import badge, scorecard
    from headway.testing.kit.kit import words_of_checks

    console = Terminal()
    report = _run(wanted, console)
    for line in scorecard(report, words_of_checks(), min(console.width, 100)):
        console.print(line, soft_wrap=True, highlight=False)
    if json_file is not None:
        report.write(json_file)
    if badge_file is not None:
        write_bytes(badge(report).encode(), badge_file, "--badge")
    return report


def _compare(first: Path, second: Path) -> None:
    """Print the changes between two result files; exit with code 1 if the second file is worse."""
    from headway.testing.kit.report import ReportComparison, read_check

    found = ReportComparison(read_check(first), read_check(second))
    for line in found.lines():
        print(line)
    if found.worse:
        raise typer.Exit(1)


def _run(wanted: Wanted, console: Terminal) -> CheckReport:
    """Run the checks, with a progress line on the terminal."""
    from headway.testing.kit.checking import check as run
    from headway.tuning.isolated.trial import try_plugins

    what = wanted.target or wanted.layout
    done, failed, whole = 0, 0, 0
    with console.status(f"{what}: loading") as status:
        if wanted.in_process:
            status.stop()  # a debugger shares the terminal

        def start(count: int) -> None:
            nonlocal whole
            whole = count

        def show_cell(result: CellResult) -> None:
            nonlocal done, failed
            done, failed = done + 1, failed + (result.status == "failed")
            status.update(f"{what}: {done} of {whole} cells, {failed} failed")

        return run(wanted, start, show_cell, try_plugins)
