"""A table for a terminal, as Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.bench.crossover.view import Row, View, show, unit
from headway.tuning.device import DeviceIdentity
from headway.tuning.schema import Cell, CrossoverTable, PhaseName

_LENGTHS: dict[PhaseName, str] = {
    "prefill": "query_len",
    "decode": "kv_len",
    "verify": "query_len of kv_len",
    "extend": "query_len of kv_len",
    "generate": "input + output",
}


def print_view(view: View, console: Console) -> None:
    """Print one block a batch size: a column a backend, the winner, and its speed-up over the runner-up."""
    table = view.table
    console.print(Text("CROSSOVER ANALYSIS", "bold"), Text(f"{table.title} · {view.where}"), soft_wrap=True)
    console.print(Text(software(table.device), "dim"), soft_wrap=True)
    for block in view.blocks:
        title = f"{block.phase}, batch size {block.batch} ({unit(block.phase)})"
        shown = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        shown.add_column(_LENGTHS[block.phase], no_wrap=True)
        for name in view.backends:
            shown.add_column(name, justify="right", no_wrap=True)
        shown.add_column("winner", no_wrap=True)
        shown.add_column("speed-up", justify="right", no_wrap=True)
        for row in block.rows:
            cells = [_styled(row.cells.get(name), row) for name in view.backends]
            shown.add_row(row.label, *cells, winner(row), speedup(row))
        console.print(shown)
    for line in notes(table):
        console.print(Text(line), soft_wrap=True)


def _styled(cell: Cell | None, row: Row) -> Text:
    if cell is None:
        return Text("")
    if cell.median_us is None:
        return Text(show(cell), "red" if cell.status in ("incorrect", "error", "oom") else "dim")
    return Text(show(cell), "bold green" if cell.backend in row.winners else "dim" if cell.status == "dropped" else "")


def winner(row: Row) -> str:
    """The fastest, or the fastest ones where they cannot be told apart."""
    return " = ".join(row.winners) or "none"


def speedup(row: Row) -> str:
    """Over the runner-up: "1.23x"; a dash without one."""
    return "-" if row.speedup is None else f"{row.speedup:.2f}x"


def software(device: DeviceIdentity) -> str:
    """What the times depend on beside the device, in one line."""
    parts = [f"compute capability {device.compute_capability}"] if device.compute_capability else []
    parts += [f"driver {device.driver}"] if device.driver else []
    parts += [f"{device.clock_mhz} MHz"] if device.clock_mhz else []
    parts += [f"{device.threads} threads"] if device.threads else []
    parts += [f"torch {device.torch}", *(f"{name} {version}" for name, version in device.libraries.items())]
    return ", ".join(parts)


def notes(table: CrossoverTable) -> list[str]:
    """Who took no part, why cells have no time, and whether the run is complete."""
    lines = [f"{record.name} takes no part: {record.reason}" for record in table.backends if not record.usable]
    reasons: dict[str, list[str]] = {}
    for cell in table.cells:
        if cell.status in ("incorrect", "error", "oom", "unsupported"):
            reasons.setdefault(f"{cell.backend} {cell.status}: {cell.reason}", []).append(f"{cell.phase} {cell.case}")
    for reason, cases in reasons.items():
        named = list(dict.fromkeys(cases))
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        lines.append(f"{reason} [{', '.join(named[:3])}{more}]")
    if not table.complete:
        lines.append("not complete: interrupted, or the budget ended; --resume goes on")
    lines.append(f"measured {table.date}; times that differ by less than {table.noise:.1%} are alike; ~: a clear loser, few runs")
    return lines


def to_markdown(view: View) -> str:
    """The view as a Markdown document."""
    return f"# Crossover: {view.table.title}\n\n{to_section(view)}"


def to_section(view: View) -> str:
    """The blocks as Markdown tables, with what they were measured on and the notes."""
    lines = [f"    {view.table.command}", "", f"{view.table.title}, {view.where}. {software(view.table.device)}.", ""]
    for block in view.blocks:
        header = [_LENGTHS[block.phase], *view.backends, "winner", "speed-up"]
        lines += [f"**{block.phase}, batch size {block.batch}** ({unit(block.phase)})", "", _line(header)]
        lines.append("|---|" + "---:|" * len(view.backends) + "---|---:|")
        for row in block.rows:
            cells = [_emphasised(row, name) for name in view.backends]
            lines.append(_line([row.label, *cells, winner(row), speedup(row)]))
        lines.append("")
    return "\n".join([*lines, *(f"- {note}" for note in notes(view.table)), ""])


def _emphasised(row: Row, name: str) -> str:
    text = show(row.cells.get(name))
    return f"**{text}**" if name in row.winners else text


def _line(parts: Iterable[str]) -> str:
    return "| " + " | ".join(part.replace("|", "\\|") for part in parts) + " |"


def to_csv(table: CrossoverTable) -> str:
    """Every cell of every layout and block size, one a line, under the names of the schema."""
    out = io.StringIO()
    names = [*Cell.model_fields, "layer_us", "tokens_per_second"]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for cell in table.cells:
        writer.writerow({**cell.model_dump(), "layer_us": cell.layer_us, "tokens_per_second": cell.tokens_per_second})
    return out.getvalue()
