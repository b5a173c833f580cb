"""Anthropic's Messages API: request bodies, conversion to and from chats, answers and routes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Annotated, Any, ClassVar, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from headway.core.contract.errors import ConfigError, PromptError
from headway.core.contract.text_plugins import ChatPiece
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown
from headway.outputs import CompletionOutput, RequestOutput
from headway.requests.chats import ChatText, ToolCall, text_field
from headway.requests.tool_use import check_function
from headway.server.errors import ApiError, Fields
from headway.server.middleware import request_name
from headway.server.openai.answers import num_written
from headway.server.openai.chat import SHARED_FIELDS, ChatAnswer, Chats, ConvertedAnswer, text_parts
from headway.server.openai.params import tool_use
from headway.server.openai.reply import Reply
from headway.server.openai.requests import MOST_STOPS, ChatRequest
from headway.server.routing import RouteGroup, answers, json_response
from headway.server.service import Service


class _Strict(BaseModel):
    """Base class for parts of a body without type coercion, such as from text to number."""

    model_config = ConfigDict(strict=True)


class InputMessage(_Strict):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Any
    """A text or a list of blocks, which `_blocks` checks."""


class AnthropicTool(_Strict):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: str
    type: str | None = None
    """"custom" or None. Anthropic's server-side tools have other types."""
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicToolChoice(_Strict):
    """Tool choice: the functions that the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(_Strict):
    """Reasoning setting, for models whose chat template supports it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(_Strict):
    """Structured output of the answer."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Strict):
    """Structured output and effort of the answer."""

    format: OutputFormat | None = None
    effort: str | None = None


class TokenCountRequest(Fields):
    """The body of /v1/messages/count_tokens."""

    model_config = ConfigDict(strict=True)
    known_extras: ClassVar[frozenset[str]] = frozenset(SHARED_FIELDS)

    model: str | None = None
    messages: list[InputMessage]
    system: Any = None
    """Content of a system message; text only."""
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: dict[str, Any] | None = None
    """Ignored, as is the next field."""
    service_tier: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return the chat's fields without sampling. :raises ConfigError: if content is unsupported or has a wrong type."""
        system = "" if self.system is None else _text(self.system, "system")
        messages = [{"role": "system", "content": system}] if system else []
        for number, each in enumerate(self.messages):
            messages += _READERS[each.role](each.content, f"messages.{number}.content")
        continued = bool(self.messages) and self.messages[-1].role == "assistant"
        found: dict[str, Any] = {name: value for name, value in (self.model_extra or {}).items() if name in SHARED_FIELDS}
        found.update(model=self.model, messages=messages, continue_final_message=continued, add_generation_prompt=not continued)
        if self.tools:
            found["tools"] = [_function(each, f"tools.{number}") for number, each in enumerate(self.tools)]
        found.update(_choice(self.tool_choice))
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            found["chat_template_kwargs"] = {"enable_thinking": thinks, **(found.get("chat_template_kwargs") or {})}
        return found


