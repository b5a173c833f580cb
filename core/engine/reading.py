"""What a step has brought for a sequence, and what clients are told of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

from headway.core.engine.deltas import OutputDelta
from headway.core.engine.sequence import Sequence
from headway.core.engine.step import Found, Sampled
from headway.core.sampling.logprobs import TokenLogprobs
from headway.core.sampling.sampler import NOT_A_TOKEN

_delta: Callable[[tuple[Any, ...]], OutputDelta] = partial(tuple.__new__, OutputDelta)
"""An OutputDelta of all its fields, without the call in Python that its constructor makes: every token comes in one."""


def delta_of(seq: Sequence, tokens: Items[int]) -> OutputDelta:
    """What is told of a sequence that has got these tokens, or ended without any."""
    told = (
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
    return _delta(told)


def with_logprobs(delta: OutputDelta, seq: Sequence, logprobs: Items[TokenLogprobs], known: int) -> OutputDelta:
    """The same with log-probabilities of its tokens, and of its prompt where these are its first. known: tokens before them."""
    prompt = tuple(seq.prompt_logprobs) if known == seq.num_prompt_tokens else ()
    return delta._replace(logprobs=tuple(logprobs[: len(delta.new_token_ids)]), prompt_logprobs=prompt)


def _reason_for(seq: Sequence, fault: int, error: str | None, first_nan: str | None) -> str:
    """Why a sequence has no next token. fault: what stands in the token's place. error: what the sampler says of it."""
    if error is not None:
        return error
    if fault == NOT_A_TOKEN:
        found = first_nan or "HEADWAY_DEBUG=1 says which layer made the first"
        return f"the logits of token {seq.num_tokens} hold a NaN; {found}"
    return f"token {seq.num_tokens}: what the request forbids leaves no token; its parameters exclude each other here"


def keep_prompt_logprobs(step: Items[Sequence], found: Found) -> None:
    """Append what a step has found of prompts; a prompt that is computed again brings nothing new."""
    for index, (position, entries) in found.prompt_logprobs.items():
        seq = step[index]
        known = len(seq.prompt_logprobs)
        assert position - 1 <= known, "a part of the prompt was spared"
        seq.prompt_logprobs += entries[known - (position - 1) :]


def take_plain(
    sampling: Items[Sequence], tokens: Items[int], read: Callable[[Sequence, list[int]], list[int]]
) -> tuple[list[OutputDelta], list[Sequence]]:
    """Append one token to each sequence that has not ended: what most steps bring, with no more work for each than that takes.

    read: see `Scheduler.read`. Returns what is told of them, and those that have ended.
    """
    told: list[OutputDelta] = []
    ended: list[Sequence] = []
    tell = told.append
    for seq, token in zip(sampling, tokens, strict=True):
        if seq.together:
            known = seq.token_ids
            known.append(token)
            if token in seq.stop_token_ids or len(known) >= seq.max_len:
                seq.end()
            delta = _delta((seq.request_id, seq.index, (token,), seq.finish_reason, None, seq.num_cached_tokens, (), (), None))
        elif seq.finished:
            read(seq, [])
            continue
        else:
            delta = delta_of(seq, read(seq, [token]))
        if seq.prompt_logprobs:  # the step that computed the prompt's end may have found none of them
            delta = with_logprobs(delta, seq, (), len(seq.token_ids) - 1)
        tell(delta)
        if seq.finish_reason is not None:
            ended.append(seq)
    return told, ended


def take_sampled(
    sampling: Items[Sequence],
    sampled: Sampled,
    first_nan: str | None,
    read: Callable[[Sequence, list[int]], list[int]],
    verified: Callable[[Sequence, int, int], None],
) -> tuple[list[OutputDelta], list[Sequence]]:
    """Append whatever a step has brought to each sequence that has not ended; see `take_plain`.

    first_nan: which layer made the first NaN. verified: told of a sequence's guesses, and of how many of them held.
    """
    told: list[OutputDelta] = []
    ended: list[Sequence] = []
    errors, logprobs = ({}, {}) if sampled.found is None else (sampled.found.errors, sampled.found.logprobs)
    for index, (seq, tokens) in enumerate(zip(sampling, sampled.token_lists(), strict=True)):
        if seq.finished:
            read(seq, [])
            continue
        fault, known = tokens[-1], len(seq.token_ids)
        if seq.num_unverified:
            verified(seq, seq.num_unverified, len(tokens) - 1)
        new = read(seq, tokens[:-1] if fault < 0 else tokens)
        if fault < 0 and not seq.finished:
            seq.fail(_reason_for(seq, fault, errors.get(index), first_nan))
        if seq.finished:
            ended.append(seq)
        delta = delta_of(seq, new)
        told.append(
            with_logprobs(delta, seq, logprobs.get(index, ()), known) if index in logprobs or seq.prompt_logprobs else delta
        )
    return told, ended
