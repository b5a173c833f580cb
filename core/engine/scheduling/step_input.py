"""Conversion of a scheduled step into plain data for the executor, and of its sampled tokens into deltas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.adapters import NO_ADAPTER
from headway.core.engine.data.groups import CacheGroup
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.data.step import (
    NEWEST,
    NO_TOKEN_LEFT,
    NewPages,
    OutputDelta,
    PageCopy,
    Sampled,
    SampledExtras,
    ScheduledSequence,
    ScheduledStep,
    StartedRow,
    StepInput,
)
from headway.core.engine.scheduling.adapter_slots import AdapterTable
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.sampling.logprobs import TokenLogprobs
from headway.core.sampling.sampler import NOT_A_TOKEN, OF_TOKENS, need_of

log = logging.getLogger("headway")

_delta: Callable[[tuple[Any, ...]], OutputDelta] = partial(tuple.__new__, OutputDelta)
"""Function that makes an OutputDelta from a tuple of its fields. It avoids a Python constructor call for every token."""


class StepResults:
    """Appends sampled tokens to their sequences, and makes the deltas for clients."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._stats = scheduler.stats

    def take(
        self, step: Items[Sequence], sampling: Items[Sequence], sampled: Sampled, first_nan: str | None
    ) -> tuple[list[OutputDelta], list[Sequence]]:
        """Append a step's tokens to its sequences. Returns the deltas, and the sequences that have ended. first_nan: source of
        the first NaN, or None."""
        if sampled.extras is not None:
            _keep_prompt_logprobs(step, sampled.extras)
        plain = sampled.plain_tokens()
        if plain is None:
            deltas, ended = self._take_sampled(sampling, sampled, first_nan)
            self._stats.num_output_tokens += sum(len(each.new_token_ids) for each in deltas)
        else:
            deltas, ended = self._take_plain(sampling, plain)
            self._stats.num_output_tokens += len(deltas)
        return deltas, ended

    def _take_plain(self, sampling: Items[Sequence], tokens: Items[int]) -> tuple[list[OutputDelta], list[Sequence]]:
        """Append one token to each unfinished sequence. This is the fast path of most steps."""
        deltas: list[OutputDelta] = []
        ended: list[Sequence] = []
        add, append_sampled = deltas.append, self._scheduler.append_sampled
        for seq, token in zip(sampling, tokens, strict=True):
            if seq.in_decode_batch:
                known = seq.token_ids
                known.append(token)
                if token in seq.stop_token_ids or len(known) >= seq.max_len:
                    seq.end()
                if len(known) == seq.num_prompt_tokens + 1:
                    delta = delta_of(seq, (token,))
                else:
                    delta = _delta(
                        (seq.request_id, seq.index, (token,), seq.finish_reason, None, seq.num_cached_tokens, (), (), None, None)
                    )
            elif seq.finished:
                append_sampled(seq, [])
                continue
            else:
                delta = delta_of(seq, append_sampled(seq, [token]))
            if seq.prompt_logprobs:  # the step that computed the prompt's end may have sampled no token
                delta = _with_logprobs(delta, seq, (), len(seq.token_ids) - 1)
            add(delta)
            if seq.finish_reason is not None:
                ended.append(seq)
        return deltas, ended

    def _take_sampled(
        self, sampling: Items[Sequence], sampled: Sampled, first_nan: str | None
    ) -> tuple[list[OutputDelta], list[Sequence]]:
        """Append each unfinished sequence's tokens, including accepted drafts, and process log-probabilities and errors."""
        deltas: list[OutputDelta] = []
        ended: list[Sequence] = []
        errors, logprobs = ({}, {}) if sampled.extras is None else (sampled.extras.errors, sampled.extras.logprobs)
        for index, (seq, tokens) in enumerate(zip(sampling, sampled.token_lists(), strict=True)):
            if seq.finished:
                self._scheduler.append_sampled(seq, [])
                continue
            fault, known = tokens[-1], len(seq.token_ids)
            if seq.num_unverified and self._scheduler.drafting is not None:
                self._stats.num_accepted_tokens += len(tokens) - 1
                self._scheduler.drafting.verified(seq, seq.num_unverified, len(tokens) - 1)
            new = self._scheduler.append_sampled(seq, tokens[:-1] if fault < 0 else tokens)
            if fault < 0 and not seq.finished:
                reason = _reason_for(seq, fault, errors.get(index), first_nan)
                log.warning("request %s ends: %s", seq.request_id, reason)
                seq.fail(reason)
            if seq.finished:
                ended.append(seq)
            delta = delta_of(seq, new)
            if index in logprobs or seq.prompt_logprobs:
                delta = _with_logprobs(delta, seq, logprobs.get(index, ()), known)
            deltas.append(delta)
        return deltas, ended


def delta_of(seq: Sequence, tokens: Items[int]) -> OutputDelta:
    """Return the delta of a sequence that got these tokens, or that ended without a new token."""
    report = None if seq.num_tokens > seq.num_prompt_tokens + len(tokens) else seq.cache_report
    state = seq.finish_reason, seq.error, seq.num_cached_tokens
    return _delta((seq.request_id, seq.index, tuple(tokens), *state, (), (), seq.admitted_time, report))


