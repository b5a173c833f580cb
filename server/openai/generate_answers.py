"""The answers of /generate, in SGLang's form and in that of vLLM's small server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from headway.core.sampling.logprobs import Logprob
from headway.outputs import CompletionOutput, LogprobsByToken, RequestOutput
from headway.server.errors import ApiError
from headway.server.openai.answers import DONE, Answer, completion_logprobs, event, prompt_logprobs
from headway.server.openai.generate_requests import NativeRequest, TokensRequest
from headway.server.openai.requests import CompletionRequest

_Scored = list[Any]
"""A token's log-probability, its id, and its text or None."""


class NativeAnswer(Answer):
    """Writes an answer as SGLang does: the whole text so far in every event."""

    prefix = "gen-"

    def __init__(self, asked: NativeRequest, body: CompletionRequest, model: str) -> None:
        super().__init__(body, model)
        self._asked = asked
        self._began = time.perf_counter()
        self.tells_usage = True  # an event has what came before it, too

    def piece(self, index: int, new: CompletionOutput, used: tuple[RequestOutput, int] | None) -> bytes:
        """See `Answer`."""
        assert used is not None, "tells_usage"
        place = index % (self.body.n or 1)
        told = self._told(used[0], used[0].outputs[place], self._id_of(index // (self.body.n or 1)))
        return event({"index": index, **told} if self._asked.is_list else told)

    def end(self, used: Sequence[tuple[RequestOutput, int]]) -> bytes:
        """See `Answer`."""
        return DONE

    def failed(self, error: ApiError) -> bytes:
        """See `Answer`."""
        return error.event() + DONE

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """See `Answer`."""
        told = [self._told(output, each, self._id_of(number)) for number, output in enumerate(outputs) for each in output.outputs]
        return orjson.dumps(told if self._asked.is_list else told[0])

    def _id_of(self, number: int) -> str:
        """The id of a prompt's answer: the caller's, where it gave one."""
        given = self._asked.rid
        if isinstance(given, str):
            return given
        return given[number] if given and number < len(given) else f"{self.id}-{number}"

    def _told(self, output: RequestOutput, new: CompletionOutput, request_id: str) -> dict[str, Any]:
        asked, usage = self._asked, (len(output.prompt_token_ids), len(new.token_ids), output.num_cached_tokens)
        meta: dict[str, Any] = {
            "id": request_id,
            "finish_reason": _reason(new),
            **dict(zip(("prompt_tokens", "completion_tokens", "cached_tokens"), usage, strict=True)),
            "weight_version": "default",
            "e2e_latency": time.perf_counter() - self._began,
        }
        if asked.return_logprob:
            pairs = zip(new.logprobs or (), new.token_ids, strict=False)
            meta["output_token_logprobs"] = [self._scored(place[token], token) for place, token in pairs]
            meta["input_token_logprobs"] = self._of_prompt(output)
            if asked.top_logprobs_num:
                meta["output_top_logprobs"] = [self._top(place) for place in new.logprobs or ()]
                meta["input_top_logprobs"] = [self._top(place) for place in (output.prompt_logprobs or ())[self._first :]]
        return {"text": new.text, "output_ids": new.token_ids, "meta_info": meta}

    @property
    def _first(self) -> int:
        return max(self._asked.logprob_start_len, 0)

    def _of_prompt(self, output: RequestOutput) -> list[_Scored]:
        if not self._asked.scores_prompt:
            return []
        pairs = list(zip(output.prompt_logprobs or (), output.prompt_token_ids, strict=False))
        return [self._scored(None if place is None else place[token], token) for place, token in pairs[self._first :]]

    def _top(self, place: LogprobsByToken | None) -> list[_Scored] | None:
        if place is None:
            return None
        likely = sorted(place.items(), key=lambda each: -each[1].logprob)[: self._asked.top_logprobs_num]
        return [self._scored(each, token) for token, each in likely]

    def _scored(self, found: Logprob | None, token: int) -> _Scored:
        if found is None:
            return [None, token, None]
        return [found.logprob, token, found.decoded_token if self._asked.return_text_in_logprobs else None]


def _reason(new: CompletionOutput) -> dict[str, Any] | None:
    if new.finish_reason is None:
        return None
    if new.finish_reason == "length":
        return {"type": "length", "length": len(new.token_ids)}
    matched = new.stop_reason if new.stop_reason is not None else (new.token_ids[-1] if new.token_ids else None)
    return {"type": new.finish_reason, "matched": matched}


class TokensAnswer(Answer):
    """Writes an answer of token ids, as vLLM's server does at /inference/v1/generate."""

    prefix = "generate-tokens-"

    def __init__(self, asked: TokensRequest, body: CompletionRequest, model: str, name: str = "") -> None:
        """name: see `Answer`."""
        super().__init__(body, model, asked.request_id or name)
        self.id = asked.request_id or self.id
        self._most = body.logprobs

    def piece(self, index: int, new: CompletionOutput, used: tuple[RequestOutput, int] | None) -> bytes:
        """See `Answer`; a stream is refused before."""
        return b""

    def end(self, used: Sequence[tuple[RequestOutput, int]]) -> bytes:
        """See `Answer`; a stream is refused before."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """See `Answer`; a stream is refused before."""
        return b""

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """See `Answer`."""
        choices = [
            {
                "index": each.index,
                "token_ids": each.token_ids,
                "finish_reason": each.finish_reason,
                "logprobs": self._logprobs(each),
            }
            for each in outputs[0].outputs
        ]
        told = {"request_id": self.id, "choices": choices, **prompt_logprobs(self.body, outputs[0])}
        return orjson.dumps(told)

    def _logprobs(self, new: CompletionOutput) -> dict[str, Any] | None:
        if self._most is None:
            return None
        return completion_logprobs(new.logprobs or [], new.token_ids, 0, self._most, True, "token_id:{}".format)[0]


class DemoAnswer(Answer):
    """Writes an answer as vLLM's api_server does: prompt and completion as one text, and in a stream a line for each state."""

    prefix = "gen-"

    def __init__(self, body: CompletionRequest, model: str) -> None:
        super().__init__(body, model)
        self.tells_usage = True

    def piece(self, index: int, new: CompletionOutput, used: tuple[RequestOutput, int] | None) -> bytes:
        """See `Answer`."""
        assert used is not None, "tells_usage"
        return orjson.dumps({"text": _texts(used[0])}) + b"\n"

    def end(self, used: Sequence[tuple[RequestOutput, int]]) -> bytes:
        """See `Answer`."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """See `Answer`."""
        return orjson.dumps(error.body) + b"\n"

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """See `Answer`."""
        return orjson.dumps({"text": _texts(outputs[0])})


def _texts(output: RequestOutput) -> list[str]:
    return [f"{output.prompt or ''}{each.text}" for each in output.outputs]
