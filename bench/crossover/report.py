"""Crossover table for one layout and block size, one row per point: for a terminal, as Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Final

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from headway.core.contract.errors import ConfigError
from headway.core.system.text import csv_cell, harmless, markdown
from headway.tuning.table.noise import MOST_DRIFT, TIE_RULE, is_tie
from headway.tuning.table.schema import COUNTED, Cell, CrossoverTable, DeviceIdentity, PhaseName, points, without_refusals

PairName = tuple[str | None, int | None]
"""Layout and block size by name; (None, None) in an engine-level table."""


@dataclass(frozen=True)
class TableRow:
    """Row of the table: one point."""

    cells: dict[str, Cell]
    """Backend -> the backend's cell at this point."""

    @property
    def first(self) -> Cell:
        """Any cell of the row, for the fields that all its cells share."""
        return next(iter(self.cells.values()))

    @property
    def label(self) -> str:
        """Lengths of the row's point. The batch size is in the block's heading."""
        cell = self.first
        if cell.phase in COUNTED:
            return str(cell.batch)
        if cell.phase in ("prefill", "scan", "step"):
            return str(cell.query_len)
        if cell.phase == "generate":
            return f"{cell.query_len} + {cell.kv_len - cell.query_len}"
        return str(cell.kv_len) if cell.phase == "decode" else f"{cell.query_len} of {cell.kv_len}"

    @cached_property
    def ranked(self) -> list[Cell]:
        """Cells with a time, fastest first, including slower candidates with a rough time."""
        return sorted((cell for cell in self.cells.values() if cell.layer_us is not None), key=lambda cell: cell.layer_us or 0)

    @cached_property
    def winners(self) -> list[str]:
        """The fastest backend, and all backends whose times are indistinguishable from its time."""
        ranked = self.ranked
        same = [cell.kernel for cell in ranked[1:] if cell.status != "dropped" and is_tie(ranked[0], cell)]
        return [cell.kernel for cell in ranked[:1]] + same

    @cached_property
    def speedup(self) -> float | None:
        """The runner-up's time divided by the winner's, even for a tie. None without a runner-up."""
        ranked = self.ranked
        return (ranked[1].layer_us or 0) / (ranked[0].layer_us or math.inf) if len(ranked) > 1 else None


@dataclass(frozen=True)
class Block:
    """Rows of one phase and batch size."""

    phase: PhaseName
    batch: int
    """Batch size. 0 for the phases rows, tokens and bytes, which form one block."""
    rows: list[TableRow]

    @property
    def heading(self) -> str:
        """Phase and batch size in words."""
        return f"{self.phase}, batch size {self.batch}" if self.batch else self.phase


@dataclass(frozen=True)
class View:
    """A table for one layout and block size."""

    table: CrossoverTable
    pair: PairName
    backends: list[str]
    """Backends that were tried with this layout and block size."""
    blocks: list[Block]
    """Blocks of rows, one row per point of the grid."""

    @property
    def between(self) -> int:
        """Number of points measured between grid points. They are not among the rows."""
        return len({cell.point for cell in self.table.cells if cell.between})

    @property
    def elsewhere(self) -> dict[str, list[PairName]]:
        """Backend without a time for this layout and block size -> the layouts and block sizes for which the backend has a
        time."""
        timed: dict[str, list[PairName]] = {}
        for cell in self.table.cells:
            if cell.median_us is not None and cell.layout is not None:
                timed.setdefault(cell.kernel, []).append((cell.layout, cell.block_size))
        return {name: list(dict.fromkeys(pairs)) for name, pairs in timed.items() if self.pair not in pairs}

    @property
    def rows(self) -> Iterator[TableRow]:
        """Rows of all blocks."""
        for block in self.blocks:
            yield from block.rows

    @property
    def where(self) -> str:
        """Layout and block size in words."""
        if self.pair[0] is None:
            return "layout and block size as chosen" if self.table.kind == "attention" else "without a layout"
        return f"kv_layout {self.pair[0]}, block_size {self.pair[1]}" if self.pair[1] else f"layout {self.pair[0]}"


