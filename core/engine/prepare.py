"""From what the scheduler has chosen to plain data: the last place that sees the engine's live sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from headway.core.engine.groups import CacheGroup
from headway.core.engine.scheduler import ScheduledSequence
from headway.core.engine.sequence import Sequence as Completion
from headway.core.engine.step import NEWEST, NewPages, PageCopy, StartedRow, StepInput
from headway.core.sampling.needs import OF_TOKENS, need_of


def _started(row: int, seq: Completion) -> StartedRow:
    tokens = tuple(seq.token_ids) if need_of(seq.params) & OF_TOKENS else ()
    stops = tuple(seq.stop_token_ids) if seq.params.min_tokens else ()
    return StartedRow(row, seq.params, seq.seed, tokens, seq.num_prompt_tokens, stops)


def prepare(step: list[ScheduledSequence], groups: Sequence[CacheGroup]) -> StepInput:
    """The step as the executor reads it. Its sequences are noted as told of their pages, so every step must be launched."""
    started: list[StartedRow] = []
    new_pages: list[NewPages] = []
    copies: list[PageCopy] = []
    token_ids: list[int] = []
    num_newest = 0
    for seq, count, context_len, _, drafts in step:
        if seq.table_changes:
            row = seq.row
            assert row is not None, "a scheduled sequence has a row"
            if not seq.started:
                started.append(_started(row, seq))
                seq.started = True
            for group, start, pages in seq.table_changes:
                new_pages.append(NewPages(row, start, pages, group))
            seq.table_changes.clear()
        if seq.prefix_copies:
            for group, source, size in seq.prefix_copies:
                target = seq.tables[group].pages[context_len // groups[group].page_size]
                copies.append(PageCopy(group, source, target, size))
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
        tuple(new_pages),
        tuple(copies),
    )
