"""Check of a shipped table (prior) at a few points measured on this machine.

If a checked point agrees with the prior, the prior's times near this point are adopted, scaled. If a backend is somewhat slower
or faster than expected at the point, its times nearby are corrected by that factor. If a backend is far off, the prior is not
used near the point.

In each phase, the first checked points are those with the largest leads of a backend, because a mistake costs most at these
points. The next checked points are far from the first. Each point of the prior follows the nearest checked point. Only candidates
are measured: backends that come near the fastest somewhere in the phase, with the smallest block size that is not clearly slower.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any

from headway.core.speculation.proposers import is_captured
from headway.tuning.measure.measure_point import CLEAR_LOSS
from headway.tuning.measure.points import Coordinates, Point, Times, place_of, rival_times
from headway.tuning.measure.run import NEAR, surviving_pairs
from headway.tuning.measure.workloads import Pair
from headway.tuning.table.files import Prior, as_adopted
from headway.tuning.table.noise import mark_ties, noise_of
from headway.tuning.table.schema import COUNTED, Cell, CrossoverTable, PhaseName, PointKey, points

_MOST_POINTS = 4
"""Maximum number of points to check in each phase."""
_LARGE = 0.25
"""Maximum cache size of a checked point, as a fraction of the largest cache size in the phase. Larger points take long and give
no new information."""
_LOSS, _DRIFT = 0.05, 0.15
"""Maximum relative loss of the prior's choice at a checked point, and maximum relative error of a backend's time, for which no
correction is made."""
_WRONG = 1.5
"""Maximum factor by which a backend's time, relative to the prior's choice, may be off and still be corrected. Beyond this
factor, the prior is considered wrong."""
_NOWHERE_NEAR = 1.5
"""Ratio to the fastest time. A backend above this ratio at every point of a phase is not measured in a check."""
_NOISES = 2.0
"""Minimum tolerance of a check, as a multiple of the noise of both tables."""


def check_points(prior: CrossoverTable, wanted: Sequence[Point], names: Collection[str]) -> list[Point]:
    """Return the points of `wanted` to measure for a check of a prior: a few of each phase, all with level 0.

    names: names of the backends that can run here.
    """
    measured = {key: rival_times([cell for cell in cells if cell.kernel in names]) for key, cells in points(prior.cells).items()}
    found: list[Point] = []
    for phase in dict.fromkeys(point.phase for point in wanted):
        known = [point for point in wanted if point.phase == phase and any(measured.get((phase, point.case), {}).values())]
        limit = _LARGE * max((point.batch * point.kv_len for point in known), default=0)
        small = known if phase in COUNTED else [point for point in known if point.batch * point.kv_len <= limit] or known
        choose = _choose_on_axis if phase in COUNTED else _choose
        found += choose({point: measured[phase, point.case] for point in small})
    return [replace(point, level=0) for point in found]


@dataclass(frozen=True)
class Extent:
    """Extent of a check: the candidates that are measured at the points that check a prior."""

    layouts: Sequence[str]
    block_sizes: Sequence[int | None]
    given_up: Mapping[PhaseName, Mapping[str, str]]
    """Phase -> backend that is not measured -> reason."""

    @classmethod
    def of(cls, prior: CrossoverTable, pairs: Sequence[Pair], names: Collection[str]) -> Extent:
        """Return the candidates that may win according to a prior, plus the candidates that the prior does not contain.

        pairs: all layouts and block sizes. names: names of the backends that can run here.
        """
        known = {(cell.layout, cell.block_size) for cell in prior.cells}
        ours = [pair for pair in pairs if any(pair[0].name == name for name, _ in known)]
        winning = {layout.name for layout, _ in (surviving_pairs(prior.cells, ours) if ours else ())}
        lost = {layout.name for layout, _ in ours} - winning
        kept = [pair for pair in pairs if pair[0].name not in lost]
        layouts = list(dict.fromkeys(layout.name for layout, _ in kept))
        sizes = list(dict.fromkeys(size for _, size in kept))
        if all((layout.name, size) in known for layout, size in kept):
            sizes = [
                size for _, size in surviving_pairs(prior.cells, kept)[:1]
            ]  # auto chooses smaller blocks if both sizes remain
        given_up: dict[PhaseName, dict[str, str]] = {}
        for (phase, name), ratio in _at_best([cell for cell in prior.cells if cell.kernel in names]).items():
            if ratio > _NOWHERE_NEAR:
                given_up.setdefault(phase, {})[name] = f"at best {ratio:.2f} times the fastest of those here in the shipped table"
        return cls(layouts, sizes, given_up)


def _choose(times: Mapping[Point, Times]) -> list[Point]:
    """Return the points of one phase to check: first the point of each winner's largest lead, then the points farthest from these
    points."""
    wins: dict[str, tuple[float, Point]] = {}
    for point, places in times.items():
        for rivals in places.values():
            ranked = sorted(rivals, key=rivals.__getitem__)
            lead = rivals[ranked[1]] / rivals[ranked[0]] if len(ranked) > 1 else 1.0
            if ranked and lead > wins.get(ranked[0], (0.0, point))[0]:
                wins[ranked[0]] = lead, point
    chosen = list(dict.fromkeys(point for _, point in sorted(wins.values(), key=lambda win: -win[0])))[:_MOST_POINTS]
    while len(chosen) < min(_MOST_POINTS, len(times)):
        rest = [point for point in times if point not in chosen]
        chosen.append(max(rest, key=lambda point: min(_far(_place(point), _place(other)) for other in chosen)))
    return chosen


def _choose_on_axis(times: Mapping[Point, Times]) -> list[Point]:
    """Return the first and the last point of an axis, and the first points at which the fastest kernel changes."""
    timed = sorted(times, key=lambda point: point.batch)
    fastest = {point: min(rivals, key=rivals.__getitem__) for point in timed for rivals in times[point].values()}
    changes = [point for before, point in pairwise(timed) if fastest[before] != fastest[point]]
    chosen = {*timed[:1], *timed[-1:], *changes[: _MOST_POINTS - 2]}
    return [point for point in timed if point in chosen]


def _place(point: Point) -> Coordinates:
    return point.batch, point.query_len, point.kv_len


def _far(a: Coordinates, b: Coordinates) -> float:
    """Return the distance between two points in octaves (factors of 2), summed over the coordinates."""
    return sum(abs(math.log2(one / other)) for one, other in zip(a, b, strict=True))


def adopt(prior: Prior, here: CrossoverTable, asked: Sequence[Point], wanted: Sequence[Point]) -> CrossoverTable:
    """Return the table of the points measured here, plus the prior's times near points at which the prior is not wrong. The
    prior's times are scaled, corrected and marked.

    here: table of the points measured here. asked: result of `check_points`; a point that was not reached counts as a
    disagreement. wanted: grid points that a complete table must have.
    """
    names = [record.name for record in here.kernels if record.usable]
    shared = set(names) - set(prior.unknown(names))
    same_graphs = prior.table.graph_len == here.graph_len
    replays = {(cell.phase, cell.kernel) for cell in here.cells if cell.graph}
    known = [cell for cell in prior.table.cells if cell.kernel in shared and (same_graphs or not cell.graph)]
    comparable = [as_replay(cell) if (cell.phase, cell.kernel) in replays else cell for cell in known]
    scales = _Scales.of(comparable, here.cells)
    scaled = [scales.apply(cell) for cell in comparable if cell.phase in scales.device]
    settled = _settled(here.cells, {cell.key: cell for cell in scaled})
    verdict = _Check(points(scaled), points(settled), shared, _NOISES * max(prior.table.noise, here.noise))
    faults: dict[PointKey, str] = {point.key: verdict.fault(point) for point in asked}
    factors = {key: verdict.factors(key) for key, fault in faults.items() if not fault}
    taken = points(_around(scaled, asked, factors))
    missing_there = {key: ratio for key, ratio in _at_best(here.cells).items() if key[1] in set(names) - shared}
    measured = points(here.cells)
    cells = [cell for key, rivals in measured.items() for cell in _with_untried(rivals, taken.get(key, []))]
    for key, rivals in taken.items():
        if key not in measured:
            cells += mark_ties([*rivals, *_left_out(rivals[0], missing_there)])
    there = {cell.point for cell in cells}
    record = prior.record().model_copy(
        update={
            "checked": [f"{phase} {case}" for phase, case in faults if (phase, case) in measured],
            "disagreed": [f"{phase} {case}: {fault}" for (phase, case), fault in faults.items() if fault],
            "corrected": [f"{phase} {case}: {_factors_text(found)}" for (phase, case), found in factors.items() if found],
            "device_scale": {phase: round(scale, 4) for phase, scale in scales.device.items()},
            "host_scale": round(scales.host, 4),
        }
    )
    whole = all(point.key in there for point in wanted)
    more = {"cells": cells, "complete": whole, "noise": max(noise_of(cells), here.noise), "prior": record}
    return here.model_copy(update=more)


def as_replay(cell: Cell) -> Cell:
    """Return a verify cell as a graph replay if engines replay such a step. Tables before 2026-11-27 timed verification without a
    graph, so only the device time of such a cell is used."""
    if cell.graph or cell.phase != "verify" or not is_captured(cell.batch, cell.query_len):
        return cell
    return cell.model_copy(update={"graph": True, "host_us": None})


@dataclass(frozen=True)
class _Scales:
    """Scale factors of a prior's times: one per phase for device times, one for all host times."""

    device: Mapping[PhaseName, float]
    """Phase -> scale factor of device times. A phase is missing if the two tables have no times in common in it."""
    host: float

    @classmethod
    def of(cls, there: Sequence[Cell], here: Sequence[Cell]) -> _Scales:
        """Return the median ratios of times, measured here to prior, over the cells that both tables have."""
        before = {cell.key: cell for cell in there}
        pairs = [(before[cell.key], cell) for cell in here if cell.key in before]
        both = [(old, new) for old, new in pairs if old.median_us and new.median_us]
        phases = dict.fromkeys(new.phase for _, new in both)
        device = {
            phase: _median_ratio((old.median_us, new.median_us) for old, new in both if new.phase == phase) for phase in phases
        }
        hosts = [(old.host_us, new.host_us) for old, new in both] + [(old.plan_us, new.plan_us) for old, new in both]
        return cls(device, _median_ratio(hosts))

    def apply(self, cell: Cell) -> Cell:
        return as_adopted(_slower(cell, self.device[cell.phase], self.host))


