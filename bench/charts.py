"""What every picture has in common: how matplotlib (the extra `plot`) is found, and how a figure becomes a PNG."""

from __future__ import annotations

import io
import textwrap
from typing import Any

from headway.core.contract.errors import ConfigError

_PIXELS_PER_INCH = 110
_LETTERS_PER_INCH = 11.5
"""Of a heading."""


def new_figure(width: float, height: float, otherwise: str = "") -> Any:
    """An empty figure on white, in inches. otherwise: what to do without matplotlib.

    :raises ConfigError: matplotlib is not installed.
    """
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
    """The title of a whole figure; a line that is wider than the figure is broken."""
    width = int(_LETTERS_PER_INCH * figure.get_figwidth())
    broken = [part for line in lines for part in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)]
    figure.suptitle("\n".join(broken), fontsize=10)


def png(figure: Any) -> bytes:
    """The figure as a file's content."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=_PIXELS_PER_INCH)
    return out.getvalue()


def bare(axis: Any) -> None:
    """Leave of the frame what carries numbers, and draw a light grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
