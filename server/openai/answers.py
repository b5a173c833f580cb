"""OpenAI's objects from a request's outputs: parts that all answers share, and /v1/completions."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from uuid import uuid4

import orjson
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails

from headway.core.contract.errors import ConfigError
from headway.core.engine.cache.misses import FOUND
from headway.core.engine.data.step import NO_TOKEN_LEFT
from headway.core.sampling.logprobs import Logprob
from headway.outputs import CompletionOutput, LogprobsByToken, RequestOutput
from headway.requests.request_state import TextBytes
from headway.server.errors import ApiError
from headway.server.openai.requests import CompletionRequest, SamplingRequest

DONE = b"data: [DONE]\n\n"


def event(data: object) -> bytes:
    """Return a server-sent event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class Answer(ABC):
    """Writer of one answer: its id, the whole answer, and the events of its stream (if the path supports streams)."""

    prefix: ClassVar[str]
    """Prefix of the answer's id."""

    def __init__(self, body: SamplingRequest, model: str, name: str = "") -> None:
        """model: name for the answer. name: the client's request id, which becomes part of the answer's id; "" means none."""
        self.id = f"{self.prefix}{name or uuid4().hex}"
        self.key = f"{self.id}-{uuid4().hex[:8]}" if name else self.id
        """Unique key of the answer: clients may give two requests the same id."""
        self.body = body
        self.model = model
        self.created = int(time.time())
        options = body.stream_options
        self.reports_usage = options is not None and options.continuous_usage_stats
        """True if every chunk has the usage so far."""
        given = body.response_format is not None or body.structured_outputs is not None
        self.is_structured = given or bool(body.older_form)
        self.form_field = "structured_outputs"
        """Name of the field that requested the structured output, for errors."""

    def check_ended(self, new: CompletionOutput) -> None:
        """Check that an ended completion has succeeded. :raises ApiError: if it has failed or was ended by the server."""
        check_ended(new, self.is_structured, self.form_field)

    def begin(self, index: int, output: Callable[[], RequestOutput]) -> bytes:
        """Write a choice's first events. output: function that returns the output so far; only some kinds of answers need this
        output."""
        return b""

    def piece(self, index: int, new: CompletionOutput, used: tuple[RequestOutput, int] | None) -> bytes:
        """Write the new part of a choice as events. used: the output and its number of tokens so far, if `reports_usage`."""
        return b""

    def end(self, used: Sequence[tuple[RequestOutput, int]]) -> bytes:
        """Write the end of a stream. used: the last output of each prompt, with the number of tokens of its completions."""
        return DONE

    def failed(self, error: ApiError) -> bytes:
        """Write the end of a stream that has failed after it began."""
        return error.event() + DONE

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the complete answer, serialised. outputs: one output per prompt."""


class ChunkedAnswer(Answer):
    """Writer of OpenAI's chats and completions, whose streams are chunks.

    Most chunks of a stream differ only in their text. The JSON before and after the text is rendered once per choice, so that
    a chunk costs little more than escaping its text.
    """

    chunk_object: ClassVar[str]
    around: ClassVar[tuple[str, str]]
    """JSON before and after the text in a chunk's choice, between index and finish_reason."""

    def __init__(self, body: SamplingRequest, model: str, has_logprobs: bool, name: str = "") -> None:
        """model, name: see `Answer`. :raises ConfigError: if a stream asks for prompt_logprobs, which vLLM rejects too."""
        super().__init__(body, model, name)
        if body.stream and body.prompt_logprobs:
            raise ConfigError("prompt_logprobs", "stream=false beside it", "stream=true")
        options = body.stream_options
        self.includes_usage = options is not None and options.include_usage
        self._plain = not (has_logprobs or body.return_token_ids or self.reports_usage)
        self._common = {"id": self.id, "object": self.chunk_object, "created": self.created, "model": model}
        self._heads: dict[int, bytes] = {}
        self._tail = (self.around[1] + ',"finish_reason":null}]' + (',"usage":null' if self.includes_usage else "")).encode()
        self._tail += b"}\n\n"

    def piece(self, index: int, new: CompletionOutput, used: tuple[RequestOutput, int] | None) -> bytes:
        if self._plain and new.finish_reason is None:
            head = self._heads.get(index)
            if head is None:
                head = self._heads[index] = self._head(index)
            return head + orjson.dumps(new.text) + self._tail
        return self.chunk([self.choice(index, new)], None if used is None else usage([used], self.body))

    def chunk(self, choices: list[dict[str, Any]], used: CompletionUsage | None = None) -> bytes:
        """Write an event with these choices."""
        data = {**self._common, "choices": choices}
        if self.includes_usage or used is not None:
            data["usage"] = None if used is None else used.model_dump(exclude_none=True)
        return event(data)

    def _head(self, index: int) -> bytes:
        common = orjson.dumps(self._common)[:-1]
        return b"data: " + common + f',"choices":[{{"index":{index},{self.around[0]}'.encode()

    def end(self, used: Sequence[tuple[RequestOutput, int]]) -> bytes:
        return self.chunk([], usage(used, self.body)) + DONE if self.includes_usage else DONE

    @abstractmethod
    def choice(self, index: int, new: CompletionOutput) -> dict[str, Any]:
        """Return a chunk's choice for the new part of a completion."""