def _settled(cells: Sequence[Cell], expected: Mapping[tuple[object, ...], Cell]) -> list[Cell]:
    """Replace host times by the expected host times unless they are far off, because host times vary by more than the lead of a
    backend."""
    found = []
    for cell in cells:
        us, now = expected[cell.key].host_us if cell.key in expected else None, cell.host_us
        near = us and now and abs(math.log(now / us)) < math.log(_WRONG)
        found.append(cell.model_copy(update={"host_us": us}) if near else cell)
    return found


def _slower(cell: Cell, device: float, host: float) -> Cell:
    by = dict.fromkeys(("median_us", "p20_us", "p80_us"), device) | dict.fromkeys(("host_us", "plan_us"), host)
    known = {field: us for field in by if (us := getattr(cell, field)) is not None}
    return cell.model_copy(update={field: us * by[field] for field, us in known.items()})


def _factors_text(factors: Mapping[str, float]) -> str:
    times = ", ".join(f"{name} {factor:.2f}" for name, factor in sorted(factors.items()))
    return f"{times} times as long as expected"


def _median_ratio(pairs: Iterable[tuple[float | None, float | None]]) -> float:
    ratios = [math.log(new / old) for old, new in pairs if old and new]
    return math.exp(median(ratios)) if ratios else 1.0


