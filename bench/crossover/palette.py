"""One colour a backend, told apart by people who do not see all colours, and readable with dark text or white."""

from __future__ import annotations

from collections.abc import Sequence

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99", "#99ddff", "#bbbbbb")
"""After Paul Tol's bright and light schemes."""
NONE = "#6e7278"
TIE = "#d9c7a3"
"""Of no backend: two or more that cannot be told apart."""


def colours(backends: Sequence[str]) -> dict[str, str]:
    """A colour for each backend, by its place in the table."""
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(backends)}


def cell_colour(winners: Sequence[str], chosen: dict[str, str]) -> str:
    """The winner's colour; TIE where several win, NONE where no backend has a time."""
    return NONE if not winners else TIE if len(winners) > 1 else chosen.get(winners[0], NONE)


def faded(speedup: float | None) -> float:
    """Opacity of a winner's cell: the more it gains, the fuller; a win by half again is full."""
    gain = 1.0 if speedup is None else min(max(speedup - 1.0, 0.0) / 0.5, 1.0)
    return 0.45 + 0.55 * gain
