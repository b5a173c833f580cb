"""The body of /v1/responses, and the chat that it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.server.converted import SHARED_FIELDS, text_parts
from headway.server.errors import ApiError
from headway.server.requests import ChatRequest
from headway.server.unknown_fields import Fields

Item = dict[str, Any]
"""An item of a conversation: a message, a thought, a call or the result of one."""


class TextFormat(BaseModel):
    """The form of the answer."""

    model_config = ConfigDict(populate_by_name=True)

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

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesRequest(Fields):
    """The body of /v1/responses."""

    known_extras: ClassVar[frozenset[str]] = frozenset((*SHARED_FIELDS, "top_k", "stop", "include", "max_tool_calls"))

    model: str | None = None
    input: str | list[Item]
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

        :raises ApiError: items or tools that chats do not have.
        """
        found: dict[str, Any] = {
            name: value for name, value in (self.model_extra or {}).items() if name in (*SHARED_FIELDS, "top_k", "stop")
        }
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages = system + messages_of_items([*before, *self.items], len(before))
        if self.tools:
            found["tools"] = [_function(each, f"tools.{number}") for number, each in enumerate(self.tools)]
            found["tool_choice"] = _choice(self.tool_choice)
            found["parallel_tool_calls"] = self.parallel_tool_calls
        if self.text is not None and self.text.format is not None:
            found["response_format"] = self.text.format.response_format
        if self.reasoning is not None:
            found["reasoning_effort"] = self.reasoning.effort
        return ChatRequest(
            **found,
            model=self.model,
            messages=messages,
            max_tokens=self.max_output_tokens,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
        )

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
_TEXTS: Final = frozenset(("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"))


def messages_of_items(items: Iterable[Item], first: int = 0) -> list[dict[str, Any]]:
    """A chat's messages of items: a thought, a message of the model and calls that follow one another are one message.

    first: number of the first item of the request's own, by which errors name places.

    :raises ApiError: an item that chats do not have.
    """
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        place = f"input.{number - first}"
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            content = _text(item.get("output"), f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": content})
        elif kind == "message" and item.get("role") != "assistant":
            role = "system" if item.get("role") == "developer" else str(item.get("role"))
            messages.append({"role": role, "content": text_parts(_texts(item.get("content"), f"{place}.content"))})
        elif kind in ("message", "reasoning", "function_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            _extend(messages[-1], kind, item, place)
        else:
            need = "a message, reasoning, function_call or function_call_output"
            raise ApiError(400, f"{place}.type: needs {need}, got {str(kind)[:60]!r}", f"{place}.type")
    return messages


def _extend(message: dict[str, Any], kind: str, item: Item, place: str) -> None:
    """Add an item to a message of the model."""
    if kind == "message":
        message["content"] += _text(item.get("content"), f"{place}.content")
    elif kind == "reasoning":
        thought = _text(item.get("content") or item.get("summary") or "", f"{place}.content")
        message["reasoning_content"] = message.get("reasoning_content", "") + thought
    else:
        function = {"name": str(item.get("name")), "arguments": item.get("arguments") or "{}"}
        call = {"id": str(item.get("call_id")), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _text(content: Any, place: str) -> str:
    """The texts of an item's content as one. Raises as `_texts`."""
    return "".join(_texts(content, place))


def _texts(content: Any, place: str) -> list[str]:
    """The texts of an item's content.

    :raises ApiError: it holds something else.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ApiError(400, f"{place}: needs a text or a list of parts, got {type(content).__name__}", place)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in _TEXTS or not isinstance(text, str):
            raise ApiError(400, f"{place}.{number}: needs a part that is a text, got {str(kind)[:60]!r}", f"{place}.{number}")
        texts.append(text)
    return texts


def _function(tool: ResponseTool, place: str) -> dict[str, Any]:
    """A tool in the form of chats.

    :raises ApiError: a tool that OpenAI's servers run themselves, or one without a name.
    """
    if tool.type != "function" or tool.name is None:
        got = tool.type if tool.type != "function" else "a function without a name"
        raise ApiError(400, f"{place}.type: needs a function with a name, got {got[:60]!r}", f"{place}.type")
    given = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {"name": tool.name, **{k: v for k, v in given.items() if v is not None}}}


def _choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Which functions the model may or must call, as chats say it.

    :raises ApiError: a choice that chats do not have.
    """
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function" or not isinstance(given.get("name"), str):
        got = str(given.get("type"))[:60]
        raise ApiError(400, f"tool_choice: needs auto, none, required or a function's name, got {got!r}", "tool_choice")
    return {"type": "function", "function": {"name": given["name"]}}