def pairs_of(table: CrossoverTable) -> list[PairName]:
    """Return layouts and block sizes, in the order in which they were measured."""
    found = [(cell.layout, cell.block_size) for cell in table.cells if cell.layout is not None]
    return list(dict.fromkeys(found)) or [(None, None)]


def view(table: CrossoverTable, layout: str | None = None, block_size: int | None = None) -> View:
    """Return the table for a layout and block size. An unspecified layout or block size is chosen by the lowest time over all
    points.
    :raises ConfigError: if no matching layout and block size was measured.
    """
    pairs = pairs_of(table)
    fitting = [pair for pair in pairs if layout in (None, pair[0]) and block_size in (None, pair[1])]
    if not fitting:
        need = f"one that was measured: {', '.join(f'{name} {size}' for name, size in pairs)}"
        raise ConfigError("layout and block size", need, f"{layout or 'any'} {block_size or 'any'}")
    by_point = points([cell for cell in table.cells if not cell.between])
    pair = min(fitting, key=lambda pair: _mean_log(list(by_point.values()), pair))
    rows = [TableRow({cell.kernel: cell for cell in _over(cells, pair)}) for cells in by_point.values()]
    rows = sorted((row for row in rows if row.cells), key=_order)
    blocks: list[Block] = []
    for row in rows:
        key = (row.first.phase, 0 if row.first.phase in COUNTED else row.first.batch)
        if not blocks or (blocks[-1].phase, blocks[-1].batch) != key:
            blocks.append(Block(*key, []))
        blocks[-1].rows.append(row)
    present = {name for row in rows for name, cell in row.cells.items() if cell.status != "unsupported"}
    return View(table, pair, [record.name for record in table.kernels if record.name in present], blocks)


def _over(cells: Sequence[Cell], pair: PairName) -> list[Cell]:
    return without_refusals([cell for cell in cells if (cell.layout, cell.block_size) in (pair, (None, None))])


def _mean_log(groups: Sequence[Sequence[Cell]], pair: PairName) -> float:
    best = [min((cell.layer_us for cell in _over(cells, pair) if cell.layer_us), default=math.inf) for cells in groups]
    return fmean(math.log(us) for us in best) if best else math.inf


_PHASE_ORDER: tuple[PhaseName, ...] = ("generate", "decode", "verify", "prefill", "extend", "step", "scan", *COUNTED)


def _order(row: TableRow) -> tuple[int, ...]:
    cell = row.first
    return _PHASE_ORDER.index(cell.phase), cell.batch, cell.query_len, cell.kv_len


def show(cell: Cell | None) -> str:
    """Return a cell's text: its time (for generations, tokens per second), or the reason for a missing time."""
    if cell is None:
        return ""
    if cell.median_us is None:
        return {"oom": "OOM", "dropped": "loser"}.get(cell.status, cell.status)
    if cell.tokens_per_second is not None:
        return f"{cell.tokens_per_second:,.0f}"
    us = cell.layer_us or cell.median_us
    text = f"{us:,.1f}" if us < 1000 else f"{us:,.0f}"
    return f"~{text}" if cell.status == "dropped" else text


def unit(phase: PhaseName) -> str:
    """Return the unit of a cell's number."""
    return "output tok/s" if phase == "generate" else "us per layer"


_LENGTHS: dict[PhaseName, str] = {
    "prefill": "query_len",
    "decode": "kv_len",
    "verify": "query_len of kv_len",
    "extend": "query_len of kv_len",
    "generate": "input + output",
    "scan": "query_len",
    "step": "query_len",
    "rows": "rows",
    "tokens": "tokens",
    "bytes": "bytes",
}
_MOST_LAID_OUT: Final = 500
"""Maximum total number of rows for which rich lays out the tables, in colors."""


