"""From what the scheduler has chosen to plain data: the last place that sees the engine's live sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from headway.core.engine.groups import CacheGroup
from headway.core.engine.schedule import Schedule
from headway.core.engine.sequence import Sequence as Completion
from headway.core.engine.step import NEWEST, NewPages, PageCopy, StartedRow, StepInput
from headway.core.sampling.needs import OF_TOKENS, need_of


def _started(row: int, seq: Completion) -> StartedRow:
    tokens = tuple(seq.token_ids) if need_of(seq.params) & OF_TOKENS else ()
    stops = tuple(seq.stop_token_ids) if seq.params.min_tokens else ()
    return StartedRow(row, seq.params, seq.seed, tokens, seq.num_prompt_tokens, stops)


def prepare(step: Schedule, groups: Sequence[CacheGroup]) -> StepInput:
    """The step as the executor reads it. Its sequences are noted as told of their pages, so every step must be launched."""
    started: list[StartedRow] = []
    new_pages: list[NewPages] = []
    for seq in step.changed:
        _tell(seq, started, new_pages)
    if not step.apart:
        return _plain(step, tuple(new_pages))
    copies: list[PageCopy] = []
    token_ids: list[int] = []
    num_newest = len(step.members)
    for seq, count, context_len, _, drafts in step.apart:
        if seq.table_changes:
            _tell(seq, started, new_pages)
        if seq.prefix_copies:
            for group, source, size in seq.prefix_copies:
                target = seq.tables[group].pages[context_len // groups[group].page_size]
                copies.append(PageCopy(group, source, target, size))
        if count == 1 and seq.newest_at == context_len:
            token_ids.append(NEWEST if seq.num_pending else seq.token_ids[context_len])
            num_newest += 1
        else:
            known = seq.token_ids[context_len : context_len + count - drafts]
            assert len(known) == count - drafts, "only a decoding sequence runs ahead of the host"
            token_ids += known
            token_ids += seq.draft_token_ids[:drafts]
    seqs, counts, contexts, samples, drafts_of = zip(*step.apart, strict=True)
    batch = _plain(step)
    # Where drafts are made all tokens have been read, and a graph that verifies takes none from the device.
    drafting = any(drafts_of)
    newest = numpy.array([seq.token_ids[-1] for seq in step.members], dtype=numpy.int64) if drafting else batch.token_ids
    decodes = (
        drafting
        and all(samples)
        and all(contexts)
        and all(one == drafts + 1 for one, drafts in zip(counts, drafts_of, strict=True))
    )

    def joined(own: Iterable[int | bool], others: NDArray[Any]) -> NDArray[Any]:
        numbers = numpy.array(own, dtype=others.dtype)
        return numpy.concatenate([numbers, others]) if len(others) else numbers

    return StepInput(
        joined([seq.row for seq in seqs], batch.rows),
        joined(counts, batch.query_lens),
        joined(contexts, batch.context_lens),
        joined(drafts_of, batch.num_draft_tokens),
        joined(samples, batch.samples),
        joined(token_ids, newest),
        num_newest == len(step),
        decodes,
        tuple(started),
        tuple(new_pages),
        tuple(copies),
    )


def _plain(step: Schedule, new_pages: tuple[NewPages, ...] = ()) -> StepInput:
    """Of the members of the batch alone."""
    count = len(step.members)
    return StepInput(
        step.rows,
        numpy.ones(count, dtype=numpy.int32),
        step.context_lens,
        numpy.zeros(count, dtype=numpy.int32),
        numpy.ones(count, dtype=numpy.bool_),
        numpy.full(count, NEWEST, dtype=numpy.int64),
        True,
        new_pages=new_pages,
    )


def _tell(seq: Completion, started: list[StartedRow], new_pages: list[NewPages]) -> None:
    """Note what the executor has not been told of a sequence's pages, and of the sequence itself."""
    row = seq.row
    assert row is not None, "a scheduled sequence has a row"
    if not seq.started:
        started.append(_started(row, seq))
        seq.started = True
    for group, start, pages in seq.table_changes:
        new_pages.append(NewPages(row, start, pages, group))
    seq.table_changes.clear()
