"""What an executor knows of the blocks of the sequence in each row."""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

from headway.core.engine.step import StepInput


class Rows:
    """Host memory by row, brought up to date by each step."""

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        """max_blocks: of the longest sequence."""
        self.tables: NDArray[numpy.int32] = numpy.zeros((max_num_seqs, max_blocks), dtype=numpy.int32)
        """Block table of each row; what is beyond a sequence's blocks is left from others."""

    def update(self, step: StepInput) -> None:
        """Take in what a step tells."""
        for row, start, blocks in step.new_blocks:
            self.tables[row, start : start + len(blocks)] = blocks

    def blocks(self, rows: NDArray[numpy.int32], seq_lens: NDArray[numpy.int32], block_size: int) -> NDArray[numpy.int32]:
        """The block table of a step: [num_seqs, blocks of the longest], 0 past a sequence's own blocks."""
        counts = -(-seq_lens // block_size)
        table = numpy.take(self.tables, rows, axis=0)[:, : int(counts.max())]
        table[numpy.arange(table.shape[1]) >= counts[:, None]] = 0
        return table

    def slots(self, rows: NDArray[numpy.int32], positions: NDArray[numpy.int32], block_size: int) -> NDArray[numpy.int64]:
        """Where the k and v of one position of each row go."""
        blocks = self.tables[rows, positions // block_size].astype(numpy.int64)
        slots: NDArray[numpy.int64] = blocks * block_size + positions % block_size
        return slots
