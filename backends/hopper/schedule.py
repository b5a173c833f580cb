"""Schedule of a prefill or extend step: query tiles and their key ranges, split over programs if there are few query rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
from numpy.typing import NDArray

from headway.backends.hopper.tiles import AttentionTile
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec

ITEM_INTS = 12
"""Number of integers in struct Item of shape.cuh."""
PARTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
"""Candidate numbers of parts into which the keys of the longest query tile are split."""
TAPERED = (3, 4, 5, 6, 7)
"""Candidate numbers of parts for tapered splits."""
MAX_PARTIALS = 4
"""Maximum number of partial results of a step, per program."""
L2_BYTES = 32 << 20
"""Maximum number of bytes of keys and values that concurrent programs share in the L2 cache of an H100 or H200. The rest of the
cache is left for other data."""
_START = 1.3  # Fixed cost of an item, in key tiles: its first scores and last accumulation overlap with nothing
_PARTIAL = 1.3  # Additional cost of an item with a partial result, in key tiles, and
_MERGE = 0.7
"""Time to read one partial result, in units of the time of a key tile."""
_GAIN, _WORTH = 0.98, 2.0  # A split must take at most 98 % of the time without it, and save 2 key tiles
_MAX_ROUNDS = 16  # Number of items per program from which on an incomplete last round does not matter
_COSTS = {1: 0.62, 2: 1.0, 3: 1.45, 4: 0.8}  # Relative time of a key tile, by number of warpgroups that run MMAs

Ints = NDArray[numpy.int64]
Floats = NDArray[numpy.floating[Any]]


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Query tiles of a step, and the range of key tiles of each query tile before splitting."""

    seq: Ints
    tile: Ints
    first: Ints
    last: Ints

    @property
    def lengths(self) -> Ints:
        """Number of key tiles of each query tile."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Split:
    """Split of a step's items into parts with fewer key tiles. The first `whole` items are not split."""

    whole: int
    run: int
    """Maximum number of key tiles per part, on average. An item has as few parts as possible."""
    tapered: bool = False
    """False if the parts of a query tile are equal. True if each part has half of the key tiles that are left, so that short
    parts fill the gaps at the end."""

    def parts(self, lengths: Ints) -> Parts:
        """Return the parts of these query tiles, tile after tile. lengths: number of key tiles of each."""
        counts = -(-lengths // self.run)
        counts[: self.whole] = 1
        tile = numpy.repeat(numpy.arange(len(lengths)), counts)
        number = numpy.arange(len(tile)) - (numpy.cumsum(counts) - counts)[tile]
        length, count = lengths[tile], counts[tile]
        if self.tapered:
            first, last = length - (length >> number), length - (length >> number + 1)
            last[number + 1 == count] = length[number + 1 == count]
        else:
            first, last = length * number // count, length * (number + 1) // count
        return Parts(tile, number, count, first, last)


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of query tiles: arrays with one element per part."""

    tile: Ints
    number: Ints
    count: Ints
    """Number of parts of the same query tile."""
    first: Ints
    """First key tile, counted from the first one of the query tile."""
    last: Ints

    @property
    def costs(self) -> Floats:
        """Estimated time of each part, in key tiles."""
        return self.last - self.first + _START + _PARTIAL * (self.count > 1)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Work list of a step."""

    tile: AttentionTile
    items: NDArray[numpy.int32]
    """[num_items, ITEM_INTS]: items in the order in which programs take them."""
    num_partials: int = 0
    num_tickets: int = 0
    """Number of items that were split."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Properties of a step that determine its schedule."""

    starts: Ints
    """[num_seqs + 1]: index of each sequence's first packed token."""
    query_lens: Ints
    kv_lens: Ints
    group: int
    """Number of query heads per kv head."""
    heads: int
    """Number of kv heads. Each query tile is processed once for each kv head."""
    window: int | None
    token_bytes: int
    """Number of bytes of a token's key and value in one kv head."""
    programs: int
    """Number of thread blocks that run concurrently."""

    @classmethod
    def of(cls, metadata: AttentionMetadata, spec: AttentionSpec, programs: int) -> Problem:
        """Return the problem for a step."""
        starts = metadata.query_start_loc_cpu.numpy().astype(numpy.int64)
        return cls(
            starts=starts,
            query_lens=starts[1:] - starts[:-1],
            kv_lens=metadata.seq_lens_cpu.numpy().astype(numpy.int64),
            group=spec.group_size,
            heads=spec.num_kv_heads,
            window=spec.sliding_window,
            token_bytes=(spec.head_dim + spec.v_head_dim) * spec.dtype.itemsize,
            programs=programs,
        )

    def rows(self, tile: AttentionTile) -> QueryTiles:
        """Return the query tiles of one kv head, in order of decreasing sequence length. Within a sequence, the last tile, which
        has the most keys, comes first."""
        used = tile.rows_used(self.group) * max(tile.cluster, 1)
        counts = -(-self.query_lens * self.group // used) * (self.kv_lens > 0)
        order = numpy.argsort(-self.kv_lens, kind="stable")
        seq = numpy.repeat(order, counts[order])
        number = numpy.repeat(numpy.cumsum(counts[order]), counts[order]) - 1 - numpy.arange(len(seq))
        last_token = numpy.minimum(((number + 1) * used - 1) // self.group, self.query_lens[seq] - 1)
        before = (self.kv_lens - self.query_lens)[seq]
        last = -(-(before + last_token + 1) // tile.keys)
        if self.window is None:
            return QueryTiles(seq, number, numpy.zeros_like(last), last)
        first_token = number * used // self.group
        return QueryTiles(seq, number, numpy.maximum(before + first_token + 1 - self.window, 0) // tile.keys, last)

    def sections(self, count: int) -> int:
        """Return the number of sections of kv heads, which are processed one after the other. A section has as many heads as have
        keys and values that fit the L2 cache, but at least one head. count: number of query tiles of a kv head."""
        if count * self.heads <= 4 * self.programs:
            return 1
        heads = L2_BYTES // max(int(self.kv_lens.sum()) * self.token_bytes, 1)
        return -(-self.heads // min(max(heads, 1), self.heads))

    def order(self, lengths: Ints) -> tuple[Ints, Ints, Ints]:
        """Return (query tile, kv head, section) of each item before splitting, the longest items of a section first.

        lengths: number of key tiles of each query tile of a kv head.
        """
        tiles = numpy.argsort(-lengths, kind="stable")
        parts = numpy.array_split(numpy.arange(self.heads), self.sections(len(tiles)))
        tile = numpy.concatenate([numpy.repeat(tiles, len(heads)) for heads in parts])
        head = numpy.concatenate([numpy.tile(heads, len(tiles)) for heads in parts])
        return tile, head, numpy.repeat(numpy.arange(len(parts)), [len(tiles) * len(heads) for heads in parts])

    def ends(self, costs: Floats, begins: Floats) -> Floats:
        """Return the times at which programs end, in key tiles, if each takes the next item whenever it ends one.

        costs: time of each item, in decreasing order. begins: [programs]: time at which each program begins.
        """
        rounds = -(-len(costs) // self.programs)
        padded = numpy.zeros((rounds, self.programs))
        padded.reshape(-1)[: len(costs)] = costs
        ends = begins.copy()
        for costs in padded:
            ends.sort()
            ends += costs
        return ends

    def split(self, lengths: Ints, limit: float = math.inf) -> tuple[Split, float]:
        """Return the split with the lowest estimated time, and that time in key tiles.

        lengths: number of key tiles of each item, in order. limit: time from which on the result need not be the best.

        Without a split, some programs have one item more than others, and the others wait at the end. To avoid this, the items of
        the last, incomplete round of all programs are split, or also the items of the round before, or all items.
        """
        count, idle = len(lengths), numpy.zeros(self.programs)
        unsplit, even = Split(count, int(lengths.max())), (float(lengths.sum()) + _START * count) / self.programs
        if count > _MAX_ROUNDS * self.programs and unsplit.run < even:
            return unsplit, even
        best, even = (unsplit, float(self.ends(lengths + _START, idle).max())), even + _PARTIAL + 2 * _MERGE
        full = count // self.programs * self.programs
        for whole in sorted({0, max(full - self.programs, 0), full} - {count}, reverse=True):
            if even > min(_GAIN * best[1], best[1] - _WORTH, limit):
                break
            begins, rest = self.ends(lengths[:whole] + _START, idle), lengths[whole:]
            longest, busy = int(rest.max()), float(begins.sum())
            candidates = [Split(whole, -(-longest // parts)) for parts in PARTS if 2 * parts <= longest]
            if count <= 2 * self.programs and whole == 0:
                candidates += [Split(0, -(-longest // n), True) for n in TAPERED if longest << 2 >= n << n]
            for candidate in candidates:
                counts = -(-rest // candidate.run)
                partials, merging = int(counts[counts > 1].sum()), _MERGE * int(counts.max())
                work = float(rest.sum()) + _START * float(counts.sum()) + _PARTIAL * partials
                most = min(_GAIN * best[1], limit) - merging
                if partials <= MAX_PARTIALS * self.programs and busy + work < most * self.programs:
                    costs = replace(candidate, whole=0).parts(rest).costs
                    time = float(self.ends(-numpy.sort(-costs), begins).max())
                    if time < most:
                        best = candidate, time + merging
        return best


def choose(problem: Problem, tiles: Sequence[AttentionTile], num_splits: int | None = None) -> Schedule:
    """Return the schedule with the lowest estimated time. num_splits: number of parts of the longest query tile's keys, which
    overrides the rule."""
    best: tuple[float, Problem, AttentionTile, QueryTiles, Split] | None = None
    for tile in tiles:
        rows, shared = problem.rows(tile), replace(problem, programs=problem.programs // max(tile.cluster, 1))
        if not len(rows.seq):
            return Schedule(tile, numpy.zeros((0, ITEM_INTS), dtype=numpy.int32))
        if num_splits is None:
            limit = math.inf if best is None else best[0] / (_COSTS[tile.groups] * tile.keys)
            split, time = shared.split(rows.lengths[shared.order(rows.lengths)[0]], limit)
        else:
            split, time = Split(0, -(-int(rows.lengths.max()) // num_splits)), 0.0
        time *= _COSTS[tile.groups] * tile.keys
        if best is None or time < best[0]:
            best = time, shared, tile, rows, split
    assert best is not None
    return cut(*best[1:])


def cut(problem: Problem, tile: AttentionTile, rows: QueryTiles, split: Split) -> Schedule:
    """Return the items of a step. Within a section of kv heads, parts come after the items that are not split, the longest and
    the first part of each query tile first, so that concurrent programs share keys."""
    whole = numpy.zeros((len(rows.seq), ITEM_INTS), dtype=numpy.int32)
    whole[:, 0] = problem.starts[rows.seq]
    whole[:, 1] = problem.query_lens[rows.seq]
    whole[:, 2] = problem.kv_lens[rows.seq]
    whole[:, 3] = rows.seq
    whole[:, 4] = rows.tile
    whole[:, 5] = rows.first
    whole[:, 6] = rows.last
    whole[:, 7] = 1
    of, head, section = problem.order(rows.lengths)
    items = whole.take(of, axis=0)
    items[:, 11] = head
    if split.whole >= len(items):
        return Schedule(tile, items)
    parts = split.parts(rows.lengths[of])
    shared = parts.count > 1
    items = items.take(parts.tile, axis=0)
    items[:, 6] = items[:, 5] + parts.last
    items[:, 5] += parts.first.astype(numpy.int32)
    items[:, 7] = parts.count
    items[:, 8] = parts.number
    items[:, 9] = numpy.cumsum(shared) - shared - parts.number
    items[:, 10] = numpy.cumsum(shared & (parts.number == 0)) - 1
    rest = slice(split.whole, None)
    order = numpy.lexsort((parts.number[rest], (parts.first - parts.last)[rest], section[parts.tile[rest]]))
    items[rest] = items[rest].take(order, axis=0)
    return Schedule(tile, items, int(shared.sum()), int((shared & (parts.number == 0)).sum()))
