"""How far times differ before they count as different."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from headway.tuning.table.schema import Cell

LEAST_DIFFERENCE = 0.01
"""Two times that differ by less are a tie, however steady they are."""
_MOST_NOISE = 0.10
"""Two times that differ by more are no tie, however far they spread: a busy machine is no reason to call them equal."""
MOST_DRIFT = 0.25
"""A share of the time: rounds, or runs, of one call that disagree by more are told, since the machine was not steady."""
TIE_RULE = (
    f"a tie: times that differ by less than {LEAST_DIFFERENCE:.0%}, or by less than {_MOST_NOISE:.0%} with ranges (p20 to p80) "
    "that overlap"
)


def mark_ties(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of one point, those that cannot be told from the fastest marked as ties.

    A cell competes with those of its own layout and block size, which are those it could be switched with; see TIE_RULE.
    """
    placed: list[tuple[str | None, int | None]] = [(cell.layout, cell.block_size) for cell in cells if cell.layout]
    pairs = list(dict.fromkeys(placed)) or [(None, None)]
    tied: set[int] = set()
    for pair in pairs:
        rivals = [
            (number, cell)
            for number, cell in enumerate(cells)
            if cell.status in ("ok", "tie") and (cell.layout, cell.block_size) in (pair, (None, None))
        ]
        first, fastest = min(rivals, key=lambda rival: rival[1].layer_us or math.inf, default=(-1, None))
        same = {number for number, cell in rivals if fastest is not None and number != first and is_tie(fastest, cell)}
        tied |= same | ({first} if same else set())
    return [
        cell.model_copy(update={"status": "tie" if number in tied else "ok"}) if cell.status in ("ok", "tie") else cell
        for number, cell in enumerate(cells)
    ]


def is_tie(fastest: Cell, other: Cell) -> bool:
    """Whether a time cannot be told from the fastest, by TIE_RULE."""
    least, us = fastest.layer_us or math.inf, other.layer_us or math.inf
    # What a layer costs is the slower of device and host, at either end of the range.
    overlap = max(other.p20_us or math.inf, other.host_us or 0.0) <= max(fastest.p80_us or 0.0, fastest.host_us or 0.0)
    return us <= least * (1 + LEAST_DIFFERENCE) or (overlap and us <= least * (1 + _MOST_NOISE))


def noise_of(cells: Sequence[Cell]) -> float:
    """How far a time may be off: the median of the cells' relative spreads, between one and ten hundredths."""
    spreads = [
        (cell.p80_us - cell.p20_us) / (2 * cell.median_us)
        for cell in cells
        if cell.status in ("ok", "tie") and cell.median_us and cell.p20_us is not None and cell.p80_us is not None
    ]
    return min(max(median(spreads) if spreads else 0.0, LEAST_DIFFERENCE), _MOST_NOISE)
