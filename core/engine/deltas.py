"""What a step of the engine tells its clients."""

from __future__ import annotations

from typing import NamedTuple

from headway.core.sampling.logprobs import TokenLogprobs


class OutputDelta(NamedTuple):
    """What a step has added to one completion of a request. Immutable; a request ends when all its completions have."""

    request_id: str
    completion: int
    """Which of the request's n completions."""
    new_token_ids: tuple[int, ...]
    """Sampled since the last delta; a stop token that ended the completion is the last."""
    finish_reason: str | None = None
    """"stop" (end-of-text or stop token), "length" or "error"; None while the completion runs."""
    error: str | None = None
    """What went wrong, where finish_reason is "error"."""
    num_cached_tokens: int = 0
    """Prompt tokens whose k and v were in the cache already when the sequence was admitted."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of new_token_ids, where they are wanted."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens from the second on, where they are wanted: with the first token of completion 0."""
    admitted_time: float | None = None
    """When the sequence was first admitted (time.perf_counter); told with its first token, afterwards it may be None."""