_MARKS: Final = {
    "unsupported": "the backend cannot compute this point",
    "OOM": "the point needs more memory than the device has",
    "incorrect": "the result differed from float64 by more than the tolerance",
    "error": "the backend raised an error",
    "loser": "a slower candidate that was not timed",
}
"""Text that `show` returns for a cell without a time -> its meaning."""


def print_view(view: View, console: Console, all_backends: bool = False) -> None:
    """Print a summary, a block per batch size, the meaning of marks, and notes.

    A block has a column for each backend, the winner, and its speed-up over the runner-up. If the terminal is too narrow, each
    row has only the winner and the runner-up with their times. all_backends: also print why backends could not run where the
    table was measured.
    """
    table = view.table
    console.print(Text("CROSSOVER ANALYSIS", "bold"), Text(table.title))
    console.print(Text(f"{view.where}; {_wins(view)}"))
    plain = sum(len(block.rows) for block in view.blocks) > _MOST_LAID_OUT
    blocks = [_block(block, view.backends, plain) for block in view.blocks]
    unbounded = console.options.update(width=10_000)
    fits = all(console.measure(block, options=unbounded).maximum <= console.width for block in blocks)
    for block in blocks if fits else [_narrow_block(block, plain) for block in view.blocks]:
        # Lines of a Text are final; a narrow terminal wraps them itself.
        console.print(Segments([Segment(f"{block}\n")]) if isinstance(block, Text) else block, crop=False)
    if not fits:
        console.print(Text("the two fastest of each row; a wider terminal, --json or --export shows every backend", "dim"))
    for mark, meaning in legend(view).items():
        console.print(Text(f"{mark}: {meaning}", "dim"))
    absent = _absent(table)
    if absent and not all_backends:
        console.print(Text(f"not listed: {len(absent)} backends that could not run where this was measured (--all)", "dim"))
    for line in [*(absent if all_backends else ()), *_remarks(view), software(table.device), _measured(table)]:
        console.print(Text(line))


def _wins(view: View) -> str:
    """Return a sentence on how many points each backend wins."""
    counts = Counter(winner(row) if len(row.winners) < 2 else "tie" for row in view.rows)
    total = counts.total()
    return f"fastest of {total} point{'s' * (total != 1)}: " + ", ".join(f"{name} {won}" for name, won in counts.most_common())


def legend(view: View) -> dict[str, str]:
    """Return the marks of the view and their meanings."""
    words = {show(cell) for row in view.rows for cell in row.cells.values() if cell.median_us is None}
    tie = TIE_RULE.partition(": ")[2]
    marks = {
        "speed-up": "the runner-up's time divided by the winner's",
        "tie (=)": tie,
        "~": "a slower candidate, timed in few runs",
    }
    return marks | {word: meaning for word, meaning in _MARKS.items() if word in words}


def _as_lines(block: Table) -> Text:
    """Return the table as padded lines. For 10,000 rows, rich takes 9 s of CPU time and this function 0.9 s."""
    columns = [[" ".join(str(cell).split()) for cell in (column.header, *column.cells)] for column in block.columns]
    fills = ["<" if column.justify == "left" else ">" for column in block.columns]
    widths = [max(map(cell_len, column)) for column in columns]
    padded = [[f"{cell:{fill}{width}}" for cell in column] for column, fill, width in zip(columns, fills, widths, strict=True)]
    lines = ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]
    return Text("\n".join([str(block.title), lines[0], "-" * max(map(len, lines)), *lines[1:], ""]))


def _block(block: Block, backends: Sequence[str], plain: bool) -> Table | Text:
    """Return a block with a column per backend. plain: True to return lines without colors."""
    shown = _empty(block, _LENGTHS[block.phase])
    for name in backends:
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("winner", no_wrap=True)
    shown.add_column("speed-up", justify="right", no_wrap=True)
    for row in block.rows:
        cells = [_styled(row.cells.get(name), row) for name in backends]
        shown.add_row(row.label, *cells, winner(row), speedup(row))
    return _as_lines(shown) if plain else shown


