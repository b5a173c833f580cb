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
"""int32 numbers a query tile whose keys are shared: first query token of the sequence, query_len, tile, first slot, slots; the rest
is unused."""

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
    starts = query_lens.cumsum() - query_lens
    counts = -(-(query_lens * group) // block_m) * (kv_lens > 0)
    order = numpy.argsort(-kv_lens, kind="stable") if len(kv_lens) > 1 else numpy.zeros(1, numpy.int64)
    seqs = order.repeat(counts[order])
    numbers = counts[order].cumsum().repeat(counts[order]) - 1 - numpy.arange(len(seqs))
    query_len, kv_len = query_lens[seqs], kv_lens[seqs]
    context = kv_len - query_len
    first_row = numbers * block_m
    ends = numpy.minimum(context + (first_row + block_m - 1) // group + 1, kv_len)
    first = numpy.zeros_like(ends)
    if window is not None:
        first = numpy.maximum(context + first_row // group - window + 1, 0) // block_n
    tiles = -(-ends // block_n) - first
    most = longest_run(tiles) if len(tiles) else 1
    parts = -(-tiles // most)
    split = parts > 1
    columns: list[Ints] = [seqs, numbers, starts[seqs], query_len, kv_len, first, ends, numpy.full_like(seqs, -1)]
    if not split.any():
        return Work(numpy.stack(columns, 1).astype(numpy.int32), len(seqs), 0)

    each = -(-tiles // parts)
    parts = -(-tiles // each)
    split = parts > 1
    first_program = parts.cumsum() - parts
    slots = numpy.where(split, parts, 0)
    first_slot = slots.cumsum() - slots
    tile = numpy.arange(len(seqs)).repeat(parts)
    part = numpy.arange(len(tile)) - first_program[tile]
    columns = [column[tile] for column in columns]
    columns[5] = columns[5] + part * each[tile]
    columns[6] = numpy.minimum(columns[6], (columns[5] + each[tile]) * block_n)
    columns[7] = numpy.where(split[tile], first_slot[tile] + part, -1)
    unused = numpy.zeros_like(seqs)
    merges = [starts[seqs], query_len, numbers, first_slot, parts, unused, unused, unused]
    merged = numpy.stack(merges, 1)[split]
    return Work(numpy.concatenate([numpy.stack(columns, 1), merged]).astype(numpy.int32), len(tile), int(slots.sum()))
