"""The tile schedule of a prefill or extend step: a list of programs, made on the host from the step's exact lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy
from numpy.typing import NDArray

COLUMNS = 8
"""int32 numbers per row of the schedule."""


class TileColumn(IntEnum):
    """Columns of a row that says what one program computes. The kernel reads them by the same numbers."""

    SEQUENCE = 0
    FIRST_TOKEN = 1
    """The sequence's first query token."""
    QUERY_LEN = 2
    KV_LEN = 3
    QUERY_TILE = 4
    FIRST_KEY_TILE = 5
    KEY_END = 6
    """The first key that the program does not read."""
    SLOT = 7
    """Where the partial result goes; -1 where the program reads all keys of its query tile."""


class MergeColumn(IntEnum):
    """Columns of a row that says which partial results of a query tile are merged; the other columns are unused."""

    FIRST_TOKEN = 0
    QUERY_LEN = 1
    QUERY_TILE = 2
    FIRST_SLOT = 3
    NUM_SLOTS = 4


Ints = NDArray[numpy.int32]


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """What the programs of one launch compute, and which results are merged afterwards."""

    rows: Ints
    """[programs + merges, COLUMNS]: a row of `TileColumn`s for each program, then one of `MergeColumn`s for each merged tile.

    Sequence by sequence, the longest first, so that neighbouring programs share keys in the L2 cache. Each sequence begins with
    its last tile, which has most keys, so that no long program starts last.
    """
    programs: int
    slots: int
    """Number of partial results."""

    @property
    def merges(self) -> int:
        """Number of query tiles that are merged."""
        return len(self.rows) - self.programs


def schedule_tiles(
    starts: Ints,
    kv_lens: Ints,
    group: int,
    block_m: int,
    block_n: int,
    window: int | None,
    cut: Callable[[Ints], tuple[int, int]],
    causal: bool = True,
) -> TileSchedule:
    """Cut a step into query tiles of block_m rows, and their keys into runs of tiles of block_n keys.

    starts: [num_seqs + 1], first query token of each sequence, and the end of the last; kv_lens: [num_seqs], 0 marks padding.
    group: query heads per kv head, which are the rows of one token. cut: takes the number of key tiles that each query tile sees;
    returns how many query tiles, from the first of the list, keep all their key tiles, and the most key tiles that one program of
    the other query tiles reads. causal: see AttentionSpec.
    """
    rows = _query_tiles(starts, kv_lens, group, block_m, block_n, window, causal)
    if len(rows) == 0:
        return TileSchedule(rows, 0, 0)
    tiles = (rows[:, TileColumn.KEY_END] + (block_n - 1)) // block_n - rows[:, TileColumn.FIRST_KEY_TILE]
    whole, most = cut(tiles)
    if most >= tiles.max():
        return TileSchedule(rows, len(rows), 0)

    tiles_per_program = -(-tiles // -(-tiles // most))
    tiles_per_program[:whole] = tiles[:whole]
    parts = -(-tiles // tiles_per_program)
    split = parts > 1
    slots = parts * split
    first_slot = slots.cumsum() - slots
    tile = numpy.arange(len(rows)).repeat(parts)
    part = numpy.arange(len(tile)) - (parts.cumsum() - parts)[tile]
    merges = rows[split]
    merges[:, : MergeColumn.FIRST_SLOT] = merges[:, [TileColumn.FIRST_TOKEN, TileColumn.QUERY_LEN, TileColumn.QUERY_TILE]]
    merges[:, MergeColumn.FIRST_SLOT] = first_slot[split]
    merges[:, MergeColumn.NUM_SLOTS] = parts[split]
    rows, tiles_per_program = rows[tile], tiles_per_program[tile]
    rows[:, TileColumn.FIRST_KEY_TILE] += part * tiles_per_program
    end = (rows[:, TileColumn.FIRST_KEY_TILE] + tiles_per_program) * block_n
    rows[:, TileColumn.KEY_END] = numpy.minimum(rows[:, TileColumn.KEY_END], end)
    rows[:, TileColumn.SLOT] = numpy.where(split[tile], first_slot[tile] + part, -1)
    return TileSchedule(numpy.concatenate([rows, merges]), len(rows), int(slots.sum()))


def _query_tiles(starts: Ints, kv_lens: Ints, group: int, block_m: int, block_n: int, window: int | None, causal: bool) -> Ints:
    """A row of `TileColumn`s for each query tile, with all the keys that the tile sees."""
    sequences = numpy.empty((len(kv_lens), 4), numpy.int32)
    sequences[:, TileColumn.SEQUENCE] = numpy.arange(len(kv_lens))
    sequences[:, TileColumn.FIRST_TOKEN] = starts[:-1]
    sequences[:, TileColumn.QUERY_LEN] = starts[1:] - starts[:-1]
    sequences[:, TileColumn.KV_LEN] = kv_lens
    counts = -(-(sequences[:, TileColumn.QUERY_LEN] * group) // block_m) * (kv_lens > 0)
    if len(counts) > 1:
        order = numpy.argsort(-kv_lens, kind="stable")
        counts, sequences = counts[order], sequences[order]
    rows = numpy.empty((counts.sum(), COLUMNS), numpy.int32)
    if len(rows) == 0:
        return rows
    rows[:, : TileColumn.QUERY_TILE] = sequences.repeat(counts, 0)
    numbers = counts.cumsum(dtype=numpy.int32).repeat(counts) - numpy.arange(1, len(rows) + 1, dtype=numpy.int32)
    kv_len = rows[:, TileColumn.KV_LEN]
    context = kv_len - rows[:, TileColumn.QUERY_LEN]
    rows[:, TileColumn.QUERY_TILE] = numbers
    rows[:, TileColumn.FIRST_KEY_TILE] = 0
    if window is not None:
        rows[:, TileColumn.FIRST_KEY_TILE] = numpy.maximum(context + numbers * block_m // group - window + 1, 0) // block_n
    rows[:, TileColumn.KEY_END] = kv_len
    ahead = 1 if causal else window  # keys from the tile's newest query on
    if ahead is not None:
        rows[:, TileColumn.KEY_END] = numpy.minimum(context + (numbers * block_m + (block_m - 1)) // group + ahead, kv_len)
    rows[:, TileColumn.SLOT] = -1
    return rows
