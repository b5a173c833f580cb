"""A value of the wrong kind anywhere in the body of a conversation is the client's fault, at its place; never a fault of ours.

Bodies go through reading, validation and the chat template, without a server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

pytest.importorskip("llguidance", reason="needs llguidance: pip install 'headway[structured]'")

from headway import LLM, SamplingParams
from headway.core.sampling.grammar import GrammarError, grammar_text
from headway.requests.chats import ChatFormat
from headway.server.anthropic import MessagesRequest, TokenCountRequest
from headway.server.errors import ApiError, api_error
from headway.server.openai.params import ParamsMaker, chat_params, tool_use
from headway.server.openai.requests import ChatRequest
from headway.server.openai.responses import ResponsesRequest

Place = tuple[str | int, ...]

SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer"}}}
HELLO: Final = [{"role": "user", "content": "a"}]
TEXT: Final = {"type": "text", "text": "fox"}
CALL: Final = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
FUNCTION: Final = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}

MESSAGES: Final[dict[str, Any]] = {
    "model": "tiny",
    "max_tokens": 8,
    "system": [TEXT],
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, TEXT]},
        {"role": "user", "content": [TEXT]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "d", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, TEXT], "is_error": True},
                {"type": "tool_result", "tool_use_id": "d", "content": "2"},
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "type": "custom", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2048},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["x"],
    "stream": False,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
}
FORMED: Final = {
    "messages": HELLO,
    "max_tokens": 8,
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
}
COUNTED: Final = {"messages": HELLO, **{name: MESSAGES[name] for name in ("system", "tools", "tool_choice", "thinking")}}
CHAT: Final[dict[str, Any]] = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [TEXT, TEXT], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "developer", "content": "d"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
}
ALLOWED: Final = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
RESPONSES: Final[dict[str, Any]] = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "developer", "content": "d"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "b"},
    ],
    "instructions": "i",
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "f"},
}
JSON_FORM: Final = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
TAG: Final = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}}
TRIGGERED: Final = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a"],
}

BODIES: Final[dict[str, tuple[type[Any], dict[str, Any]]]] = {
    "messages": (MessagesRequest, MESSAGES),
    "messages with a form": (MessagesRequest, FORMED),
    "count_tokens": (TokenCountRequest, COUNTED),
    "chat": (ChatRequest, CHAT),
    "chat of several tools": (ChatRequest, {**CHAT, "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}}),
    "chat with a schema": (ChatRequest, {"messages": HELLO, "response_format": JSON_FORM}),
    "chat with a tag": (ChatRequest, {"messages": HELLO, "response_format": TAG}),
    "chat with tags": (ChatRequest, {"messages": HELLO, "response_format": TRIGGERED}),
    "responses": (ResponsesRequest, RESPONSES),
    "responses with a form": (
        ResponsesRequest,
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA}}},
    ),
}
WRONG: Final[list[Any]] = [
    *(None, True, False, 0, -1, 5, 1.5, 10**30, "", "x", "\x00"),
    *([], [None], [5], ["x"], [[]], [{}], [{"type": None}]),
    *({}, {"a": None}, {"type": None}, {"type": "x"}, {"type": ["text"]}, {"type": "text"}, {"type": "text", "text": 5}),
    *({"type": "image", "source": {}}, {"type": "function"}, {"function": 5}, {"name": 5}),
]
FREE: Final = ("properties", "input_schema", "schema", "parameters", "input", "metadata", "structures", "format")
"""Fields whose insides are the client's own, or are looked at when a form is compiled."""
KINDS: Final[dict[str, tuple[type, ...]]] = {
    "content": (str, list),
    "system": (str, list),
    "output": (str, list),
    "arguments": (str, dict),
    "summary": (str, list),
    "tool_choice": (str, dict),
    "schema": (dict, bool),
}
"""Kinds that a field may have, by its name; of other fields the one that the valid body has."""


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Every place in a body."""
    if at:
        yield at
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(each, (*at, key))


def value_at(body: Any, place: Place) -> Any:
    for key in place:
        body = body[key]
    return body


def changed(body: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    made = json.loads(json.dumps(body))
    value_at(made, place[:-1])[place[-1]] = value
    return made


def kind_of(value: Any) -> type:
    return float if type(value) is int else type(value)


def is_wrong(body: Any, place: Place, value: Any) -> bool:
    """Whether a value has certainly the wrong kind for its place."""
    if value is None or any(key in FREE for key in place[:-1]):
        return False
    known = value_at(body, place)
    kinds = KINDS.get(str(place[-1]), ())
    if known is None or (place[-1] == "input" and "messages" not in body):
        return False
    if kinds and isinstance(known, kinds):
        return not isinstance(value, kinds)
    return kind_of(value) is not kind_of(known) and not (isinstance(place[-1], int) and isinstance(known, dict))


@pytest.fixture(scope="module")
def prepare(llm: LLM) -> Callable[[type[Any], dict[str, Any]], None]:
    """Take a body as far as the engine's door."""
    chats, maker = ChatFormat.of(llm.get_tokenizer()), ParamsMaker(SamplingParams())
    template = (
        "{% for each in messages %}{{ each.role + each.content }}{% for call in each.tool_calls or [] %}{{ call }}{% endfor %}"
    )
    template += "{% endfor %}{{ tools }}"

    def run(kind: type[Any], body: dict[str, Any]) -> None:
        asked = kind.model_validate_json(json.dumps(body))
        if isinstance(asked, ResponsesRequest):
            asked.check()
            asked.ignored()
        if isinstance(asked, ChatRequest):
            chat = asked
        elif isinstance(asked, ResponsesRequest):
            chat = asked.chat(())
        else:
            chat = asked.chat() if isinstance(asked, MessagesRequest) else ChatRequest(**asked.fields())
        asked.unknown()
        use, params = tool_use(chat), chat_params(chat, maker)
        messages, tools = chats.conversation(chat.messages, use)
        prompt: Any = llm.driver.validator.chat_prompt(messages, chat_template=template, tools=tools)
        form = chats.params(params, use, prompt).structured_outputs
        try:
            if form is not None:
                grammar_text(form)
        except ValueError as error:  # which ends the request alone, when it is compiled
            raise GrammarError(str(error)) from None

    return run


