"""From the engine's deltas to what callers see: texts, stop texts, times and request outputs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from headway.core.engine.deltas import OutputDelta
from headway.core.sampling.detokenizer import Detokenizer, NoTokenizer, Tokenizer
from headway.core.sampling.params import SamplingParams
from headway.outputs import CompletionOutput, RequestMetrics, RequestOutput


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


class _Completion:
    """One completion on its way."""

    def __init__(self, index: int, text: Detokenizer) -> None:
        self.index = index
        self.text = text
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.error: str | None = None


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
        streamed: bool,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = list(prompt_token_ids)
        self.completions = [_Completion(index, Detokenizer(tokenizer, params.stop or ())) for index in range(params.n)]
        self.watched = streamed or bool(params.stop)
        """Whether the text is read as it grows, or a stop text may come; else it is made when the completion ends."""
        self.num_cached_tokens = 0
        self._progress = progress
        progress.num_completions += params.n
        self._num_unfinished = params.n
        self.arrival_time = time.perf_counter()
        self.first_token_time: float | None = None
        self.finished_time: float | None = None

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return self._num_unfinished == 0

    def take(self, delta: OutputDelta, now: float) -> bool:
        """Take in a delta that was read at a time; True if a stop text ends the completion, of which the engine knows nothing."""
        completion = self.completions[delta.completion]
        if completion.finish_reason is not None:  # a stop text has ended it before the engine heard of that
            return False
        if delta.new_token_ids and self.first_token_time is None:
            self.first_token_time, self.num_cached_tokens = now, delta.num_cached_tokens
        completion.token_ids += delta.new_token_ids
        self._progress.num_tokens += len(delta.new_token_ids)
        completion.finish_reason, completion.error = delta.finish_reason, delta.error
        stopped = self._read(completion)
        if completion.finish_reason is not None:
            completion.text.flush()
            self._num_unfinished -= 1
            self._progress.num_finished += 1
            if self.finished:
                self.finished_time = now
        return stopped

    def _read(self, completion: _Completion) -> bool:
        """Detokenise what is new, where somebody looks at it; True if a stop text has ended the completion."""
        text, tokens = completion.text, completion.token_ids
        if not (self.watched or completion.finish_reason):
            return False
        end = -1 if completion.finish_reason == "stop" else None  # the token that ends a text is not part of it
        new = tokens[text.num_tokens : end]
        if not self.watched:
            text.extend(new)
            return False
        for token in new:
            if text.append(token) and completion.error is None:
                del tokens[text.num_tokens :]
                completion.finish_reason = "stop"
                return True
        return False

    def output(self) -> RequestOutput:
        """What the caller sees."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            list(self.prompt_token_ids),
            [
                CompletionOutput(each.index, each.text.text, list(each.token_ids), each.finish_reason, each.error)
                for each in self.completions
            ],
            self.finished,
            RequestMetrics(self.arrival_time, self.first_token_time, self.finished_time),
            self.num_cached_tokens,
        )


class OutputProcessor:
    """Keeps the requests of one engine, for whichever client drives it."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """tokenizer: None where tokens alone are wanted; every text is then empty."""
        self._tokenizer = NoTokenizer() if tokenizer is None else tokenizer
        self._requests: dict[str, RequestState] = {}

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Items[int],
        params: SamplingParams,
        progress: Progress,
        streamed: bool = False,
    ) -> RequestState:
        """Begin a request. progress: of the call it belongs to. streamed: somebody reads its text as it grows."""
        state = RequestState(request_id, prompt, prompt_token_ids, params, self._tokenizer, progress, streamed)
        self._requests[request_id] = state
        return state

    def remove(self, request_id: str) -> None:
        """Forget a request; further deltas of it are dropped."""
        self._requests.pop(request_id, None)

    def process(self, deltas: Iterable[OutputDelta]) -> list[tuple[str, int]]:
        """Take in what a step of the engine has returned.

        Returns the completions, as request id and index, that a stop text has ended: the engine is to abort them.
        """
        now = time.perf_counter()
        stopped = []
        for delta in deltas:
            state = self._requests.get(delta.request_id)
            if state is not None and state.take(delta, now) and delta.finish_reason is None:
                stopped.append((delta.request_id, delta.completion))
        return stopped