def _narrow_block(block: Block, plain: bool) -> Table | Text:
    """Return a block with the two fastest backends per row, for terminals of 80 columns. plain: True to return lines without
    colors."""
    shown = _empty(block, _LENGTHS[block.phase].replace(" of ", "\nof "))
    short = unit(block.phase).split(" ")[0 if block.phase != "generate" else 1]
    for who in ("fastest", "runner-up"):
        shown.add_column(who, no_wrap=True)
        shown.add_column(short, justify="right", no_wrap=True)
    shown.add_column("speed-up", justify="right", no_wrap=True)
    for row in block.rows:
        two = [(cell.kernel, show(cell)) for cell in row.ranked[:2]]
        (first, us), (second, other) = [*two, ("-", ""), ("", "")][:2]
        style = "bold green" if two else "dim"
        shown.add_row(row.label, Text(first, style), Text(us, style), second, other, speedup(row))
    return _as_lines(shown) if plain else shown


def _empty(block: Block, lengths: str) -> Table:
    title = f"{block.heading} ({unit(block.phase)})"
    shown = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column(lengths, no_wrap=True)
    return shown


def _styled(cell: Cell | None, row: TableRow) -> Text:
    if cell is None:
        return Text("")
    if cell.median_us is None:
        return Text(show(cell), "red" if cell.status in ("incorrect", "error", "oom") else "dim")
    return Text(show(cell), "bold green" if cell.kernel in row.winners else "dim" if cell.status == "dropped" else "")


def winner(row: TableRow) -> str:
    """Return the name of the fastest backend, or of all backends that are tied."""
    return " = ".join(row.winners) or "none"


def speedup(row: TableRow) -> str:
    """Return the speed-up over the runner-up as "1.23x", "tie", or a dash without a runner-up."""
    return "-" if row.speedup is None else "tie" if len(row.winners) > 1 else f"{row.speedup:.2f}x"


def software(device: DeviceIdentity) -> str:
    """Return one line with the software on which the times depend."""
    parts = [f"compute capability {device.compute_capability}"] if device.compute_capability else []
    parts += [f"driver {device.driver}"] if device.driver else []
    parts += [f"{device.clock_mhz} MHz"] if device.clock_mhz else []
    parts += [f"{device.threads} thread{'s' if device.threads > 1 else ''}"] if device.threads else []
    parts += [f"torch {device.torch}", *(f"{name} {version}" for name, version in device.libraries.items())]
    return ", ".join(parts)


def notes(view: View) -> list[str]:
    """Return the notes of exports: unavailable backends, remarks, marks, and the date and spread of the times."""
    marks = [f"{mark}: {meaning}" for mark, meaning in legend(view).items()]
    return [*_absent(view.table), *_remarks(view), *marks, _measured(view.table)]


def _absent(table: CrossoverTable) -> list[str]:
    """Return why backends could not run where the table was measured."""
    return [f"{record.name} is not used: {record.reason}" for record in table.kernels if not record.available]


def _measured(table: CrossoverTable) -> str:
    return f"measured {table.date}; median spread of the times {table.noise:.1%}"


def _remarks(view: View) -> list[str]:
    """Return remarks: failed backends, backends with times only for other layouts, reasons for missing times, incomplete runs."""
    table = view.table
    lines = [f"{record.name} is not used: {record.reason}" for record in table.kernels if record.available and record.reason]
    for name, pairs in view.elsewhere.items():
        others = ", ".join(f"{layout} {size}" for layout, size in pairs)
        lines.append(f"{name} has no time over {view.where}; it was measured over {others} (--kv-layout, --block-size)")
    reasons: dict[str, list[str]] = {}
    for cell in (cell for rivals in points(table.cells).values() for cell in without_refusals(rivals)):
        if cell.status in ("incorrect", "error", "oom", "unsupported"):
            reasons.setdefault(f"{cell.kernel} {cell.status}: {cell.reason}", []).append(f"{cell.phase} {cell.case}")
    for reason, cases in reasons.items():
        named = list(dict.fromkeys(cases))
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        lines.append(f"{reason} [{', '.join(named[:3])}{more}]")
    lines += unsteady(table)
    if view.between:
        lines.append(
            f"{view.between} more points were measured between these, where the fastest backend changes; auto uses them, and "
            "--export table.csv lists them"
        )
    if table.prior is not None:
        sources = Counter({"measured": "measured here", "prior": "shipped"}.get(cell.source, cell.source) for cell in table.cells)
        lines.append(f"cells: {', '.join(f'{count} {word}' for word, count in sources.most_common())}; {table.prior}")
    if not table.complete:
        lines.append("incomplete: interrupted, or the budget ended; --resume continues")
    return lines


