"""One step's prefill or extend as a list of programs, made on the host from its exact lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

WORK_FIELDS = 8
"""int32 numbers a program: its sequence and that one's first query token, query_len and kv_len; its query tile, its first tile of
keys and the end of its keys; the slot of its partial result, -1 where it has all keys of its query tile."""
MERGE_FIELDS = 8
"""int32 numbers a query tile whose keys are shared: first query token of the sequence, query_len, tile, first slot, number of
slots; the rest is unused."""

Ints = NDArray[numpy.int32]


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
    starts: Ints,
    kv_lens: Ints,
    group: int,
    block_m: int,
    block_n: int,
    window: int | None,
    cut: Callable[[Ints], tuple[int, int]],
) -> Work:
    """Cut a step into query tiles of block_m rows, and their keys into runs of tiles of block_n keys.

    starts: first query token of each sequence, and the end of the last; kv_lens: of each sequence, 0 marks padding. group: query
    heads of a kv head, rows of one token. cut: from the tiles of keys that each query tile sees, how many query tiles keep all
    of theirs, the first of the list, and the most that one program of the others folds.
    """
    sequences = numpy.empty((len(kv_lens), 4), numpy.int32)
    sequences[:, 0] = numpy.arange(len(kv_lens))
    sequences[:, 1] = starts[:-1]
    sequences[:, 2] = starts[1:] - starts[:-1]
    sequences[:, 3] = kv_lens
    counts = -(-(sequences[:, 2] * group) // block_m) * (kv_lens > 0)
    if len(counts) > 1:
        order = numpy.argsort(-kv_lens, kind="stable")
        counts, sequences = counts[order], sequences[order]
    rows = numpy.empty((counts.sum(), WORK_FIELDS), numpy.int32)
    if len(rows) == 0:
        return Work(rows, 0, 0)
    rows[:, :4] = sequences.repeat(counts, 0)
    numbers = counts.cumsum(dtype=numpy.int32).repeat(counts) - numpy.arange(1, len(rows) + 1, dtype=numpy.int32)
    context = rows[:, 3] - rows[:, 2]
    ends = numpy.minimum(context + (numbers * block_m + (block_m - 1)) // group + 1, rows[:, 3])
    rows[:, 4] = numbers
    rows[:, 5] = 0
    tiles = (ends + (block_n - 1)) // block_n
    if window is not None:
        rows[:, 5] = numpy.maximum(context + numbers * block_m // group - window + 1, 0) // block_n
        tiles -= rows[:, 5]
    rows[:, 6] = ends
    rows[:, 7] = -1
    whole, most = cut(tiles)
    if most >= tiles.max():
        return Work(rows, len(rows), 0)

    each = -(-tiles // -(-tiles // most))
    each[:whole] = tiles[:whole]
    parts = -(-tiles // each)
    split = parts > 1
    slots = parts * split
    first_slot = slots.cumsum() - slots
    tile = numpy.arange(len(rows)).repeat(parts)
    part = numpy.arange(len(tile)) - (parts.cumsum() - parts)[tile]
    merges = rows[split]
    merges[:, 0:3] = merges[:, [1, 2, 4]]
    merges[:, 3] = first_slot[split]
    merges[:, 4] = parts[split]
    rows, each = rows[tile], each[tile]
    rows[:, 5] += part * each
    rows[:, 6] = numpy.minimum(rows[:, 6], (rows[:, 5] + each) * block_n)
    rows[:, 7] = numpy.where(split[tile], first_slot[tile] + part, -1)
    return Work(numpy.concatenate([rows, merges]), len(rows), int(slots.sum()))
