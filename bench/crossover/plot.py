"""PNG charts of a table with matplotlib (the extra `plot`): winners as a heat map, and curves of time by length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from headway.bench.charts import TIE, bare, cell_colour, colours, faded, heading, new_figure, png
from headway.bench.crossover.report import Block, TableRow, View, speedup, winner
from headway.core.contract.errors import ConfigError
from headway.core.system.text import picture
from headway.tuning.table.schema import PhaseName

TITLES: dict[PhaseName, str] = {
    "decode": "decode: one new token for each sequence",
    "verify": "verification: several new tokens for each sequence (a speculator's drafts)",
    "prefill": "prefill: prompts without a cached context",
    "extend": "extend: new tokens after a cached context",
    "generate": "whole generations",
}
LENGTHS: dict[PhaseName, str] = {
    "decode": "cached tokens of each sequence",
    "verify": "new tokens of all tokens in each sequence",
    "prefill": "tokens of each prompt",
    "extend": "new tokens of all tokens in each sequence",
    "generate": "input + output tokens of each request",
}


def to_png(view: View) -> bytes:
    """Return a PNG with one panel per phase. Rows are batch sizes and columns are lengths; each cell has its winner's color and
    speed-up.
    :raises ConfigError: if matplotlib is not installed or the table has no points.
    """
    if not view.blocks:
        raise ConfigError("a picture of the winners", "a table with points", "one without any")
    panels = [(phase, list(blocks)) for phase, blocks in groupby(view.blocks, key=lambda block: block.phase)]
    sizes = [max(len(blocks), 2) for _, blocks in panels]
    widest = max(len(lengths(blocks)) for _, blocks in panels)
    height = 2.0 + sum(0.62 * size + 1.2 for size in sizes)
    figure = new_figure(max(7.0, 1.25 * widest + 1.5), height, "ask for .html")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[size + 1 for size in sizes])[:, 0]
    chosen = colours(view.backends)
    for (phase, blocks), axis in zip(panels, axes, strict=True):
        _panel(axis, phase, blocks, chosen)
    measured = f"{view.table.title}, {view.where}, measured {view.table.date[:10]}"
    heading(figure, "Fastest attention backend, and how many times faster than the runner-up", picture(measured))
    won = [name for name in view.backends if any(row.winners == [name] for row in view.rows)]
    handles = [_patch(chosen[name], picture(name)) for name in won]
    handles += [_patch(TIE, "tie: cannot be told apart"), _not_measured("not measured")]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6), frameon=False, fontsize=9)
    return png(figure)


def _panel(axis: Any, phase: PhaseName, blocks: list[Block], chosen: dict[str, str]) -> None:
    labels = lengths(blocks)
    for down, block in enumerate(blocks):
        by_label = {row.label: row for row in block.rows}
        for across, label in enumerate(labels):
            row = by_label.get(label)
            if row is None:
                axis.add_patch(_not_measured("", across, down))
                continue
            opacity = 1.0 if len(row.winners) > 1 else faded(row.speedup)
            axis.add_patch(_rectangle(across, down, cell_colour(row.winners, chosen), opacity))
            names = picture(winner(row)).replace(" = ", "\n= ")
            axis.text(across + 0.5, down + 0.38, names, ha="center", va="center", fontsize=7)
            axis.text(across + 0.5, down + 0.8, speedup(row), ha="center", va="center", fontsize=8, weight="bold")
    axis.set(xlim=(0, len(labels)), ylim=(len(blocks), 0), ylabel="sequences (batch size)", xlabel=LENGTHS[phase])
    axis.set_title(TITLES[phase], fontsize=10)
    axis.set_xticks([place + 0.5 for place in range(len(labels))], labels, fontsize=8)
    axis.set_yticks([place + 0.5 for place in range(len(blocks))], [str(block.batch) for block in blocks], fontsize=8)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def lengths(blocks: list[Block]) -> list[str]:
    """Return the labels of a phase's lengths, shortest first."""
    rows: dict[str, TableRow] = {row.label: row for block in blocks for row in block.rows}
    return sorted(rows, key=lambda label: (rows[label].first.query_len, rows[label].first.kv_len))


def _rectangle(across: float, down: float, colour: str, opacity: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((across + 0.02, down + 0.03), 0.96, 0.94, facecolor=colour, alpha=opacity, linewidth=0)


def _not_measured(label: str, across: float = 0, down: float = 0) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((across + 0.02, down + 0.03), 0.96, 0.94, facecolor="white", edgecolor="#cccccc", hatch="////", label=label)


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=label)


_COLUMNS = 3
"""Maximum number of panels per phase: for the smallest, a middle and the largest batch size or number of new tokens."""
_MARKERS = "osD^vPX*<>"
_PHASES: tuple[PhaseName, ...] = ("decode", "prefill", "extend")
_TOTALS = {"decode": LENGTHS["decode"], "prefill": LENGTHS["prefill"]}
"""Phase -> label of the horizontal axis. In other phases, the axis shows the total number of tokens of each sequence."""


@dataclass(frozen=True)
class Panel:
    """A panel of a chart: points that differ only in length, shortest first."""

    batch: int
    query_len: int
    """Number of new tokens per sequence. 0 in prefill, because all tokens of a sequence are new."""
    rows: list[TableRow]

    @property
    def title(self) -> str:
        """Title with the number of sequences and the number of new tokens."""
        sequences = "1 sequence" if self.batch == 1 else f"{self.batch} sequences"
        return f"{sequences}, {self.query_len:,} new tokens each" if self.query_len > 1 else sequences


