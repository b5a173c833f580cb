"""The answer of /v1/messages: blocks of thoughts, text and calls, whole or as events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson

from headway.core.contract.chat_parsers import ChatPiece
from headway.core.system.json_text import parse_json
from headway.outputs import CompletionOutput, RequestOutput
from headway.requests.chats import ChatText, ToolCall
from headway.server.errors import ApiError
from headway.server.openai.answers import num_written
from headway.server.openai.chat import ChatAnswer
from headway.server.openai.converted import ConvertedAnswer

_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer(ConvertedAnswer):
    """Writes a chat's answer as a message of Anthropic's API."""

    prefix = "msg_"

    def __init__(self, chat: ChatAnswer, name: str = "") -> None:
        """name: see `Answer`."""
        super().__init__(chat, name)
        self._open: tuple[str, int] | None = None
        """Type and call of the block that is being written."""
        self._block = -1
        """Number of that block."""
        self._stop = _stop("stop", None)

    def begin(self, index: int, output: Callable[[], RequestOutput]) -> bytes:
        """Write the message without its content, and the ping that Anthropic's servers send."""
        message = self._message([], usage_of(output(), 1))
        return _event({"type": "message_start", "message": message}) + _event({"type": "ping"})

    def piece(self, index: int, new: CompletionOutput, used: tuple[RequestOutput, int] | None) -> bytes:
        """See `Answer`."""
        pieces, reason = self.chat.read(0, new)
        if reason is not None:
            self._stop = _stop(reason, new.stop_reason)
        return b"".join(self._piece(each) for each in pieces)

    def _piece(self, piece: ChatPiece) -> bytes:
        """Write a piece, and before it the end of a block of another kind and the start of its own."""
        said, kind = b"", _TYPES[piece.kind]
        if self._open != (kind, piece.call):
            said = self._close()
            self._open = kind, piece.call
            self._block += 1
            call = ToolCall(piece.id, piece.text) if piece.kind == "call" else None
            block = _text_block(kind, "") if call is None else _call_block(call)
            said += _event({"type": "content_block_start", "index": self._block, "content_block": block})
        if piece.kind != "call":
            delta = {"type": _DELTAS[kind][0], _DELTAS[kind][1]: piece.text}
            said += _event({"type": "content_block_delta", "index": self._block, "delta": delta})
        return said

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        said = b""
        if self._open[0] == "thinking":
            delta = {"type": "signature_delta", "signature": ""}
            said = _event({"type": "content_block_delta", "index": self._block, "delta": delta})
        self._open = None
        return said + _event({"type": "content_block_stop", "index": self._block})

    def end(self, used: Sequence[tuple[RequestOutput, int]]) -> bytes:
        """See `Answer`."""
        ((output, count),) = used
        told = {"type": "message_delta", "delta": self._stop, "usage": usage_of(output, count)}
        return self._close() + _event(told) + _event({"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        """See `Answer`."""
        return _event(error.anthropic_body)

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """See `Answer`."""
        (output,) = outputs
        (new,) = output.outputs
        pieces, reason = self.chat.read(0, new)
        found = ChatText()
        found.add(pieces)
        content = [_text_block("thinking", found.reasoning)] if found.reasoning else []
        content += [_text_block("text", found.content)] if found.content else []
        message = self._message([*content, *map(_call_block, found.calls)], usage_of(output, num_written(output)))
        return orjson.dumps(message | _stop(reason, new.stop_reason))

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


_TYPES: Final = {"content": "text", "reasoning": "thinking", "call": "tool_use", "arguments": "tool_use"}
"""Kind of a piece -> type of its block."""
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a block -> type and field of its deltas."""


def _text_block(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "thinking": text, "signature": ""} if kind == "thinking" else {"type": kind, "text": text}


def _call_block(call: ToolCall) -> dict[str, Any]:
    """A block of a call. Arguments that are no JSON, for the answer was cut short, are an empty object."""
    try:
        given = parse_json(call.arguments, "arguments")
    except ValueError:
        given = {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _stop(reason: str | None, stop_reason: int | str | None) -> dict[str, Any]:
    """Why a message has ended. reason: a chat's finish_reason. stop_reason: the stop text or token that ended it."""
    if reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": _REASONS.get(reason or "", "end_turn"), "stop_sequence": None}


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
