"""Block tables: the blocks of the pool that hold the tokens of the sequence in each row; and copies between pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.layout import LayerCache
from headway.core.contract.transfer import upload
from headway.core.engine.data.groups import CacheGroup
from headway.core.engine.data.step import PageCopy, StepInput


class HostBlockTables:
    """The block tables of all rows, in host memory; each step brings them up to date."""

    def __init__(self, max_num_seqs: int, max_blocks: int, groups: Sequence[CacheGroup]) -> None:
        """max_blocks: of the longest sequence."""
        shape = max_num_seqs + 1, max_blocks
        self.tables: list[NDArray[numpy.int32]] = [numpy.zeros(shape, dtype=numpy.int32) for _ in groups]
        """The block table of each row, for each cache group; what is beyond a sequence's blocks is left from others. The last row
        belongs to padding and stays zero."""
        self.num_updates = self.last_change = 0
        """How many updates there have been, and the number of the last one that has changed a table."""
        self.updated: NDArray[numpy.int64] = numpy.zeros(max_num_seqs + 1, dtype=numpy.int64)
        """[rows]: the number of the update that has changed each table last."""
        self._groups = tuple(groups)

    def update(self, step: StepInput) -> None:
        """Take in the pages that a step gives to rows."""
        self.num_updates += 1
        if step.new_pages:
            self.last_change = self.num_updates
        for row, start, pages, number in step.new_pages:
            self.updated[row] = self.num_updates
            group, table = self._groups[number], self.tables[number]
            if group.page_stride == 1:  # a page is a block
                table[row, start : start + len(pages)] = pages
            else:
                first, blocks = start * group.blocks_per_page, group.blocks_of(pages)
                table[row, first : first + len(blocks)] = blocks[: table.shape[1] - first]

    def of_step(self, rows: NDArray[numpy.int32], seq_lens: NDArray[numpy.int32], block_size: int) -> list[NDArray[numpy.int32]]:
        """The block tables of some rows, by group: [num_seqs, blocks of the longest], 0 past a sequence's own blocks."""
        counts = -(-seq_lens // block_size)
        longest = int(counts.max())
        beyond = numpy.arange(longest) >= counts[:, None]
        found = []
        for tables in self.tables:
            table = numpy.take(tables, rows, axis=0)[:, :longest]
            table[beyond] = 0
            found.append(table)
        return found

    def slots(
        self, rows: NDArray[numpy.int32], positions: NDArray[numpy.int32], block_size: int, group: int
    ) -> NDArray[numpy.int64]:
        """Slots of one position of each row in the caches of a group: where its key and value are written."""
        blocks = self.tables[group][rows, positions // block_size].astype(numpy.int64)
        slots: NDArray[numpy.int64] = blocks * block_size + positions % block_size
        return slots


class MirroredTables:
    """Block tables in a host buffer; only those that have changed since the last step are written again."""

    def __init__(self, mirror: NDArray[numpy.int32]) -> None:
        """mirror: [groups, batch, blocks], of the buffer; whatever it holds is void."""
        mirror.fill(0)
        self._mirror = mirror
        self._rows: NDArray[numpy.int64] = numpy.full(mirror.shape[1], -1, dtype=numpy.int64)
        """[batch]: the row whose block table each entry of the mirror holds; -1: none yet."""
        self._num_updates = 0
        """`HostBlockTables.num_updates` when the mirror was filled last."""

    def fill(self, rows: NDArray[numpy.int64], tables: HostBlockTables) -> int:
        """Make entry i the block table of `rows[i]`, in each group; returns how many had to be written.

        rows: [batch]. tables: the same object in every call.
        """
        if tables.last_change <= self._num_updates and (self._rows == rows).all():
            return 0
        stale = numpy.flatnonzero((self._rows != rows) | (tables.updated[rows] > self._num_updates))
        if len(stale):
            for mirror, known in zip(self._mirror, tables.tables, strict=True):
                blocks = min(mirror.shape[1], known.shape[1])
                mirror[stale, :blocks] = known[rows[stale], :blocks]
        self._rows[:] = rows
        self._num_updates = tables.num_updates
        return len(stale)


def copy_slots(caches: Sequence[LayerCache], groups: Sequence[CacheGroup], copies: Sequence[PageCopy]) -> None:
    """Copy the first slots of pages, in the caches of their groups' layers. No page is a source and a target.

    Works on every tensor of any layout, with the same few launches for one copy as for many.
    """
    for number, group in enumerate(groups):
        own = [copy[1:] for copy in copies if copy.group == number]
        if not own or not group.layers:
            continue
        cache = caches[group.layers[0]]
        sources, targets, counts = numpy.array(own, dtype=numpy.int64).T
        tokens = numpy.arange(counts.sum()) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
        blocks, slots = numpy.divmod(tokens, cache.block_size)
        within = blocks * group.block_stride
        source_blocks, target_blocks = (numpy.repeat(each, counts) * group.page_stride + within for each in (sources, targets))
        indices = numpy.stack([source_blocks, target_blocks, slots])
        source, target, slot = upload(torch.from_numpy(indices), cache.key.device)
        for layer in group.layers:
            cache = caches[layer]
            for name in cache.tensors:
                rows = _indexable(cache.by_slot(name))
                rows[target, slot] = rows[source, slot]


def _indexable(rows: Tensor) -> Tensor:
    """The same memory in an element type that torch can index, which fp8 is not."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