def to_curves(view: View, phases: Sequence[str] = ()) -> bytes:
    """Return a PNG with a row of panels per phase. Both axes are logarithmic.

    Decode and prefill have a panel for each of three batch sizes; extend has a panel for each of three numbers of new tokens.
    phases: phases to draw; empty means decode, prefill and extend, if measured.
    :raises ConfigError: if matplotlib is not installed or the view has no times at several lengths.
    """
    wanted = phases or _PHASES
    found = {phase: panels(list(blocks)) for phase, blocks in groupby(view.blocks, key=lambda block: block.phase)}
    drawn = {phase: some for phase, some in found.items() if phase in wanted and some}
    if not drawn:
        raise ConfigError(
            "curves", f"a table with times of {' or '.join(wanted)} at several lengths", f"level {view.table.level}"
        )
    figure = new_figure(9.0, 0.9 + 2.7 * len(drawn))
    chosen = colours(view.backends)
    measured = f"{view.table.title}, {view.where}, measured {view.table.date[:10]}"
    heading(figure, "Time of attention by length: lower is faster, both axes are logarithmic", measured)
    parts = figure.subfigures(len(drawn), 1, squeeze=False)[:, 0]
    for part, (phase, some) in zip(parts, drawn.items(), strict=True):
        part.suptitle(TITLES[phase], fontsize=10, weight="bold")
        axes = part.subplots(1, _COLUMNS, squeeze=False)[0]
        for axis in axes[len(some) :]:
            axis.set_visible(False)
        for axis, panel in zip(axes, some, strict=False):
            _draw(axis, panel, view.backends, chosen)
        axes[0].set_ylabel("time of one layer (us)", fontsize=9)
        axes[(len(some) - 1) // 2].set_xlabel(_TOTALS.get(phase, "tokens of each sequence, cached and new"), fontsize=9)
    _legend(figure, view, chosen, [row for some in drawn.values() for panel in some for row in panel.rows])
    return png(figure)


def panels(blocks: list[Block]) -> list[Panel]:
    """Return at most three panels of a phase. The points within a panel differ only in length."""
    of_prompts = blocks[0].phase == "prefill"
    groups: dict[tuple[int, int], list[TableRow]] = {}
    for block in blocks:
        for row in block.rows:
            groups.setdefault((block.batch, 0 if of_prompts else row.first.query_len), []).append(row)
    found = [Panel(*key, sorted(rows, key=_length)) for key, rows in groups.items() if len(rows) > 1]
    if blocks[0].phase in ("extend", "verify"):
        found = [panel for panel in found if panel.batch == found[0].batch]
    places = sorted({0, len(found) // 2, len(found) - 1}) if found else []
    return [found[place] for place in places]


def _length(row: TableRow) -> int:
    return row.first.kv_len


def _draw(axis: Any, panel: Panel, backends: list[str], chosen: dict[str, str]) -> None:
    from matplotlib.ticker import LogLocator

    lengths = [_length(row) for row in panel.rows]
    steps = [math.sqrt(after / before) for before, after in pairwise(lengths)]
    for place, row in enumerate(panel.rows):
        if len(row.winners) > 1:
            left, right = steps[max(place - 1, 0)], steps[min(place, len(steps) - 1)]
            axis.axvspan(lengths[place] / left, lengths[place] * right, color=TIE, alpha=0.45, linewidth=0)
    for number, name in enumerate(backends):
        timed = [(_length(row), row.cells[name]) for row in panel.rows if _has_time(row, name)]
        axis.plot([length for length, _ in timed], [cell.layer_us for _, cell in timed], color=chosen[name], linewidth=1.4)
        for length, cell in timed:
            face = "white" if cell.status == "dropped" else chosen[name]
            marker = _MARKERS[number % len(_MARKERS)]
            axis.plot(length, cell.layer_us, marker, color=chosen[name], markerfacecolor=face, markersize=5)
    axis.set(xscale="log", yscale="log", xlim=(lengths[0] / steps[0], lengths[-1] * steps[-1]))
    axis.set_xticks(lengths, [_short(length) for length in lengths], fontsize=8)
    axis.set_xticks([], minor=True)
    axis.tick_params(axis="y", which="both", labelsize=8)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.yaxis.set_minor_formatter("")
    axis.set_title(panel.title, fontsize=9, loc="left")
    bare(axis)


def _short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def _has_time(row: TableRow, name: str) -> bool:
    return name in row.cells and row.cells[name].layer_us is not None


def _legend(figure: Any, view: View, chosen: dict[str, str], drawn: list[TableRow]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    timed = [name for name in view.backends if any(_has_time(row, name) for row in drawn)]
    handles: list[Any] = [
        Line2D([], [], color=chosen[name], marker=_MARKERS[view.backends.index(name) % len(_MARKERS)], label=name)
        for name in timed
    ]
    handles.append(Patch(facecolor=TIE, alpha=0.45, label="tie: cannot be told apart"))
    if any(cell.status == "dropped" for row in drawn for cell in row.cells.values() if cell.layer_us):
        handles.append(
            Line2D(
                [], [], color="#777777", marker="o", markerfacecolor="white", linestyle="", label="a slower candidate, few runs"
            )
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
