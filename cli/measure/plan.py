"""`headway plan`: deployments of a model on GPUs of one kind, ranked by predicted throughput, and the number of GPUs that a load
needs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from headway.cli.options import names_of, sizes_of
from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal, progress_bar

if TYPE_CHECKING:
    from headway.plan.attention_times import MeasuredLayer
    from headway.plan.demand import Demand, Routing
    from headway.plan.devices import GpuKind
    from headway.plan.results import PlanReport, PlanRow
    from headway.plan.search import FleetSearch


_WIDTH = 80
_MODEL = "Model: a folder with a config.json, a Hugging Face Hub id, or a built-in shape. No weights are read."
_LIMIT = "in milliseconds, for --percentile of the requests."


def plan(
    model: Annotated[str, typer.Argument(help=_MODEL)],
    gpu: Annotated[str, typer.Option(help="Kind of GPU: h100, h200, a100, l40s or b200.")] = "h200",
    num_gpus: Annotated[int, typer.Option(help="Number of available GPUs, eight per host.")] = 1,
    input_len: Annotated[int, typer.Option(help="Number of tokens per prompt.")] = 1024,
    output_len: Annotated[int, typer.Option(help="Number of tokens to generate per prompt.")] = 256,
    rate: Annotated[float | None, typer.Option(help="Requests per second. Default: the maximum of each deployment.")] = None,
    arrivals: Annotated[
        Path | None,
        typer.Option(help="JSON Lines file of requests with times and lengths. Replaces --input-len, --output-len, --rate."),
    ] = None,
    first_token: Annotated[float | None, typer.Option(help=f"Maximum time to first token {_LIMIT}")] = None,
    time_per_token: Annotated[float | None, typer.Option(help=f"Maximum time per later token {_LIMIT}")] = None,
    percentile: Annotated[float, typer.Option(min=0, max=100, help="Percentage of requests that must meet the limits.")] = 95.0,
    prefix_len: Annotated[int, typer.Option(help="Number of tokens in the common prefix of prompts. 0 means none.")] = 0,
    prefixes: Annotated[int, typer.Option(help="Number of different common prefixes.")] = 1,
    routing: Annotated[str, typer.Option(help="Routing between replicas: round-robin or prefix-aware.")] = "round-robin",
    tensor_parallel_sizes: Annotated[
        str | None,
        typer.Option(help="Tensor-parallel sizes to try, comma-separated. Default: powers of two up to a host's GPUs."),
    ] = None,
    kv_cache_dtypes: Annotated[
        str, typer.Option(help="KV cache types to try, comma-separated: auto, fp8_e4m3, int8_per_token_head.")
    ] = ("auto,fp8_e4m3"),
    weights: Annotated[
        str, typer.Option(help="Weight formats to try, comma-separated: model (unchanged), fp8, int4, mxfp4 (experts only).")
    ] = "model",
    crossover_table: Annotated[
        list[Path] | None,
        typer.Option(help="Crossover table of this kind of GPU. Repeatable. Default: the tables of this machine."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the full result to this JSON file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw tokens per GPU against tokens per user to this .png file.")] = None,
) -> None:
    """Rank deployments of a model by predicted throughput.

    A deployment is a number of ranks and replicas, a KV cache type and a batch size. The output shows latency and memory.
    """
    from headway.core.system.json_files import write_json
    from headway.core.system.provenance import command_line
    from headway.plan.demand import Demand, LatencyLimits
    from headway.plan.devices import gpu_kind
    from headway.plan.model_costs import weight_format
    from headway.plan.results import report_of

    kind, limits = gpu_kind(gpu), LatencyLimits(first_token, time_per_token, percentile)
    if picture is not None and picture.suffix.lower() != ".png":
        raise ConfigError("--picture", "a file name that ends in .png", str(picture))
    demand = (
        Demand(input_len, output_len, rate, limits, prefix_len, prefixes, _routing(routing))
        if arrivals is None
        else Demand.of_file(arrivals, limits, _routing(routing))
    )
    search = _search(model, kind, num_gpus, demand, _tables(crossover_table, kind))
    usual = [size for size in (1, 2, 4, 8) if size <= max(num_gpus, 1)]
    sizes = sizes_of("--tensor-parallel-sizes", tensor_parallel_sizes) or usual
    formats = [weight_format(name) for name in names_of(weights) or ["model"]]
    layouts = search.layouts(sizes, names_of(kv_cache_dtypes) or ["auto"], formats)
    with progress_bar(Terminal(stderr=True)) as progress:
        task = progress.add_task("simulating", total=len(layouts))
        best = search.run(layouts, lambda: progress.advance(task))
    report = report_of(search, best, model, command_line())
    if json_file is not None:
        write_json(report, json_file, "--json")
    if picture is not None:
        from headway.core.system.json_files import write_bytes

        write_bytes(to_picture(report), picture, "--picture")
    print_report(report, Terminal(width=_WIDTH, highlight=False))


def _routing(name: str) -> Routing:
    from headway.plan.demand import ROUTINGS

    found = next((each for each in ROUTINGS if each == name), None)
    if found is None:
        raise ConfigError("--routing", " or ".join(ROUTINGS), repr(name))
    return found


def _tables(paths: list[Path] | None, kind: GpuKind) -> list[MeasuredLayer]:
    """Return the named crossover tables, or this machine's for the GPU kind. :raises ConfigError: if a table is for a different
    GPU."""
    from headway.plan.attention_times import MeasuredLayer
    from headway.tuning.table.files import TableError, read_table, stored_tables

    found = []
    for path in paths or stored_tables():
        try:
            table = read_table(path)
        except TableError:
            if paths:
                raise
            continue  # `auto` reports it when it reads the file
        fits = table.device.name == kind.title and table.level == "kernel"
        if paths and not fits:
            got = f"{path}: level {table.level}, {table.device.name}"
            raise ConfigError("--crossover-table", f"a table of kernels of {kind.title}", got)
        if fits:
            found.append(MeasuredLayer.of(table))
    return found


def _search(model: str, kind: GpuKind, num_gpus: int, demand: Demand, tables: Sequence[MeasuredLayer]) -> FleetSearch:
    """Return the search over a model's layouts. :raises HeadwayError: if the model does not exist or its sizes are unknown."""
    from headway.plan.model_costs import read_planned_model
    from headway.plan.search import FleetSearch

    config, dtype = read_planned_model(model)
    if demand.max_model_len > config.max_position_embeddings:
        most = config.max_position_embeddings
        raise ConfigError(
            "--input-len and --output-len", f"at most {most} tokens together, the model's limit", demand.max_model_len
        )
    return FleetSearch(config, dtype, kind, num_gpus, demand, tables)


