"""Successive halving: with little time, clear losers make room for the points that decide between the others.

After each level of the grid (corners, middles, the rest) half of the layouts and block sizes go on, and in each phase half of the
backends, beside those that came near the fastest anywhere. After Jamieson and Talwalkar (2016), with times in place of losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.tuning.measure_point import Pair
from headway.tuning.schema import Cell, points

_UNDECIDED = 1.15
"""Times the fastest, in the mean: layouts and block sizes between which the corners of a grid do not decide. All of them go on:
were noise to drop one here, it would decide what `auto` takes."""
NEAR = 1.15
"""Times the fastest: a backend that was this near somewhere may win elsewhere."""


def surviving_pairs(cells: Sequence[Cell], pairs: Sequence[Pair]) -> list[Pair]:
    """The better half of the layouts and block sizes, by the geometric mean of their fastest backends' times, and the undecided.

    They stay in the order given, smallest blocks first. One that no backend serves at some point goes.
    """
    measured = points(cells)

    def loss(pair: Pair) -> float:
        total = 0.0
        for rivals in measured.values():
            key = (pair[0].name, pair[1])
            times = [cell.layer_us for cell in rivals if (cell.layout, cell.block_size) in (key, (None, None))]
            total += math.log(min((us for us in times if us is not None), default=math.inf))
        return total / max(len(measured), 1)

    losses = [loss(pair) for pair in pairs]
    limit = max(min(losses) + math.log(_UNDECIDED), sorted(losses)[math.ceil(len(pairs) / 2) - 1])
    return [pair for pair, lost in zip(pairs, losses, strict=True) if lost <= limit and lost < math.inf] or list(pairs[:1])


def losers(cells: Sequence[Cell], phase: str, names: Sequence[str]) -> dict[str, str]:
    """Backends to drop in a phase, each with the reason; never all of them."""
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for (found, _), rivals in points(cells).items():
        timed = [(cell.backend, cell.layer_us) for cell in rivals if cell.layer_us is not None]
        if found != phase or not timed:
            continue
        best = min(us for _, us in timed)
        for name in names:
            own = [us / best for backend, us in timed if backend == name]
            if own:
                ratios[name].append(min(own))
    known = [name for name in names if ratios[name]]
    ranked = sorted(known, key=lambda name: sum(map(math.log, ratios[name])) / len(ratios[name]))
    worse = ranked[max(1, math.ceil(len(ranked) / 2)) :]
    return {
        name: f"at best {min(ratios[name]):.2f} times the fastest at the first {len(ratios[name])} points: given up to save time"
        for name in worse
        if min(ratios[name]) > NEAR
    }
