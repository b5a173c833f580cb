"""OpenAI's Responses API: request bodies, conversion to and from chats, answers, storage and routes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, Literal
from uuid import uuid4

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from headway.core.contract.errors import ConfigError, PromptError
from headway.core.contract.text_plugins import ChatPiece
from headway.core.sampling.params import SamplingParams
from headway.core.system.text import shown
from headway.outputs import CompletionOutput, RequestOutput
from headway.requests.chats import call_arguments, text_field
from headway.requests.tool_use import check_function
from headway.server.errors import ApiError, Fields
from headway.server.openai.answers import num_written
from headway.server.openai.chat import SHARED_FIELDS, ChatAnswer, Chats, ConvertedAnswer, text_parts
from headway.server.openai.reply import Reply
from headway.server.openai.requests import ChatRequest
from headway.server.routing import RouteGroup, answers, json_response
from headway.server.service import Service

Item = dict[str, Any]
"""An item of a conversation: a message, reasoning, a call or a call's result."""


class TextFormat(BaseModel):
    """Structured output of the answer."""

    model_config = ConfigDict(populate_by_name=True, strict=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "schema"
    schema_: dict[str, Any] | None = Field(alias="schema", default=None)
    strict: bool | None = None

    @property
    def response_format(self) -> dict[str, Any]:
        """The structured output in the format of chats."""
        if self.type != "json_schema":
            return {"type": self.type}
        if self.schema_ is None:
            raise ApiError(400, "text.format.schema: needs a schema, got none", "text.format.schema")
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_, "strict": self.strict}}


class TextConfig(Fields):
    """Structured output of the answer, nested as in OpenAI's API."""

    format: TextFormat | None = None


class ReasoningConfig(Fields):
    """Reasoning effort, for models whose chat template supports it."""

    known_extras: ClassVar[frozenset[str]] = frozenset(("summary", "generate_summary"))

    effort: str | None = None


