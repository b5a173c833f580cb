"""The points of a crossover table: batch x length grids for each phase, in the order in which they matter, and held-out ones."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.select.costs import Shape
from headway.tuning.schema import PhaseName
from headway.tuning.work import Geometry, Work, make_work

PHASES: tuple[PhaseName, ...] = ("decode", "prefill", "extend", "verify")
CORE_PHASE = {"decode": Phase.DECODE, "verify": Phase.DECODE, "prefill": Phase.PREFILL, "extend": Phase.EXTEND}
"""Verification is DECODE with several query tokens."""


@dataclass(frozen=True, slots=True)
class Axes:
    """A grid of one phase. Points beyond the limits are left out."""

    query_lens: tuple[int, ...]
    batches: tuple[int, ...]
    kv_lens: tuple[int, ...]
    """() in prefill, where they are the query_lens."""
    max_query_tokens: int
    """batch * query_len."""
    max_kv_tokens: int
    """batch * kv_len."""


GRIDS: dict[str, dict[PhaseName, Axes]] = {
    "cuda": {
        "decode": Axes((1,), (1, 2, 4, 8, 16, 32, 64, 128, 256), (256, 1024, 4096, 16384, 65536), 256, 2**20),
        "prefill": Axes((32, 128, 256, 512, 1024, 2048, 4096, 8192, 32768), (1, 2, 3, 4, 6, 8, 16, 32, 64), (), 2**15, 2**15),
        "extend": Axes((16, 32, 128, 512, 2048, 8192), (1, 3, 8), (2048, 4096, 8192, 16384, 32768), 2**13, 2**17),
        "verify": Axes((2, 4, 8), (1, 4, 16, 64), (512, 2048, 8192, 32768), 512, 2**18),
    },
    "cpu": {
        "decode": Axes((1,), (1, 4, 16, 64), (32, 128, 512, 2048), 64, 2**13),
        "prefill": Axes((16, 64, 256, 1024), (1, 4, 16), (), 2**10, 2**10),
        "extend": Axes((16, 128), (1, 4), (64, 256, 1024), 2**9, 2**12),
        "verify": Axes((4,), (1, 8), (64, 512), 64, 2**12),
    },
}
"""By device type. Neighbours are a factor of about 4 apart: between them times are interpolated in their logarithms. A GPU's
batches are denser, because its times go in steps there (a kernel that does not split takes as long for 32 sequences as for 16
where both fit the multiprocessors), its prompts around 2,048 tokens, where time goes over from launches to arithmetic, and its
extensions in every length, since a kernel that splits keys and one that does not cross more than once."""


@dataclass(frozen=True, slots=True)
class Point:
    """Sequences of equal lengths, and how soon they are worth measuring."""

    phase: PhaseName
    batch: int
    query_len: int
    kv_len: int
    level: int = 0
    """0: a corner of the grid, then ever finer."""
    mixed: str = ""
    """The case where its sequences differ; the numbers are their means then."""

    @property
    def case(self) -> str:
        """In the grammar of headway.testing.cases."""
        query, kv = _text(self.query_len), _text(self.kv_len)
        return self.mixed or (f"{self.batch}q{query}" if self.phase == "prefill" else f"{self.batch}q{query}s{kv}")

    @property
    def shape(self) -> Shape:
        """As costs are looked up."""
        return Shape(CORE_PHASE[self.phase], self.batch, self.query_len, self.kv_len)

    def work(self, spec: AttentionSpec) -> Work:
        """The step it stands for."""
        geometry = Geometry.of(spec)
        return make_work("decode" if self.phase in ("decode", "verify") else "prefill", self.case, geometry, spec)


def grid(
    device_type: str,
    phases: Collection[PhaseName] = PHASES,
    batches: Sequence[int] | None = None,
    lens: Sequence[int] | None = None,
) -> list[Point]:
    """The device's usual points, the most telling first: corners, then middles, then the rest; decode before the others.

    batches, lens: instead of the usual batch sizes and lengths (kv_len; in prefill query_len).
    """
    ranked: list[tuple[int, int, int, Point]] = []
    for number, phase in enumerate(phase for phase in PHASES if phase in phases):
        axes = GRIDS.get(device_type, GRIDS["cuda"])[phase]
        if batches:
            axes = replace(axes, batches=tuple(batches), max_query_tokens=2**30, max_kv_tokens=2**30)
        if lens:
            axes = replace(axes, query_lens=tuple(lens)) if phase == "prefill" else replace(axes, kv_lens=tuple(lens))
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
    """Random points within the grid's range that are not on it: half of them decode, the rest shared by the other phases.

    known: the cases that were measured. Batch and lengths are drawn uniformly in their logarithms.
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