@dataclass(frozen=True)
class _Check:
    there: Mapping[PointKey, Sequence[Cell]]
    here: Mapping[PointKey, Sequence[Cell]]
    shared: Collection[str]
    """Names of the backends that both tables contain."""
    noise: float

    @cached_property
    def winners(self) -> dict[PhaseName, set[str]]:
        """Phase -> backends that win somewhere in the phase according to the prior. These backends are compared with each other
        at every point."""
        found: dict[PhaseName, set[str]] = {}
        for rivals in self.there.values():
            times = rival_times(rivals).values()
            found.setdefault(rivals[0].phase, set()).update(min(each, key=each.__getitem__) for each in times if each)
        return found

    def fault(self, point: Point) -> str:
        """Return why the prior is wrong at a checked point, or "" if the measurement agrees."""
        key = point.key
        if key not in self.here:
            return "not measured: the time did not suffice"
        if key not in self.there:
            return "no times in common"
        expected, found = rival_times(self.there[key]), rival_times(self.here[key])
        tried = {(cell.layout, cell.block_size) for cell in self.here[key]}
        for place, times in expected.items():
            name = f"{place[0]} {place[1]}"
            if place in found and (fault := self._fault(times, found[place], self.winners[point.phase])):
                return f"{fault}, on {name}" if place[0] else fault
            if place in tried - found.keys():
                return f"no time here on {name}"
        best = min((us for times in found.values() for us in times.values()), default=math.inf)
        for place, times in found.items():
            if place not in expected and min(times.values()) < NEAR * best:
                return f"{place[0]} {place[1]}, which it does not know, is among the fastest"
        return ""

    def _fault(self, expected: Mapping[str, float], found: Mapping[str, float], rivals: set[str]) -> str:
        """Return `fault` for one layout and block size. rivals: backends whose times matter in this phase."""
        first, fastest = min(expected, key=expected.__getitem__), min(found, key=found.__getitem__)
        if first not in found:
            return f"{first} has no time here"
        near = [name for name, us in found.items() if name not in self.shared and us < NEAR * found[fastest]]
        if near:
            return f"{near[0]}, which it does not know, is among the fastest"
        for name in (rivals | {fastest}) & expected.keys() & found.keys():
            was, now = expected[name] / expected[first], found[name] / found[first]
            if min(was, now) < CLEAR_LOSS and abs(math.log(now / was)) > math.log(_WRONG):
                if now < 1.0:
                    return f"{first} takes {1 / now:.2f} times as long as {name}, expected {1 / was:.2f}"
                return f"{name} takes {now:.2f} times as long as {first}, expected {was:.2f}"
        return ""

    def factors(self, key: PointKey) -> dict[str, float]:
        """Return backend -> measured time / prior's time at a point. The result contains all backends if the prior's choice loses
        at the point, else only backends that are clearly off."""
        expected, found = rival_times(self.there[key]), rival_times(self.here[key])
        logs: dict[str, list[float]] = {}
        loses = False
        for place in expected.keys() & found.keys():
            was, now = expected[place], found[place]
            first = now[min(was, key=was.__getitem__)]
            loses = loses or first > min(now.values()) * (1 + max(_LOSS, self.noise))
            for name in was.keys() & now.keys():
                logs.setdefault(name, []).append(math.log(now[name] / was[name]))
        least = 0.0 if loses else math.log(1 + max(_DRIFT, self.noise))
        means = {name: sum(each) / len(each) for name, each in logs.items()}
        return {name: math.exp(mean) for name, mean in means.items() if abs(mean) > least}


