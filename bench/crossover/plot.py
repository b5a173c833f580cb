"""The winners and their speed-ups as a heat-map in a PNG, drawn with matplotlib (the extra `plot`)."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from headway.bench.charts import TIE, cell_colour, colours, faded, heading, new_figure, png
from headway.bench.crossover.report import speedup, winner
from headway.bench.crossover.view import Block, TableRow, View
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
    """One panel for each phase: batch sizes down, lengths across, a cell in its winner's colour with its speed-up.

    :raises ConfigError: matplotlib is not installed, or the table has no points.
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
    """Labels of a phase's lengths, the shortest first."""
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