def print_report(report: PlanReport, console: Terminal) -> None:
    """Print a report: the request, the table, the command, why other layouts are slower, and the sources of the times."""
    load = "maximum load" if report.rate is None else f"{report.rate:g} requests/s"
    lengths = f"{report.input_len:,} tokens in, {report.output_len:,} out"
    console.print(Text(f"{report.model} on {report.num_gpus:,} x {report.gpu}; {lengths}; {load}"))
    limits = [
        f"{what} {limit:g} ms"
        for what, limit in (("first token", report.max_first_token_ms), ("time per token", report.max_per_token_ms))
        if limit is not None
    ]
    console.print(Text(f"limits for {report.percentile:g} % of the requests: {', '.join(limits) or 'none'}; all times predicted"))
    console.print(_table(report.plans))
    best = report.plans[0]
    console.print(Text("command for each replica of the first plan"))
    console.print(Text(f"  {best.command or 'the same with a checkpoint in that format'}"), soft_wrap=True)
    _print_reasons(report, console)
    console.print(Text("sources of the times"))
    for line in report.sources:
        _print_point(line, console)


def _print_reasons(report: PlanReport, console: Terminal) -> None:
    reasons = [(_name(row), row.reason) for row in report.plans[1:]]
    reasons += [(each.layout, each.reason) for each in report.refused]
    if reasons:
        console.print(Text("why the other layouts rank lower"))
    for name, reason in reasons:
        _print_point(f"{name}: {reason}", console)


def _print_point(text: str, console: Terminal) -> None:
    """Print a list item with its continuation lines indented."""
    for line in textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False):
        console.print(Text(line))


def _name(row: PlanRow, size: str = "tensor-parallel size", of_cache: str = " cache") -> str:
    """Return the name of a layout. size, of_cache: words for the size and the cache type; a picture uses shorter words."""
    cache = "" if row.kv_cache_dtype == "auto" else f", {row.kv_cache_dtype}{of_cache}"
    weights = "" if row.weights == "model" else f", {row.weights} weights"
    return f"{size} {row.tensor_parallel_size}{cache}{weights}"


def _table(rows: Sequence[PlanRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, width=_WIDTH, padding=(0, 1, 0, 0), pad_edge=False)
    formats = any(row.weights != "model" for row in rows)
    columns: dict[str, Callable[[PlanRow], str]] = {
        "tp": lambda row: str(row.tensor_parallel_size),
        "repl.": lambda row: f"{row.replicas:,}",
        "cache": lambda row: row.kv_cache_dtype.removesuffix("_per_token_head"),
        "weights": lambda row: row.weights,
        "batch": lambda row: str(row.batch),
        "tok/s/GPU": lambda row: f"{row.tokens_per_second_per_gpu:,.0f}",
        "first ms": lambda row: f"{row.first_token_ms:,.1f}",
        "ms/tok": lambda row: f"{row.per_token_ms:.2f}",
        "GiB": lambda row: f"{row.memory_gib:.0f}",
    }
    shown = {name: show for name, show in columns.items() if formats or name != "weights"}
    for name in shown:
        table.add_column(name, justify="left" if name in ("cache", "weights") else "right")
    for row in rows:
        table.add_row(*(show(row) for show in shown.values()))
    return table


def to_picture(report: PlanReport) -> bytes:
    """Return a PNG chart of a report's plans at full load, by batch size. :raises ConfigError: if matplotlib is not installed."""
    from headway.bench.charts import BAR_COLOURS, bare, heading, new_figure, png

    figure = new_figure(8.0, 5.2, "leave --picture out")
    axis = figure.subplots()
    for number, (name, rows) in enumerate(groupby(report.full_load, key=lambda row: _name(row, "tp", ""))):
        curve = list(rows)
        colour, style = BAR_COLOURS[number % len(BAR_COLOURS)], "-" if number < len(BAR_COLOURS) else "--"
        x, y = [row.tokens_per_second_per_user for row in curve], [row.tokens_per_second_per_gpu for row in curve]
        axis.plot(x, y, color=colour, linestyle=style, marker="o", markersize=4, label=name)
    axis.set(xlabel="Output tokens per second per user", ylabel="Output tokens per second per GPU", xscale="log", yscale="log")
    if report.max_per_token_ms is not None:
        axis.axvline(1e3 / report.max_per_token_ms, color="#444444", linewidth=1, linestyle=":", label="limit of time per token")
    for formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter, axis.yaxis.set_major_formatter):
        formatter("{x:,.0f}")
    bare(axis)
    lengths = f"{report.input_len:,} tokens in, {report.output_len:,} out"
    heading(figure, f"{report.model} on {report.num_gpus:,} x {report.gpu}, {lengths}: predicted, one point per batch size")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return png(figure)
