"""/v1/messages: what Anthropic's clients send and read, held to the chat that it is."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from headway import LLM
from headway.core.contract.text_plugins import ChatPiece
from headway.server.anthropic import MessagesRequest
from headway.server.options import ServerOptions
from sandbox import CHAT
from server_clients import always_read, chat, events_of
from server_thread import Running, running

PATH = "/v1/messages"
ASK = [{"role": "user", "content": "the quick fox"}]
BODY = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "messages": ASK}


def test_a_message_is_the_chat_of_its_conversation(served: Running, http: httpx.Client) -> None:
    blocks = [{"type": "text", "text": "the quick"}, {"type": "text", "text": " fox"}]
    asked = {**BODY, "system": [{"type": "text", "text": "be brief"}], "messages": [{"role": "user", "content": blocks}]}
    message = http.post(PATH, json=asked).json()
    same = chat(http, [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick\n fox"}])
    assert message["content"] == [{"type": "text", "text": same["choices"][0]["message"]["content"]}]
    assert (message["type"], message["role"], message["model"], message["id"][:4]) == ("message", "assistant", "tiny", "msg_")
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == same["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == 8


def test_a_form_is_that_of_the_chat() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    asked = MessagesRequest.model_validate({**BODY, "output_config": form}).chat()
    assert asked.response_format is not None
    assert asked.response_format.model_dump(exclude_none=True, by_alias=True)["json_schema"]["schema"] == {"type": "object"}


def test_a_stream_is_the_message_in_events(served: Running, http: httpx.Client) -> None:
    whole = http.post(PATH, json=BODY).json()
    events = events_of(http.post(PATH, json={**BODY, "stream": True}))
    kinds = [each["type"] for each in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert "".join(each["delta"]["text"] for each in events[3:-3]) == whole["content"][0]["text"]
    assert events[0]["message"]["content"] == []
    assert events[2]["content_block"] == {"type": "text", "text": ""}
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 8


def test_a_stop_sequence_is_named(served: Running, http: httpx.Client) -> None:
    text = http.post(PATH, json=BODY).json()["content"][0]["text"]
    message = http.post(PATH, json={**BODY, "stop_sequences": ["\x00", text[3:6]]}).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", text[3:6])
    assert message["content"][0]["text"] == text[: text.index(text[3:6])]


def test_the_last_message_of_the_model_is_continued(served: Running, http: httpx.Client) -> None:
    begun = [*ASK, {"role": "assistant", "content": "jumps"}]
    message = http.post(PATH, json={**BODY, "messages": begun}).json()
    same = chat(http, begun, continue_final_message=True, add_generation_prompt=False)
    assert message["content"][0]["text"] == same["choices"][0]["message"]["content"]


def test_tokens_are_counted(served: Running, http: httpx.Client) -> None:
    found = http.post(f"{PATH}/count_tokens", json={"model": "tiny", "system": "be brief", "messages": ASK}).json()
    messages = [{"role": "system", "content": "be brief"}, *ASK]
    assert found == {"input_tokens": http.post("/tokenize", json={"messages": messages}).json()["count"]}


PIECES = [
    ChatPiece("reasoning", "hm"),
    ChatPiece("content", "so"),
    ChatPiece("call", "f", 0, "a"),
    ChatPiece("arguments", '{"x"', 0),
    ChatPiece("arguments", ": 1}", 0),
    ChatPiece("call", "g", 1, "b"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_calls_are_blocks(
    served: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    always_read(monkeypatch, PIECES)
    answer = http.post(PATH, json={**BODY, "stream": stream})
    if not stream:
        message = answer.json()
        assert message["content"] == [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "so"},
            {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
            {"type": "tool_use", "id": "b", "name": "g", "input": {}},
        ]
        assert message["stop_reason"] == "tool_use"
        return
    events = events_of(answer)
    started = [each["content_block"] for each in events if each["type"] == "content_block_start"]
    assert [each["type"] for each in started] == ["thinking", "text", "tool_use", "tool_use"]
    assert started[2] == {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    assert [each["index"] for each in events if each["type"] == "content_block_stop"] == [0, 1, 2, 3]
    deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
    assert [each["type"] for each in deltas] == [
        *("thinking_delta", "signature_delta", "text_delta", "input_json_delta", "input_json_delta")
    ]
    assert "".join(each["partial_json"] for each in deltas[3:]) == '{"x": 1}'
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"name": "f", "description": "does it", "input_schema": SCHEMA}


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called_is_and_its_result_is_read(llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", CHAT + "{# whose tools need no room #}")
    asked = {**BODY, "ignore_eos": False, "max_tokens": 150, "tools": [TOOL], "tool_choice": {"type": "any"}, "stream": stream}
    asked["logit_bias"] = {"220": -90, "198": -90}  # spaces, which random weights would fill the room with
    with running(llm) as own:
        answer = httpx.post(own.url + PATH, json=asked)
        if stream:
            events = events_of(answer)
            block = events[2]["content_block"]
            text = "".join(each["delta"].get("partial_json", "") for each in events if each["type"] == "content_block_delta")
            assert (events[-2]["delta"]["stop_reason"], list(json.loads(text))) == ("tool_use", ["a"])
        else:
            (block,) = answer.json()["content"]
            assert (answer.json()["stop_reason"], list(block["input"])) == ("tool_use", ["a"])
        assert (block["type"], block["name"]) == ("tool_use", "f")
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "42"}]}
        turns = [*ASK, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
        assert httpx.post(own.url + PATH, json={**BODY, "tools": [TOOL], "messages": turns}).status_code == 200


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
    "a server's tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    "a tool without a name": ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "a tool without a schema": ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    "another model": ({"model": "huge"}, "huge"),
    "no such role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    "a temperature": ({"temperature": -1}, "temperature"),
}


@pytest.mark.parametrize(("change", "said"), BAD.values(), ids=BAD)
def test_errors_have_anthropics_shape(served: Running, http: httpx.Client, change: dict[str, Any], said: str) -> None:
    answer = http.post(PATH, json={**BODY, **change})
    assert answer.status_code == (404 if said == "huge" else 400)
    told = answer.json()
    assert set(told) == {"type", "error"}
    assert told["type"] == "error"
    assert set(told["error"]) == {"type", "message"}
    assert said in told["error"]["message"]
    assert "\n" not in told["error"]["message"]


def test_the_key_may_come_as_anthropics_clients_send_it(llm: LLM) -> None:
    with running(llm, ServerOptions(served_model_names=("tiny",), api_key="secret")) as own:
        for headers, status in (({"x-api-key": "secret"}, 200), ({"x-api-key": "other"}, 401), ({}, 401)):
            answer = httpx.post(own.url + PATH, json=BODY, headers=headers)
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"
