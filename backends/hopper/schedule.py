"""Schedule of a prefill or extend step: query tiles and their key ranges, split over programs if there are few query rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy
from numpy.typing import NDArray

from headway.backends.hopper.tiles import AttentionTile
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec

ITEM_INTS = 12
"""Number of integers in struct Item of shape.cuh."""
SPLITS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
"""Candidate numbers of parts into which the keys of the longest query tile are split."""
L2_BYTES = 32 << 20
"""Maximum number of bytes of keys and values that concurrent programs share in the L2 cache of an H100 or H200. The rest of the
cache is left for other data."""
_START = 1.3  # Fixed cost of an item, in key tiles: its first scores and last accumulation overlap with nothing
_PARTIAL = 0.5  # Additional cost of an item with a partial result, in key tiles, and
_MERGE = 0.25
"""Time to read one partial result, in units of the time of a key tile."""
_COSTS = {1: 0.62, 2: 1.0, 3: 1.45, 4: 0.8}  # Relative time of a key tile, by number of warpgroups that run MMAs

Ints = NDArray[numpy.int64]


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
class Schedule:
    """Work list of a step."""

    tile: AttentionTile
    items: NDArray[numpy.int32]
    """[num_items, ITEM_INTS]: items in the order in which programs process them."""
    num_partials: int = 0
    """Number of partial results per kv head."""
    num_tickets: int = 0
    """Number of query tiles whose keys are split over several items."""
    section: int = 1
    """Number of kv heads whose items are processed together."""


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
    """Number of kv heads. All items are processed once for each kv head."""
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

    def section(self, num_items: int) -> int:
        """Return the number of kv heads whose keys and values together fit the L2 cache. Return 0 if not even one head fits, and
        the number of all heads if there are few items."""
        if num_items * self.heads <= 4 * self.programs:
            return self.heads
        return min(L2_BYTES // max(int(self.kv_lens.sum()) * self.token_bytes, 1), self.heads)

    def rows(self, tile: AttentionTile) -> QueryTiles:
        """Return the query tiles in order of decreasing sequence length. Within a sequence, the last tile, which has the most
        keys, comes first."""
        tokens = tile.tokens(self.group) * max(tile.cluster, 1)
        counts = -(-self.query_lens // tokens) * (self.kv_lens > 0)
        order = numpy.argsort(-self.kv_lens, kind="stable")
        seq = numpy.repeat(order, counts[order])
        number = numpy.repeat(numpy.cumsum(counts[order]), counts[order]) - 1 - numpy.arange(len(seq))
        first_token = number * tokens
        last_token = numpy.minimum(first_token + tokens, self.query_lens[seq]) - 1
        before = (self.kv_lens - self.query_lens)[seq]
        last = -(-(before + last_token + 1) // tile.keys)
        if self.window is None:
            return QueryTiles(seq, number, numpy.zeros_like(last), last)
        return QueryTiles(seq, number, numpy.maximum(before + first_token + 1 - self.window, 0) // tile.keys, last)

    def time(self, tiles: Mapping[int, int], run: int, limit: float = math.inf) -> float:
        """Return the estimated time, in units of key tiles, if items have at most `run` key tiles and programs process the
        longest items first.

        tiles: number of key tiles -> number of query tiles with that number of key tiles. The mapping has few entries.
        limit: time from which on infinity may be returned instead.
        """
        costs, num_items, most_pieces = [], 0, 1
        for length, count in tiles.items():
            pieces = -(-length // run)
            items = pieces * self.heads * count
            costs.append((length / pieces + (_START + _PARTIAL if pieces > 1 else _START), items))
            num_items += items
            most_pieces = max(most_pieces, pieces)
        merging = _MERGE * most_pieces if most_pieces > 1 else 0.0
        rounds = -(-num_items // self.programs)
        if rounds == 1:
            return max(costs)[0] + merging
        if sum(cost * items for cost, items in costs) / self.programs + merging >= limit:
            return math.inf
        costs.sort(reverse=True)
        padded = numpy.zeros(rounds * self.programs)
        padded[:num_items] = numpy.repeat([cost for cost, _ in costs], [items for _, items in costs])
        laps = padded.reshape(rounds, self.programs)
        laps[1::2] = laps[1::2, ::-1]  # the program with the longest item of one round takes the shortest of the next
        return float(laps.sum(0).max()) + merging

    def longest_run(self, lengths: Ints) -> tuple[int, float]:
        """Return (maximum number of key tiles per item, estimated time in key tiles) of the best split."""
        tiles = Counter(lengths.tolist())
        longest = max(tiles)
        best = longest, self.time(tiles, longest)
        even = sum(length * count for length, count in tiles.items()) * self.heads / self.programs
        if longest < 4 or best[1] < 1.1 * (even + _START):
            return best
        for splits in SPLITS:
            run = -(-longest // splits)
            if run < 2 or run * 3 < even:
                break
            limit = 0.97 * best[1]
            time = self.time(tiles, run, limit)
            if time < limit:
                best = run, time
        return best


def cut(problem: Problem, tile: AttentionTile, rows: QueryTiles, run: int) -> Schedule:
    """Return the schedule that splits each query tile into equal items of at most `run` key tiles, longest items first.

    If not even one head's keys fit the L2 cache, items stay ordered by sequence, so that concurrent programs share keys.
    """
    lengths, seq = rows.lengths, rows.seq
    whole = numpy.zeros((len(seq), ITEM_INTS), dtype=numpy.int32)
    whole[:, 0] = problem.starts[seq]
    whole[:, 1] = problem.query_lens[seq]
    whole[:, 2] = problem.kv_lens[seq]
    whole[:, 3] = seq
    whole[:, 4] = rows.tile
    whole[:, 5] = rows.first
    whole[:, 6] = rows.last
    whole[:, 7] = 1
    items, num_partials, num_tickets = (whole, 0, 0) if run >= lengths.max() else _pieces(whole, lengths, run)
    section = problem.section(len(items))
    if section:
        items = items[numpy.argsort(items[:, 5] - items[:, 6], kind="stable")]
    return Schedule(tile, items, num_partials, num_tickets, max(section, 1))


def _pieces(whole: NDArray[numpy.int32], lengths: Ints, run: int) -> tuple[NDArray[numpy.int32], int, int]:
    """Return the items into which query tiles are split, the number of partial results, and the number of tiles that were
    split."""
    splits = -(-lengths // max(run, 1))
    shared = splits > 1
    partials = splits * shared
    whole[:, 7] = splits
    whole[:, 9] = numpy.cumsum(partials) - partials
    whole[:, 10] = numpy.cumsum(shared) - shared
    items = numpy.repeat(whole, splits, axis=0)
    split = numpy.arange(len(items)) - numpy.repeat(numpy.cumsum(splits) - splits, splits)
    length, count, first = numpy.repeat(lengths, splits), items[:, 7], items[:, 5].copy()
    items[:, 5] = first + length * split // count
    items[:, 6] = first + length * (split + 1) // count
    items[:, 8] = split
    return items, int(partials.sum()), int(shared.sum())


def choose(problem: Problem, tiles: Sequence[AttentionTile], num_splits: int | None = None) -> Schedule:
    """Return the schedule with the lowest estimated time. num_splits: number of parts of the longest query tile's keys, which
    overrides the rule."""
    best: tuple[float, AttentionTile, QueryTiles, int, Problem] | None = None
    for tile in tiles:
        rows, shared = problem.rows(tile), replace(problem, programs=problem.programs // max(tile.cluster, 1))
        if not len(rows.seq):
            return Schedule(tile, numpy.zeros((0, ITEM_INTS), dtype=numpy.int32))
        if num_splits is None:
            run, time = shared.longest_run(rows.lengths)
        else:
            run, time = -(-int(rows.lengths.max()) // num_splits), 0.0
        time *= _COSTS[tile.groups] * tile.keys
        if best is None or time < best[0]:
            best = time, tile, rows, run, shared
    assert best is not None
    _, tile, rows, run, shared = best
    return cut(shared, tile, rows, run)
