"""What a step has brought: tokens appended to sequences, deltas for clients, and what follows from a lack of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import torch

from headway.core.engine.data.schedule import ScheduledSequence
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.data.stats import EngineStats
from headway.core.engine.data.step import NO_TOKEN_LEFT, OutputDelta, Sampled, SampledExtras
from headway.core.engine.scheduling.drafting import Drafting
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.sampling.logprobs import TokenLogprobs
from headway.core.sampling.sampler import NOT_A_TOKEN

log = logging.getLogger("headway")

_delta: Callable[[tuple[Any, ...]], OutputDelta] = partial(tuple.__new__, OutputDelta)
"""An OutputDelta of all its fields, without the call in Python that its constructor makes: every token comes in one."""


class StepResults:
    """Appends what steps have sampled to their sequences, and makes the deltas that clients get."""

    def __init__(self, scheduler: Scheduler, drafting: Drafting | None, stats: EngineStats) -> None:
        self._scheduler = scheduler
        self._drafting = drafting
        self._stats = stats

    def take(
        self, step: Items[Sequence], sampling: Items[Sequence], sampled: Sampled, first_nan: str | None
    ) -> tuple[list[OutputDelta], list[Sequence]]:
        """Append a step's tokens to the sequences that sample and have not ended.

        first_nan: which layer made the first NaN. Returns the deltas, and the sequences that the tokens have ended.
        """
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
        """Append one token to each sequence that has not ended: what most steps bring, with no more work for each than needed."""
        deltas: list[OutputDelta] = []
        ended: list[Sequence] = []
        add, append_sampled = deltas.append, self._scheduler.append_sampled
        for seq, token in zip(sampling, tokens, strict=True):
            if seq.in_decode_batch:
                known = seq.token_ids
                known.append(token)
                if token in seq.stop_token_ids or len(known) >= seq.max_len:
                    seq.end()
                delta = _delta(
                    (seq.request_id, seq.index, (token,), seq.finish_reason, None, seq.num_cached_tokens, (), (), None)
                )
            elif seq.finished:
                append_sampled(seq, [])
                continue
            else:
                delta = delta_of(seq, append_sampled(seq, [token]))
            if seq.prompt_logprobs:  # the step that computed the prompt's end may have found none of them
                delta = _with_logprobs(delta, seq, (), len(seq.token_ids) - 1)
            add(delta)
            if seq.finish_reason is not None:
                ended.append(seq)
        return deltas, ended

    def _take_sampled(
        self, sampling: Items[Sequence], sampled: Sampled, first_nan: str | None
    ) -> tuple[list[OutputDelta], list[Sequence]]:
        """Append whatever a step has brought to each sequence that has not ended: drafts that held, log-probabilities, faults."""
        deltas: list[OutputDelta] = []
        ended: list[Sequence] = []
        errors, logprobs = ({}, {}) if sampled.extras is None else (sampled.extras.errors, sampled.extras.logprobs)
        for index, (seq, tokens) in enumerate(zip(sampling, sampled.token_lists(), strict=True)):
            if seq.finished:
                self._scheduler.append_sampled(seq, [])
                continue
            fault, known = tokens[-1], len(seq.token_ids)
            if seq.num_unverified and self._drafting is not None:
                self._stats.num_accepted_tokens += len(tokens) - 1
                self._drafting.verified(seq, seq.num_unverified, len(tokens) - 1)
            new = self._scheduler.append_sampled(seq, tokens[:-1] if fault < 0 else tokens)
            if fault < 0 and not seq.finished:
                seq.fail(_reason_for(seq, fault, errors.get(index), first_nan))
            if seq.finished:
                ended.append(seq)
            delta = delta_of(seq, new)
            if index in logprobs or seq.prompt_logprobs:
                delta = _with_logprobs(delta, seq, logprobs.get(index, ()), known)
            deltas.append(delta)
        return deltas, ended


def delta_of(seq: Sequence, tokens: Items[int]) -> OutputDelta:
    """The delta of a sequence that has got these tokens, or ended without any."""
    fields = (
        seq.request_id,
        seq.index,
        tuple(tokens),
        seq.finish_reason,
        seq.error,
        seq.num_cached_tokens,
        (),
        (),
        seq.admitted_time,
    )
    return _delta(fields)


def _with_logprobs(delta: OutputDelta, seq: Sequence, logprobs: Items[TokenLogprobs], known: int) -> OutputDelta:
    """Add log-probabilities of a delta's tokens, and of the prompt where these are the first. known: tokens before them."""
    prompt = tuple(seq.prompt_logprobs) if known == seq.num_prompt_tokens else ()
    return delta._replace(logprobs=tuple(logprobs[: len(delta.new_token_ids)]), prompt_logprobs=prompt)


def _reason_for(seq: Sequence, fault: int, error: str | None, first_nan: str | None) -> str:
    """Why a sequence has no next token. fault: what stands in the token's place. error: what the sampler reports about it."""
    if error is not None:
        return error
    if fault == NOT_A_TOKEN:
        found = first_nan or "HEADWAY_DEBUG=1 says which layer made the first"
        return f"the logits of token {seq.num_tokens} hold a NaN; {found}"
    return f"token {seq.num_tokens}: {NO_TOKEN_LEFT}; its parameters exclude each other here"


def _keep_prompt_logprobs(step: Items[Sequence], extras: SampledExtras) -> None:
    """Append a step's log-probabilities of prompt tokens; a prompt that is computed again brings nothing new."""
    for index, (position, entries) in extras.prompt_logprobs.items():
        seq = step[index]
        known = len(seq.prompt_logprobs)
        assert position - 1 <= known, "a part of the prompt was spared"
        seq.prompt_logprobs += entries[known - (position - 1) :]


def smaller_budget(step: Items[ScheduledSequence], error: Exception, chunked: bool) -> int | None:
    """Most tokens of a step from now on, after one for which memory was too small; None: nothing smaller would help.

    chunked: whether a prompt may be cut.
    """
    tokens = sum(scheduled.num_new_tokens for scheduled in step)
    smallest = 1 if chunked else max(scheduled.num_new_tokens for scheduled in step)
    if not isinstance(error, torch.OutOfMemoryError) or tokens <= smallest:
        return None
    torch.cuda.empty_cache()
    smaller = max(tokens // 2, smallest)
    log.warning(
        "out of memory in a step of %d tokens: steps have at most %d from now on; a lower max_num_batched_tokens or "
        "gpu_memory_utilization leaves room from the start",
        tokens,
        smaller,
    )
    return smaller
