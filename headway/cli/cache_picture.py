"""The cache drawn in a terminal: blocks by sequence and group, and what the pool holds."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.core.engine.usage import GIVEN_BACK, OWN, RESERVED, SHARED, CacheUsage, GroupUsage

_STYLES = {OWN: "green", SHARED: "cyan", RESERVED: "yellow", GIVEN_BACK: "dim", "c": "blue", ".": "dim"}
_WORDS = {OWN: "own", SHARED: "shared", RESERVED: "reserved", GIVEN_BACK: "given back"}
_ROW = 60
"""Letters in a line."""
_MOST_ROWS = 4
"""Lines of one sequence in one group; beyond them a letter stands for several blocks."""


def picture(usage: CacheUsage) -> RenderableType:
    """At most 80 columns wide; it reads without colours too."""
    legend = Text.assemble(*(part for letter, word in _WORDS.items() for part in _entry(letter, word)))
    parts: list[RenderableType] = [legend]
    for number, group in enumerate(usage.groups):
        parts.append(Text(f"group {number}: {_what(group)}", style="bold"))
        for seq in usage.sequences:
            parts += _rows(f"{seq.name}, {seq.num_tokens:,} tokens", seq.blocks[number])
    return Group(*parts, Text(), _pool(usage), Text(), _table(usage))


def _entry(letter: str, word: str) -> list[tuple[str, str]]:
    return [(letter, _STYLES[letter]), (f" {word}   ", "")]


def _what(group: GroupUsage) -> str:
    layers = "1 layer" if group.num_layers == 1 else f"{group.num_layers} layers"
    one = group.num_layers == 1
    seen = f"see{'s' * one} {group.window:,} tokens" if group.window else f"keep{'s' * one} every token"
    together = f", {group.blocks_per_page} blocks to a page" if group.blocks_per_page > 1 else ""
    return f"{layers} {seen}{together}"


def _rows(title: str, letters: str) -> Iterator[Text]:
    """A title, and one letter for each block or, in a long sequence, for several."""
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
    """A bar of the pool's pages: the number of the group that uses them, c for cached, a dot for free."""
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
    return bar


def _table(usage: CacheUsage) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("group", "blocks", "used", "cached", "given back"):
        table.add_column(column, justify="left" if column == "group" else "right")
    for number, group in enumerate(usage.groups):
        table.add_row(str(number), *(f"{count:,}" for count in (group.total, group.used, group.cached, group.given_back)))
    return table
