"""Grids of points at which backends are measured, most important points first, and random held-out points."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from headway.core.contract.spec import AttentionSpec
from headway.core.select.costs import Shape
from headway.tuning.measure.workloads import AttentionWork, Geometry, make_work
from headway.tuning.table.convert import CORE_PHASE
from headway.tuning.table.schema import COUNTED, Cell, PhaseName, PointKey, points

PHASES: tuple[PhaseName, ...] = ("decode", "prefill", "extend", "verify")


@dataclass(frozen=True, slots=True)
class Axes:
    """Axes of the grid of one phase. Points beyond the limits are omitted."""

    query_lens: tuple[int, ...]
    batches: tuple[int, ...]
    kv_lens: tuple[int, ...]
    """Values of kv_len; empty in prefill, where kv_len equals query_len."""
    max_query_tokens: int
    """Maximum batch * query_len."""
    max_kv_tokens: int
    """Maximum batch * kv_len."""


GRIDS: dict[str, dict[PhaseName, Axes]] = {
    "cuda": {
        "decode": Axes((1,), (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256), (256, 512, 1024, 4096, 16384, 65536), 256, 2**20),
        "prefill": Axes(
            (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768), (1, 2, 3, 4, 6, 8, 16, 32, 48, 64), (), 2**15, 2**15
        ),
        "extend": Axes((16, 32, 64, 128, 256, 512, 1024, 2048, 8192), (1, 3, 8), (2048, 4096, 8192, 16384, 32768), 2**13, 2**17),
        "verify": Axes((2, 4, 6, 8), (1, 4, 8, 16, 64), (512, 2048, 8192, 32768), 512, 2**18),
    },
    "cpu": {
        "decode": Axes((1,), (1, 4, 16, 64), (32, 128, 512, 2048), 64, 2**13),
        "prefill": Axes((16, 64, 256, 1024), (1, 4, 16), (), 2**10, 2**10),
        "extend": Axes((16, 128), (1, 4), (64, 256, 1024), 2**9, 2**12),
        "verify": Axes((4,), (1, 8), (64, 512), 64, 2**12),
    },
}
"""Device type -> grid. Neighbouring values differ by a factor of about 4; times between them are interpolated on a logarithmic
scale.