class MessagesRequest(TokenCountRequest):
    """The body of /v1/messages."""

    max_tokens: int
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def chat(self) -> ChatRequest:
        """Return the equivalent chat request. Raises the same errors as `fields`."""
        found = self.fields()
        if self.output_config is not None and self.output_config.format is not None:
            schema = self.output_config.format.schema_
            found["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        found |= {name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        return ChatRequest(**{**found, "stop": self.stop_sequences})


def _blocks(content: Any, place: str, kinds: Sequence[str]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield path, type and fields of each block; a text is one block. :raises PromptError: if the content is neither a text nor a
    list of allowed blocks."""
    if isinstance(content, str):
        yield place, "text", {"text": content}
        return
    if not isinstance(content, list):
        raise PromptError(place, "a text or a list of blocks", shown(content, 60))
    for number, block in enumerate(content):
        if not isinstance(block, dict):
            raise PromptError(f"{place}.{number}", 'a block such as {"type": "text", "text": "Hello"}', shown(block, 60))
        kind = text_field(block, "type", f"{place}.{number}")
        if kind not in kinds:
            raise PromptError(f"{place}.{number}", f"a block of the type {' or '.join(kinds)}", shown(kind, 60))
        yield f"{place}.{number}", kind, block


def _text(content: Any, place: str) -> str:
    """Return the text of text-only content. :raises PromptError: if the content has anything else."""
    return "".join(text_field(block, "text", at) for at, _, block in _blocks(content, place, ("text",)))


def _result_text(block: Mapping[str, Any], place: str) -> str:
    """Return the text of a call's result, whose content may be absent. Raises the same errors as `_text`."""
    content, is_error = block.get("content"), block.get("is_error")
    if not isinstance(is_error, (bool, NoneType)):
        raise PromptError(f"{place}.is_error", "true or false", shown(is_error, 60))
    text = "" if content is None else _text(content, f"{place}.content")
    return f"Error: {text}" if is_error else text


def _user(content: Any, place: str) -> list[dict[str, Any]]:
    """Return chat messages for a user message: a message per tool result, then the texts."""
    results, texts = [], []
    for at, kind, block in _blocks(content, place, ("text", "tool_result")):
        if kind == "text":
            texts.append(text_field(block, "text", at))
        else:
            call = text_field(block, "tool_use_id", at)
            results.append({"role": "tool", "tool_call_id": call, "content": _result_text(block, at)})
    return [*results, {"role": "user", "content": text_parts(texts)}] if texts or not results else results


def _assistant(content: Any, place: str) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for at, kind, block in _blocks(content, place, ("text", "thinking", "redacted_thinking", "tool_use")):
        if kind == "text":
            texts.append(text_field(block, "text", at))
        elif kind == "thinking":
            text_field(block, "signature", at, optional=True)
            thoughts.append(text_field(block, "thinking", at))
        elif kind == "redacted_thinking":  # encrypted: only Anthropic can read it
            text_field(block, "data", at)
        else:
            arguments = block.get("input", {})
            if not isinstance(arguments, dict):
                raise PromptError(f"{at}.input", "an object", shown(arguments, 60))
            function = {"name": text_field(block, "name", at), "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": text_field(block, "id", at), "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


_READERS: Final[dict[str, Callable[[Any, str], list[dict[str, Any]]]]] = {
    "system": lambda content, place: [{"role": "system", "content": _text(content, place)}],
    "user": _user,
    "assistant": _assistant,
}


def _function(tool: AnthropicTool, place: str) -> dict[str, Any]:
    """Return a tool in the format of chats. :raises ConfigError: if the tool is invalid or one of Anthropic's server-side
    tools."""
    if tool.type not in (None, "custom"):
        raise ConfigError(f"{place}.type", "a tool of the client's own (custom)", shown(tool.type, 60))
    if tool.input_schema is None:
        raise ConfigError(f"{place}.input_schema", "a JSON schema of an object", "none", "{} takes no parameters")
    check_function({"name": tool.name, "input_schema": tool.input_schema}, place, "input_schema")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(given: AnthropicToolChoice | None) -> Iterator[tuple[str, Any]]:
    """Yield a chat's fields for the tool choice. :raises ConfigError: if the function's name is missing."""
    if given is None:
        return
    if given.type == "tool":
        if given.name is None:
            raise ConfigError("tool_choice.name", "the name of a tool", "none")
        yield "tool_choice", {"type": "function", "function": {"name": given.name}}
    else:
        yield "tool_choice", {"auto": "auto", "any": "required", "none": "none"}[given.type]
    if given.disable_parallel_tool_use:
        yield "parallel_tool_calls", False


_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer(ConvertedAnswer):
    """Converter of a chat's answer to a message of Anthropic's API."""

    prefix = "msg_"

    def __init__(self, chat: ChatAnswer, name: str = "") -> None:
        super().__init__(chat, name)
        self._open: tuple[str, int] | None = None  # Type and call of the block that is being written
        self._block = -1  # Index of that block
        self._stop = _stop("stop", None)

    def begin(self, index: int, output: Callable[[], RequestOutput]) -> bytes:
        """Write the message without content, and a ping as Anthropic's servers do."""
        message = self._message([], usage_of(output(), 1))
        return _event({"type": "message_start", "message": message}) + _event({"type": "ping"})

    def piece(self, index: int, new: CompletionOutput, used: tuple[RequestOutput, int] | None) -> bytes:
        pieces, reason = self.chat.read(0, new)
        if reason is not None:
            self._stop = _stop(reason, new.stop_reason)
        return b"".join(self._piece(each) for each in pieces)

    def _piece(self, piece: ChatPiece) -> bytes:
        """Write a piece. If the piece belongs to a new block, first write the end of the old block and the start of the new
        one."""
        events, kind = b"", _TYPES[piece.kind]
        if self._open != (kind, piece.call):
            events = self._close()
            self._open = kind, piece.call
            self._block += 1
            call = ToolCall(piece.id, piece.text) if piece.kind == "call" else None
            block = _text_block(kind, "") if call is None else _call_block(call)
            events += _event({"type": "content_block_start", "index": self._block, "content_block": block})
        if piece.kind != "call":
            delta = {"type": _DELTAS[kind][0], _DELTAS[kind][1]: piece.text}
            events += _event({"type": "content_block_delta", "index": self._block, "delta": delta})
        return events

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        events = b""
        if self._open[0] == "thinking":
            delta = {"type": "signature_delta", "signature": ""}
            events = _event({"type": "content_block_delta", "index": self._block, "delta": delta})
        self._open = None
        return events + _event({"type": "content_block_stop", "index": self._block})

    def end(self, used: Sequence[tuple[RequestOutput, int]]) -> bytes:
        ((output, count),) = used
        changes = {"type": "message_delta", "delta": self._stop, "usage": usage_of(output, count)}
        return self._close() + _event(changes) + _event({"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        return _event(error.anthropic_body)

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        (output,) = outputs
        (new,) = output.outputs
        pieces, reason = self.chat.read(0, new)
        found = ChatText.of(pieces)
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
"""Kind of a piece -> type of the piece's block."""
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a block -> type and field of the block's deltas."""


def _text_block(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "thinking": text, "signature": ""} if kind == "thinking" else {"type": kind, "text": text}


def _call_block(call: ToolCall) -> dict[str, Any]:
    """Return the block of a call. Arguments that are invalid JSON, as in a truncated answer, become an empty object."""
    try:
        given = parse_json(call.arguments, "arguments")
    except ValueError:
        given = {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _stop(reason: str | None, stop_reason: int | str | None) -> dict[str, Any]:
    """Return the fields that state why a message has ended. reason: a chat's finish_reason. stop_reason: the stop text or
    token."""
    if reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": _REASONS.get(reason or "", "end_turn"), "stop_sequence": None}


def usage_of(output: RequestOutput, written: int) -> dict[str, int]:
    """Return the usage of a message. written: number of tokens in its completion."""
    return {
        "input_tokens": len(output.prompt_token_ids) - output.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.num_cached_tokens,
        "output_tokens": written,
    }


def _event(data: Mapping[str, Any]) -> bytes:
    return b"event: " + str(data["type"]).encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


class MessagesRoutes(RouteGroup):
    """Routes of the Messages API: /v1/messages and /v1/messages/count_tokens."""

    def __init__(self, service: Service, chats: Chats) -> None:
        self._service = service
        self._chats = chats

    @answers("POST", "/v1/messages", body=[MessagesRequest], direct=True)
    async def messages(self, request: Request) -> Response:
        """Answer a conversation."""
        self._service.check_room()
        body = await self._service.read(request, MessagesRequest)
        chat = body.chat()
        answer = MessagesAnswer(self._chats.answer(chat), request_name(request))
        return Reply(self._service, answer, partial(self._chats.prepare, chat, answer.chat), body.unknown())

    @answers("POST", "/v1/messages/count_tokens", body=[TokenCountRequest])
    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation in the model's chat template."""
        body = await self._service.read(request, TokenCountRequest)
        chat = ChatRequest(**body.fields())
        prompt = await self._chats.prompt(chat, tool_use(chat))
        return json_response({"input_tokens": len(prompt["prompt_token_ids"])})
