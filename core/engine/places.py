"""Where in a step something is sampled, and what it verifies."""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

from headway.core.engine.step import StepInput


def positions_of(step: StepInput) -> NDArray[numpy.int64]:
    """Position in its sequence of every new token: int64 [num_tokens]."""
    starts = numpy.cumsum(step.query_lens, dtype=numpy.int64) - step.query_lens
    positions: NDArray[numpy.int64] = numpy.arange(step.num_tokens) + numpy.repeat(step.context_lens - starts, step.query_lens)
    return positions


def logit_indices(step: StepInput) -> NDArray[numpy.int64]:
    """Which new tokens something is sampled after: the last of each sampling sequence, and with d drafts the d before it."""
    counts = numpy.where(step.samples, step.num_draft_tokens + 1, 0)
    ends = numpy.cumsum(step.query_lens, dtype=numpy.int64)
    if not step.num_draft_tokens.any():
        last: NDArray[numpy.int64] = ends[step.samples] - 1
        return last
    indices: NDArray[numpy.int64] = numpy.repeat(ends - numpy.cumsum(counts), counts)
    return indices + numpy.arange(len(indices))


def sampled_at(step: StepInput) -> tuple[NDArray[numpy.int32], NDArray[numpy.int32]]:
    """Row and position of every token that is sampled."""
    indices = logit_indices(step)
    if len(indices) == step.num_tokens == step.num_seqs:
        return step.rows, step.context_lens + 1
    rows = numpy.repeat(step.rows, step.query_lens)[indices]
    return rows, (positions_of(step)[indices] + 1).astype(numpy.int32)


def drafts_by_row(step: StepInput) -> dict[int, list[int]]:
    """The guesses that a step verifies, by row."""
    ends, counts = numpy.cumsum(step.query_lens), step.num_draft_tokens
    return {
        int(step.rows[index]): step.token_ids[ends[index] - counts[index] : ends[index]].tolist()
        for index in numpy.flatnonzero(counts)
        if step.samples[index]
    }
