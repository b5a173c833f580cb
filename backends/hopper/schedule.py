"""Schedule of a prefill or extend step: query tiles and their key ranges, split over programs if there are few query rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from headway.backends.hopper.tiles import AttentionTile
from headway.backends.split_kv import Ints, Programs, QueryTiles, Split
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec

ITEM_INTS = 11
"""Number of integers in struct Item of shape.cuh."""
L2_BYTES = 32 << 20
"""Maximum number of bytes of keys and values that concurrent programs share in the L2 cache of an H100 or H200. The rest of the
cache is left for other data."""
_ONE = Programs(1, start=1.3, partial=1.3, merge=0.7)
"""Costs in key tiles, fitted on an H200. An item's first scores and last accumulation overlap with nothing."""
_COSTS = {1: 0.62, 2: 1.0, 3: 1.45, 4: 0.8}  # Relative time of a key tile, by number of warpgroups that run MMAs


@dataclass(frozen=True, slots=True)
class Schedule:
    """Work list of a step."""

    tile: AttentionTile
    items: NDArray[numpy.int32]
    """[num_items, ITEM_INTS]: items in the order in which programs take them."""
    num_partials: int = 0


class Order(NamedTuple):
    """Items in the order in which programs take them: query tile, kv head, and section of kv heads."""

    tile: Ints
    head: Ints
    section: Ints


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
        """Return the query tiles of one kv head."""
        used = tile.rows_used(self.group) * max(tile.cluster, 1)
        return QueryTiles.of(self.query_lens, self.kv_lens, self.group, used, tile.keys, self.window)

    def sections(self, count: int) -> int:
        """Return the number of sections of kv heads, which are processed one after the other. A section has as many heads as have
        keys and values that fit the L2 cache, but at least one head. count: number of query tiles of a kv head."""
        if count * self.heads <= 4 * self.programs:
            return 1
        heads = L2_BYTES // max(int(self.kv_lens.sum()) * self.token_bytes, 1)
        return -(-self.heads // min(max(heads, 1), self.heads))

    def order(self, lengths: Ints) -> Order:
        """Return the items before splitting, the longest items of a section first. lengths: number of key tiles of each query
        tile of a kv head."""
        tiles = numpy.argsort(-lengths, kind="stable")
        parts = numpy.array_split(numpy.arange(self.heads), self.sections(len(tiles)))
        tile = numpy.concatenate([numpy.repeat(tiles, len(heads)) for heads in parts])
        head = numpy.concatenate([numpy.tile(heads, len(tiles)) for heads in parts])
        return Order(tile, head, numpy.repeat(numpy.arange(len(parts)), [len(tiles) * len(heads) for heads in parts]))


def choose(problem: Problem, tiles: Sequence[AttentionTile], num_splits: int | None = None) -> Schedule:
    """Return the schedule with the lowest estimated time. num_splits: number of parts of the longest query tile's keys, which
    overrides the rule."""
    best: tuple[float, Problem, AttentionTile, QueryTiles, Order, Split] | None = None
    work = 0.0  # rows x keys of each program, with the previous tile
    for tile in tiles:
        if best is not None and work * _COSTS[tile.groups] / tile.rows > best[0]:
            continue
        rows, shared = problem.rows(tile), replace(problem, programs=max(problem.programs // max(tile.cluster, 1), 1))
        if not len(rows.seq):
            return Schedule(tile, numpy.zeros((0, ITEM_INTS), dtype=numpy.int32))
        order = shared.order(lengths := rows.lengths(tile.keys))
        if num_splits is None:
            limit = math.inf if best is None else best[0] / (_COSTS[tile.groups] * tile.keys)
            split, time = replace(_ONE, count=shared.programs).split(lengths[order.tile], limit=limit)
        else:
            split, time = Split(0, -(-int(lengths.max()) // num_splits)), 0.0
        work = int(lengths.sum()) * problem.heads / shared.programs * tile.keys * tile.rows
        time *= _COSTS[tile.groups] * tile.keys
        if best is None or time < best[0]:
            best = time, shared, tile, rows, order, split
    assert best is not None
    return cut(*best[1:])


def cut(problem: Problem, tile: AttentionTile, rows: QueryTiles, order: Order, split: Split) -> Schedule:
    """Return the items of a step. Within a section of kv heads, parts come after the items that are not split, the longest and
    the first part of each query tile first, so that concurrent programs share keys."""
    lengths = rows.lengths(tile.keys)
    whole = numpy.zeros((len(rows.seq), ITEM_INTS), dtype=numpy.int32)
    whole[:, 0] = problem.starts[rows.seq]
    whole[:, 1] = problem.query_lens[rows.seq]
    whole[:, 2] = problem.kv_lens[rows.seq]
    whole[:, 3] = rows.seq
    whole[:, 4] = rows.number
    whole[:, 5] = rows.first
    whole[:, 6] = rows.first + lengths
    whole[:, 7] = 1
    items = whole.take(order.tile, axis=0)
    items[:, 10] = order.head
    if split.whole >= len(items):
        return Schedule(tile, items)
    parts = split.parts(lengths[order.tile])
    items = items.take(parts.tile, axis=0)
    items[:, 6] = items[:, 5] + parts.last
    items[:, 5] += parts.first.astype(numpy.int32)
    items[:, 7] = parts.count
    items[:, 8] = parts.number
    items[:, 9] = parts.slots - parts.number
    rest = slice(split.whole, None)
    places = numpy.lexsort((parts.number[rest], (parts.first - parts.last)[rest], order.section[parts.tile[rest]]))
    items[rest] = items[rest].take(places, axis=0)
    return Schedule(tile, items, int(parts.shared.sum()))
