"""Turns what the scheduler has chosen into plain data: the last place that sees the engine's live sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.adapters import NO_ADAPTER
from headway.core.engine.data.groups import CacheGroup
from headway.core.engine.data.schedule import ScheduledStep
from headway.core.engine.data.sequence import Sequence as Completion
from headway.core.engine.data.step import NEWEST, NewPages, PageCopy, StartedRow, StepInput
from headway.core.engine.scheduling.adapter_slots import AdapterTable
from headway.core.sampling.row_needs import OF_TOKENS, need_of


def prepare(
    step: ScheduledStep, groups: Sequence[CacheGroup], states: bool = False, adapters: AdapterTable | None = None
) -> StepInput:
    """Turn a step into the executor's input. Changes of pages are reported once, so every prepared step must be launched.

    states: whether layers of the model keep states. adapters: of the engine; None: there are none.
    """
    found = _without_states(step, groups)
    if adapters is not None:
        slots = _joined([each.seq.adapter_slot for each in step.individual], step.adapter_slots)
        used = slots if (slots != NO_ADAPTER).any() else None
        found = replace(found, adapters=used, adapter_loads=adapters.take_loads())
    if not states:
        return found
    if not step.individual:
        return replace(found, state_indices=step.state_indices)
    seqs = [each.seq for each in step.individual]
    return replace(
        found,
        state_indices=_joined([seq.state_index for seq in seqs], step.state_indices),
        restored=tuple((seq.restored_from, seq.row) for seq in seqs if seq.restored_from is not None and seq.row is not None),
        checkpoints=numpy.array(
            [(index, kept.num_tokens, kept.slot) for index, seq in enumerate(seqs) for kept in seq.checkpoints], dtype=numpy.int32
        ).reshape(-1, 3),
    )


def _without_states(step: ScheduledStep, groups: Sequence[CacheGroup]) -> StepInput:
    """The step as layers with keys and values see it."""
    started: list[StartedRow] = []
    new_pages: list[NewPages] = []
    for seq in step.changed:
        _tell(seq, started, new_pages)
    if not step.individual:
        return _members_alone(step, tuple(new_pages))
    copies: list[PageCopy] = []
    token_ids: list[int] = []
    embedded: list[tuple[int, Tensor]] = []
    num_newest = len(step.members)
    for seq, count, context_len, _, drafts in step.individual:
        if seq.table_changes:
            _tell(seq, started, new_pages)
        if seq.prefix_copies:
            for group, source, size in seq.prefix_copies:
                target = seq.tables[group].pages[context_len // groups[group].page_size]
                copies.append(PageCopy(group, source, target, size))
        if seq.embedded is not None and context_len < seq.num_prompt_tokens:
            embedded.append((len(token_ids), seq.embedded.rows[context_len : context_len + count]))
        if count == 1 and seq.newest_at == context_len:
            token_ids.append(NEWEST if seq.num_pending else seq.token_ids[context_len])
            num_newest += 1
        else:
            known = seq.token_ids[context_len : context_len + count - drafts]
            assert len(known) == count - drafts, "only a decoding sequence runs ahead of the host"
            token_ids += known
            token_ids += seq.draft_token_ids[:drafts]
    found = _with_members(step, token_ids, num_newest == len(step), tuple(started), tuple(new_pages), tuple(copies))
    return replace(found, embedded=tuple(embedded)) if embedded else found


def _with_members(
    step: ScheduledStep,
    token_ids: list[int],
    goes_on: bool,
    started: tuple[StartedRow, ...],
    new_pages: tuple[NewPages, ...],
    copies: tuple[PageCopy, ...],
) -> StepInput:
    """The individual sequences of a step, and after them the members of the batch. token_ids: of the former."""
    seqs, counts, contexts, samples, drafts = zip(*step.individual, strict=True)
    members = _members_alone(step)
    # Where drafts are made all tokens have been read, and a graph that verifies takes none from the device.
    drafting = any(drafts)
    newest = numpy.array([seq.token_ids[-1] for seq in step.members], dtype=numpy.int64) if drafting else members.token_ids
    decodes = all(samples) and all(contexts) and all(one == own + 1 for one, own in zip(counts, drafts, strict=True))
    return StepInput(
        rows=_joined([seq.row for seq in seqs], members.rows),
        query_lens=_joined(counts, members.query_lens),
        context_lens=_joined(contexts, members.context_lens),
        num_draft_tokens=_joined(drafts, members.num_draft_tokens),
        samples=_joined(samples, members.samples),
        token_ids=_joined(token_ids, newest),
        goes_on=goes_on,
        verifies=drafting and decodes,
        started=started,
        new_pages=new_pages,
        copies=copies,
    )


def _members_alone(step: ScheduledStep, new_pages: tuple[NewPages, ...] = ()) -> StepInput:
    """The members of the batch: what most steps consist of."""
    count = len(step.members)
    return StepInput(
        rows=step.rows,
        query_lens=numpy.ones(count, dtype=numpy.int32),
        context_lens=step.context_lens,
        num_draft_tokens=numpy.zeros(count, dtype=numpy.int32),
        samples=numpy.ones(count, dtype=numpy.bool_),
        token_ids=numpy.full(count, NEWEST, dtype=numpy.int64),
        goes_on=True,
        new_pages=new_pages,
    )


def _joined(own: Iterable[int | bool | None], others: NDArray[Any]) -> NDArray[Any]:
    numbers = numpy.array(own, dtype=others.dtype)
    return numpy.concatenate([numbers, others]) if len(others) else numbers


def _tell(seq: Completion, started: list[StartedRow], new_pages: list[NewPages]) -> None:
    """Note what the executor does not know yet of a sequence and its pages."""
    row = seq.row
    assert row is not None, "a scheduled sequence has a row"
    if not seq.started:
        started.append(_started_row(row, seq))
        seq.started = True
    for group, start, pages in seq.table_changes:
        new_pages.append(NewPages(row, start, pages, group))
    seq.table_changes.clear()


def _started_row(row: int, seq: Completion) -> StartedRow:
    return StartedRow(
        row=row,
        params=seq.params,
        seed=seq.seed,
        token_ids=tuple(seq.token_ids) if need_of(seq.params) & OF_TOKENS else (),
        num_prompt_tokens=seq.num_prompt_tokens,
        stop_token_ids=tuple(seq.stop_token_ids) if seq.params.min_tokens else (),
    )
