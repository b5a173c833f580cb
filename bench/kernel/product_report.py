"""Tables of products for people, one for each shape and form: microseconds of each way beside the least they could be."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.bench.kernel.products import ProductsBench, ProductTime


def print_products(report: ProductsBench, console: Console) -> None:
    """Print the device and its rates, the tables, and why any cell has no time."""
    (gbps, tflops), peak = report.rates, report.peak
    of = (
        f"peak ({peak.source})"
        if peak.gbps and peak.tflops
        else "measured"
        if not peak.gbps
        else "peak where known, else measured"
    )
    console.print(Text(f"{report.device.name}, torch {report.device.torch}, x in {report.dtype}"), soft_wrap=True)
    console.print(Text(f"floors at {gbps:,.0f} GB/s and {tflops:,.3g} TFLOP/s: {of}"), soft_wrap=True)
    for shape, form in dict.fromkeys((cell.shape, cell.form) for cell in report.cells):
        cells = [cell for cell in report.cells if (cell.shape, cell.form) == (shape, form)]
        source = report.choices[f"{shape} {form}"]
        console.print(Text(f"\n{shape} {form}").append(f"; *: what an engine takes, by {source}", "dim"), soft_wrap=True)
        console.print(_table(cells))
    told: dict[str, list[str]] = {}
    for cell in report.cells:
        if cell.reason:
            where = f"{cell.shape} {cell.form}, {cell.rows} rows"
            told.setdefault(f"{cell.way} {cell.status}: {cell.reason}", []).append(where)
    for line, places in told.items():
        console.print(Text(f"{line} [{'; '.join(places)}]"), soft_wrap=True)
    if report.busy:
        console.print(Text(f"measured on a busy machine, {report.busy}: times may be too long"), soft_wrap=True)


def _table(cells: Sequence[ProductTime]) -> Table:
    """The fastest way of a number of rows first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("rows", justify="right")
    table.add_column("way", no_wrap=True)
    for column in ("us", "floor us", "of", "share", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for rows in dict.fromkeys(cell.rows for cell in cells):
        rivals = sorted((cell for cell in cells if cell.rows == rows), key=lambda cell: cell.median_us or math.inf)
        for number, cell in enumerate(rivals):
            us = cell.median_us
            timed = [cell.status, "", "", "", ""]
            if us is not None:
                timed = [
                    f"{us:,.1f}",
                    f"{cell.floor_us:,.1f}",
                    cell.bound,
                    f"{cell.floor_us / us:.0%}",
                    f"{cell.relative_error:.1e}",
                ]
            shown = ("" if number else str(rows), cell.way + " *" * cell.chosen, *timed)
            table.add_row(*shown, style="" if number else "bold green", end_section=cell is rivals[-1])
    return table