def _around(cells: Sequence[Cell], asked: Sequence[Point], factors: Mapping[PointKey, Mapping[str, float]]) -> list[Cell]:
    """Return the cells whose nearest checked point of the same phase is in `factors`. Each backend's times are multiplied by the
    backend's factor at that point."""
    taken = []
    for key, rivals in points(cells).items():
        near = [point for point in asked if point.phase == key[0]]
        if not near:
            continue
        place = place_of(rivals[0])
        nearest = min(near, key=lambda point: _far(_place(point), place))
        found = factors.get(nearest.key)
        if found is None:
            continue
        for cell in rivals:
            factor = found.get(cell.kernel)
            taken.append(cell if factor is None else _slower(cell, factor, factor))
    return taken


def _with_untried(here: Sequence[Cell], there: Sequence[Cell]) -> list[Cell]:
    """Return the cells measured at a point, plus the prior's cells for kernels and layouts that were not tried."""
    tried = [cell for cell in here if not _is_given_up(cell)]
    places = {(cell.kernel, cell.layout, cell.block_size) for cell in tried}
    everywhere = {cell.kernel for cell in tried if cell.layout is None}
    more = [cell for cell in there if cell.kernel not in everywhere and (cell.kernel, cell.layout, cell.block_size) not in places]
    in_prior = {cell.kernel for cell in more}
    return mark_ties([*tried, *(cell for cell in here if _is_given_up(cell) and cell.kernel not in in_prior), *more])


def _is_given_up(cell: Cell) -> bool:
    return cell.status == "dropped" and cell.median_us is None and cell.layout is None


def _at_best(cells: Sequence[Cell]) -> dict[tuple[PhaseName, str], float]:
    """Return (phase, backend) -> the backend's lowest ratio to the fastest time."""
    found: dict[tuple[PhaseName, str], float] = {}
    for rivals in points(cells).values():
        for times in rival_times(rivals).values():
            for name, us in times.items():
                key, ratio = (rivals[0].phase, name), us / min(times.values())
                found[key] = min(ratio, found.get(key, math.inf))
    return found


def _left_out(cell: Cell, missing_there: Mapping[tuple[PhaseName, str], float]) -> list[Cell]:
    """Return cells that mark backends missing in the prior as dropped, at a point adopted from the prior. cell: any cell of the
    point."""
    place: dict[str, Any] = {name: getattr(cell, name) for name in ("phase", "case", "batch", "query_len", "kv_len", "between")}
    return [
        Cell(
            **place,
            kernel=name,
            layout=None,
            block_size=None,
            status="dropped",
            reason=f"not in the shipped table, and at best {ratio:.2f} times the fastest where that was checked",
        )
        for (phase, name), ratio in missing_there.items()
        if phase == cell.phase
    ]
