"""/v1/responses: what OpenAI's client sends and reads, held to the chat that it is."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import TypeAdapter

from headway.core.contract.text_plugins import ChatPiece
from headway.server.openai.responses import ResponseStore, StoredResponse, messages_of_items
from server_clients import always_read, chat, events_of
from server_thread import Running

responses = pytest.importorskip("openai.types.responses", reason="openai below 1.66 has no responses")
PATH = "/v1/responses"
ASK = [{"role": "user", "content": "the quick fox"}]
BODY = {"model": "tiny", "max_output_tokens": 8, "temperature": 0, "ignore_eos": True, "input": "the quick fox"}
EVENT: TypeAdapter[Any] = TypeAdapter(responses.ResponseStreamEvent)


def numbered(answer: httpx.Response) -> list[dict[str, Any]]:
    """The data of the events, each of which is numbered, named by its type and of OpenAI's type."""
    found = events_of(answer)
    assert [each["sequence_number"] for each in found] == [*range(len(found))]
    for each in found:
        EVENT.validate_python(each)
    return found


def test_a_response_is_the_chat_of_its_items(served: Running, http: httpx.Client) -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": text} for text in ("the quick", "fox")]}]
    told = http.post(PATH, json={**BODY, "input": items, "instructions": "be brief", "metadata": {"a": "b"}}).json()
    response = responses.Response.model_validate(told)
    same = chat(http, [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick\nfox"}])
    assert response.output_text == same["choices"][0]["message"]["content"]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.input_tokens, response.usage.output_tokens) == (same["usage"]["prompt_tokens"], 8)
    assert (response.metadata, response.instructions, response.temperature) == ({"a": "b"}, "be brief", 0)


def test_a_stream_is_the_response_in_events(served: Running, http: httpx.Client) -> None:
    whole = http.post(PATH, json=BODY).json()
    events = numbered(http.post(PATH, json={**BODY, "stream": True}))
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(each["delta"] for each in events[4:-4]) == text
    assert events[-4]["text"] == text
    last = events[-1]["response"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert last["usage"]["output_tokens"] == 8
    assert events[0]["response"]["output"] == []


def test_a_response_goes_on_where_it_was_stored(served: Running, http: httpx.Client, client: OpenAI) -> None:
    asked = {"model": "tiny", "max_output_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    first = client.responses.create(input="the quick fox", **asked)
    second = client.responses.create(input="and then", previous_response_id=first.id, **asked)
    messages = [*ASK, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "and then"}]
    assert second.output_text == chat(http, messages)["choices"][0]["message"]["content"]
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert len(client.responses.input_items.list(second.id).data) == 1
    third = client.responses.create(input="more", previous_response_id=second.id, **asked)
    assert third.usage.input_tokens > second.usage.input_tokens  # type: ignore[union-attr]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no response 'resp_.*' is stored; this server keeps the last 1000"):
        client.responses.retrieve(first.id)
    gone = http.post(PATH, json={**BODY, "previous_response_id": first.id})
    assert (gone.status_code, gone.json()["error"]["code"]) == (400, "previous_response_not_found")
    unstored = client.responses.create(input="a", store=False, **asked)
    assert http.get(f"{PATH}/{unstored.id}").status_code == 404


def test_the_oldest_responses_give_way() -> None:
    store = ResponseStore(3, most_bytes=2000)
    for number in range(6):
        store.put(StoredResponse({"id": str(number), "output": []}, [], [{"content": "x" * (10 if number < 5 else 1950)}]))
        if number == 4:
            assert [store.get(str(each)).response["id"] for each in (2, 3, 4)] == ["2", "3", "4"]
    assert store.get("5").response["id"] == "5"
    for gone in "01234":
        with pytest.raises(Exception, match="is stored"):
            store.get(gone)
    store.remove("5")
    store.put(StoredResponse({"id": "6", "output": []}, [], [{"content": "x" * 1900}]))
    store.put(StoredResponse({"id": "7", "output": []}, [], []))
    assert store.get("6").conversation == [{"content": "x" * 1900}]


PIECES = [
    ChatPiece("reasoning", "hm"),
    ChatPiece("content", "so"),
    ChatPiece("call", "f", 0, "call_1"),
    ChatPiece("arguments", '{"x": 1}', 0),
]


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_calls_are_items(served: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    always_read(monkeypatch, PIECES)
    answer = http.post(PATH, json={**BODY, "stream": stream})
    response = numbered(answer)[-1]["response"] if stream else answer.json()
    responses.Response.model_validate(response)
    assert [each["type"] for each in response["output"]] == ["reasoning", "message", "function_call"]
    call = response["output"][2]
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_1", "f", '{"x": 1}')
    assert response["status"] == "completed"
    result = {"type": "function_call_output", "call_id": "call_1", "output": "42"}
    asked = {**BODY, "input": [result], "previous_response_id": response["id"]}
    assert http.post(PATH, json=asked).status_code == 200
    items = [{"role": "user", "content": "the quick fox"}, *response["output"], result]
    user, model, tool = messages_of_items(items)
    assert (user, tool) == (ASK[0], {"role": "tool", "tool_call_id": "call_1", "content": "42"})
    assert (model["role"], model["content"], model["reasoning_content"]) == ("assistant", "so", "hm")
    assert model["tool_calls"] == [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "the background": ({"background": True}, "background"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "a cut": ({"truncation": "auto"}, "truncation"),
    "a picture": ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
    "a reference": ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
    "a server's tool": ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    "no input": ({"input": None}, "input"),
}


@pytest.mark.parametrize(("change", "param"), BAD.values(), ids=BAD)
def test_what_is_not_built_is_refused_by_name(served: Running, http: httpx.Client, change: dict[str, Any], param: str) -> None:
    answer = http.post(PATH, json={**BODY, **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"].startswith(param)


def test_a_response_has_the_form_that_was_asked_for(served: Running, http: httpx.Client) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    answer = http.post(PATH, json={**BODY, "text": {"format": form, "verbosity": "low"}, "logit_bias": {"220": -50}})
    assert answer.headers["x-headway-ignored"] == "text.verbosity"
    response = answer.json()
    assert response["output"][0]["content"][0]["text"].lstrip()[:1] == "{"
    assert response["text"]["format"]["schema"] == schema
