"""`headway table`: show, compare, merge and plot crossover tables, and check whether they fit this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.cli.options import PluginFiles, on_command_line, report_written, sizes_of, write_result
from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal

if TYPE_CHECKING:
    from headway.bench.crossover.regret import RegretReport
    from headway.core.contract.operation import OperationKind
    from headway.tuning.table.schema import CrossoverTable

table = typer.Typer(help="Show, compare, merge, draw and check crossover tables.", no_args_is_help=True)

_FILE = typer.Argument(help="Table file. Default: the newest table for this machine.")


@table.command()
def show(
    file: Annotated[Path | None, _FILE] = None,
    layout: Annotated[str | None, typer.Option("--kv-layout", help="Cache layout to show. Default: the fastest.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Block size to show. Default: the fastest.")] = None,
    export_to: Annotated[
        list[Path] | None, typer.Option("--export", help="Also export to this .csv, .md, .html or .png file. Repeatable.")
    ] = None,
    all_backends: Annotated[
        bool, typer.Option("--all", help="Also print why backends could not run on the machine that measured the table.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Print the fastest backends and their times for one layout and block size."""
    from headway.bench.crossover.export import check_target, export
    from headway.bench.crossover.report import print_view, to_plain, view
    from headway.tuning.table.files import read_table

    for target in export_to or ():
        check_target(target, file)
    shown = view(read_table(_found(file), kind=None), layout, block_size)
    for target in export_to or ():
        export(shown, target)
    if as_json:
        print(json.dumps(to_plain(shown), indent=2))
        return
    console = Terminal()
    print_view(shown, console, all_backends)
    for target in export_to or ():
        report_written(target, console)


@table.command()
def plot(
    file: Annotated[Path, typer.Argument(help="Table file.")],
    picture: Annotated[Path, typer.Argument(help="Picture file to write: .png or .html.")],
    curves: Annotated[bool, typer.Option("--curves", help="Draw time against length, one curve per backend (.png).")] = False,
    layout: Annotated[str | None, typer.Option("--kv-layout", help="Cache layout to show. Default: the fastest.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Block size to show. Default: the fastest.")] = None,
) -> None:
    """Draw a heat map of the fastest backends and their speed-ups.

    With --curves, the picture shows time against length instead.
    """
    from headway.bench.crossover.export import check_target, export
    from headway.bench.crossover.report import view
    from headway.tuning.table.files import read_table

    check_target(picture, file)
    shown = view(read_table(file), layout, block_size)
    if curves:
        from headway.bench.crossover.plot import to_curves
        from headway.core.system.json_files import write_bytes

        if picture.suffix.lower() != ".png":
            raise ConfigError("--curves", "a file name that ends in .png", str(picture))
        write_bytes(to_curves(shown), picture)
    else:
        export(shown, picture)
    report_written(picture, _console())


@table.command()
def check(file: Annotated[Path | None, _FILE] = None, plugin: PluginFiles = None) -> None:
    """Check whether a table fits this machine: device, driver, libraries.

    The exit code is 1 if the table does not fit.
    """
    from headway.tuning.isolated.trial import create_registry
    from headway.tuning.measure.device import identify_device, resolve_device
    from headway.tuning.measure.self_test import owners
    from headway.tuning.table.compare import differences, remarks
    from headway.tuning.table.files import read_table

    path = _found(file)
    known = read_table(path, kind=None)
    registry = create_registry(plugin or ())
    device = resolve_device(None if known.device.type == "cuda" else known.device.type)
    here = identify_device(device)
    kind = _registered(known)
    available = [record.name for record in known.kernels] if kind is None else registry.of(kind).all_able(device.type)
    reasons = differences(known, here, owners={} if kind is None else owners(registry, kind))
    console = _console()
    console.print(Text(f"{path}: {known.title}, {len(known.cells)} cells, measured {known.date}"), soft_wrap=True)
    for line in remarks(known, here, available):
        console.print(Text(f"  note: {line}"), soft_wrap=True)
    for reason in reasons:
        console.print(Text(f"  {reason.what}: the table has {reason.need}, this machine {reason.got}", "red"), soft_wrap=True)
    if reasons:
        console.print(Text("does not fit this machine: auto does not use it; headway bench crossover measures again"))
        raise typer.Exit(1)
    console.print(Text("fits this machine", "green"))


