"""Noise of times: how much two times must differ to count as different."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from headway.tuning.table.schema import Cell

LEAST_DIFFERENCE = 0.01
"""Relative difference below which two times are always a tie."""
_MOST_NOISE = 0.10
"""Relative difference above which two times are never a tie: a wide spread on a busy machine does not make them equal."""
MOST_DRIFT = 0.25
"""Relative difference between rounds or runs of one call above which the difference is reported, because the machine was not
steady."""
TIE_RULE = (
    f"a tie: times that differ by less than {LEAST_DIFFERENCE:.0%}, or by less than {_MOST_NOISE:.0%} with ranges (p20 to p80) "
    "that overlap"
)


def mark_ties(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells of one point, with cells marked as ties if their times equal the fastest time within noise.

    A cell competes only with cells that have the same layout and block size; see TIE_RULE.
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
    """Return whether a time equals the fastest time according to TIE_RULE."""
    least, us = fastest.layer_us or math.inf, other.layer_us or math.inf
    # A layer's cost is the slower of device and host, at both ends of the range.
    overlap = max(other.p20_us or math.inf, other.host_us or 0.0) <= max(fastest.p80_us or 0.0, fastest.host_us or 0.0)
    return us <= least * (1 + LEAST_DIFFERENCE) or (overlap and us <= least * (1 + _MOST_NOISE))


def noise_of(cells: Sequence[Cell]) -> float:
    """Return the noise of times: the median of the cells' relative spreads, between LEAST_DIFFERENCE and _MOST_NOISE."""
    spreads = [
        (cell.p80_us - cell.p20_us) / (2 * cell.median_us)
        for cell in cells
        if cell.status in ("ok", "tie") and cell.median_us and cell.p20_us is not None and cell.p80_us is not None
    ]
    return min(max(median(spreads) if spreads else 0.0, LEAST_DIFFERENCE), _MOST_NOISE)


def launch_us(cells: Iterable[Cell]) -> dict[tuple[str, str], float]:
    """Return the median host time per launch of each kernel and phase. A launch costs the same for all lengths; cells differ by a
    factor of two because other processes delay the host."""
    found = defaultdict(list)
    for cell in cells:
        if cell.host_us is not None:
            found[cell.kernel, cell.phase].append(cell.host_us)
    return {key: median(times) for key, times in found.items()}
