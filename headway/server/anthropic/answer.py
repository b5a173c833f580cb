"""The answer of /v1/messages: blocks of thoughts, text and calls, whole or as events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import uuid4

import orjson

from headway.outputs import CompletionOutput, RequestOutput
from headway.server.answers import Answer, num_written
from headway.server.chat import ChatAnswer
from headway.server.chat_parts import ChatEnd, Part, streamed_parts, whole_parts
from headway.server.errors import ApiError

_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer(Answer):
    """Writes a chat's answer as a message of Anthropic's API."""

    prefix = "msg_"

    def __init__(self, chat: ChatAnswer) -> None:
        super().__init__(chat.body, chat.model)
        self._chat = chat
        self._open: tuple[str, int] | None = None
        """Kind and call of the block that is being written."""
        self._block = -1
        """Number of that block."""
        self._end = ChatEnd("stop", None)

    def begin(self, index: int, output: Callable[[], RequestOutput]) -> bytes:
        """Write the message without its content, and the ping that Anthropic's servers send."""
        message = self._message([], usage_of(output(), 1))
        return _event({"type": "message_start", "message": message}) + _event({"type": "ping"})

    def piece(self, index: int, new: CompletionOutput, used: tuple[RequestOutput, int] | None) -> bytes:
        """See `Answer`."""
        parts, end = streamed_parts(self._chat, new)
        self._end = end or self._end
        return b"".join(self._part(each) for each in parts)

    def _part(self, part: Part) -> bytes:
        """Write a part, and before it the end of a block of another kind and the start of its own."""
        said = b""
        if self._open != (part.kind, part.call):
            said = self._close()
            self._open = part.kind, part.call
            self._block += 1
            start = _block(replace(part, text=""))
            said += _event({"type": "content_block_start", "index": self._block, "content_block": start})
        if part.text:
            delta = {"type": _DELTA[part.kind], _DELTA_FIELD[part.kind]: part.text}
            said += _event({"type": "content_block_delta", "index": self._block, "delta": delta})
        return said

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        said = b""
        if self._open[0] == "reasoning":
            delta = {"type": "signature_delta", "signature": ""}
            said = _event({"type": "content_block_delta", "index": self._block, "delta": delta})
        self._open = None
        return said + _event({"type": "content_block_stop", "index": self._block})

    def end(self, used: Sequence[tuple[RequestOutput, int]]) -> bytes:
        """See `Answer`."""
        ((output, count),) = used
        told = {"type": "message_delta", "delta": _stop(self._end), "usage": usage_of(output, count)}
        return self._close() + _event(told) + _event({"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        """See `Answer`."""
        return _event(error.anthropic_body)

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """See `Answer`."""
        (output,) = outputs
        parts, end = whole_parts(self._chat, outputs)
        message = self._message([_block(each) for each in parts], usage_of(output, num_written(output)))
        return orjson.dumps(message | _stop(end))

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


_DELTA: Final = {"text": "text_delta", "reasoning": "thinking_delta", "call": "input_json_delta"}
_DELTA_FIELD: Final = {"text": "text", "reasoning": "thinking", "call": "partial_json"}


def _block(part: Part) -> dict[str, Any]:
    """A block of content."""
    if part.kind == "call":
        return {
            "type": "tool_use",
            "id": part.call_id or f"toolu_{uuid4().hex}",
            "name": part.name,
            "input": _object(part.text),
        }
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


def _object(arguments: str) -> Any:
    """The arguments of a call; a text that is no JSON, for the answer was cut short, is an empty object."""
    try:
        return orjson.loads(arguments)
    except ValueError:
        return {}


def _stop(end: ChatEnd) -> dict[str, Any]:
    if end.finish_reason == "stop" and isinstance(end.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
    return {"stop_reason": _REASONS.get(end.finish_reason, "end_turn"), "stop_sequence": None}


def usage_of(output: RequestOutput, written: int) -> dict[str, int]:
    """The usage of a message. written: tokens of its completion."""
    return {
        "input_tokens": len(output.prompt_token_ids) - output.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.num_cached_tokens,
        "output_tokens": written,
    }


def _event(data: Mapping[str, Any]) -> bytes:
    return b"event: " + str(data["type"]).encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