def usage(outputs: Sequence[tuple[RequestOutput, int]], body: SamplingRequest) -> CompletionUsage:
    """Return the usage of several prompts. outputs: output of each prompt, with the number of tokens of its completions."""
    prompt = sum(len(output.prompt_token_ids) for output, _ in outputs)
    written = sum(count for _, count in outputs)
    cached = PromptTokensDetails(cached_tokens=sum(output.num_cached_tokens for output, _ in outputs))
    if body.return_cache_report:
        parts = Counter[str]()
        for output, _ in outputs:
            parts.update(output.cache_report)
        parts["unseen"] += parts.pop("salt", 0)  # a client must not find out what was sent with another salt
        missed = {reason: count for reason, count in parts.items() if reason not in FOUND and count}
        report = {"restored_tokens": parts["offload"], "missed": missed}
        cached = PromptTokensDetails.model_validate({"cached_tokens": cached.cached_tokens, **report})
    return CompletionUsage(
        prompt_tokens=prompt, completion_tokens=written, total_tokens=prompt + written, prompt_tokens_details=cached
    )


def num_written(output: RequestOutput) -> int:
    """Return the number of tokens of all completions of an output."""
    return sum(len(each.token_ids) for each in output.outputs)


def check_ended(new: CompletionOutput, structured: bool, field: str = "structured_outputs") -> None:
    """Check that a completion has not failed.

    structured: True if the request asks for a structured output, which may be invalid.
    field: name of the request's field that asks for the structured output.
    :raises ApiError: if the completion has failed or was ended by the server.
    """
    if new.finish_reason == "error":
        message = new.error or "the completion has failed"
        by_form = message.startswith("structured_outputs") or (structured and not new.token_ids)
        message = message.replace("structured_outputs", field, 1)
        raise ApiError(400 if NO_TOKEN_LEFT in message or by_form else 500, message)
    if new.finish_reason == "abort":
        raise ApiError(503, "the server has ended the request", code="aborted")


def extras(body: SamplingRequest, new: CompletionOutput) -> dict[str, Any]:
    """Return the fields that vLLM adds to a choice."""
    found: dict[str, Any] = {"stop_reason": new.stop_reason} if new.finish_reason is not None else {}
    if body.return_token_ids:
        found["token_ids"] = new.token_ids
    return found


def prompt_extras(body: SamplingRequest, output: RequestOutput) -> dict[str, Any]:
    """Return the fields about a prompt that vLLM adds to a chat's answer and to each choice of completions."""
    found: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids} if body.return_token_ids else {}
    return {**found, **prompt_logprobs(body, output)}


def prompt_logprobs(body: SamplingRequest, output: RequestOutput) -> dict[str, Any]:
    """Return the field prompt_logprobs as in vLLM; empty if not requested."""
    if body.prompt_logprobs is None:
        return {}

    def by_token(place: LogprobsByToken) -> dict[str, Any]:
        return {
            str(token): {"logprob": _finite(found), "rank": found.rank, "decoded_token": found.decoded_token}
            for token, found in place.items()
        }

    return {"prompt_logprobs": [place and by_token(place) for place in output.prompt_logprobs or []]}


LOWEST = -9999.0
"""Log-probability written for minus infinity, which JSON cannot represent, as in vLLM."""


def chat_logprobs(places: Sequence[LogprobsByToken], most: int, as_ids: bool, text: TextBytes) -> dict[str, Any]:
    """Return `logprobs` of a chat's choice. most: value of top_logprobs. as_ids: write tokens as "token_id:123". text: bytes of
    the text before `places`."""
    content = []
    for place in places:
        own = text.take(list(place))
        entries: list[dict[str, Any]] = [
            {"token": _name(token, found.decoded_token or "", as_ids), "logprob": _finite(found), "bytes": list(each)}
            for (token, found), each in zip(place.items(), own, strict=True)
        ]
        likely = [entry for entry, found in zip(entries, place.values(), strict=True) if (found.rank or 0) <= most]
        likely.sort(key=lambda each: -each["logprob"])
        content.append({**entries[0], "top_logprobs": likely[:most]})
    return {"content": content, "refusal": None}


