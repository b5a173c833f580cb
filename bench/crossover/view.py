"""A table as people read it: over one layout and block size, a row a point, a column a backend, the winner and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from headway.core.contract.errors import ConfigError
from headway.tuning.table.noise import is_tie
from headway.tuning.table.schema import Cell, CrossoverTable, PhaseName, points, without_refusals

PairName = tuple[str | None, int | None]
"""Layout and block size by name; (None, None) in a table of level engine."""


@dataclass(frozen=True)
class TableRow:
    """One point."""

    cells: dict[str, Cell]
    """Backend -> its cell."""

    @property
    def first(self) -> Cell:
        """Any cell, for what all have in common."""
        return next(iter(self.cells.values()))

    @property
    def label(self) -> str:
        """The lengths, without the batch, which heads the block."""
        cell = self.first
        if cell.phase == "prefill":
            return str(cell.query_len)
        if cell.phase == "generate":
            return f"{cell.query_len} + {cell.kv_len - cell.query_len}"
        return str(cell.kv_len) if cell.phase == "decode" else f"{cell.query_len} of {cell.kv_len}"

    @cached_property
    def ranked(self) -> list[Cell]:
        """Cells with a time, fastest first; a loser that was only roughly timed counts."""
        return sorted((cell for cell in self.cells.values() if cell.layer_us is not None), key=lambda cell: cell.layer_us or 0)

    @cached_property
    def winners(self) -> list[str]:
        """The fastest backend, and those whose times cannot be told from its."""
        ranked = self.ranked
        same = [cell.backend for cell in ranked[1:] if cell.status != "dropped" and is_tie(ranked[0], cell)]
        return [cell.backend for cell in ranked[:1]] + same

    @cached_property
    def speedup(self) -> float | None:
        """The runner-up's time over the winner's, also where the two are a tie; None without a runner-up."""
        ranked = self.ranked
        return (ranked[1].layer_us or 0) / (ranked[0].layer_us or math.inf) if len(ranked) > 1 else None


@dataclass(frozen=True)
class Block:
    """The rows of one phase and batch size."""

    phase: PhaseName
    batch: int
    rows: list[TableRow]


@dataclass(frozen=True)
class View:
    """A table over one layout and block size."""

    table: CrossoverTable
    pair: PairName
    backends: list[str]
    """Backends that were tried over this layout and block size."""
    blocks: list[Block]
    """Points of the grid."""

    @property
    def between(self) -> int:
        """Points that were measured between those of the grid, and are not among the rows."""
        return len({cell.point for cell in self.table.cells if cell.between})

    @property
    def elsewhere(self) -> dict[str, list[PairName]]:
        """Backends without a time over this layout and block size -> those over which they have one."""
        timed: dict[str, list[PairName]] = {}
        for cell in self.table.cells:
            if cell.median_us is not None and cell.layout is not None:
                timed.setdefault(cell.backend, []).append((cell.layout, cell.block_size))
        return {name: list(dict.fromkeys(pairs)) for name, pairs in timed.items() if self.pair not in pairs}

    @property
    def rows(self) -> Iterator[TableRow]:
        """All rows."""
        for block in self.blocks:
            yield from block.rows

    @property
    def where(self) -> str:
        """The layout and block size, in words."""
        return f"kv_layout {self.pair[0]}, block_size {self.pair[1]}" if self.pair[0] else "layout and block size as chosen"


def pairs_of(table: CrossoverTable) -> list[PairName]:
    """Layouts and block sizes, in the order in which they were measured."""
    found = [(cell.layout, cell.block_size) for cell in table.cells if cell.layout is not None]
    return list(dict.fromkeys(found)) or [(None, None)]


def view(table: CrossoverTable, layout: str | None = None, block_size: int | None = None) -> View:
    """The table over the asked layout and block size; what is not asked for is chosen by the least time over all points.

    :raises ConfigError: none was measured over what is asked.
    """
    pairs = pairs_of(table)
    fitting = [pair for pair in pairs if layout in (None, pair[0]) and block_size in (None, pair[1])]
    if not fitting:
        need = f"one that was measured: {', '.join(f'{name} {size}' for name, size in pairs)}"
        raise ConfigError("layout and block size", need, f"{layout or 'any'} {block_size or 'any'}")
    by_point = points([cell for cell in table.cells if not cell.between])
    pair = min(fitting, key=lambda pair: _mean_log(list(by_point.values()), pair))
    rows = [TableRow({cell.backend: cell for cell in _over(cells, pair)}) for cells in by_point.values()]
    rows = sorted((row for row in rows if row.cells), key=_order)
    blocks: list[Block] = []
    for row in rows:
        key = (row.first.phase, row.first.batch)
        if not blocks or (blocks[-1].phase, blocks[-1].batch) != key:
            blocks.append(Block(*key, []))
        blocks[-1].rows.append(row)
    present = {name for row in rows for name, cell in row.cells.items() if cell.status != "unsupported"}
    return View(table, pair, [record.name for record in table.backends if record.name in present], blocks)


def _over(cells: Sequence[Cell], pair: PairName) -> list[Cell]:
    return without_refusals([cell for cell in cells if (cell.layout, cell.block_size) in (pair, (None, None))])


def _mean_log(groups: Sequence[Sequence[Cell]], pair: PairName) -> float:
    best = [min((cell.layer_us for cell in _over(cells, pair) if cell.layer_us), default=math.inf) for cells in groups]
    return fmean(math.log(us) for us in best) if best else math.inf


_PHASE_ORDER: tuple[PhaseName, ...] = ("generate", "decode", "verify", "prefill", "extend")


def _order(row: TableRow) -> tuple[int, ...]:
    cell = row.first
    return _PHASE_ORDER.index(cell.phase), cell.batch, cell.query_len, cell.kv_len


def show(cell: Cell | None) -> str:
    """A cell in a word: its time (in a generation tokens a second), or why it has none."""
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
    """What a cell's number is."""
    return "output tok/s" if phase == "generate" else "us per layer"