A GPU's grid is denser for three reasons. Batches: times rise in steps (without split-KV, 32 sequences take as long as 16 if both
batches fit on the SMs). Prompts: near 2,048 tokens, launch time stops dominating. Extend: kernels with and without split-KV cross
more than once.
"""


@dataclass(frozen=True, slots=True)
class Point:
    """A step of sequences with equal lengths, and its rank in the order of measurement."""

    phase: PhaseName
    batch: int
    query_len: int
    kv_len: int
    level: int = 0
    """Level in the grid. Level 0 holds the corners; higher levels are finer."""
    mixed: str = ""
    """Case text, set only if the sequences differ in length; the numbers of this point are then means."""

    @property
    def case(self) -> str:
        """The point in the case grammar of headway.core.oracle.cases, or the number of rows, tokens or bytes."""
        if self.phase in COUNTED or self.mixed:
            return self.mixed or str(self.batch)
        if self.phase in ("scan", "step"):
            return f"{self.batch}q{self.query_len}"
        query, kv = _text(self.query_len), _text(self.kv_len)
        return f"{self.batch}q{query}" if self.phase == "prefill" else f"{self.batch}q{query}s{kv}"

    @property
    def key(self) -> PointKey:
        """The value of `Cell.point` for this point."""
        return self.phase, self.case

    @property
    def shape(self) -> Shape:
        """The shape with which costs are looked up."""
        return Shape(CORE_PHASE[self.phase], self.batch, self.query_len, self.kv_len)

    def work(self, spec: AttentionSpec) -> AttentionWork:
        """Return the attention step that is measured at this point."""
        geometry = Geometry.of(spec)
        return make_work("decode" if self.phase in ("decode", "verify") else "prefill", self.case, geometry, spec)


def counted_points(phase: PhaseName, counts: Sequence[int]) -> list[Point]:
    """Return points for numbers of rows, tokens or bytes."""
    return [Point(phase, count, 1, 1) for count in counts]


def grid(
    device_type: str,
    phases: Collection[PhaseName] = PHASES,
    batches: Sequence[int] | None = None,
    lens: Sequence[int] | None = None,
) -> list[Point]:
    """Return the default points of a device, most important first: corners, then middles, then the remaining points. In each
    level, decode comes first.

    batches, lens: batch sizes and lengths that replace the defaults (`lens` are kv_len or, in prefill, query_len). Duplicates are
    removed, because a table holds each cell once.
    """
    ranked: list[tuple[int, int, int, Point]] = []
    for number, phase in enumerate(phase for phase in PHASES if phase in phases):
        axes = GRIDS.get(device_type, GRIDS["cuda"])[phase]
        if batches:
            axes = replace(axes, batches=tuple(dict.fromkeys(batches)), max_query_tokens=2**30, max_kv_tokens=2**30)
        if lens:
            once = tuple(dict.fromkeys(lens))
            axes = replace(axes, query_lens=once) if phase == "prefill" else replace(axes, kv_lens=once)
            axes = replace(axes, max_query_tokens=2**30, max_kv_tokens=2**30)
        before = [0, 0, 0]
        for point in _points(phase, axes):
            ranked.append((point.level, before[point.level], number, point))
            before[point.level] += 1
    return [point for *_, point in sorted(ranked, key=lambda row: row[:3])]


def _points(phase: PhaseName, axes: Axes) -> Iterator[Point]:
    for at_query, query_len in enumerate(axes.query_lens):
        for at_batch, batch in enumerate(axes.batches):
            lens = [query_len] if phase == "prefill" else [kv_len for kv_len in axes.kv_lens if kv_len > query_len]
            lens = [
                kv_len for kv_len in lens if batch * kv_len <= axes.max_kv_tokens and batch * query_len <= axes.max_query_tokens
            ]
            for at_len, kv_len in enumerate(lens):
                places = [(at_query, len(axes.query_lens)), (at_batch, len(axes.batches)), (at_len, len(lens))]
                yield Point(phase, batch, query_len, kv_len, max(_level(*place) for place in places))


def _level(index: int, count: int) -> int:
    if index in (0, count - 1):
        return 0
    return 1 if index == count // 2 else 2


def held_out(device_type: str, count: int, seed: int, known: Collection[str]) -> list[Point]:
    """Return random points within the range of the grid but not on it. Half of the points are decode; the other half is divided
    among the other phases.

    known: cases that were already measured and must not be returned. Batch sizes and lengths are drawn uniformly on a logarithmic
    scale.
    """
    draw = random.Random(seed)
    phases: list[PhaseName] = ["decode", "prefill", "decode", "extend", "decode", "verify"]
    points: list[Point] = []
    while len(points) < count:
        phase = phases[len(points) % len(phases)]
        axes = GRIDS.get(device_type, GRIDS["cuda"])[phase]
        batch = _between(draw, axes.batches)
        query_len = draw.choice([2, 3, 4, 6, 8]) if phase == "verify" else _between(draw, axes.query_lens)
        kv_len = query_len if phase == "prefill" else _between(draw, axes.kv_lens)
        point = Point(phase, batch, query_len, kv_len)
        fits = batch * query_len <= axes.max_query_tokens and batch * kv_len <= axes.max_kv_tokens
        if fits and (phase == "prefill" or kv_len > query_len) and point.case not in known and point not in points:
            points.append(point)
    return points


def _between(draw: random.Random, values: Sequence[int]) -> int:
    return round(math.exp(draw.uniform(math.log(min(values)), math.log(max(values)))))


def _text(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


ROUNDS = 2
"""Maximum number of times that an interval is halved if the fastest backend changes in it."""
_NEAREST = 1.5
"""Factor between neighbours below which the interval is not refined, since interpolation is accurate enough."""
_LEAST_LOSS = 0.03
"""Minimum relative loss of either winner at the other winner's point. Below it, the two backends are nearly tied, and a point
between them is not worth measuring."""

_LEVEL = 3
"""Level of the added midpoints, which comes after all levels of a grid."""

Coordinates = tuple[int, int, int]
"""(batch, query_len, kv_len)."""
Times = Mapping[tuple[str | None, int | None], Mapping[str, float]]
"""(layout, block size) -> backend -> microseconds per layer."""


def midpoints(cells: Sequence[Cell], noise: float) -> list[Point]:
    """Return the logarithmic midpoints of all pairs of neighbours between which the winner changes, largest loss first.

    Neighbours differ in one of batch, query_len and kv_len, with no measured point between them. noise: noise of the table.
    """
    measured = points(cells)
    found: dict[PointKey, tuple[float, Point]] = {}
    for phase in dict.fromkeys(cell.phase for cell in cells):
        times = {place_of(rivals[0]): rival_times(rivals) for (of, _), rivals in measured.items() if of == phase}
        for low, high in _neighbours(list(times), phase):
            loss = _loss(times[low], times[high])
            middle = _middle(phase, low, high)
            if middle is None or loss <= max(_LEAST_LOSS, noise):
                continue
            key = (phase, middle.case)
            if key not in measured and loss > found.get(key, (0.0, middle))[0]:
                found[key] = loss, middle
    return [point for _, point in sorted(found.values(), key=lambda ranked: -ranked[0])]


def place_of(cell: Cell) -> Coordinates:
    """Return the coordinates of a cell's point."""
    return cell.batch, cell.query_len, cell.kv_len


