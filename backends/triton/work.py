"""One step's prefill or extend as a list of programs, made on the host from its exact lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

WORK_FIELDS = 8
"""int32 numbers a program: its sequence, query tile, first query token of the sequence, query_len and kv_len; its first tile of
keys and the end of its keys; the slot of its partial result, -1 where it has all keys of its query tile."""
MERGE_FIELDS = 8
"""int32 numbers a query tile whose keys are shared: first query token of the sequence, query_len, tile, first slot, number of
slots; the rest is unused."""

Ints = NDArray[numpy.int64]


@dataclass(frozen=True, slots=True)
class Work:
    """What the programs of one launch do."""

    rows: NDArray[numpy.int32]
    """[programs + merges, 8]: WORK_FIELDS of each program, then MERGE_FIELDS of each query tile that is merged.

    Sequence by sequence, the longest first, so that programs side by side share keys in the L2 cache. In each the last tile,
    which has most keys, comes first, so that no long one starts last.
    """
    programs: int
    slots: int
    """Partial results."""

    @property
    def merges(self) -> int:
        """Query tiles that are merged."""
        return len(self.rows) - self.programs


def list_work(
    query_lens: Ints,
    kv_lens: Ints,
    group: int,
    block_m: int,
    block_n: int,
    window: int | None,
    longest_run: Callable[[Ints], int],
) -> Work:
    """Cut a step into query tiles of block_m rows, and their keys into runs of tiles of block_n keys.

    query_lens, kv_lens: of each sequence; kv_len 0 marks padding. group: query heads of a kv head, rows of one token.
    longest_run: from the tiles of keys that each query tile sees, the most that one program should fold.
    """
    counts = -(-(query_lens * group) // block_m) * (kv_lens > 0)
    if len(counts) == 1:
        seqs = numpy.zeros(counts[0], numpy.int64)
        numbers = numpy.arange(counts[0] - 1, -1, -1)
    else:
        order = numpy.argsort(-kv_lens, kind="stable")
        counts = counts[order]
        seqs = order.repeat(counts)
        numbers = counts.cumsum().repeat(counts) - numpy.arange(1, len(seqs) + 1)
    rows = numpy.empty((len(seqs), WORK_FIELDS), numpy.int32)
    query_len, kv_len = query_lens[seqs], kv_lens[seqs]
    first_token = kv_len - query_len + numbers * block_m // group  # position of the first row's token
    ends = numpy.minimum(kv_len - query_len + ((numbers + 1) * block_m - 1) // group + 1, kv_len)
    first = 0 if window is None else numpy.maximum(first_token - window + 1, 0) // block_n
    tiles = -(-ends // block_n) - first
    rows[:, 0] = seqs
    rows[:, 1] = numbers
    rows[:, 2] = (query_lens.cumsum() - query_lens)[seqs]
    rows[:, 3] = query_len
    rows[:, 4] = kv_len
    rows[:, 5] = first
    rows[:, 6] = ends
    rows[:, 7] = -1
    most = longest_run(tiles) if len(tiles) else 1
    if len(tiles) == 0 or most >= tiles.max():
        return Work(rows, len(rows), 0)

    each = -(-tiles // -(-tiles // most))
    parts = -(-tiles // each)
    split = parts > 1
    slots = parts * split
    first_slot = slots.cumsum() - slots
    tile = numpy.arange(len(seqs)).repeat(parts)
    part = numpy.arange(len(tile)) - (parts.cumsum() - parts)[tile]
    merges = rows[split]
    merges[:, 0:3] = merges[:, [2, 3, 1]]
    merges[:, 3] = first_slot[split]
    merges[:, 4] = parts[split]
    rows, each = rows[tile], each[tile]
    rows[:, 5] += part * each
    rows[:, 6] = numpy.minimum(rows[:, 6], (rows[:, 5] + each) * block_n)
    rows[:, 7] = numpy.where(split[tile], first_slot[tile] + part, -1)
    return Work(numpy.concatenate([rows, merges]), len(rows), int(slots.sum()))
