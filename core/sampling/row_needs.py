"""Needs of a request: what its parameters ask for beyond a draw from the model's own distribution; and its temperature."""

from __future__ import annotations

from enum import IntFlag

from headway.core.sampling.params import SamplingParams


class Need(IntFlag):
    """A part of what happens between a model's logits and a token."""

    TOP = 1
    MIN_P = 2
    PENALTY = 4
    BIAS = 8
    MIN_TOKENS = 16
    ALLOWED = 32
    BAD_WORDS = 64
    PROCESSOR = 128
    GRAMMAR = 256
    LOGPROBS = 512
    PROMPT_LOGPROBS = 1024


SHAPING = (
    Need.TOP
    | Need.MIN_P
    | Need.PENALTY
    | Need.BIAS
    | Need.MIN_TOKENS
    | Need.ALLOWED
    | Need.BAD_WORDS
    | Need.PROCESSOR
    | Need.GRAMMAR
)
"""Needs for which the logits change before a token is chosen."""
FILTERING = Need.TOP | Need.MIN_P
"""Needs that a kernel may serve in place of changed logits, see `SamplingOps.filter`."""
ON_HOST = Need.PROCESSOR | Need.GRAMMAR
"""Needs for which the host must have seen the tokens before."""
OF_HISTORY = Need.PENALTY | Need.BAD_WORDS
"""Needs for which the device must know the tokens before."""
OF_TOKENS = ON_HOST | OF_HISTORY | Need.PROMPT_LOGPROBS
"""Needs for which an executor is told the tokens with which a sequence begins in a row."""

REASONS = {
    Need.TOP: "top_k or top_p",
    Need.MIN_P: "min_p",
    Need.PENALTY: "penalties",
    Need.BIAS: "logit_bias",
    Need.MIN_TOKENS: "min_tokens",
    Need.ALLOWED: "allowed_token_ids",
    Need.BAD_WORDS: "bad_words",
    Need.PROCESSOR: "logits_processors",
    Need.GRAMMAR: "structured_outputs",
    Need.LOGPROBS: "logprobs",
    Need.PROMPT_LOGPROBS: "prompt_logprobs",
}
"""The words of a request for each need, for EngineStats."""


def scale_of(params: SamplingParams) -> float:
    """1 / temperature, 0 for greedy; kept where it is neither 0 nor infinite as a float32.

    Times a logit of -inf or of 0 those would be NaN.
    """
    return 0.0 if params.greedy else max(1 / max(params.temperature, 2.0**-100), 2.0**-100)


def need_of(params: SamplingParams) -> Need:
    """Everything that the parameters ask for."""
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    words = params.bad_words_token_ids or ()
    wanted_by = {
        Need.TOP: not params.greedy and (params.top_k > 0 or params.top_p < 1),
        Need.MIN_P: not params.greedy and params.min_p > 0,
        Need.PENALTY: penalties != (1, 0, 0),
        Need.BIAS: bool(params.logit_bias) or any(len(word) == 1 for word in words),
        Need.MIN_TOKENS: params.min_tokens > 0,
        Need.ALLOWED: params.allowed_token_ids is not None,
        Need.BAD_WORDS: any(len(word) > 1 for word in words),
        Need.PROCESSOR: bool(params.logits_processors),
        Need.GRAMMAR: params.structured_outputs is not None,
        Need.LOGPROBS: params.logprobs is not None or params.num_drawn > params.n,
        Need.PROMPT_LOGPROBS: params.prompt_logprobs is not None,
    }
    found = Need(0)
    for need, wanted in wanted_by.items():
        if wanted:
            found |= need
    return found


def reasons_of(needs: int) -> tuple[str, ...]:
    """The words of those that are set."""
    return tuple(text for need, text in REASONS.items() if needs & need)
