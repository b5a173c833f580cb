"""An engine driven to the end, and what it wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.core.engine.loop import EngineLoop
from headway.core.sampling.logprobs import TokenLogprobs
from headway.core.sampling.params import SamplingParams


@dataclass
class Written:
    """One completion, from its deltas."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


def drain(engine: EngineLoop, written: dict[tuple[str, int], Written] | None = None) -> dict[tuple[str, int], Written]:
    """Run until nothing is left: completions by request id and index."""
    written = {} if written is None else written
    while engine.has_unfinished:
        for delta in engine.step():
            one = written.setdefault((delta.request_id, delta.completion), Written())
            assert one.finish_reason is None, "a delta after the last"
            one.token_ids += delta.new_token_ids
            one.logprobs += delta.logprobs
            one.prompt_logprobs += delta.prompt_logprobs
            one.finish_reason, one.error, one.num_cached_tokens = delta.finish_reason, delta.error, delta.num_cached_tokens
    engine.blocks.check_integrity([])
    assert engine.blocks.num_free == engine.blocks.num_pages
    return written


def generate(
    engine: EngineLoop, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Written]:
    """The first completion of each prompt."""
    wishes = params if isinstance(params, Sequence) else [params] * len(prompts)
    for number, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True)):
        engine.add_request(str(number), engine.limits.checked(prompt, wish))
    written = drain(engine)
    return [written[str(number), 0] for number in range(len(prompts))]


def tokens_of(written: Sequence[Written]) -> list[list[int]]:
    """The tokens of each completion."""
    return [each.token_ids for each in written]
