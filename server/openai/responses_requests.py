"""The body of /v1/responses, and the chat that it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.core.contract.errors import ConfigError, PromptError
from headway.core.system.text import shown
from headway.requests.chats import call_arguments, text_field
from headway.requests.tool_use import check_function
from headway.server.errors import ApiError, Fields
from headway.server.openai.chat import SHARED_FIELDS, text_parts
from headway.server.openai.requests import ChatRequest

Item = dict[str, Any]
"""An item of a conversation: a message, a thought, a call or the result of one."""


class TextFormat(BaseModel):
    """The form of the answer."""

    model_config = ConfigDict(populate_by_name=True, strict=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "schema"
    schema_: dict[str, Any] | None = Field(alias="schema", default=None)
    strict: bool | None = None

    @property
    def response_format(self) -> dict[str, Any]:
        """The form as chats have it."""
        if self.type != "json_schema":
            return {"type": self.type}
        if self.schema_ is None:
            raise ApiError(400, "text.format.schema: needs a schema, got none", "text.format.schema")
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_, "strict": self.strict}}


class TextConfig(Fields):
    """The form of the answer, in OpenAI's nesting."""

    format: TextFormat | None = None


class ReasoningConfig(Fields):
    """How long the model thinks, where its chat template can say so."""

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
    """Whether the response can be asked for again, and continued by its id."""
    stream: bool | None = False
    max_output_tokens: int | None = Field(default=None, lt=2**63)  # which a text may say, too
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
        """The input as items."""
        return [{"type": "message", "role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def check(self) -> None:
        """Check for what this server has not got.

        :raises ApiError: naming the field.
        """
        for name, need in _NOT_BUILT.items():
            if getattr(self, name):
                raise ApiError(400, f"{name}: needs {need}, got {str(getattr(self, name))[:60]!r}", name)
        if self.truncation == "auto":
            raise ApiError(
                400, "truncation: needs disabled, because nothing is left out of a conversation, got 'auto'", "truncation"
            )

    def chat(self, before: Sequence[Item]) -> ChatRequest:
        """The chat that this is. before: the items of the conversation that it continues.

        :raises ConfigError: items or tools that chats do not have, or a value of the wrong kind.
        """
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
        """The names of fields that are ignored, those within others too."""
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
    """A chat's messages of items: a thought, a message of the model and calls that follow one another are one message.

    first: number of the first item of the request's own, by which errors name places.

    :raises PromptError: an item that chats do not have, or a value of the wrong kind.
    """
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
    """Add an item to a message of the model."""
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
    """The texts of an item's content as one. Raises as `_texts`."""
    return "".join(_texts(content, place))


def _texts(content: Any, place: str) -> list[str]:
    """The texts of an item's content. :raises PromptError: it holds something else."""
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
    """A tool in the form of chats.

    :raises ConfigError: a tool that OpenAI's servers run themselves, or one that no model can call.
    """
    if tool.type != "function":
        raise ConfigError(f"{place}.type", "function, the one type of tools that models call here", shown(tool.type, 60))
    given = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    check_function(given, place)
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


def _choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Which functions the model may or must call, as chats say it. :raises ConfigError: a choice that chats do not have."""
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function":
        need = 'auto, none, required or {"type": "function", "name": NAME}'
        raise ConfigError("tool_choice.type", need, shown(given.get("type"), 60))
    text_field(given, "name", "tool_choice")
    return {"type": "function", "function": {"name": given["name"]}}
