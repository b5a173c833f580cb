"""A request and its completions on their way: texts, stop texts, times and log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass

from headway.core.engine.deltas import OutputDelta
from headway.core.sampling.detokenizer import Detokenizer, NoTokenizer, Tokenizer
from headway.core.sampling.logprobs import Logprob, TokenLogprobs
from headway.core.sampling.params import RequestOutputKind, SamplingParams
from headway.outputs import CompletionOutput, LogprobsByToken, RequestMetrics, RequestOutput


@dataclass
class Progress:
    """How far the requests of one call are."""

    num_completions: int = 0
    num_finished: int = 0
    num_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether all completions of all its requests have ended."""
        return self.num_finished == self.num_completions


class Completion:
    """One completion on its way."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.index = index
        self._params, self._tokenizer = params, tokenizer
        stops = params.include_stop_str_in_output, params.min_tokens
        shown = tokenizer if params.detokenize else NoTokenizer()
        self.text = Detokenizer(shown, params.stop or (), *stops, params.skip_special_tokens)
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self._scores: list[float] = []
        self._logprobs: list[LogprobsByToken] = []
        self._shown = (0, 0, False)
        """How many tokens and characters `new_output` has handed out, and whether it has told of the end."""

    @property
    def score(self) -> float:
        """Sum of its tokens' log-probabilities: what best_of goes by."""
        return sum(self._scores)

    def take(self, delta: OutputDelta) -> None:
        """Take in what a step has added."""
        self.token_ids += delta.new_token_ids
        self.finish_reason, self.error = delta.finish_reason, delta.error
        for each in delta.logprobs:
            self._scores.append(each.logprobs[0])
            if self._params.logprobs is not None:
                self._logprobs.append(by_token(each, self._tokenizer))
        if delta.finish_reason == "stop" and delta.new_token_ids[-1] in (self._params.stop_token_ids or ()):
            self.stop_reason = delta.new_token_ids[-1]

    def read(self, watched: bool) -> bool:
        """Detokenise what is new, where somebody looks at it; True if a stop text has ended the completion."""
        text, tokens = self.text, self.token_ids
        if not (watched or self.finish_reason):
            return False
        hidden = self.finish_reason == "stop" and not self._params.include_stop_str_in_output
        new = tokens[text.num_tokens : -1 if hidden else None]  # the token that ends a text is not part of it
        if not watched:
            text.extend(new)
            return False
        for token in new:
            if text.append(token) and self.error is None:
                for each in (tokens, self._scores, self._logprobs):
                    del each[text.num_tokens :]
                self.finish_reason, self.stop_reason = "stop", text.stopped_by
                return True
        return False

    @property
    def shown_text(self) -> str:
        """Its text; while it runs, less what may turn out to be the start of a stop text."""
        return self.text.safe_text if self.finish_reason is None else self.text.text

    def output(self, index: int) -> CompletionOutput:
        """What the caller sees, under this number."""
        return self._output(index, self.shown_text, 0)

    def new_output(self) -> CompletionOutput | None:
        """What is new since the last call of it; None: nothing."""
        text, (tokens, characters, ended) = self.shown_text, self._shown
        self._shown = (len(self.token_ids), len(text), self.finish_reason is not None)
        if self._shown == (tokens, characters, ended):
            return None
        return self._output(self.index, text[characters:], tokens)

    def _output(self, index: int, text: str, first: int) -> CompletionOutput:
        asked = self._params.logprobs is not None
        return CompletionOutput(
            index,
            text,
            self.token_ids[first:],
            self.score if asked else None,
            self._logprobs[first:] if asked else None,
            self.finish_reason,
            self.stop_reason,
            self.error,
        )


