"""Shipped times of experts or products held to a few that are measured here: where they agree they are taken, scaled."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from itertools import pairwise
from statistics import median
from typing import TypeVar

from headway.tuning.measure.kept import KeptTimes

Us = dict[str, list[float | None]]
"""Way -> microseconds by cell, a cell being a number of tokens or rows."""
F = TypeVar("F", bound=KeptTimes)
_MOST_CELLS = 4
_LOSS = 0.05
"""What the way that the shipped times name the fastest may lose in a cell that is checked, as a share."""
log = logging.getLogger("headway")


def times_with(
    shipped: KeptTimes | None, what: str, ways: Collection[str], count: int, measure: Callable[[Collection[int]], Us]
) -> tuple[Us, str]:
    """The times of some ways, and what `KeptTimes.prior` says of them: shipped ones that a few measured ones agree with, or all
    measured.

    what: whose times, for the log. count: of cells. measure: times the ways in some cells; the others are None.
    """
    if shipped is not None and set(ways) <= shipped.us.keys():
        us = {way: shipped.us[way] for way in ways}
        cells = cells_to_check(us)
        here = measure(cells)
        wrong = _wrong(us, here, cells)
        if not wrong:
            log.info("%s: the %s, agree here with %d measured ones", what, shipped.prior, len(cells))
            return _scaled(us, here, cells), f"{shipped.prior}, checked here in {len(cells)} of {count} cells"
        log.info("%s: the %s, are not used: %s", what, shipped.prior, wrong)
    elif shipped is not None:
        lacking = ", ".join(sorted(set(ways) - shipped.us.keys()))
        log.info("%s: the %s, are not used: %s not in them", what, shipped.prior, lacking)
    return measure(range(count)), ""


def unchecked(shipped: F | None, ways: Collection[str]) -> F | None:
    """Shipped times as they are, for a start that may measure nothing; None where they lack one of the ways."""
    if shipped is None or not set(ways) <= shipped.us.keys():
        return None
    return shipped.model_copy(update={"prior": f"{shipped.prior}, not checked here"})


def cells_to_check(us: Us) -> list[int]:
    """A few cells: the ends, and the first ones in which another way is the fastest than before."""
    timed = [cell for cell in range(min(map(len, us.values()), default=0)) if _ranked(us, cell)]
    changes = [cell for before, cell in pairwise(timed) if _ranked(us, before)[0][1] != _ranked(us, cell)[0][1]]
    return sorted(dict.fromkeys([*timed[:1], *timed[-1:], *changes[: _MOST_CELLS - 2]]))


def _ranked(us: Us, cell: int) -> list[tuple[float, str]]:
    return sorted((time, name) for name, times in us.items() if (time := times[cell]) is not None)


def _wrong(us: Us, here: Us, cells: Collection[int]) -> str:
    """Why shipped times do not hold here; empty: they do."""
    for cell in cells:
        name, found = _ranked(us, cell)[0][1], _ranked(here, cell)
        now = here[name][cell]
        if now is None:
            return f"{name} has no time here"
        if now > found[0][0] * (1 + _LOSS):
            return f"{name} takes {now / found[0][0]:.2f} times as long as {found[0][1]}"
    return "" if cells else "nothing to check them by"


def _scaled(us: Us, here: Us, cells: Collection[int]) -> Us:
    """The shipped times as long as they are here, by the median of what was measured, which stands as it is."""
    pairs = [(us[name][cell], here[name][cell]) for name in us for cell in cells]
    scale = math.exp(median(math.log(now / was) for was, now in pairs if was and now))
    return {
        name: [here[name][cell] if cell in cells else None if time is None else time * scale for cell, time in enumerate(times)]
        for name, times in us.items()
    }
