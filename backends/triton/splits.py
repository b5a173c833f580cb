"""Split-KV rules: number of programs that share the keys of a sequence or query tile, and the schedule of prefill."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy

from headway.backends.split_kv import Ints, QueryTiles, Split
from headway.backends.triton.configs import DecodeConfig

COLUMNS = 8
"""Number of int32 columns in a row of the schedule."""


class TileColumn(IntEnum):
    """Columns of a schedule row that describes one program. The kernel uses the same column indices."""

    SEQUENCE = 0
    FIRST_TOKEN = 1
    """Index of the sequence's first query token."""
    QUERY_LEN = 2
    KV_LEN = 3
    QUERY_TILE = 4
    FIRST_KEY_TILE = 5
    KEY_END = 6
    """End of the program's keys: index of the first key that it does not read."""
    SLOT = 7
    """Slot of the partial result. -1 if the program reads all keys of its query tile."""


class MergeColumn(IntEnum):
    """Columns of a schedule row that describes the merge of a query tile's partial results. Other columns are unused."""

    FIRST_TOKEN = 0
    QUERY_LEN = 1
    QUERY_TILE = 2
    FIRST_SLOT = 3
    NUM_SLOTS = 4


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """Schedule of one launch: the work of each program, and the query tiles to merge afterwards."""

    rows: Ints
    """[programs + merges, COLUMNS]: a row of `TileColumn`s per program, then a row of `MergeColumn`s per merged query tile.

    Sequences are ordered by decreasing length, so that concurrent programs share keys in the L2 cache. Each sequence begins with
    its last query tile, which has the most keys, so that no long program starts last. Query tiles that are split come last.
    """
    programs: int
    slots: int
    """Number of partial results."""

    @property
    def merges(self) -> int:
        """Number of query tiles whose partial results are merged."""
        return len(self.rows) - self.programs


def schedule_tiles(
    starts: Ints,
    kv_lens: Ints,
    group: int,
    block_m: int,
    block_n: int,
    window: int | None,
    choose: Callable[[Ints], Split],
    causal: bool = True,
) -> TileSchedule:
    """Split a step into query tiles of block_m rows, and the keys of a query tile into runs of tiles of block_n keys.

    starts: [num_seqs + 1]: index of each sequence's first query token, followed by the total number of query tokens.
    kv_lens: [num_seqs]: length of each sequence. 0 marks padding.
    group: number of query heads per kv head, which is the number of rows per token.
    choose: function that returns how to split query tiles with these numbers of key tiles.
    causal: as in AttentionSpec.
    """
    query_lens = starts[1:] - starts[:-1]
    tiles = QueryTiles.of(query_lens, kv_lens, group, block_m, block_n, window, causal)
    columns = tiles.seq, starts[tiles.seq], query_lens[tiles.seq], kv_lens[tiles.seq], tiles.number, tiles.first, tiles.end
    rows = numpy.stack((*columns, numpy.full(len(tiles.seq), -1)), axis=1, dtype=numpy.int32, casting="same_kind")
    if len(rows) == 0:
        return TileSchedule(rows, 0, 0)
    lengths = tiles.lengths(block_n)
    split = choose(lengths)
    if split.run >= lengths.max():
        return TileSchedule(rows, len(rows), 0)
    parts = split.parts(lengths)
    shared, slots = parts.shared, parts.slots

    first = shared & (parts.number == 0)
    merges = rows[parts.tile[first]]
    merges[:, : MergeColumn.FIRST_SLOT] = merges[:, [TileColumn.FIRST_TOKEN, TileColumn.QUERY_LEN, TileColumn.QUERY_TILE]]
    merges[:, MergeColumn.FIRST_SLOT] = slots[first]
    merges[:, MergeColumn.NUM_SLOTS] = parts.count[first]
    rows = rows[parts.tile]
    end = (rows[:, TileColumn.FIRST_KEY_TILE] + parts.last) * block_n
    rows[:, TileColumn.KEY_END] = numpy.minimum(rows[:, TileColumn.KEY_END], end)
    rows[:, TileColumn.FIRST_KEY_TILE] += parts.first.astype(numpy.int32)
    rows[:, TileColumn.SLOT] = numpy.where(shared, slots, -1)
    # The longest parts come first, and the first parts of all query tiles, so that concurrent programs share keys.
    whole = int(shared.argmax())
    order = numpy.lexsort((parts.number[whole:], (parts.first - parts.last)[whole:]))
    rows[whole:] = rows[whole:].take(order, axis=0)
    return TileSchedule(numpy.concatenate([rows, merges]), len(rows), int(shared.sum()))


SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Candidate numbers of splits per sequence. Numbers between these were measured and are not faster."""

MAX_WAVES = 4
"""Maximum number of waves of programs in a prefill or extend whose keys are split."""

FAN = 8
"""Number of partial results that one program merges. Larger numbers of partial results are merged in two stages."""

FAN_ROUND = 8
"""Overhead of the second merge stage, in units of the time to merge one partial result."""

FEWEST = 2
"""Minimum number of programs per SM for which configurations without splits are considered."""


@lru_cache(maxsize=4096)
def choose_split(
    items: int, keys: int, key_bytes: int, rows: int, multiprocessors: int, configs: Sequence[DecodeConfig]
) -> tuple[DecodeConfig, int]:
    """Return the configuration and number of splits with the lowest expected time.

    items: number of programs without splits, that is, sequences x kv heads x query tiles.
    keys: mean number of keys per program.
    key_bytes: size of one key and its value, in bytes.
    rows: number of rows of a query tile.
    multiprocessors: number of SMs.
    configs: candidates. Only the first configuration may split. The others are for launches with many programs.
    """
    if keys == 0 or items == 0:
        return configs[0], 1
    most = max(1, min(-(-keys // configs[0].block_n), configs[0].max_rounds * multiprocessors // items))
    cuts = [(configs[0], splits) for splits in SPLITS if splits <= most]
    if items >= FEWEST * multiprocessors:
        cuts += [(config, 1) for config in configs[1:]]
    return min(cuts, key=lambda cut: expected_us(cut[0], cut[1], items, keys, key_bytes, rows, multiprocessors))


def expected_us(
    config: DecodeConfig, splits: int, items: int, keys: int, key_bytes: int, rows: int, multiprocessors: int
) -> float:
    """Return the expected time of a launch in microseconds, without terms that are the same for all candidates.

    An SM runs `residents` programs at a time. With many programs, memory bandwidth limits the time of a tile, and with few
    programs, latency does. For numbers in between, both limits are combined. The SM with the most programs is also limited by its
    own throughput. Parameters were fitted on an H200 (docs/kernels.md).
    """
    tiles = -(-keys // config.block_n)
    each = -(-tiles // splits)
    parts = -(-tiles // each)
    shared_us = multiprocessors * config.block_n * key_bytes / config.bytes_per_us  # one tile on every SM at once
    # The last program of a sequence is shorter. If an SM runs only one program at a time, it takes a place nevertheless.
    programs = items * (parts if config.residents == 1 else tiles / each) / multiprocessors
    waves = math.floor(programs / config.residents)
    rest = programs - waves * config.residents
    time = waves * (each * math.hypot(config.tile_us, config.residents * shared_us) + config.wave_us)
    if rest > 0:
        tile_us = max(math.hypot(config.tile_us, rest * shared_us), math.ceil(rest) * config.busy_us)
        time += each * tile_us + config.wave_us
    merge_us = config.merge_us + config.merge_row_us * rows
    if parts > FAN and not config.merge_launch_us:
        parts = FAN + -(-parts // FAN) + FAN_ROUND
    return time + (config.merge_launch_us + merge_us * parts if splits > 1 else 0.0)
