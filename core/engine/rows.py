"""What an executor knows of the sequence in each row: its blocks, and how its tokens are sampled."""

from __future__ import annotations

from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from headway.core.engine.step import StepInput
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import filters, keys_of, scale_of


class Draws(NamedTuple):
    """How the tokens of some rows are chosen."""

    scales: NDArray[numpy.float32]
    """[rows]: 1 / temperature, 0 for greedy."""
    keys: NDArray[numpy.int64]
    """[rows]: what decides the random numbers."""


class Rows:
    """Host memory by row, brought up to date by each step."""

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        """max_blocks: of the longest sequence."""
        self.tables: NDArray[numpy.int32] = numpy.zeros((max_num_seqs, max_blocks), dtype=numpy.int32)
        """Block table of each row; what is beyond a sequence's blocks is left from others."""
        self.params = [SamplingParams()] * max_num_seqs
        self.seeds = [0] * max_num_seqs
        self._seeds = numpy.zeros(max_num_seqs, dtype=numpy.uint64)
        self._scales = numpy.zeros(max_num_seqs, dtype=numpy.float32)
        self._filters = numpy.zeros(max_num_seqs, dtype=numpy.bool_)

    def update(self, step: StepInput) -> None:
        """Take in what a step tells."""
        for row, params, seed in step.started:
            self.params[row], self.seeds[row] = params, seed
            self._seeds[row], self._scales[row], self._filters[row] = seed % 2**64, scale_of(params), filters(params)
        for row, start, blocks in step.new_blocks:
            self.tables[row, start : start + len(blocks)] = blocks

    def draws(self, rows: NDArray[numpy.int32], positions: NDArray[numpy.int32]) -> Draws | None:
        """What `SamplingOps.choose` takes for tokens at these positions; None where a row leaves out unlikely tokens."""
        if self._filters[rows].any():
            return None
        return Draws(self._scales[rows], keys_of(self._seeds[rows], positions).view(numpy.int64))

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
