"""Engine state in a terminal: a drawing of the KV cache, and a line of statistics below the generated text."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.core.engine.cache.usage import FREED, OWN, RESERVED, SHARED, CacheUsage, GroupUsage
from headway.core.engine.data.stats import EngineSnapshot
from headway.hosting.stats_report import stats_line

_STYLES = {OWN: "green", SHARED: "cyan", RESERVED: "yellow", FREED: "dim", "c": "blue", ".": "dim"}
_WORDS = {OWN: "own", SHARED: "shared", RESERVED: "reserved", FREED: "freed"}
_ROW = 60  # Letters in a line
_MOST_ROWS = 4  # Maximum number of lines per sequence and group; longer ones show several blocks per letter


def picture(usage: CacheUsage) -> RenderableType:
    """Return a drawing of each sequence's blocks in each cache group, and of the pool, at most 80 columns wide."""
    legend = Text()
    for letter, word in _WORDS.items():
        legend.append(letter, _STYLES[letter]).append(f" {word}   ")
    parts: list[RenderableType] = [legend]
    for number, group in enumerate(usage.groups):
        parts.append(Text(f"group {number}: {_what(group)}", style="bold"))
        for seq in usage.sequences:
            parts += _rows(f"{seq.name}, {seq.num_tokens:,} tokens", seq.blocks[number])
    parts += [Text(), _pool(usage), Text(), _table(usage)]
    return Group(*parts)


def _what(group: GroupUsage) -> str:
    layers = "1 layer" if group.num_layers == 1 else f"{group.num_layers} layers"
    one = group.num_layers == 1
    seen = f"see{'s' * one} {group.window:,} tokens" if group.window else f"keep{'s' * one} every token"
    together = f", {group.blocks_per_page} blocks to a page" if group.blocks_per_page > 1 else ""
    return f"{layers} {seen}{together}"


def _rows(title: str, letters: str) -> Iterator[Text]:
    """Yield a title, then lines with one letter per block, or with one letter for several blocks if the sequence is long."""
    each = max(1, -(-len(letters) // (_ROW * _MOST_ROWS)))
    pieces = [letters[start : start + each] for start in range(0, len(letters), each)]
    shown = "".join(max(piece, key=piece.count) for piece in pieces)
    scale = f", {each} to a letter" if each > 1 else ""
    yield Text(f"  {title}: {len(letters):,} blocks{scale}")
    for start in range(0, len(shown), _ROW):
        row = Text("    ")
        for letter in shown[start : start + _ROW]:
            row.append(letter, style=_STYLES[letter])
        yield row


def _pool(usage: CacheUsage) -> Text:
    """Return a bar of the pool's pages. A digit is the number of the group that uses a page, c means cached, and a dot means
    free."""
    used = [group.used // group.blocks_per_page for group in usage.groups]
    cached = sum(group.cached // group.blocks_per_page for group in usage.groups)
    counts = [(str(number), count) for number, count in enumerate(used)] + [("c", cached)]
    bar = Text("pool  ")
    left = _ROW
    for letter, count in counts:
        cells = min(left, -(-count * _ROW // usage.num_pages))
        bar.append(letter * cells, style=_STYLES.get(letter, "green"))
        left -= cells
    bar.append("." * left, style="dim")
    size = usage.page_bytes / 1024
    bar.append(f"\n      {usage.num_pages:,} pages of {size:,.0f} KiB; c: cached, .: free; blocks of {usage.block_size}")
    if usage.num_offloaded_blocks:
        bar.append(f"\n      {usage.num_offloaded_blocks:,} blocks kept in the host's memory")
    if usage.states is not None:
        slots, rows, kept, offloaded = usage.states
        bar.append(
            f"\nstates {rows:,} of {slots.num_rows:,} rows in use, {kept:,} of {slots.num_checkpoints:,} checkpoints kept,"
        )
        beyond = f"; {offloaded:,} states kept in the host's memory" if offloaded else ""
        bar.append(f"\n      {slots.bytes_per_slot / 2**20:,.2f} MiB each{beyond}")
    return bar


def _table(usage: CacheUsage) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("group", "blocks", "used", "cached", "given back"):
        table.add_column(column, justify="left" if column == "group" else "right")
    for number, group in enumerate(usage.groups):
        counts = group.total, group.used, group.cached, group.num_freed
        table.add_row(*[str(number), *(f"{count:,}" for count in counts)])
    return table


_SECONDS_IN_PLACE = 0.25  # Seconds between two refreshes on a terminal
_SECONDS_BETWEEN_LINES = 2.0  # Seconds between two lines if stderr is not a terminal


class LiveStats:
    """Display of an engine's state on stderr, in the terminal's last row outside the scroll region (DECSTBM). If stderr is not a
    terminal, the state is printed as lines."""

    def __init__(self, stats: Callable[[], EngineSnapshot], shown: bool = True) -> None:
        """stats: returns the engine's statistics. shown: False disables the display."""
        self._stats = stats
        self._shown = shown
        self._out = sys.stderr
        self._in_place = self._out.isatty() and os.get_terminal_size(self._out.fileno()).lines > 1  # 0 means unknown
        self._rows = 0

    def __enter__(self) -> Self:
        if self._shown:
            self._last = self._stats()
        return self

    def refresh(self) -> None:
        """Update the line if enough time has passed since the last update."""
        if self._shown and time.perf_counter() - self._last.time >= (
            _SECONDS_IN_PLACE if self._in_place else _SECONDS_BETWEEN_LINES
        ):
            self._show()

    def _show(self) -> None:
        now = self._stats()
        line = stats_line(now, self._last)
        self._last = now
        if not self._in_place:
            print(line, file=self._out, flush=True)
            return
        columns, rows = os.get_terminal_size(self._out.fileno())
        reserve = ""
        if rows != self._rows:  # "index" adds a row below the cursor; setting the region moves the cursor, hence save and restore
            reserve = f"\x1bD\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[1A"
            self._rows = rows
        self._out.write(f"{reserve}\x1b7\x1b[{rows};1H\x1b[2K{line[: columns - 1]}\x1b8")
        self._out.flush()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._rows:  # let all rows scroll again and clear the last one
            self._out.write(f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b[r\x1b8")
            self._out.flush()
            self._rows = 0
        elif self._shown and not self._in_place and self._stats().totals.num_steps > self._last.totals.num_steps:
            self._show()
