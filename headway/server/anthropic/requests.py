"""The bodies of /v1/messages and /v1/messages/count_tokens, and the chats that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from headway.server.converted import SHARED_FIELDS, text_parts
from headway.server.errors import ApiError
from headway.server.requests import MOST_STOPS, ChatRequest
from headway.server.unknown_fields import Fields

Content = str | list[dict[str, Any]]


class InputMessage(BaseModel):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: str
    type: str | None = None
    """"custom" or none; the tools that Anthropic's own servers run have other types."""
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicToolChoice(BaseModel):
    """Which functions the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(BaseModel):
    """Whether the model thinks before it answers, where its chat template can say so."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(BaseModel):
    """The form of the answer."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """The form of the answer, and how hard the model tries."""

    format: OutputFormat | None = None
    effort: str | None = None


class TokenCountRequest(Fields):
    """The body of /v1/messages/count_tokens."""

    known_extras: ClassVar[frozenset[str]] = frozenset(SHARED_FIELDS)

    model: str | None = None
    messages: list[InputMessage]
    system: Content | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def fields(self) -> dict[str, Any]:
        """The fields of the chat that this is, those for drawing tokens aside.

        :raises ApiError: content that chats do not have, such as a picture.
        """
        messages = [{"role": "system", "content": _text(self.system, "system")}] if self.system else []
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
    stop_sequences: Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def chat(self) -> ChatRequest:
        """The chat that this is; raises as `fields`."""
        found = self.fields()
        if self.output_config is not None and self.output_config.format is not None:
            schema = self.output_config.format.schema_
            found["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        return ChatRequest(
            **found,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )


def _text(content: Content, place: str) -> str:
    """The text of content that can be nothing else.

    :raises ApiError: it holds something else.
    """
    if isinstance(content, str):
        return content
    texts = []
    for number, block in enumerate(content):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise _refused(f"{place}.{number}", "a text block", block)
        texts.append(block["text"])
    return "".join(texts)


def _system(content: Content, place: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": _text(content, place)}]


def _user(content: Content, place: str) -> list[dict[str, Any]]:
    """A user's message: the results of calls, each a message of its own, and then the texts."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results, texts = [], []
    for number, block in enumerate(content):
        at = f"{place}.{number}"
        if block.get("type") == "tool_result" and isinstance(block.get("tool_use_id"), str):
            text = _text(block.get("content") or "", f"{at}.content")
            text = f"Error: {text}" if block.get("is_error") else text
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        elif block.get("type") == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        else:
            raise _refused(at, "a text or tool_result block", block)
    return [*results, {"role": "user", "content": text_parts(texts)}] if texts or not results else results


def _assistant(content: Content, place: str) -> list[dict[str, Any]]:
    """A model's message: its thoughts, its text and its calls."""
    if isinstance(content, str):
        return [{"role": "assistant", "content": content}]
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(content):
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use" and isinstance(block.get("id"), str) and isinstance(block.get("name"), str):
            function = {"name": block["name"], "arguments": orjson.dumps(block.get("input") or {}).decode()}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind != "redacted_thinking":  # which nobody but its author can read
            raise _refused(f"{place}.{number}", "a text, thinking or tool_use block", block)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


_READERS: Final[dict[str, Callable[[Content, str], list[dict[str, Any]]]]] = {
    "system": _system,
    "user": _user,
    "assistant": _assistant,
}


def _function(tool: AnthropicTool, place: str) -> dict[str, Any]:
    """A tool in the form of chats.

    :raises ApiError: a tool that Anthropic's servers run themselves.
    """
    if tool.type not in (None, "custom"):
        raise ApiError(400, f"{place}.type: needs a tool of the client's own (custom), got {tool.type[:60]!r}", place)
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema or {"type": "object", "properties": {}}}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(given: AnthropicToolChoice | None) -> Iterator[tuple[str, Any]]:
    """The fields of a chat that say which functions may or must be called.

    :raises ApiError: a function without its name.
    """
    if given is None:
        return
    if given.type == "tool":
        if given.name is None:
            raise ApiError(400, "tool_choice.name: needs the name of a tool, got none", "tool_choice.name")
        yield "tool_choice", {"type": "function", "function": {"name": given.name}}
    else:
        yield "tool_choice", {"auto": "auto", "any": "required", "none": "none"}[given.type]
    if given.disable_parallel_tool_use:
        yield "parallel_tool_calls", False


def _refused(place: str, need: str, block: dict[str, Any]) -> ApiError:
    got = block.get("type")
    return ApiError(400, f"{place}: needs {need}, got {str(got)[:60]!r}", place)