@table.command()
def priors(
    plugin: PluginFiles = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False
) -> None:
    """List the tables that ship with Headway, and which of them fit this machine.

    A first start on this machine checks and uses the tables that fit.
    """
    from headway.tuning.isolated.trial import create_registry
    from headway.tuning.measure.device import identify_device, resolve_device
    from headway.tuning.measure.self_test import owners
    from headway.tuning.table.files import FOLDER_VARIABLE, Prior, TableError, find_prior, prior_folder, read_table, shipped

    if not (folder := prior_folder()).is_dir():
        raise ConfigError(f"${FOLDER_VARIABLE}", "a folder of tables, or no value for those that ship", folder)
    here, registry = identify_device(resolve_device(None)), create_registry(plugin or ())
    rows: list[dict[str, object]] = []
    for path in shipped():
        fitting: Prior | None = None
        try:
            known = read_table(path, kind=None)
            if known.device.name == here.name:
                kind = _registered(known)
                fitting = find_prior(here, known.spec, {} if kind is None else owners(registry, kind))
        except TableError as error:
            rows.append({"file": path.name, "what": str(error), "fits": False, "differs": []})
            continue
        differs = [] if fitting is None else list(fitting.differs)
        what = f"{known.spec}: {Prior(path, known, ()).record().made}, {len(known.cells)} cells"
        rows.append({"file": path.name, "what": what, "fits": fitting is not None, "differs": differs})
    if as_json:
        print(json.dumps({"device": here.name, "priors": rows}, indent=2))
        return
    console = _console()
    for row in rows:
        console.print(Text(f"{row['what']}", "green" if row["fits"] else ""), soft_wrap=True)
        for line in row["differs"]:  # type: ignore[attr-defined]
            console.print(Text(f"  other there: {line}", "dim"), soft_wrap=True)
    fit = sum(bool(row["fits"]) for row in rows)
    counted = f"{fit} of {len(rows)} shipped tables are of this kind of device" if rows else "no table ships with this version"
    derives = here.type == "cuda" and bool(rows)
    instead = "" if fit else ": a first start derives times from them" if derives else ": a first start measures in full"
    console.print(Text(f"{here.name}: {counted}{instead}"), soft_wrap=True)


@table.command()
def diff(
    first: Annotated[Path, typer.Argument(help="Table file.")],
    second: Annotated[Path, typer.Argument(help="Table file to compare with.")],
    at_least: Annotated[float, typer.Option(min=0.0, help="Minimum relative difference between two times to show.")] = 0.05,
) -> None:
    """Show the cells in which two tables differ.

    A cell differs if its times differ by more than the noise, or if only one table has a time.
    """
    from headway.tuning.table import compare
    from headway.tuning.table.files import read_table

    tables = read_table(first, kind=None), read_table(second, kind=None)
    console = _console()
    for reason in compare.differences(tables[0], tables[1].device, tables[1].spec):
        console.print(Text(f"{reason.what}: {reason.need} in the first, {reason.got} in the second"), soft_wrap=True)
    changes = compare.diff(tables[0], tables[1], at_least)
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("phase", "case", "backend", "layout", "first us", "second us", "factor", "what"):
        shown.add_column(column, justify="right" if column in ("first us", "second us", "factor") else "left")
    for change in changes:
        cell = change.cell
        where = " ".join(str(each) for each in (cell.layout, cell.block_size) if each) or "any"
        before, after = (f"{us:.1f}" if us is not None else "-" for us in (change.before_us, change.after_us))
        factor = f"{change.factor:.2f}" if change.factor is not None else ""
        shown.add_row(cell.phase, cell.case, cell.kernel, where, before, after, factor, change.status)
    if changes:
        console.print(shown)
    console.print(Text(f"{len(changes)} cells differ, of {len(tables[0].cells)} and {len(tables[1].cells)}"))


