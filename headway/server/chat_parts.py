"""The seam between chats and the APIs that are other forms of them: a chat's answer, as parts of a text, a thought or a call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import orjson

from headway.core.engine.state.request_limits import CheckedRequest
from headway.outputs import CompletionOutput, RequestOutput
from headway.requests.prompts import Prompt
from headway.server.chat import ChatAnswer
from headway.server.requests import ChatRequest

Kind = Literal["reasoning", "text", "call"]

SHARED_FIELDS: Final = (
    *("seed", "presence_penalty", "frequency_penalty", "logit_bias", "min_p", "repetition_penalty", "min_tokens", "priority"),
    *("stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "bad_words"),
    *("structured_outputs", "split_special_tokens", "chat_template_kwargs", "truncate_prompt_tokens"),
)
"""Fields of a chat that the other APIs do not have and take all the same."""


class ChatPaths(NamedTuple):
    """How a chat becomes a request of the engine, and what writes its answer."""

    prompt: Callable[[ChatRequest], Awaitable[Prompt]]
    prepare: Callable[[ChatRequest], Awaitable[Sequence[CheckedRequest]]]
    answer: Callable[[ChatRequest], ChatAnswer]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer."""

    kind: Kind
    text: str
    """New text; of a call, of its arguments."""
    call: int = 0
    """Number of the call in its answer."""
    call_id: str = ""
    name: str = ""
    """Of the function; given with the call's first piece, as its id is."""


class ChatEnd(NamedTuple):
    """Why an answer has ended."""

    finish_reason: str
    """"stop", "length" or "tool_calls"."""
    stop_reason: int | str | None
    """The stop text or token that ended it."""


def parts_of(message: Mapping[str, Any]) -> Iterator[Part]:
    """The parts of a chat's message, or of the delta of a chunk, in the order in which models write them."""
    thought = message.get("reasoning") or message.get("reasoning_content")
    if thought:
        yield Part("reasoning", thought)
    if message.get("content"):
        yield Part("text", message["content"])
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        text, name = function.get("arguments") or "", function.get("name") or ""
        yield Part("call", text, call.get("index", number), call.get("id") or "", name)


def end_of(choice: Mapping[str, Any]) -> ChatEnd | None:
    """Why a choice has ended; None: it goes on."""
    reason = choice.get("finish_reason")
    return None if reason is None else ChatEnd(reason, choice.get("stop_reason"))


def streamed_parts(chat: ChatAnswer, new: CompletionOutput) -> tuple[list[Part], ChatEnd | None]:
    """The parts that a chat's stream would show next, and why it ends there, if it does."""
    choice = chat.choice(0, new)
    return list(parts_of(choice["delta"])), end_of(choice)


def whole_parts(chat: ChatAnswer, outputs: Sequence[RequestOutput]) -> tuple[list[Part], ChatEnd]:
    """The parts of a whole answer, and why it has ended."""
    (choice,) = orjson.loads(chat.whole(outputs))["choices"]
    ended = end_of(choice)
    assert ended is not None, "a whole answer has ended"
    return list(parts_of(choice["message"])), ended
