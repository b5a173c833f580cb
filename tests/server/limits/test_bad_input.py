"""What clients get wrong, also at random: each is answered in OpenAI's shape, and the server lives."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from openai import OpenAI

from headway import LLM, SamplingParams
from headway.server.openai.params import ParamsMaker, completion_params, template_kwargs
from headway.server.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from server_thread import Running, raw

ASK = [{"role": "user", "content": "the quick fox"}]
JSON = {"content-type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "temperature below 0": (TEXT, {"prompt": "a", "temperature": -1}, "temperature"),
    "no tokens": (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    "a million completions": (TEXT, {"prompt": "a", "n": 10**6}, "n"),
    "best_of below n": (TEXT, {"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
    "best_of in a stream": (TEXT, {"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
    "a bias of 1000": (TEXT, {"prompt": "a", "logit_bias": {"5": 1000}}, "logit_bias"),
    "a bias of no token": (TEXT, {"prompt": "a", "logit_bias": {"word": 1}}, "logit_bias.word"),
    "too many logprobs": (TEXT, {"prompt": "a", "logprobs": 1000}, "logprobs"),
    "top_logprobs alone": (CHAT, {"messages": ASK, "top_logprobs": 3}, "top_logprobs"),
    "no prompt": (TEXT, {}, "prompt"),
    "an empty prompt": (TEXT, {"prompt": ""}, "prompt"),
    "a prompt of mixed things": (TEXT, {"prompt": ["a", 5]}, "prompt"),
    "no messages": (CHAT, {}, "messages"),
    "an empty conversation": (CHAT, {"messages": []}, "messages"),
    "a message without a role": (CHAT, {"messages": [{"content": "a"}]}, "messages.0.role"),
    "a picture": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
    "another form": (CHAT, {"messages": ASK, "response_format": {"type": "xml"}}, "response_format.type"),
    "a form without a schema": (
        CHAT,
        {"messages": ASK, "response_format": {"type": "json_schema"}},
        "response_format.json_schema",
    ),
    "a template of one's own": (CHAT, {"messages": ASK, "chat_template": "{% for i in range(9) %}{% endfor %}"}, "chat_template"),
    "and by the back door": (CHAT, {"messages": ASK, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
    "a truth value among tokens": (TEXT, {"prompt": [5, True]}, "prompt"),
    "a truth value as an allowed token": (TEXT, {"prompt": "a", "allowed_token_ids": [True]}, "allowed_token_ids.0"),
    "usage without a stream": (CHAT, {"messages": ASK, "stream_options": {"include_usage": True}}, "stream_options"),
    "a suffix": (TEXT, {"prompt": "a", "suffix": "z"}, "suffix"),
    "a seed beyond 64 bits": (TEXT, {"prompt": "a", "seed": 2**70}, "seed"),
    "neither text nor messages": ("/tokenize", {}, "prompt"),
    "a long conversation": (CHAT, {"messages": [{"role": "user", "content": "a b " * 300}]}, "messages"),
    "a stream of a beam search": (TEXT, {"prompt": "a", "use_beam_search": True, "stream": True}, "stream"),
    "functions of old": (CHAT, {"messages": ASK, "functions": [{"name": "f"}]}, "functions"),
    "sound by its modality": (CHAT, {"messages": ASK, "modalities": ["text", "audio"]}, "modalities.1"),
    "a budget of thoughts": (CHAT, {"messages": ASK, "thinking_token_budget": 5}, "thinking_token_budget"),
    "an adapter for SGLang": ("/generate", {"text": "a", "lora_path": "x"}, "lora_path"),
    "two forms": (TEXT, {"prompt": "a", "guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
    "an unknown kind of form": (TEXT, {"prompt": "a", "structured_outputs": {"xml": "a"}}, "structured_outputs"),
}


def told(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error, whose shape is checked."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


@pytest.mark.parametrize(("path", "body", "param"), BAD.values(), ids=BAD)
def test_a_value_that_cannot_work_is_named(
    served: Running, http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    error = told(http.post(path, json=body), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"prompt": "a"', b"\xff\xfe", b'{"prompt": NaNa}', b"[" * 100_000])
def test_invalid_json_is_answered_with_the_place(served: Running, http: httpx.Client, body: bytes) -> None:
    assert told(http.post(TEXT, content=body, headers=JSON), 400)["type"] == "invalid_request_error"


VAST: dict[str, tuple[str, str, str]] = {
    "tokens at most": ("/v1/responses", '"input": "a", "max_output_tokens": NUMBER', "max_output_tokens"),
    "a part of a message": (
        CHAT,
        '"messages": [{"role": "user", "content": [{"type": "text", "x": NUMBER}]}]',
        "messages.0.content.0.x",
    ),
    "a tool": (
        CHAT,
        '"messages": [], "tools": [{"function": {"parameters": {"maximum": NUMBER}}}]',
        "tools.0.function.parameters.maximum",
    ),
    "a variable of the template": (CHAT, '"messages": [], "chat_template_kwargs": {"a": NUMBER}', "chat_template_kwargs.a"),
    "a schema": (
        TEXT,
        '"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": [NUMBER]}}}',
        "response_format.json_schema.schema.const.0",
    ),
    "a schema as a text": (TEXT, '"prompt": "a", "guided_json": "{\\"const\\": NUMBER}"', "structured_outputs.json"),
    "a field that is unknown": (TEXT, '"prompt": "a", "frobnicate": {"a": [NUMBER]}', "frobnicate.a.0"),
    "metadata of a response": ("/v1/responses", '"input": "a", "metadata": {"a": NUMBER}', "metadata.a"),
    "an item of a response": ("/v1/responses", '"input": [{"role": "user", "content": "a", "x": NUMBER}]', "input.0.x"),
    "a tool of a response": ("/v1/responses", '"input": "a", "tools": [{"type": "function", "x": NUMBER}]', "tools.0.x"),
    "tokens": ("/tokenize", '"prompt": "a", "x": NUMBER', "x"),
    "SGLang's parameters": ("/generate", '"text": "a", "sampling_params": {"top_k": NUMBER}', "sampling_params.top_k"),
    "vLLM's small server": ("/generate", '"prompt": "a", "top_k": NUMBER', "top_k"),
    "whatever the body is for": ("/invocations", '"prompt": "a", "x": NUMBER', "x"),
}


@pytest.mark.parametrize("number", ["1" + "0" * 30, "-9223372036854775809", "1e999", "NaN", "-Infinity"])
def test_numbers_that_cannot_be_written_again_are_refused_by_their_paths(
    served: Running, http: httpx.Client, number: str
) -> None:
    for path, fields, param in VAST.values():
        error = told(http.post(path, content=f"{{{fields}}}".replace("NUMBER", number), headers=JSON), 400)
        assert (error["param"], "64 bits" in error["message"]) == (param, True), (path, fields, error)
    for fields in ('"metadata": {"a": NUMBER}', '"messages": [{"role": "user", "content": "a", "x": NUMBER}], "stream": true'):
        body = f'{{"model": "tiny", "max_tokens": 3, "messages": [], {fields}}}'.replace("NUMBER", number)
        answer = http.post("/v1/messages", content=body, headers=JSON)
        assert (answer.status_code, "64 bits" in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
def test_parameters_that_leave_no_token_are_the_clients_fault(
    served: Running, http: httpx.Client, llm: LLM, stream: bool
) -> None:
    eos = llm.get_tokenizer().eos_token_id
    body = {"prompt": "a", "allowed_token_ids": [eos], "min_tokens": 3, "max_tokens": 5, "stream": stream}
    error = told(http.post(TEXT, json=body), 400)
    assert (error["type"], "leaves no token" in error["message"]) == ("invalid_request_error", True)


def test_unknown_fields_are_named_in_a_header(served: Running, http: httpx.Client) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 2,
        "stop": None,
        "stream": None,
        "frobnicate": {"deep": [1]},
        "service_tier": "auto",
        "logprobs": None,
        "use_beam_search": False,
        "bad\r\nname": 1,
    }
    for stream in (False, True):
        answer = http.post(TEXT, json={**body, "stream": stream})
        assert answer.status_code == 200
        assert answer.headers["x-headway-ignored"] == "frobnicate, bad??name"
    assert "x-headway-ignored" not in http.post(TEXT, json={"prompt": "a", "max_tokens": 1, "user": "me"}).headers


def test_arguments_of_templates_and_of_processors_are_passed_on() -> None:
    passages = [{"title": "foxes", "text": "are quick"}]
    assert template_kwargs(ChatRequest(messages=ASK, documents=passages)) == {"documents": passages}
    own = template_kwargs(ChatRequest(messages=ASK, documents=passages, chat_template_kwargs={"documents": []}))
    assert own == {"documents": []}
    body = CompletionRequest(prompt="a", vllm_xargs={"target_token": 5})
    assert completion_params(body, ParamsMaker(SamplingParams())).extra_args == {"target_token": 5}


def test_forms_by_the_names_that_they_had_are_served(served: Running, http: httpx.Client) -> None:
    pytest.importorskip("llguidance")
    for field, wanted, texts in (("guided_choice", ["fox", "dog"], ("fox", "dog")), ("guided_regex", "quick", ("quick",))):
        answer = http.post(TEXT, json={"prompt": "the ", "max_tokens": 20, "temperature": 0, field: wanted})
        assert answer.json()["choices"][0]["text"] in texts
    assert told(http.post(TEXT, json={"prompt": "a", "guided_regex": "(a"}), 400)


def test_what_is_not_there(served: Running, http: httpx.Client, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has tiny, small, not 'huge'") as caught:
        client.chat.completions.create(model="huge", messages=ASK)  # type: ignore[arg-type]
    assert caught.value.code == "model_not_found"
    told(http.get("/v1/models/huge"), 404)


def test_a_prompt_that_is_too_long_says_how_long_it_may_be(served: Running, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 255 tokens") as caught:
        client.completions.create(model="tiny", prompt=[7] * 300)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("levels", [130, 250, 480])
def test_a_schema_that_is_too_deep_is_answered_400(served: Running, http: httpx.Client, levels: int) -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"items": schema}
    wanted = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    error = told(http.post(TEXT, json={"prompt": "a", "response_format": wanted}), 400)
    assert "structured_outputs.json: needs at most 120 levels" in error["message"] or "more than 200 levels" in error["message"]


def test_a_body_of_100_mb_is_refused_unread(served: Running, http: httpx.Client) -> None:
    def parts() -> Any:
        for _ in range(100):
            yield bytes(2**20)

    assert told(http.post(TEXT, content=bytes(100 * 2**20), headers=JSON), 413)["code"] == "body_too_large"
    with served.connect() as sock:
        sock.sendall(raw("POST", TEXT).replace(b"content-length: 0", b"content-length: 99999999"))
        assert sock.recv(100).startswith(b"HTTP/1.1 413")
    with suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        told(
            http.post(TEXT, content=parts(), headers=JSON), 413
        )  # it is cut off: the client may hear of that before it hears why
    assert http.get("/health").status_code == 200


def test_probes_may_ask_for_the_head_alone_and_other_methods_hear_which_there_are(served: Running, http: httpx.Client) -> None:
    for path in ("/health", "/ping"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    refused = http.get(TEXT)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["message"] == f"'{TEXT}': needs POST, got 'GET'"
    refused = http.put("/health")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/V1/Models", "/v1/models"),
        ("/v1/v1/completions", "/v1/completions"),
    ],
)
def test_an_unknown_path_names_itself_and_the_nearest(http: httpx.Client, path: str, near: str) -> None:
    for answer in (http.get(path), http.post(path, json={})):
        assert told(answer, 404)["message"] == f"'{path}': this server has no such path; the nearest is {near}"
    assert len(told(http.get("/v1/" + "x" * 9_000), 404)["message"]) < 300
    assert told(http.get("/%0a%E2%80%AE"), 404)["message"].isprintable()


def test_what_is_not_http_is_refused(served: Running, http: httpx.Client) -> None:
    for nonsense in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with served.connect() as sock:
            sock.sendall(nonsense)
            status = sock.recv(12)
            assert status == b"HTTP/1.1 400", status
    assert http.get("/health").status_code == 200


def test_a_prompt_is_cut_to_what_the_model_has_room_for(served: Running, http: httpx.Client) -> None:
    longest = http.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"prompt": [5] * (longest + 10), "truncate_prompt_tokens": -1, "ignore_eos": True, "temperature": 0}
    assert http.post(TEXT, json={**body, "truncate_prompt_tokens": None}).status_code == 400
    for most, kept in ((3, longest - 3), (longest - 4, 4), (longest, longest - 1), (None, longest - 16)):
        used = http.post(TEXT, json={**body, "max_tokens": most}).json()["usage"]
        assert (used["prompt_tokens"], used["completion_tokens"]) == (kept, longest - kept)
    short = http.post(TEXT, json={**body, "prompt": [5] * 3, "max_tokens": 1}).json()["usage"]
    assert short["prompt_tokens"] == 3
    chat = {**body, "messages": [{"role": "user", "content": "fox " * longest}], "prompt": None}
    assert http.post(CHAT, json=chat).json()["usage"]["prompt_tokens"] == longest - 1


BODIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "the", "max_tokens": 2}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "the"}], "max_tokens": 2}),
    "/tokenize": (TokenizeRequest, {"prompt": "the"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [3]}),
}
NUMBERS = [0, 1, -1, 2, 5, 63, 299, 300, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.0, -0.0, 0.5, 1e-300, 1e39, 1e308, -1.5]
TEXTS = ["", "a", "auto", "none", "5", "\x00", "\u2028", "<eos>", "{{ 1 }}", "{% for i in x %}", "a" * 300]
SCALARS = st.sampled_from([None, True, False, *NUMBERS, *TEXTS])
NAMES = ["type", "role", "content", "text", "name", "function", "arguments", "id", "tool_calls", "schema", "json_schema", "regex"]
NAMES += ["choice", "grammar", "json", "json_object", "include_usage", "messages", "self", "tools", "0", "5", "299", "bos_token"]
NAMES += ["add_generation_prompt", "documents", "range", "raise_exception", "loop", "disable_any_whitespace", "parameters"]
ANY_JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3), max_leaves=6
)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("examples", [25, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_no_field_of_a_request_makes_a_fault(served: Running, path: str, examples: int) -> None:
    kind, usual = BODIES[path]
    fields = st.sampled_from(sorted(field.alias or name for name, field in kind.model_fields.items()))
    messages = st.lists(st.dictionaries(st.sampled_from(NAMES), ANY_JSON, max_size=3), min_size=1, max_size=2)
    changes = st.dictionaries(fields, ANY_JSON, min_size=1, max_size=3) | st.fixed_dictionaries({"messages": messages})

    with httpx.Client(base_url=served.url, timeout=30) as http:

        @seed(19)
        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(changes)
        def check(changed: dict[str, Any]) -> None:
            body = json.dumps({**usual, **changed}).encode()
            answer = http.post(path, content=body, headers={"content-type": "application/json"})
            told = answer.text
            assert answer.status_code in (200, 400, 404), (changed, told)
            assert '"server_error"' not in told, (changed, told)  # in a stream that has begun
            if answer.status_code != 200:
                message = answer.json()["error"]["message"]
                assert "\n" not in message, (changed, told)
                assert len(message) < 600, (changed, told)

        check()