@table.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Table files of one machine and one kind of layer.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Table file to write.")],
) -> None:
    """Merge tables into one file. Cells of later tables replace earlier ones."""
    from headway.core.system.json_files import write_json
    from headway.tuning.table import compare
    from headway.tuning.table.files import read_table

    if len(files) < 2:
        raise ConfigError("headway table merge", "two files or more", len(files))
    merged = compare.merge([read_table(path, kind=None) for path in files], files)
    write_json(merged, output)
    console = _console()
    console.print(Text(f"{len(merged.cells)} cells written to {output}"), soft_wrap=True)
    if partly := compare.partly_measured(merged):
        console.print(Text(f"note: {partly} points were not measured for every backend; there auto considers the others only"))


@table.command()
def regret(
    context: typer.Context,
    files: Annotated[list[Path] | None, typer.Argument(help="Table files. Default: the newest table for this machine.")] = None,
    points: Annotated[int, typer.Option(min=1, help="Number of held-out random points to measure per seed.")] = 40,
    seed: Annotated[str, typer.Option(help="Seeds of the points and their inputs, comma-separated.")] = "1",
    workload: Annotated[str, typer.Option(help="Expected workload: chat, long, batch, or BATCHxINPUT+OUTPUT.")] = "chat",
    without: Annotated[bool, typer.Option("--leave-one-out", help="Leave out each point in turn instead of measuring.")] = False,
    anywhere: Annotated[bool, typer.Option("--anywhere", help="Also compare with every other layout and block size.")] = False,
    plugin: PluginFiles = None,
    trials: Annotated[Path | None, typer.Option(help="Use the times in this earlier --output file instead of measuring.")] = None,
    derived_from: Annotated[
        list[Path] | None,
        typer.Option(help="Measure nothing: choose by times derived from this table of another layer or GPU. Repeatable."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="JSON file for the results. For several tables, a folder with one file per table."),
    ] = None,
) -> None:
    """Measure how much slower auto is than the best backend outside a table.

    auto uses the table. The points to measure are drawn at random and are not in the table.
    """
    from headway.bench.crossover.regret import RegretReport, derived_regret, judge_again, leave_one_out, measure_regret
    from headway.core.select.request import Workload
    from headway.machine.process import set_threads
    from headway.tuning.isolated.trial import create_registry
    from headway.tuning.measure.device import resolve_device
    from headway.tuning.table.files import read_table

    _check_judged(context, {"--leave-one-out": without, "--trials": trials, "--derived-from": derived_from})
    paths = files or [_found(None)]
    if trials is not None and len(paths) > 1:
        raise ConfigError("headway table regret --trials", "one table, which the times are of", f"{len(paths)} tables")
    seeds = list(dict.fromkeys(sizes_of("--seed", seed, least=0) or [1]))  # duplicate seeds count once
    tables = [read_table(path) for path in paths]
    expected, registry = Workload.parse(workload), create_registry(plugin or ())
    reports: list[RegretReport] = []
    for path, known in zip(paths, tables, strict=True):
        if without:
            report = leave_one_out(known)
        elif trials is not None:
            report = judge_again(RegretReport.read(trials), known, expected)
        elif derived_from:
            report = derived_regret(known, [read_table(each) for each in derived_from])
        else:
            device = resolve_device(None if known.device.type == "cuda" else known.device.type)
            if device.type == "cpu":
                set_threads(known.device.threads)
            err = Terminal(stderr=True)
            report = measure_regret(known, registry, device, points, seeds, expected, console=err, anywhere=anywhere)
        reports.append(report)
        print_regret(report, path, anywhere or (trials is not None and len(report.places) > 1))
        if output is not None:
            target = output if len(paths) == 1 else output / f"regret-{path.stem.removeprefix('crossover-')}.json"
            write_result(report, target, _console())
    if len(reports) > 1:
        count = sum(len(report.trials) for report in reports)
        worst = max(report.worst for report in reports)
        means = ", ".join(f"{report.geometric_mean:.3f}" if report.trials else "none" for report in reports)
        _console().print(Text(f"{len(reports)} tables, {count} points: geometric means {means}, worst {worst:.3f}", "bold"))


