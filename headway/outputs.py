"""What `LLM.generate` returns; the shape of vLLM's offline API."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    """Which of the request's n."""
    text: str
    token_ids: list[int]
    """A stop token that ended it is the last."""
    finish_reason: str | None
    """"stop" (end-of-text token, stop token or stop text), "length", or "error"; None while it runs."""
    error: str | None = None
    """What went wrong in the engine: backend, phase and shapes, or the NaN."""


@dataclass
class RequestMetrics:
    """Seconds on one clock (time.perf_counter)."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None

    @property
    def time_to_first_token(self) -> float:
        """Seconds from arrival to the first token."""
        assert self.first_token_time is not None, "no token yet"
        return self.first_token_time - self.arrival_time


@dataclass
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None
    """None where token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = field(default=0)
    """Prompt tokens whose k and v were already in the cache."""
