"""From what the scheduler has chosen to plain data: the last place that sees the engine's live sequences."""

from __future__ import annotations

import numpy

from headway.core.engine.scheduler import ScheduledSequence
from headway.core.engine.sequence import Sequence
from headway.core.engine.step import NEWEST, BlockCopy, NewBlocks, StartedRow, StepInput
from headway.core.sampling.needs import OF_TOKENS, need_of


def _started(row: int, seq: Sequence) -> StartedRow:
    tokens = tuple(seq.token_ids) if need_of(seq.params) & OF_TOKENS else ()
    stops = tuple(seq.stop_token_ids) if seq.params.min_tokens else ()
    return StartedRow(row, seq.params, seq.seed, tokens, seq.num_prompt_tokens, stops)


def prepare(step: list[ScheduledSequence], block_size: int) -> StepInput:
    """The step as the executor reads it. Its sequences are noted as told of their blocks, so every step must be launched."""
    started: list[StartedRow] = []
    new_blocks: list[NewBlocks] = []
    copies: list[BlockCopy] = []
    token_ids: list[int] = []
    num_newest = 0
    for seq, count, context_len, _, drafts in step:
        sent = seq.num_blocks_sent
        if sent < len(seq.blocks):
            row = seq.row
            assert row is not None, "a scheduled sequence has a row"
            if sent == 0:
                started.append(_started(row, seq))
            new_blocks.append(NewBlocks(row, sent, seq.blocks[sent:]))
            seq.num_blocks_sent = len(seq.blocks)
        if seq.prefix_copy is not None:
            source, size = seq.prefix_copy
            copies.append(BlockCopy(source, seq.blocks[context_len // block_size], size))
        if count == 1 and seq.newest_at == context_len:
            token_ids.append(NEWEST)
            num_newest += 1
        else:
            known = seq.token_ids[context_len : context_len + count - drafts]
            assert len(known) == count - drafts, "only a decoding sequence runs ahead of the host"
            token_ids += known
            token_ids += seq.draft_token_ids[:drafts]
    seqs, counts, contexts, samples, drafts_of = zip(*step, strict=True)
    return StepInput(
        numpy.array([seq.row for seq in seqs], dtype=numpy.int32),
        numpy.array(counts, dtype=numpy.int32),
        numpy.array(contexts, dtype=numpy.int32),
        numpy.array(drafts_of, dtype=numpy.int32),
        numpy.array(samples, dtype=numpy.bool_),
        numpy.array(token_ids, dtype=numpy.int64),
        num_newest == len(step),
        tuple(started),
        tuple(new_blocks),
        tuple(copies),
    )