def unsteady(table: CrossoverTable) -> list[str]:
    """Return warnings if the machine was busy or rounds of the same call disagree; empty if the times are reliable."""
    lines = [f"measured on a busy machine, {table.busy}: times may be too long"] if table.busy else []
    timed = [cell for cell in table.cells if cell.drift is not None]
    shaken = [cell for cell in timed if (cell.drift or 0.0) > MOST_DRIFT]
    if shaken:
        worst = max(shaken, key=lambda cell: cell.drift or 0.0)
        lines.append(
            f"rounds of the same call disagree by more than {MOST_DRIFT:.0%} in {len(shaken)} of {len(timed)} cells (most by "
            f"{worst.drift:.0%}: {worst.kernel}, {worst.phase} {worst.case}): the machine was not steady"
        )
    return lines


def to_markdown(view: View) -> str:
    """Return the view as a Markdown document."""
    return f"# Crossover: {markdown(view.table.title)}\n\n{to_section(view)}"


def to_section(view: View) -> str:
    """Return the blocks as Markdown tables, with device, software and notes."""
    measured = markdown(f"{view.table.title}, {view.where}, {software(view.table.device)}.")
    lines = [f"    {harmless(view.table.command)}", "", measured, ""]
    for block in view.blocks:
        header = [_LENGTHS[block.phase], *map(markdown, view.backends), "winner", "speed-up"]
        lines += [f"**{block.heading}** ({unit(block.phase)})", "", _line(header)]
        lines.append("|---|" + "---:|" * len(view.backends) + "---|---:|")
        for row in block.rows:
            cells = [_emphasised(row, name) for name in view.backends]
            lines.append(_line([row.label, *cells, markdown(winner(row)), speedup(row)]))
        lines.append("")
    return "\n".join([*lines, *(f"- {markdown(note)}" for note in notes(view)), ""])


def _emphasised(row: TableRow, name: str) -> str:
    text = show(row.cells.get(name))
    return f"**{text}**" if name in row.winners else text


def _line(parts: Iterable[str]) -> str:
    return "| " + " | ".join(parts) + " |"


def to_plain(view: View) -> dict[str, Any]:
    """Return the view as plain data, for `headway table show --json`."""
    return {
        "device": view.table.device.name,
        "layer": str(view.table.spec),
        "model": view.table.model,
        "level": view.table.level,
        "date": view.table.date,
        "complete": view.table.complete,
        "kv_layout": view.pair[0],
        "block_size": view.pair[1],
        "backends": view.backends,
        "rows": [
            {
                **row.first.model_dump(include={"phase", "case", "batch", "query_len", "kv_len"}),
                "us": {name: cell.layer_us for name, cell in row.cells.items()},
                "status": {name: cell.status for name, cell in row.cells.items()},
                "winners": row.winners,
                "speedup": row.speedup,
            }
            for row in view.rows
        ],
        "notes": notes(view),
    }


def to_csv(table: CrossoverTable) -> str:
    """Return every cell of every layout and block size, one per line, with the schema's field names."""
    out = io.StringIO()
    names = [*Cell.model_fields, "layer_us", "tokens_per_second"]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for cell in table.cells:
        row = {**cell.model_dump(), "layer_us": cell.layer_us, "tokens_per_second": cell.tokens_per_second}
        writer.writerow({name: csv_cell(value) if isinstance(value, str) else value for name, value in row.items()})
    return out.getvalue()