def fault(prepare: Callable[..., None], kind: type[Any], body: dict[str, Any]) -> ApiError | None:
    """The error of a body; None: it is served."""
    try:
        prepare(kind, body)
    except Exception as error:  # what the server turns into its answer
        return api_error(error)
    return None


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BODIES)
def test_a_value_of_the_wrong_kind_is_refused_at_its_place(prepare: Callable[..., None], name: str, share: int) -> None:
    """share: one of so many values, by turns, at each place."""
    kind, body = BODIES[name]
    assert fault(prepare, kind, body) is None
    for number, place in enumerate(places(body)):
        for value in WRONG[number % share :: share]:
            told, where = fault(prepare, kind, changed(body, place, value)), ".".join(map(str, place))
            if told is None:
                assert not is_wrong(body, place, value), (where, value)
                continue
            said = str(told)
            assert told.status == 400, (where, value, said)
            assert "\n" not in said, (where, value, said)
            assert len(said) < 400, (where, value, said)
            assert (told.param or "") in said, (where, value, said)
            if is_wrong(body, place, value):
                assert f"{told.param}.".startswith(f"{where}."), (where, value, told.param, said)
                assert said.startswith(f"{told.param}: "), (where, value, said)


@pytest.mark.parametrize("name", BODIES)
def test_a_field_that_is_missing_makes_no_fault_of_ours(prepare: Callable[..., None], name: str) -> None:
    kind, body = BODIES[name]
    for place in places(body):
        made = json.loads(json.dumps(body))
        del value_at(made, place[:-1])[place[-1]]
        told = fault(prepare, kind, made)
        assert told is None or told.status == 400, (place, told)
