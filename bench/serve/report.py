"""A report as a table of 80 columns, and as pictures."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from headway.bench.charts import bars
from headway.bench.serve.profiling import print_profile
from headway.bench.serve.results import ServeCell, ServeReport, Spread
from headway.core.system.json_files import write_bytes

_TIMES = {
    "time_to_first_token_ms": "time to first token",
    "time_per_output_token_ms": "time per output token",
    "inter_token_latency_ms": "inter-token latency",
    "end_to_end_ms": "end to end",
}


def print_report(report: ServeReport, console: Console) -> None:
    """Rates first, then the times of each cell."""
    console.print(f"{report.model} at {report.url}, /v1/{report.endpoint}", highlight=False)
    console.print(f"{report.load['conversations']} conversations of {report.load['turns']}, {_rest(report)}", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    names = ["requests", "failed", "req/s", "tokens/s", "cached", *(["goodput/s", "good"] if report.limits_ms else [])]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for cell in report.cells:
        table.add_row(cell.label, *_rates(cell))
    console.print(table)
    table = Table(title="milliseconds", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(("", "time", "mean", "p50", "p95", "p99")):
        table.add_column(name, justify="right" if number > 1 else "left", style="" if number else "bold", no_wrap=True)
    for cell in report.cells:
        for number, (field, name) in enumerate(_TIMES.items()):
            found: Spread | None = getattr(cell, field)
            figures = ["-"] * 4 if found is None else [_ms(each) for each in (found.mean, found.p50, found.p95, found.p99)]
            table.add_row("" if number else cell.label, name, *figures, end_section=number == len(_TIMES) - 1)
    console.print(table)
    for line in notes(report):
        console.print(line, highlight=False)
    for cell in report.cells:
        if cell.profile is not None:
            print_profile(cell.label, cell.profile, console)


def _rest(report: ServeReport) -> str:
    """What else is known of the load, in few words."""
    prefix = report.load["shared prefix"]
    return f"tokens {report.load['tokens in/out']}" + ("" if prefix == "none" else f", shared prefix {prefix}")


def notes(report: ServeReport) -> list[str]:
    """What is worth a line beside the tables."""
    lines = [f"measured on a busy machine, {report.busy}: times may be too long"] if report.busy else []
    if report.limits_ms:
        lines.append("good: " + ", ".join(f"{name} of at most {most:g} ms" for name, most in report.limits_ms.items()))
    for cell in report.cells:
        lines += [f"{cell.label}: {count} failed: {error}" for error, count in cell.errors.items()]
        if cell.lateness_ms is not None and cell.lateness_ms.p99 > 20:
            lines.append(f"{cell.label}: the client sent its requests late, p99 {cell.lateness_ms.p99:.0f} ms")
    return lines


def _rates(cell: ServeCell) -> list[str]:
    cached = f"{cell.cached_tokens / cell.prompt_tokens:.0%}" if cell.prompt_tokens else ""
    rates = f"{cell.requests_per_second:.2f}", f"{cell.output_tokens_per_second:,.0f}"
    good = [] if cell.goodput is None else [f"{cell.goodput:.2f}", f"{cell.good_share:.0%}"]
    return [str(cell.completed), str(cell.failed), *rates, cached, *good]


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def draw(report: ServeReport, folder: Path) -> list[Path]:
    """One picture for the times to first token, one for those per token, one for the rates; returns their files.

    :raises ConfigError: matplotlib is not installed, or the folder cannot be written to.
    """
    groups = [cell.label for cell in report.cells]
    cells = [cell for cell in report.cells if cell.completed]
    if not cells:
        return []
    groups = [cell.label for cell in cells]
    xlabel = "requests that arrive per second; offline: all at once; naive: one after the other"
    made = []
    for field in ("time_to_first_token_ms", "time_per_output_token_ms"):
        spreads: list[Spread | None] = [getattr(cell, field) for cell in cells]
        series = {name: [None if each is None else getattr(each, name) for each in spreads] for name in ("p50", "p95", "p99")}
        if any(each is not None for each in spreads):
            title = f"{_TIMES[field].capitalize()}, {report.model}, {report.date[:10]}"
            made.append((field.removesuffix("_ms"), bars(title, groups, series, "milliseconds", xlabel)))
    rates = {"output tokens": [cell.output_tokens_per_second for cell in cells]}
    made.append(
        ("tokens_per_second", bars(f"Output, {report.model}, {report.date[:10]}", groups, rates, "tokens per second", xlabel))
    )
    paths = [folder / f"{name}.png" for name, _ in made]
    for path, (_, picture) in zip(paths, made, strict=True):
        write_bytes(picture, path, "--plots")
    return paths
