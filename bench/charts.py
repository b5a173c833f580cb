"""Helpers for charts: colors, import of matplotlib (the extra `plot`), PNG output and grouped bars."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from headway.core.contract.errors import ConfigError

_PIXELS_PER_INCH = 110
_LETTERS_PER_INCH = 11.5
"""Maximum number of letters in a heading per inch of the figure's width."""
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99", "#99ddff", "#bbbbbb")
"""One color per backend: distinguishable with color blindness, and readable with dark text or white text. The colors follow Paul
Tol's bright and light schemes."""
BAR_COLOURS = ("#4477aa", "#ee6677", "#ccbb44", "#228833", "#66ccee", "#aa3377")
"""One color per series of bars. The first is Headway's."""
NONE = "#6e7278"
TIE = "#d9c7a3"
"""Color of a tie: backends whose times are indistinguishable."""


def colours(backends: Sequence[str]) -> dict[str, str]:
    """Return a color for each backend, by its position in the table."""
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(backends)}


def cell_colour(winners: Sequence[str], chosen: dict[str, str]) -> str:
    """Return the winner's color, TIE if several backends win, or NONE if no backend has a time."""
    return NONE if not winners else TIE if len(winners) > 1 else chosen.get(winners[0], NONE)


def faded(speedup: float | None) -> float:
    """Return the opacity of a winner's cell, which grows with the speed-up, up to a speed-up of 1.5."""
    gain = 1.0 if speedup is None else min(max(speedup - 1.0, 0.0) / 0.5, 1.0)
    return 0.45 + 0.55 * gain


Series = Mapping[str, Sequence[float | None]]
"""Name of a series -> height of its bar in each group; None if not measured."""


def new_figure(width: float, height: float, otherwise: str = "") -> Any:
    """Return an empty white figure. width, height: inches. otherwise: alternative to suggest if matplotlib is missing.
    :raises ConfigError: if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "pip install 'headway[plot]'" + (f", or {otherwise}" if otherwise else "")
        raise ConfigError("a .png", "matplotlib", str(error), hint) from error
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def heading(figure: Any, *lines: str) -> None:
    """Set the title of a whole figure, wrapping lines that are wider than the figure."""
    width = int(_LETTERS_PER_INCH * figure.get_figwidth())
    broken = [part for line in lines for part in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)]
    figure.suptitle("\n".join(broken), fontsize=10)


def png(figure: Any) -> bytes:
    """Return the figure as PNG data."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=_PIXELS_PER_INCH)
    return out.getvalue()


def bare(axis: Any) -> None:
    """Remove the frame lines that have no numbers, and draw a light grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)


def bars(
    title: str, groups: Sequence[str], series: Series, ylabel: str, xlabel: str, line: tuple[float, str] | None = None
) -> bytes:
    """Return grouped bars as a PNG, each with its value above it, or "not measured". line: a height at which to draw a line, and
    its label.
    :raises ConfigError: if matplotlib is not installed."""
    figure = new_figure(max(7.5, 1.15 * len(groups) * max(len(series), 2) ** 0.6 + 1.5), 4.6)
    axis = figure.subplots()
    width = 0.82 / len(series)
    highest = max(value for values in series.values() for value in values if value is not None)
    for number, (name, values) in enumerate(series.items()):
        places = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        axis.bar(
            places, [value or 0.0 for value in values], 0.94 * width, label=name, color=BAR_COLOURS[number % len(BAR_COLOURS)]
        )
        for place, value in zip(places, values, strict=True):
            _figure(axis, place, value, highest)
    if line is not None:
        axis.axhline(line[0], color="#444444", linewidth=1, linestyle="--", label=line[1])
    axis.set(title=title, ylabel=ylabel, xlabel=xlabel, ylim=(0, 1.14 * highest))
    axis.set_xticks(range(len(groups)), groups)
    axis.spines[["top", "right"]].set_visible(False)
    if highest >= 100:
        axis.yaxis.set_major_formatter("{x:,.0f}")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return png(figure)


def _figure(axis: Any, place: float, value: float | None, highest: float) -> None:
    if value is None:
        axis.text(place, 0.01 * highest, "not measured", ha="center", va="bottom", rotation=90, fontsize=7, color="#777777")
    else:
        text = f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
        readable = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # readable where a line crosses the text
        axis.text(place, value + 0.015 * highest, text, ha="center", va="bottom", fontsize=7, bbox=readable)
