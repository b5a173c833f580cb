"""How the outputs of a request become OpenAI's objects: what chats and completions have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from uuid import uuid4

import orjson
from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails

from headway.outputs import CompletionOutput, RequestOutput
from headway.server.errors import ApiError
from headway.server.requests import SamplingRequest

DONE = b"data: [DONE]\n\n"
"""The end of every stream."""


def event(data: object) -> bytes:
    """A server-sent event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class Shape(ABC):
    """One answer: its id, and how its parts are written.

    Most chunks of a stream differ in nothing but their text. What stands before and after the text is rendered once for each
    choice, so that a chunk costs little more than the escaping of its text.
    """

    prefix: ClassVar[str]
    """Of ids."""
    chunk_object: ClassVar[str]
    around: ClassVar[tuple[str, str]]
    """What stands around a text in a choice of a chunk, between its index and its finish_reason."""

    def __init__(self, asked: SamplingRequest, model: str, has_logprobs: bool) -> None:
        """model: the name to answer by."""
        self.id = f"{self.prefix}-{uuid4().hex}"
        self.asked, self.model, self.created = asked, model, int(time.time())
        options = asked.stream_options
        self.includes_usage = options is not None and options.include_usage
        self.tells_usage = options is not None and options.continuous_usage_stats
        """Whether every chunk tells the usage so far."""
        self.is_structured = asked.response_format is not None or asked.structured_outputs is not None
        self._plain = not (has_logprobs or asked.return_token_ids or self.tells_usage)
        self._common = {"id": self.id, "object": self.chunk_object, "created": self.created, "model": model}
        self._heads: dict[int, bytes] = {}
        self._tail = (self.around[1] + ',"finish_reason":null}]' + (',"usage":null' if self.includes_usage else "")).encode()
        self._tail += b"}\n\n"

    def piece(self, index: int, new: CompletionOutput, used: tuple[RequestOutput, int] | None) -> bytes:
        """The event that tells what is new of a choice. used: the output and its tokens so far, where `tells_usage`."""
        if self._plain and new.finish_reason is None:
            head = self._heads.get(index)
            if head is None:
                head = self._heads[index] = self._head(index)
            return head + orjson.dumps(new.text) + self._tail
        return self.chunk([self.choice(index, new)], None if used is None else usage([used]))

    def chunk(self, choices: list[dict[str, Any]], used: CompletionUsage | None = None) -> bytes:
        """An event with these choices."""
        data = {**self._common, "choices": choices}
        if self.includes_usage or used is not None:
            data["usage"] = None if used is None else used.model_dump(exclude_none=True)
        return event(data)

    def _head(self, index: int) -> bytes:
        common = orjson.dumps(self._common)[:-1]
        return b"data: " + common + f',"choices":[{{"index":{index},{self.around[0]}'.encode()

    def begin(self, index: int, output: Callable[[], RequestOutput]) -> bytes:
        """The events that come before all others of a choice. output: makes the output so far, which few need."""
        return b""

    @abstractmethod
    def choice(self, index: int, new: CompletionOutput) -> dict[str, Any]:
        """A choice of a chunk."""

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The answer that comes at once, one output for each prompt."""


def usage(outputs: Sequence[tuple[RequestOutput, int]]) -> CompletionUsage:
    """The usage of prompts, each with the tokens that were written for it."""
    prompt = sum(len(output.prompt_token_ids) for output, _ in outputs)
    written = sum(count for _, count in outputs)
    cached = PromptTokensDetails(cached_tokens=sum(output.num_cached_tokens for output, _ in outputs))
    return CompletionUsage(
        prompt_tokens=prompt, completion_tokens=written, total_tokens=prompt + written, prompt_tokens_details=cached
    )


def num_written(output: RequestOutput) -> int:
    """Tokens of all its completions."""
    return sum(len(each.token_ids) for each in output.outputs)


def check_ended(new: CompletionOutput, structured: bool) -> None:
    """Check that a completion has not failed. structured: it was to have a form, which perhaps could not be compiled.

    :raises ApiError: it has.
    """
    if new.finish_reason == "error":
        raise ApiError(400 if structured and not new.token_ids else 500, new.error or "the completion has failed")
    if new.finish_reason == "abort":
        raise ApiError(503, "the server has ended the request", code="aborted")


def extras(asked: SamplingRequest, new: CompletionOutput) -> dict[str, Any]:
    """Fields of a choice that vLLM adds."""
    found: dict[str, Any] = {"stop_reason": new.stop_reason} if new.finish_reason is not None else {}
    if asked.return_token_ids:
        found["token_ids"] = new.token_ids
    return found