class RequestState:
    """A request on its way: what its deltas have brought."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Items[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        progress: Progress,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = list(prompt_token_ids)
        self.params = params
        self.completions = [Completion(index, params, tokenizer) for index in range(params.num_drawn)]
        self.watched = bool(params.stop)
        """Whether a stop text may come; else the text is made when an output is, or when the completion ends."""
        self._changed = False
        self.num_cached_tokens = 0
        self._plain = False
        """Whether a delta is but a token: nobody reads the text as it grows, and the first token, with which the times and what
        is known of the prompt come, has come."""
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[LogprobsByToken | None] = [None]
        self._progress = progress
        progress.num_completions += params.num_drawn
        self._num_unfinished = params.num_drawn
        self.arrival_time = time.perf_counter()
        self.first_token_time: float | None = None
        self.scheduled_time: float | None = None
        self.finished_time: float | None = None

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return self._num_unfinished == 0

    def take(self, delta: OutputDelta, now: float) -> bool:
        """Take in a delta that was read at a time; True if a stop text ends the completion, of which the engine knows nothing."""
        completion = self.completions[delta.completion]
        self._changed = True
        if completion.finish_reason is not None:  # a stop text has ended it before the engine heard of that
            return False
        if self._plain and delta.finish_reason is None and not delta.logprobs:  # what most deltas bring: a token, to be kept
            completion.token_ids += delta.new_token_ids
            self._progress.num_tokens += len(delta.new_token_ids)
            return False
        if delta.new_token_ids and self.first_token_time is None:
            self.first_token_time, self.num_cached_tokens = now, delta.num_cached_tokens
            self.scheduled_time = delta.admitted_time
            self._plain = not self.watched
        self._prompt_logprobs += [by_token(each, self._tokenizer) for each in delta.prompt_logprobs]
        completion.take(delta)
        self._progress.num_tokens += len(delta.new_token_ids)
        stopped = completion.read(self.watched)
        if completion.finish_reason is not None:
            self._ended(completion, now)
        return stopped

    def abort(self) -> None:
        """End the completions that run, with finish_reason "abort"."""
        now, self._changed = time.perf_counter(), True
        for completion in self.completions:
            if completion.finish_reason is None:
                completion.finish_reason = "abort"
                completion.read(self.watched)
                self._ended(completion, now)

    def _ended(self, completion: Completion, now: float) -> None:
        completion.text.flush()
        self._num_unfinished -= 1
        self._progress.num_finished += 1
        if self.finished:
            self.finished_time = now

    @property
    def has_news(self) -> bool:
        """Whether there is something for a reader since the last `next_output`, by what the request's output_kind asks for."""
        return self._changed and (self.finished or self.params.output_kind is not RequestOutputKind.FINAL_ONLY)

    def next_output(self) -> RequestOutput:
        """What a reader sees next: all so far, or what is new."""
        if self.params.output_kind is not RequestOutputKind.DELTA:
            self._changed = False
            return self.output()
        return self._output(self.news())

    def news(self) -> list[CompletionOutput]:
        """What is new of each completion since this was last asked."""
        self._changed = False
        self._read()
        return [new for completion in self.completions if (new := completion.new_output()) is not None]

    def output(self) -> RequestOutput:
        """What the caller sees: of more completions than were asked for, those with the largest sum of log-probabilities."""
        shown = self.completions
        if len(shown) > self.params.n:
            shown = sorted(shown, key=lambda each: (each.error is not None, -each.score))[: self.params.n]
        self._read()
        return self._output([completion.output(index) for index, completion in enumerate(shown)])

    def _read(self) -> None:
        for completion in self.completions:
            if completion.finish_reason is None:
                completion.read(watched=True)

    def _output(self, completions: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            completions,
            self.finished,
            RequestMetrics(self.arrival_time, self.first_token_time, self.finished_time, self.scheduled_time),
            self.num_cached_tokens,
            None if self.params.prompt_logprobs is None else list(self._prompt_logprobs),
        )


def by_token(found: TokenLogprobs, tokenizer: Tokenizer) -> LogprobsByToken:
    """Log-probabilities of one place by token id, each with its own text."""
    ranks = (found.rank, *range(1, len(found.token_ids)))
    listed: LogprobsByToken = {}
    for token, logprob, rank in zip(found.token_ids, found.logprobs, ranks, strict=True):
        listed.setdefault(token, Logprob(logprob, rank, tokenizer.decode([token], skip_special_tokens=False)))
    return listed