def _check_judged(context: typer.Context, judging: Mapping[str, object]) -> None:
    """Check the options that measure nothing. judging: option -> value.

    :raises ConfigError: if several of them are given, or if one of them is given with an option that it does not read.
    """
    given = [option for option, value in judging.items() if value]
    if len(given) > 1:
        raise ConfigError("headway table regret", f"one of {', '.join(judging)}", " and ".join(given))
    if not given:
        return
    option = given[0]
    for name in ("points", "seed") if option == "--trials" else ("points", "seed", "anywhere", "workload"):
        if on_command_line(context, name):
            raise ConfigError(
                f"--{name}", "points that are measured", f"{option}, which measures none and does not read --{name}"
            )


def print_regret(report: RegretReport, path: Path, anywhere: bool) -> None:
    """Print every point with the chosen and the best backend, then the means."""
    console = _console()
    shown = Table(title=f"{path}: {report.selection}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("phase", "case", "auto", "best", "auto us", "best us", "regret"):
        shown.add_column(column, justify="right" if column in ("auto us", "best us", "regret") else "left")
    for trial in report.trials:
        own, best, regret = f"{trial.chosen_us:.0f}", f"{trial.best_us:.0f}", f"{trial.regret:.3f}"
        style = "bold" if trial.regret > 1.05 else ""
        shown.add_row(trial.phase, trial.case, trial.chosen, trial.best, own, best, regret, style=style)
    console.print(shown)
    for line in report.untimed:
        console.print(Text(f"no time: {line}"), soft_wrap=True)
    seeds = sorted({trial.seed for trial in report.trials if trial.seed is not None})
    for seed in seeds if len(seeds) > 1 else ():
        mean, worst = report.of_seed(seed)
        console.print(Text(f"seed {seed}: geometric mean {mean:.3f}, worst {worst:.3f}"))
    if not report.trials:
        console.print(Text("regret: no held-out point has a time of the choice, so there is no result", "bold"))
        return
    console.print(Text(f"auto us and best us: microseconds of a step of {report.layers} layers with its plan", "dim"))
    summary = (
        f"regret over {len(report.trials)} held-out points: geometric mean {report.geometric_mean:.3f}, worst {report.worst:.3f}"
    )
    console.print(Text(summary, "bold"))
    if anywhere:
        mean, worst = report.geometric_mean_anywhere, report.worst_anywhere
        console.print(Text(f"against the best of every layout and block size: geometric mean {mean:.3f}, worst {worst:.3f}"))


def _found(file: Path | None) -> Path:
    """Return the given file, or the newest table for this machine. :raises ConfigError: if this machine has no table."""
    from headway.tuning.table.files import stored_tables, table_folder

    if file is not None:
        return file
    known = stored_tables()
    if not known:
        raise ConfigError("table", f"a file, or one in {table_folder()}", "none", "headway bench crossover measures one")
    return known[0]


def _registered(known: CrossoverTable) -> OperationKind | None:
    """Return the table's kind of operation if its kernels are backends of the registry, else None."""
    from headway.core.contract.operation import ATTENTION, STATE

    return {kind.name: kind for kind in (ATTENTION, STATE)}.get(known.kind)


def _console() -> Console:
    console = Terminal()
    return console if console.is_terminal else Terminal(width=160)
