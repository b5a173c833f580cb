"""What an executor knows of the sequence in each row: its block tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from headway.core.engine.groups import CacheGroup
from headway.core.engine.step import StepInput


class Rows:
    """Host memory by row, brought up to date by each step."""

    def __init__(self, max_num_seqs: int, max_blocks: int, groups: Sequence[CacheGroup]) -> None:
        """max_blocks: of the longest sequence."""
        shape = max_num_seqs + 1, max_blocks
        self.tables: list[NDArray[numpy.int32]] = [numpy.zeros(shape, dtype=numpy.int32) for _ in groups]
        """Block table of each row, for each cache group; what is beyond a sequence's blocks is left from others. The last row
        belongs to padding and stays zero."""
        self.num_updates = self.last_change = 0
        """How many there have been, and the number of the last that has changed a table."""
        self.updated: NDArray[numpy.int64] = numpy.zeros(max_num_seqs + 1, dtype=numpy.int64)
        """[rows]: the number of the update that has changed each last."""
        self._groups = tuple(groups)

    def update(self, step: StepInput) -> None:
        """Take in what a step tells."""
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

    def blocks(self, rows: NDArray[numpy.int32], seq_lens: NDArray[numpy.int32], block_size: int) -> list[NDArray[numpy.int32]]:
        """The block tables of a step, by group: [num_seqs, blocks of the longest], 0 past a sequence's own blocks."""
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
        """Where the k and v of one position of each row go in the caches of a group."""
        blocks = self.tables[group][rows, positions // block_size].astype(numpy.int64)
        slots: NDArray[numpy.int64] = blocks * block_size + positions % block_size
        return slots
