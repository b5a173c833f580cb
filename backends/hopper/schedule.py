"""What the programs of one step work on: tiles of query rows, and the keys of each, cut where rows are few."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from headway.backends.hopper.tiles import Tile
from headway.core.contract.metadata import AttentionMetadata

ITEM_INTS = 12
"""Of struct Item in shape.cuh."""
MOST_SPLITS = 64
_START = 1.3
"""What an item costs beside its tiles of keys, in tiles: the first scores and the last sums overlap with nothing."""
_MERGE = 0.35
"""What a split costs more, in tiles: a partial result is written and read."""
_ALONE = 0.62
"""Time of a tile of one warpgroup, in those of two that take turns."""
_COSTS = {1: _ALONE, 2: 1.0, 3: 1.45}
"""Time of a tile of keys by warpgroups that multiply."""

Ints = NDArray[numpy.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Query tiles of a step and the range of key tiles of each, before any cut."""

    seq: Ints
    tile: Ints
    first: Ints
    last: Ints

    @property
    def lengths(self) -> Ints:
        """Tiles of keys."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Schedule:
    """The work list."""

    tile: Tile
    items: NDArray[numpy.int32]
    """[num_items, ITEM_INTS], in the order in which programs take them."""
    num_partials: int
    """Partial results that the cut leaves, of each kv head."""
    num_tickets: int
    """Query tiles that were cut."""


def rows_of(metadata: AttentionMetadata, tile: Tile, group: int, window: int | None) -> Rows:
    """The query tiles, sequence by sequence, the longest first; in each the last tile, which has most keys, comes first.

    Programs side by side so share keys in the L2 cache, and no long tile starts last.
    """
    kv_lens = metadata.seq_lens_cpu.numpy().astype(numpy.int64)
    query_lens = numpy.diff(metadata.query_start_loc_cpu.numpy()).astype(numpy.int64)
    counts = numpy.where(kv_lens > 0, -(-(query_lens * group) // tile.rows), 0)
    order = numpy.argsort(-kv_lens, kind="stable")
    seq = numpy.repeat(order, counts[order])
    ends = numpy.cumsum(counts[order])
    number = numpy.repeat(ends, counts[order]) - 1 - numpy.arange(len(seq))
    first_token = number * tile.rows // group
    last_token = numpy.minimum((number * tile.rows + tile.rows - 1) // group, query_lens[seq] - 1)
    before = (kv_lens - query_lens)[seq]
    last = -(-(before + last_token + 1) // tile.keys)
    first = numpy.zeros_like(last) if window is None else numpy.maximum(before + first_token + 1 - window, 0) // tile.keys
    return Rows(seq, number, first, last)


def longest_run(lengths: Ints, heads: int, programs: int) -> tuple[int, float]:
    """(most key tiles of an item, estimated time in key tiles of the wide tile's kind) of the best cut.

    lengths: key tiles of each query tile; heads: kv heads, each of which has all of them; programs: that run at a time.
    """
    longest, total, count = int(lengths.max()), int(lengths.sum()) * heads, len(lengths) * heads
    even = total / programs
    uncut = max(longest + _START, (total + count * _START) / programs + 0.5 * (longest + _START) * (count > programs))
    if (count > programs and longest <= even / 2) or longest < 4:
        return longest, uncut
    splits = numpy.arange(1, min(MOST_SPLITS, longest // 2) + 1)
    runs = -(-longest // splits)
    if count == len(lengths) * heads and int(lengths.min()) == longest:  # all alike
        pieces = -(-longest // runs)
        items = count * pieces
    else:
        items = (-(-lengths[:, None] // runs[None, :])).sum(0) * heads
    waves = -(-items // programs)
    merging = numpy.where(splits > 1, 1.0 + _MERGE * splits, 0.0)
    busy = (total + items * _START) / programs
    times = numpy.maximum(numpy.where(waves <= 3, waves * (runs + _START), busy + 0.5 * (runs + _START)), busy) + merging
    best = int(times.argmin())
    return int(runs[best]), float(times[best])


def schedule(
    metadata: AttentionMetadata,
    tile: Tile,
    rows: Rows,
    run: int,
) -> Schedule:
    """Cut every query tile into items of at most `run` key tiles, as even as can be."""
    lengths = rows.lengths
    splits = -(-lengths // max(run, 1))
    count = int(splits.sum())
    of = numpy.repeat(numpy.arange(len(splits)), splits)
    split = numpy.arange(count) - numpy.repeat(numpy.cumsum(splits) - splits, splits)
    cut = splits > 1
    partials = numpy.where(cut, splits, 0)
    starts = metadata.query_start_loc_cpu.numpy()
    seq = rows.seq[of]
    items = numpy.zeros((count, ITEM_INTS), dtype=numpy.int32)
    items[:, 0] = starts[seq]
    items[:, 1] = starts[seq + 1] - starts[seq]
    items[:, 2] = metadata.seq_lens_cpu.numpy()[seq]
    items[:, 3] = seq
    items[:, 4] = rows.tile[of]
    items[:, 5] = rows.first[of] + lengths[of] * split // splits[of]
    items[:, 6] = rows.first[of] + lengths[of] * (split + 1) // splits[of]
    items[:, 7] = splits[of]
    items[:, 8] = split
    items[:, 9] = (numpy.cumsum(partials) - partials)[of]
    items[:, 10] = (numpy.cumsum(cut) - cut)[of]
    return Schedule(tile, items, int(partials.sum()), int(cut.sum()))


def choose(
    metadata: AttentionMetadata,
    tiles: tuple[Tile, ...],
    group: int,
    heads: int,
    window: int | None,
    programs: int,
    num_splits: int | None = None,
) -> Schedule:
    """The schedule of least estimated time. tiles: candidates; group: query heads of a kv head; heads: kv heads.

    num_splits: in place of the rule, the splits of the longest query tile.
    """
    best: tuple[float, Tile, Rows, int] | None = None
    for tile in tiles:
        rows = rows_of(metadata, tile, group, window)
        if not len(rows.seq):
            return Schedule(tile, numpy.zeros((0, ITEM_INTS), dtype=numpy.int32), 0, 0)
        if num_splits is not None:
            run, time = -(-int(rows.lengths.max()) // num_splits), 0.0
        else:
            run, time = longest_run(rows.lengths, heads, programs)
        time *= _COSTS[tile.groups] * tile.keys
        if best is None or time < best[0]:
            best = time, tile, rows, run
    assert best is not None
    return schedule(metadata, *best[1:])