class ResponseTool(Fields):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True)

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesRequest(Fields):
    """The body of /v1/responses."""

    known_extras: ClassVar[frozenset[str]] = frozenset((*SHARED_FIELDS, "top_k", "stop", "include", "max_tool_calls"))

    model: str | None = None
    input: str | list[Any]
    """A text, or items, which `messages_of_items` checks."""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    """True to store the response, so that it can be retrieved and continued by its id."""
    stream: bool | None = False
    max_output_tokens: int | None = Field(default=None, lt=2**63)  # an int, but JSON may contain any number
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    top_logprobs: int | None = None

    @property
    def items(self) -> list[Item]:
        """The input as a list of items."""
        return [{"type": "message", "role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def check(self) -> None:
        """Check for unsupported fields. :raises ApiError: if a field is unsupported; the error names the field."""
        for name, need in _NOT_BUILT.items():
            if getattr(self, name):
                raise ApiError(400, f"{name}: needs {need}, got {str(getattr(self, name))[:60]!r}", name)
        if self.truncation == "auto":
            raise ApiError(
                400, "truncation: needs disabled, because nothing is left out of a conversation, got 'auto'", "truncation"
            )

    def chat(self, before: Sequence[Item]) -> ChatRequest:
        """Return the equivalent chat. before: items of the continued conversation. :raises ConfigError: if chats do not support
        the request."""
        found: dict[str, Any] = {
            name: value for name, value in (self.model_extra or {}).items() if name in (*SHARED_FIELDS, "top_k", "stop")
        }
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages = system + messages_of_items([*before, *self.items], len(before))
        if self.tools:
            found["tools"] = [_function(each, f"tools.{number}") for number, each in enumerate(self.tools)]
            found["parallel_tool_calls"] = self.parallel_tool_calls
        found["tool_choice"] = _choice(self.tool_choice)
        if self.text is not None and self.text.format is not None:
            found["response_format"] = self.text.format.response_format
        if self.reasoning is not None:
            found["reasoning_effort"] = self.reasoning.effort
        found |= {name: getattr(self, name) for name in ("model", "stream", "temperature", "top_p")}
        return ChatRequest(**{**found, "messages": messages, "max_tokens": self.max_output_tokens})

    def ignored(self) -> list[str]:
        """Return the names of ignored fields, including nested ones."""
        nested = [("text", self.text), ("reasoning", self.reasoning)]
        inner = [f"{place}.{name}" for place, each in nested if each is not None for name in each.unknown()]
        return [*self.unknown(), *inner]


_NOT_BUILT: Final = {
    "background": "false, because responses are computed while their client waits",
    "conversation": "none; previous_response_id continues a response",
    "prompt": "none, because this server keeps no templates of prompts",
    "top_logprobs": "0; chats and completions have log-probabilities",
}
_TEXTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
_ITEMS: Final = ("message", "reasoning", "function_call", "function_call_output")
_ROLES: Final = ("user", "assistant", "system", "developer")


def messages_of_items(items: Iterable[Any], first: int = 0) -> list[dict[str, Any]]:
    """Return the chat messages of items. Consecutive reasoning, message and calls of the model become one message.
    first: index of the first item that this request adds to the conversation. :raises PromptError: if an item is unsupported or
    invalid."""
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        place = f"input.{number - first}"
        if not isinstance(item, dict):
            raise PromptError(place, 'an item such as {"role": "user", "content": "Hello"}', shown(item, 60))
        kind = text_field(item, "type", place, optional=True) or "message"
        if kind not in _ITEMS:
            raise PromptError(f"{place}.type", f"one of {', '.join(_ITEMS)}", shown(kind, 60))
        role = text_field(item, "role", place) if kind == "message" else ""
        if kind == "message" and role not in _ROLES:
            raise PromptError(f"{place}.role", f"one of {', '.join(_ROLES)}", shown(role, 60))
        if kind == "function_call_output":
            content = _text(item.get("output"), f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": text_field(item, "call_id", place), "content": content})
        elif kind == "message" and role != "assistant":
            parts = text_parts(_texts(item.get("content"), f"{place}.content"))
            messages.append({"role": "system" if role == "developer" else role, "content": parts})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            _extend(messages[-1], kind, item, place)
    return messages


def _extend(message: dict[str, Any], kind: str, item: Item, place: str) -> None:
    if kind == "message":
        message["content"] += _text(item.get("content"), f"{place}.content")
    elif kind == "reasoning":
        field = "summary" if item.get("content") in (None, []) else "content"
        thought = "" if item.get(field) is None else _text(item[field], f"{place}.{field}")
        message["reasoning_content"] = message.get("reasoning_content", "") + thought
    else:
        arguments = text_field(item, "arguments", place, optional=True) or "{}"
        call_arguments(arguments, f"{place}.arguments")
        function = {"name": text_field(item, "name", place), "arguments": arguments}
        call = {"id": text_field(item, "call_id", place), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _text(content: Any, place: str) -> str:
    return "".join(_texts(content, place))


def _texts(content: Any, place: str) -> list[str]:
    """Return the texts of an item's content. :raises PromptError: if the content has anything other than texts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise PromptError(place, "a text or a list of parts", shown(content, 60))
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, dict):
            raise PromptError(f"{place}.{number}", "a part that is a text", shown(part, 60))
        kind = text_field(part, "type", f"{place}.{number}")
        if kind not in _TEXTS:
            raise PromptError(f"{place}.{number}", f"a part that is a text ({', '.join(_TEXTS)})", shown(kind, 60))
        texts.append(text_field(part, "refusal" if kind == "refusal" else "text", f"{place}.{number}"))
    return texts


def _function(tool: ResponseTool, place: str) -> dict[str, Any]:
    """Return a tool in the format of chats. :raises ConfigError: if the tool is invalid or is one of OpenAI's server-side
    tools."""
    if tool.type != "function":
        raise ConfigError(f"{place}.type", "function, the one type of tools that models call here", shown(tool.type, 60))
    given = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    check_function(given, place)
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


def _choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Return the tool choice in the format of chats. :raises ConfigError: if chats do not support this choice."""
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function":
        need = 'auto, none, required or {"type": "function", "name": NAME}'
        raise ConfigError("tool_choice.type", need, shown(given.get("type"), 60))
    text_field(given, "name", "tool_choice")
    return {"type": "function", "function": {"name": given["name"]}}


_TYPES: Final = {"content": "message", "reasoning": "reasoning", "call": "function_call", "arguments": "function_call"}
"""Kind of a ChatPiece -> type of the item that contains it."""
_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXT_EVENTS: Final = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


class OpenItem:
    """The item of an answer that is currently being written."""

    def __init__(self, piece: ChatPiece, place: int) -> None:
        """piece: the item's first piece. place: index among the answer's items."""
        self.kind = _TYPES[piece.kind]
        self.call = piece.call
        self.place = place
        self.id = f"{_PREFIXES[self.kind]}_{uuid4().hex}"
        self._call_id = piece.id
        self.name = piece.text if piece.kind == "call" else ""
        """Name of the called function; empty for other items."""
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)

    def add(self, text: str) -> None:
        """Append text to the item."""
        self._texts.append(text)

    @property
    def content(self) -> dict[str, Any] | None:
        """The only part of the item's content. None for a call."""
        if self.kind == "function_call":
            return None
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def item(self, status: str) -> Item:
        """Return the item. status: "in_progress", "completed" or "incomplete"; an item in progress has no content yet."""
        common = {"id": self.id, "status": status}
        if self.kind == "function_call":
            return {"type": self.kind, **common, "call_id": self._call_id, "name": self.name, "arguments": self.text}
        content = [] if status == "in_progress" else [self.content]
        if self.kind == "reasoning":
            return {"type": self.kind, **common, "summary": [], "content": content}
        return {"type": self.kind, **common, "role": "assistant", "content": content}


class ResponsesAnswer(ConvertedAnswer):
    """Converts a chat's answer to a response of the Responses API."""

    prefix = "resp_"

    def __init__(
        self, chat: ChatAnswer, parsed: ResponsesRequest, default: SamplingParams, keep: Callable[[dict[str, Any]], None]
    ) -> None:
        """default: values of fields that a request leaves out. keep: function called with the complete response."""
        super().__init__(chat)
        self._parsed = parsed
        self._default = default
        self._keep = keep
        self._items: list[Item] = []
        self._open: OpenItem | None = None
        self._status = "completed"
        self._number = 0

    def begin(self, index: int, output: Callable[[], RequestOutput]) -> bytes:
        """Write the events that announce the response, before any output."""
        response = self._response("in_progress")
        return b"".join(self._event(f"response.{word}", {"response": response}) for word in ("created", "in_progress"))

    def piece(self, index: int, new: CompletionOutput, used: tuple[RequestOutput, int] | None) -> bytes:
        pieces, reason = self.chat.read(0, new)
        self._note(reason)
        return b"".join(self._piece(each) for each in pieces)

    def _note(self, reason: str | None) -> None:
        """Mark the response as incomplete if the answer has reached its maximum length."""
        if reason == "length":
            self._status = "incomplete"

    def _piece(self, piece: ChatPiece) -> bytes:
        """Write a piece. If the piece starts a new item, first write the end of the current item and the start of the new
        item."""
        events = b""
        if self._open is None or (self._open.kind, self._open.call) != (_TYPES[piece.kind], piece.call):
            events = self._close("completed") + self._start(piece)
        assert self._open is not None
        if piece.kind != "call":
            self._open.add(piece.text)
            more: dict[str, Any] = {"logprobs": []} if piece.kind == "content" else {}
            event = f"{_TEXT_EVENTS[self._open.kind]}.delta"
            events += self._event(event, {**self._place(self._open), "delta": piece.text, **more})
        return events

    def _start(self, piece: ChatPiece) -> bytes:
        opened = self._open = OpenItem(piece, len(self._items))
        events = self._event("response.output_item.added", {"output_index": opened.place, "item": opened.item("in_progress")})
        if opened.content is not None:
            events += self._event("response.content_part.added", {**self._place(opened), "part": opened.content})
        return events

    def _close(self, status: str) -> bytes:
        """Write the end of the current item, if there is one."""
        opened = self._open
        self._open = None
        if opened is None:
            return b""
        kind, place = opened.kind, self._place(opened)
        if kind == "function_call":
            events = self._event(f"{_TEXT_EVENTS[kind]}.done", {**place, "arguments": opened.text, "name": opened.name})
        else:
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            events = self._event(f"{_TEXT_EVENTS[kind]}.done", {**place, "text": opened.text, **more})
            events += self._event("response.content_part.done", {**place, "part": opened.content})
        item = opened.item(status)
        self._items.append(item)
        return events + self._event("response.output_item.done", {"output_index": opened.place, "item": item})

    def end(self, used: Sequence[tuple[RequestOutput, int]]) -> bytes:
        ((output, count),) = used
        events = self._close(self._status)
        response = self._response(self._status, usage_of(output, count))
        self._keep(response)
        return events + self._event(f"response.{self._status}", {"response": response})

    def failed(self, error: ApiError) -> bytes:
        fields = {"code": error.code or "server_error", "message": str(error)}
        return self._event("response.failed", {"response": {**self._response("failed"), "error": fields}})

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        (output,) = outputs
        pieces, reason = self.chat.read(0, output.outputs[0])
        self._note(reason)
        for piece in pieces:
            self._piece(piece)  # builds the items; the events are not sent
        self._close(self._status)
        response = self._response(self._status, usage_of(output, num_written(output)))
        self._keep(response)
        return orjson.dumps(response)

    def _response(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        parsed, default = self._parsed, self._default
        form = parsed.text.format if parsed.text is not None else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": parsed.instructions,
            "max_output_tokens": parsed.max_output_tokens,
            "metadata": parsed.metadata or {},
            "model": self.model,
            "output": list(self._items),
            "parallel_tool_calls": parsed.parallel_tool_calls is not False,
            "previous_response_id": parsed.previous_response_id,
            "reasoning": {"effort": parsed.reasoning.effort if parsed.reasoning is not None else None, "summary": None},
            "store": parsed.store is not False,
            "temperature": default.temperature if parsed.temperature is None else parsed.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": parsed.tool_choice or "auto",
            "tools": [each.model_dump() for each in parsed.tools or ()],
            "top_p": default.top_p if parsed.top_p is None else parsed.top_p,
            "truncation": "disabled",
            "usage": usage,
        }

    def _place(self, opened: OpenItem) -> dict[str, Any]:
        place = {"item_id": opened.id, "output_index": opened.place}
        return place if opened.kind == "function_call" else {**place, "content_index": 0}

    def _event(self, kind: str, data: dict[str, Any]) -> bytes:
        fields = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(fields) + b"\n\n"


def usage_of(output: RequestOutput, written: int) -> dict[str, Any]:
    """Return the usage of a response. written: number of tokens in its completion."""
    prompt = len(output.prompt_token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + written,
    }


MOST_BYTES: Final = 64 * 2**20
"""Maximum size, in bytes of JSON, of all stored responses and their conversations."""


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation that precedes it."""

    response: dict[str, Any]
    before: Sequence[Item]
    """Items of the conversation that the request continues."""
    input: Sequence[Item]

    @property
    def conversation(self) -> list[Item]:
        """All items, including the answer's."""
        return [*self.before, *self.input, *self.response["output"]]


class ResponseStore:
    """Most recent responses of a server; the oldest responses are evicted first. For use only in the server's event loop."""

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        """most: maximum number of responses; 0 stores none. most_bytes: maximum bytes of JSON; the newest response is stored even
        if it is larger."""
        self.most = most
        self._most_bytes = most_bytes
        self._found: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._bytes = 0

    def put(self, stored: StoredResponse) -> None:
        """Store a response, unless storing is disabled."""
        if not self.most:
            return
        size = len(orjson.dumps([stored.response, stored.before, stored.input]))
        self._found[stored.response["id"]] = stored, size
        self._bytes += size
        while len(self._found) > self.most or (self._bytes > self._most_bytes and len(self._found) > 1):
            _, (_, gone) = self._found.popitem(last=False)
            self._bytes -= gone

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a stored response. param: request field that contains the id, for the error message. :raises ApiError: if no
        such response is stored (any more)."""
        found = self._found.get(response_id)
        if found is None:
            kept = (
                f"the last {self.most} responses, at most {self._most_bytes >> 20} MiB, since its start" if self.most else "none"
            )
            place = f"{param}: " if param else ""
            message = f"{place}no response {response_id[:80]!r} is stored; this server keeps {kept}"
            raise ApiError(400 if param else 404, message, param, "previous_response_not_found" if param else None)
        return found[0]

    def remove(self, response_id: str) -> None:
        """Forget a response. :raises ApiError: if no response with this id is stored."""
        self.get(response_id)
        _, size = self._found.pop(response_id)
        self._bytes -= size


class ResponsesRoutes(RouteGroup):
    """Routes of the Responses API: /v1/responses and its subpaths."""

    def __init__(self, service: Service, chats: Chats) -> None:
        self._service = service
        self._chats = chats
        self.store = ResponseStore(service.options.max_stored_responses)

    @answers("POST", "/v1/responses", body=[ResponsesRequest], direct=True)
    async def responses(self, request: Request) -> Response:
        """Answer a conversation."""
        self._service.check_room()
        parsed = await self._service.read(request, ResponsesRequest)
        parsed.check()
        before: Sequence[Item] = ()
        if parsed.previous_response_id is not None:
            before = self.store.get(parsed.previous_response_id, "previous_response_id").conversation
        chat = parsed.chat(before)
        keep = partial(self._keep, before, parsed.items) if parsed.store is not False else _forget
        answer = ResponsesAnswer(self._chats.answer(chat), parsed, self._service.default_params(), keep)
        return Reply(self._service, answer, partial(self._chats.prepare, chat, answer.chat), parsed.ignored())

    def _keep(self, before: Sequence[Item], own: Sequence[Item], response: dict[str, Any]) -> None:
        self.store.put(StoredResponse(response, before, own))

    @answers("GET", "/v1/responses/{response_id}")
    async def stored(self, response_id: str, stream: bool = False) -> Response:
        """Return a stored response."""
        if stream:
            raise ApiError(400, "stream: needs false, because the events of a response are not stored, got true", "stream")
        return json_response(self.store.get(response_id).response)

    @answers("DELETE", "/v1/responses/{response_id}")
    async def forget(self, response_id: str) -> Response:
        """Forget a stored response."""
        self.store.remove(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @answers("GET", "/v1/responses/{response_id}/input_items")
    async def input_items(self, response_id: str) -> Response:
        """Return the input items of a stored response."""
        data = [{**each, "id": f"{response_id}-{number}"} for number, each in enumerate(self.store.get(response_id).input)]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return json_response({"object": "list", "data": data, **ends, "has_more": False})

    @answers("POST", "/v1/responses/{response_id}/cancel")
    async def cancel(self, response_id: str) -> Response:
        """Reject the request: a response ends when its client disconnects."""
        self.store.get(response_id)
        raise ApiError(400, "cancel: needs a response in the background, which this server has none of", "response_id")


def _forget(_: dict[str, Any]) -> None:
    """Do not store the response."""