def _with_logprobs(delta: OutputDelta, seq: Sequence, logprobs: Items[TokenLogprobs], known: int) -> OutputDelta:
    """Return the delta with the log-probabilities of its tokens and, in the first delta, of the prompt. known: number of prompt
    and output tokens before the delta."""
    prompt = tuple(seq.prompt_logprobs) if known == seq.num_prompt_tokens else ()
    return delta._replace(logprobs=tuple(logprobs[: len(delta.new_token_ids)]), prompt_logprobs=prompt)


def _reason_for(seq: Sequence, fault: int, error: str | None, first_nan: str | None) -> str:
    """Return the reason why a sequence has no next token. fault: negative value that the sampler returned instead of a token.
    error: message of the sampler, or None."""
    if error is not None:
        return error
    if fault == NOT_A_TOKEN:
        found = first_nan or "HEADWAY_DEBUG=1 says which layer made the first"
        return f"the logits of token {seq.num_tokens} hold a NaN; {found}"
    return f"token {seq.num_tokens}: {NO_TOKEN_LEFT}; its parameters exclude each other here"


def _keep_prompt_logprobs(step: Items[Sequence], extras: SampledExtras) -> None:
    """Append the log-probabilities of prompt tokens in a step to the sequences. A recomputed part of a prompt adds none."""
    for index, (position, entries) in extras.prompt_logprobs.items():
        seq = step[index]
        known = len(seq.prompt_logprobs)
        assert position - 1 <= known, "a part of the prompt was spared"
        seq.prompt_logprobs += entries[known - (position - 1) :]


def smaller_budget(step: Items[ScheduledSequence], error: Exception, chunked: bool) -> int | None:
    """Return a smaller token budget after a step ran out of memory, or None if the step cannot be retried. chunked: True if
    prompts may be split."""
    tokens = sum(scheduled.num_new_tokens for scheduled in step)
    smallest = 1 if chunked else max(scheduled.num_new_tokens for scheduled in step)
    if not isinstance(error, torch.OutOfMemoryError) or tokens <= smallest:
        return None
    torch.cuda.empty_cache()
    smaller = max(tokens // 2, smallest)
    log.warning(
        "out of memory in a step of %d tokens: limiting steps to %d tokens; lower max_num_batched_tokens or "
        "gpu_memory_utilization to leave room from the start",
        tokens,
        smaller,
    )
    return smaller


def prepare(
    step: ScheduledStep, groups: Items[CacheGroup], states: bool = False, adapters: AdapterTable | None = None
) -> StepInput:
    """Return the executor's input for a step. The step must then be launched, because changes of pages are reported only once.

    states: True if the model has layers with a state.
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


def _without_states(step: ScheduledStep, groups: Items[CacheGroup]) -> StepInput:
    """Return the step's input without states and adapters."""
    started: list[StartedRow] = []
    new_pages: list[NewPages] = []
    for seq in step.changed:
        _collect_changes(seq, started, new_pages)
    if not step.individual:
        return StepInput.continuing(step.rows, step.context_lens, tuple(new_pages))
    copies: list[PageCopy] = []
    token_ids: list[int] = []
    embedded: list[tuple[int, Tensor]] = []
    num_newest = len(step.members)
    for seq, count, context_len, _, drafts in step.individual:
        if seq.table_changes:
            _collect_changes(seq, started, new_pages)
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
    continues: bool,
    started: tuple[StartedRow, ...],
    new_pages: tuple[NewPages, ...],
    copies: tuple[PageCopy, ...],
) -> StepInput:
    """Return the input of a step: the individual sequences, then the batch's members. token_ids: tokens of the individual
    sequences."""
    seqs, counts, contexts, samples, drafts = zip(*step.individual, strict=True)
    members = StepInput.continuing(step.rows, step.context_lens)
    # With drafts all tokens have been read, and a graph that verifies takes none from the device.
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
        continues=continues,
        verifies=drafting and decodes,
        started=started,
        new_pages=new_pages,
        copies=copies,
    )


def _joined(own: Iterable[int | bool | None], others: NDArray[Any]) -> NDArray[Any]:
    numbers = numpy.array(own, dtype=others.dtype)
    return numpy.concatenate([numbers, others]) if len(others) else numbers


def _collect_changes(seq: Sequence, started: list[StartedRow], new_pages: list[NewPages]) -> None:
    row = seq.row
    assert row is not None, "a scheduled sequence has a row"
    if not seq.started:
        started.append(_started_row(row, seq))
        seq.started = True
    for group, start, pages in seq.table_changes:
        new_pages.append(NewPages(row, start, pages, group))
    seq.table_changes.clear()


def _started_row(row: int, seq: Sequence) -> StartedRow:
    return StartedRow(
        row=row,
        params=seq.params,
        seed=seq.seed,
        token_ids=tuple(seq.token_ids) if need_of(seq.params) & OF_TOKENS else (),
        num_prompt_tokens=seq.num_prompt_tokens,
        stop_token_ids=tuple(seq.stop_token_ids) if seq.params.min_tokens else (),
    )
