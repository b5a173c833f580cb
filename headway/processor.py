"""From the engine's deltas to what callers see: the requests of one engine, by id."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Items

from headway.core.engine.deltas import OutputDelta
from headway.core.sampling.detokenizer import Tokenizer
from headway.core.sampling.params import SamplingParams
from headway.decoding import fastest_decoder
from headway.progress import Progress, RequestState


class OutputProcessor:
    """Keeps the requests of one engine, for whichever client drives it."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """tokenizer: None where tokens alone are wanted; every text is then empty."""
        self._tokenizer = fastest_decoder(tokenizer)
        self._requests: dict[str, RequestState] = {}

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Items[int],
        params: SamplingParams,
        progress: Progress,
        key: str | None = None,
    ) -> RequestState:
        """Begin a request. progress: of the call it belongs to. key: what the engine calls it; None: the same."""
        state = RequestState(request_id, prompt, prompt_token_ids, params, self._tokenizer, progress)
        self._requests[request_id if key is None else key] = state
        return state

    def remove(self, request_id: str) -> None:
        """Forget a request, by what the engine calls it; further deltas of it are dropped."""
        self._requests.pop(request_id, None)

    @property
    def request_ids(self) -> list[str]:
        """Of all requests that have not been removed."""
        return list(self._requests)

    def abort(self, request_id: str) -> None:
        """End a request of which the engine will tell nothing more."""
        state = self._requests.get(request_id)
        if state is not None:
            state.abort()

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