def rival_times(rivals: Sequence[Cell]) -> Times:
    """Return the times of one point's cells. A cell without a layout applies to all layouts."""
    timed = [(cell, cell.layer_us) for cell in rivals if cell.layer_us is not None]
    everywhere = {cell.kernel: us for cell, us in timed if cell.layout is None}
    pairs = dict.fromkeys((cell.layout, cell.block_size) for cell, _ in timed)
    if len(pairs) > 1:
        pairs.pop((None, None), None)
    return {
        pair: everywhere | {cell.kernel: us for cell, us in timed if (cell.layout, cell.block_size) == pair} for pair in pairs
    }


def _neighbours(places: Sequence[Coordinates], phase: PhaseName) -> Iterator[tuple[Coordinates, Coordinates]]:
    """Yield neighbouring pairs among points that differ in one coordinate. In prefill, query_len and kv_len are one
    coordinate."""
    for axis in (0, 1) if phase == "prefill" else (0, 1, 2):
        rows: dict[tuple[int, ...], list[Coordinates]] = {}
        for place in places:
            others = place[:1] if phase == "prefill" and axis == 1 else place[:axis] + place[axis + 1 :]
            rows.setdefault(others, []).append(place)
        for row in rows.values():
            yield from pairwise(sorted(row, key=lambda place: place[axis]))


def _loss(low: Times, high: Times) -> float:
    """Return the smaller relative loss of the two winners at each other's point: the maximum over all layouts.

    If one winner loses nothing, the same backend wins at both points, with a tie at one of them.
    """
    worst = 0.0
    for pair in low.keys() & high.keys():
        if low[pair] and high[pair]:
            first, second = (min(times, key=times.__getitem__) for times in (low[pair], high[pair]))
            lost = high[pair].get(first, 0.0) / high[pair][second], low[pair].get(second, 0.0) / low[pair][first]
            worst = max(worst, min(lost) - 1)
    return worst


def _middle(phase: PhaseName, low: Coordinates, high: Coordinates) -> Point | None:
    """Return the midpoint of two neighbours, or None if they are too close or no integer is between them."""
    batch, query_len, kv_len = (round(math.sqrt(a * b)) for a, b in zip(low, high, strict=True))
    if phase == "prefill":
        kv_len = query_len
    factor = max(b / a for a, b in zip(low, high, strict=True))
    middle = (batch, query_len, kv_len)
    if factor < _NEAREST or middle in (low, high) or (phase != "prefill" and kv_len <= query_len):
        return None
    return Point(phase, batch, query_len, kv_len, level=_LEVEL)


def state_points(verb: PhaseName, *sizes: tuple[int, int, int]) -> list[Point]:
    """Return points of state layers. sizes: (sequences, new tokens per sequence, level)."""
    return [Point(verb, batch, query_len, query_len, level) for batch, query_len, level in sizes]


_STATE_GRIDS: dict[str, Sequence[Point]] = {
    "cuda": [
        *state_points("step", (1, 1, 0), (64, 1, 0), (16, 1, 1), (256, 1, 1), (4, 1, 2), (1, 4, 1), (16, 4, 2), (64, 4, 2)),
        *state_points("scan", (1, 64, 0), (1, 2048, 0), (8, 1024, 0), (64, 32, 1), (1, 512, 1), (8, 64, 1), (1, 8192, 2)),
    ],
    "cpu": [
        *state_points("step", (1, 1, 0), (16, 1, 0), (4, 1, 1), (64, 1, 2), (1, 4, 1), (16, 4, 2)),
        *state_points("scan", (1, 64, 0), (1, 512, 0), (8, 64, 1), (1, 2048, 2), (64, 32, 2)),
    ],
}
"""Device type -> grid. A state is read and written completely, whatever the length of the context. The cost of a step therefore
depends on the number of sequences; the cost of a scan depends on the number of tokens and on how many of them are processed
sequentially. Draft tokens are timed in steps of four tokens."""


def state_grid(device_type: str) -> list[Point]:
    """Return the points of a device, most important first."""
    return sorted(_STATE_GRIDS.get(device_type, _STATE_GRIDS["cuda"]), key=lambda point: point.level)