def completion_logprobs(
    places: Sequence[LogprobsByToken | None], token_ids: Sequence[int], offset: int, most: int, as_ids: bool, decode: Any
) -> tuple[dict[str, Any], int]:
    """Return `logprobs` of a completion's choice, and the text offset after these tokens.

    places: log-probabilities for each token id; None for a prompt's first token.
    offset: number of characters before the tokens.
    most: number of logprobs that the request asks for.
    as_ids: write tokens as "token_id:123".
    decode: function that returns the text of a token.
    """
    listed: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for place, token in zip(places, token_ids, strict=False):
        text = decode(token) if place is None else place[token].decoded_token or ""
        listed["text_offset"].append(offset)
        listed["tokens"].append(_name(token, text, as_ids))
        offset += len(text)
        if place is None:
            listed["token_logprobs"].append(None)
            listed["top_logprobs"].append(None)
            continue
        listed["token_logprobs"].append(_finite(place[token]))
        top = {_name(each, found.decoded_token or "", as_ids): _finite(found) for each, found in list(place.items())[: most + 1]}
        listed["top_logprobs"].append(top if most else None)
    return listed, offset


def _name(token: int, text: str, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else text


def _finite(found: Logprob) -> float:
    return max(found.logprob, LOWEST)


class CompletionAnswer(ChunkedAnswer):
    """Writer of the answer to a CompletionRequest."""

    prefix = "cmpl-"
    chunk_object = "text_completion"
    around: ClassVar[tuple[str, str]] = ('"text":', ',"logprobs":null')

    def __init__(self, body: CompletionRequest, model: str, decode: Callable[[list[int]], str], name: str = "") -> None:
        """model, name: see `Answer`. decode: function that returns the text of tokens, including special ones."""
        super().__init__(body, model, body.logprobs is not None, name)
        self._echo = body.echo
        self._most = body.logprobs
        self._decode = decode
        self._prompt_only = body.echo and body.max_tokens == 0
        self._offsets: dict[int, int] = {}  # index of a choice -> its number of characters so far

    def begin(self, index: int, output: Callable[[], RequestOutput]) -> bytes:
        """Write the prompt, if the request asks for an echo."""
        if not (self._echo or self.body.return_token_ids):
            return b""
        text, listed = self._prompt(index, output()) if self._echo else ("", None)
        choice = {"index": index, "text": text, "logprobs": listed, "finish_reason": None}
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = output().prompt_token_ids
        return self.chunk([choice])

    def _prompt(self, index: int, output: RequestOutput) -> tuple[str, dict[str, Any] | None]:
        ids = output.prompt_token_ids
        text = output.prompt if output.prompt is not None else self._decode(ids)
        listed = self._listed(index, output.prompt_logprobs, ids)
        self._offsets[index] = len(text)
        return text, listed

    def choice(self, index: int, new: CompletionOutput) -> dict[str, Any]:
        if self._prompt_only:
            return {"index": index, "text": "", "logprobs": None, "finish_reason": new.finish_reason and "length"}
        return {
            "index": index,
            "text": new.text,
            "logprobs": self._listed(index, new.logprobs, new.token_ids),
            "finish_reason": new.finish_reason,
            **extras(self.body, new),
        }

    def _listed(
        self, index: int, places: Sequence[LogprobsByToken | None] | None, token_ids: Sequence[int]
    ) -> dict[str, Any] | None:
        """Return the log-probabilities of a choice's next tokens, or None if they were not requested."""
        if self._most is None:
            return None
        offset, as_ids = self._offsets.get(index, 0), self.body.return_tokens_as_token_ids
        listed, self._offsets[index] = completion_logprobs(
            places or [], token_ids, offset, self._most, as_ids, lambda token: self._decode([token])
        )
        return listed

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        choices, used = [], []
        for number, output in enumerate(outputs):
            written = 0
            for new in output.outputs:
                index = number * (self.body.n or 1) + new.index
                text, before = self._prompt(index, output) if self._echo else ("", None)
                choice = {**self.choice(index, new), **prompt_extras(self.body, output)}
                choice["text"] = text + choice["text"]
                choice["logprobs"] = _joined(before, choice["logprobs"])
                choices.append(CompletionChoice(**choice))
                written += 0 if self._prompt_only else len(new.token_ids)
            used.append((output, written))
        answer = Completion(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage(used, self.body),
        )
        return answer.model_dump_json(exclude_unset=True).encode()


def _joined(before: dict[str, Any] | None, after: dict[str, Any] | None) -> Logprobs | None:
    """Join log-probabilities of prompt and completion. The result is not validated, because openai's type forbids None for a
    prompt's first token."""
    if before is not None and after is not None:
        after = {name: before[name] + after[name] for name in after}
    found = after or before
    return None if found is None else Logprobs.model_construct(**found)
