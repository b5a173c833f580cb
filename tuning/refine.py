"""Where a grid is too coarse: points between neighbours at which the fastest backend is not the same one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from headway.tuning.points import Point
from headway.tuning.schema import Cell, PhaseName, PointKey, points

ROUNDS = 2
"""Halvings, one after another, of an interval in which the fastest backend changes."""
_NEAREST = 1.5
"""Neighbours that are nearer than this factor are not refined: times between them are interpolated well enough."""
_LEAST_LOSS = 0.03
"""What each of the two winners must lose at the other's point. Less is not worth a point: it is nearly a tie."""

_LEVEL = 3
"""After all levels of a grid."""

_Coordinates = tuple[int, int, int]
"""batch, query_len, kv_len."""
_Times = Mapping[tuple[str | None, int | None], Mapping[str, float]]
"""Layout and block size -> backend -> microseconds of a layer."""


def midpoints(cells: Sequence[Cell], noise: float) -> list[Point]:
    """A point in the middle, by logarithms, of every two neighbours between which the winner changes, the costliest change first.

    Neighbours differ in one of batch, query_len and kv_len and have nothing measured between them. noise: of the table.
    """
    measured = points(cells)
    found: dict[PointKey, tuple[float, Point]] = {}
    for phase in dict.fromkeys(cell.phase for cell in cells):
        times = {_place(rivals[0]): _times(rivals) for (of, _), rivals in measured.items() if of == phase}
        for low, high in _neighbours(list(times), phase):
            loss = _loss(times[low], times[high])
            middle = _middle(phase, low, high)
            if middle is None or loss <= max(_LEAST_LOSS, noise):
                continue
            key = (phase, middle.case)
            if key not in measured and loss > found.get(key, (0.0, middle))[0]:
                found[key] = loss, middle
    return [point for _, point in sorted(found.values(), key=lambda ranked: -ranked[0])]


def _place(cell: Cell) -> _Coordinates:
    return cell.batch, cell.query_len, cell.kv_len


def _times(rivals: Sequence[Cell]) -> _Times:
    """A time without a layout holds over all of them."""
    timed = [(cell, cell.layer_us) for cell in rivals if cell.layer_us is not None]
    everywhere = {cell.backend: us for cell, us in timed if cell.layout is None}
    pairs = dict.fromkeys((cell.layout, cell.block_size) for cell, _ in timed)
    if len(pairs) > 1:
        pairs.pop((None, None), None)
    return {
        pair: everywhere | {cell.backend: us for cell, us in timed if (cell.layout, cell.block_size) == pair} for pair in pairs
    }


def _neighbours(places: Sequence[_Coordinates], phase: PhaseName) -> Iterator[tuple[_Coordinates, _Coordinates]]:
    """Pairs next to each other in a row of points that differ in one number. A prompt's two lengths are one."""
    for axis in (0, 1) if phase == "prefill" else (0, 1, 2):
        rows: dict[tuple[int, ...], list[_Coordinates]] = {}
        for place in places:
            others = place[:1] if phase == "prefill" and axis == 1 else place[:axis] + place[axis + 1 :]
            rows.setdefault(others, []).append(place)
        for row in rows.values():
            yield from pairwise(sorted(row, key=lambda place: place[axis]))


def _loss(low: _Times, high: _Times) -> float:
    """What the winner of each neighbour loses at the other's point, the less of the two, as a share; of all layouts the most.

    Where one of them loses nothing there is one winner of both, and a tie at one end.
    """
    worst = 0.0
    for pair in low.keys() & high.keys():
        if low[pair] and high[pair]:
            first, second = (min(times, key=times.__getitem__) for times in (low[pair], high[pair]))
            lost = high[pair].get(first, 0.0) / high[pair][second], low[pair].get(second, 0.0) / low[pair][first]
            worst = max(worst, min(lost) - 1)
    return worst


def _middle(phase: PhaseName, low: _Coordinates, high: _Coordinates) -> Point | None:
    """None where the neighbours are too near, or no whole number lies between."""
    batch, query_len, kv_len = (round(math.sqrt(a * b)) for a, b in zip(low, high, strict=True))
    if phase == "prefill":
        kv_len = query_len
    factor = max(b / a for a, b in zip(low, high, strict=True))
    middle = (batch, query_len, kv_len)
    if factor < _NEAREST or middle in (low, high) or (phase != "prefill" and kv_len <= query_len):
        return None
    return Point(phase, batch, query_len, kv_len, level=_LEVEL)
