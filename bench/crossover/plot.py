"""The winners and their speed-ups as a heat-map in a PNG, drawn with matplotlib (the extra `plot`)."""

from __future__ import annotations

import io
from itertools import groupby
from typing import Any

from headway.bench.crossover.palette import NONE, colours, faded
from headway.bench.crossover.report import speedup, winner
from headway.bench.crossover.view import Block, Row, View
from headway.core.contract.errors import ConfigError
from headway.tuning.schema import PhaseName


def to_png(view: View) -> bytes:
    """One panel a phase: batch sizes down, lengths across, a cell in its winner's colour with its speed-up.

    :raises ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a .png", "matplotlib", str(error), "pip install 'headway[plot]', or ask for .html") from error
    panels = [(phase, list(blocks)) for phase, blocks in groupby(view.blocks, key=lambda block: block.phase)]
    sizes = [max(len(blocks), 2) for _, blocks in panels]
    widest = max(len(lengths(blocks)) for _, blocks in panels)
    figure = Figure(figsize=(max(7.0, 1.25 * widest + 1.5), 1.6 + sum(0.62 * size + 1.0 for size in sizes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[size + 1 for size in sizes])[:, 0]
    chosen = colours(view.backends)
    for (phase, blocks), axis in zip(panels, axes, strict=True):
        _panel(axis, phase, blocks, chosen)
    figure.suptitle(f"{view.table.title}\n{view.where}, {view.table.date[:10]}", fontsize=10)
    won = [name for name in view.backends if any(name in row.winners[:1] for row in view.rows)]
    handles = [_patch(chosen[name], name) for name in won]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4) or 1, frameon=False, fontsize=9)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150)
    return out.getvalue()


def _panel(axis: Any, phase: PhaseName, blocks: list[Block], chosen: dict[str, str]) -> None:
    labels = lengths(blocks)
    for down, block in enumerate(blocks):
        for row in block.rows:
            across = labels.index(row.label)
            first = row.winners[0] if row.winners else ""
            axis.add_patch(_rectangle(across, down, chosen.get(first, NONE), faded(row.speedup)))
            axis.text(across + 0.5, down + 0.38, winner(row).replace(" = ", "\n= "), ha="center", va="center", fontsize=7)
            axis.text(across + 0.5, down + 0.78, speedup(row), ha="center", va="center", fontsize=8, weight="bold")
    axis.set(xlim=(0, len(labels)), ylim=(len(blocks), 0), title=phase, ylabel="batch size")
    axis.set_xticks([place + 0.5 for place in range(len(labels))], labels, fontsize=8)
    axis.set_yticks([place + 0.5 for place in range(len(blocks))], [str(block.batch) for block in blocks], fontsize=8)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def lengths(blocks: list[Block]) -> list[str]:
    """Labels of a phase's lengths, the shortest first."""
    rows: dict[str, Row] = {row.label: row for block in blocks for row in block.rows}
    return sorted(rows, key=lambda label: (rows[label].first.query_len, rows[label].first.kv_len))


def _rectangle(across: float, down: float, colour: str, opacity: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((across + 0.02, down + 0.03), 0.96, 0.94, facecolor=colour, alpha=opacity, linewidth=0)


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=label)
