"""Calls of tools and reasoning through OpenAI's client: a grammar makes a model with random weights write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from headway import LLM
from headway.contract import ChatContext, ChatParserInfo, ConfigError
from headway.server.options import ServerOptions
from sandbox import save_tiny_model
from server_thread import running

pytest.importorskip("llguidance")

TEMPLATE = (
    "{% for tool in tools or [] %}tool {{ tool.function.name }}{{ '\n' }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% elif enable_thinking %}<think>{% endif %}{% endif %}"
)
ASK = [{"role": "user", "content": "the quick fox"}]
WORDS = {"type": "object", "properties": {"word": {"enum": ["fox", "dog"]}}, "required": ["word"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": WORDS}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
NAMED = {"type": "function", "function": {"name": "find"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("tools"), positions=1024, chat=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), kv_cache_memory="16MiB", num_threads=1, block_size=16)


@pytest.fixture(scope="module")
def url(llm: LLM) -> Iterator[str]:
    with running(llm, ServerOptions(served_model_names=("tiny",))) as found:
        yield found.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


def accumulated(chunks: Any) -> dict[str, Any]:
    """What a client keeps of a stream with one choice."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reasons": []}
    for chunk in chunks:
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            found["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(found["calls"]):
                    assert (call.type, call.function.arguments, bool(call.id)) == ("function", "", True)
                    found["calls"].append([call.function.name, ""])
                else:
                    assert (call.id, call.function.name) == (None, None)
                    found["calls"][call.index][1] += call.function.arguments
            if choice.finish_reason:
                found["reasons"].append(choice.finish_reason)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_must_come_comes_whole_and_in_pieces(client: OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": ASK,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 200,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
    }
    (answer,) = client.chat.completions.create(**asked).choices
    (call,) = answer.message.tool_calls or []
    assert (answer.finish_reason, answer.message.content, call.type) == ("tool_calls", None, "function")
    arguments = json.loads(call.function.arguments)
    if call.function.name == "find":
        assert arguments["word"] in ("fox", "dog")
    else:
        assert (choice, call.function.name, arguments) == ("required", "stop", {})
    streamed = accumulated(client.chat.completions.create(**asked, stream=True))
    assert streamed["calls"] == [[call.function.name, call.function.arguments]]
    assert (streamed["content"], streamed["reasons"]) == ("", ["tool_calls"])


def test_calls_and_their_results_go_into_the_next_prompt(client: OpenAI, llm: LLM, url: str) -> None:
    asked = {"tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False, "max_tokens": 200, "temperature": 0}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    message = client.chat.completions.create(model="tiny", messages=ASK, extra_body=off, **asked).choices[0].message
    (call,) = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
    messages: list[Any] = [*ASK, message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=2).choices
    tokens = httpx.post(f"{url}/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
    text = llm.tokenizer.decode(tokens)
    assert text.startswith("tool find\ntool stop\nuser: the quick fox\nassistant: ")
    arguments = json.dumps(json.loads(call.function.arguments))
    assert f'<tool_call>{{"arguments": {arguments}, "name": "find"}}</tool_call>' in text
    assert text.endswith("tool: 7\nassistant:")


def test_reasoning_stands_beside_the_content(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"enum": ["fox", "dog"]}}}
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "response_format": form, "max_tokens": 300, "seed": 1}
    bias = {"logit_bias": {}, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    message = client.chat.completions.create(**asked, **bias).choices[0].message
    assert json.loads(message.content or "") in ("fox", "dog")
    assert (message.reasoning, message.reasoning_content) == (None, None)  # type: ignore[attr-defined]
    thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    message = client.chat.completions.create(**{**asked, "max_tokens": 12}, **thinking).choices[0].message
    assert message.content is None
    assert message.reasoning == message.reasoning_content != ""  # type: ignore[attr-defined]
    streamed = accumulated(client.chat.completions.create(**{**asked, "max_tokens": 12}, **thinking, stream=True))
    assert (streamed["reasoning"], streamed["content"], streamed["reasons"]) == (message.reasoning, "", ["length"])  # type: ignore[attr-defined]
    hidden = {"extra_body": {**thinking["extra_body"], "include_reasoning": False}}
    message = client.chat.completions.create(**{**asked, "max_tokens": 12}, **hidden).choices[0].message
    assert message.reasoning is None  # type: ignore[attr-defined]


def test_free_text_with_a_structural_tag(client: OpenAI) -> None:
    tag = {"begin": "<word>", "schema": {"enum": ["fox"]}, "end": "</word>"}
    form: Any = {"type": "structural_tag", "structures": [tag], "triggers": ["<word>"]}
    assert client.chat.completions.create(model="tiny", messages=ASK, response_format=form, max_tokens=8).choices
    one = {"type": "sequence", "elements": [{"type": "const_string", "value": "a fox"}]}
    form = {"type": "structural_tag", "format": one}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = client.chat.completions.create(model="tiny", messages=ASK, response_format=form, extra_body=off)
    assert answer.choices[0].message.content == "a fox"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no such tool": ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
    "required without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a form beside a required tool": (
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
    ),
    "a tool without a function": ({"tools": [{"type": "function"}]}, "tools.0.function"),
    "another type of tool": ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
    "a schema of no object": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools.0.function.parameters",
    ),
    "the older choice": ({"function_call": "auto"}, "function_call"),
    **{
        f"arguments {text}": (
            {
                "messages": [
                    *ASK,
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": text}}]},
                ]
            },
            "messages.1.tool_calls.0.function.arguments",
        )
        for text in ("{", "[1]")
    },
}


@pytest.mark.parametrize(("body", "param"), BAD.values(), ids=BAD)
def test_what_cannot_work_is_named_in_one_line(url: str, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": ASK, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert "\n" not in error["message"]


def test_parsers_and_the_template_may_be_given(llm: LLM) -> None:
    template = "tools {% for message in messages %}{{ message.role }} says {{ message.content }}{% endfor %}"
    names = {"tool_call_parser": "llama3_json", "reasoning_parser": "none"}
    options = ServerOptions(served_model_names=("tiny",), chat_template=template, **names)
    with running(llm, options) as found:
        body = {"messages": ASK, "tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False, "temperature": 0}
        answer = httpx.post(f"{found.url}/v1/chat/completions", json={**body, "return_token_ids": True}).json()["choices"][0]
        assert llm.tokenizer.decode(answer["token_ids"]).startswith('{"name": "find", "parameters": {')
        assert answer["message"]["tool_calls"][0]["function"]["name"] == "find"
        assert (answer["message"]["reasoning"], answer["message"]["reasoning_content"]) == (None, None)
        asked = [{"role": "developer", "content": "a"}, {"role": "assistant", "content": None}]
        tokens = httpx.post(f"{found.url}/tokenize", json={"messages": asked}).json()["tokens"]
        assert llm.tokenizer.decode(tokens) == "tools system says aassistant says "
        (model,) = httpx.get(f"{found.url}/v1/models").json()["data"]
        assert (model["tool_call_parser"], model["reasoning_parser"]) == ("llama3_json", None)


def test_a_template_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--chat-template: needs a file with a template.*nowhere"):
        ServerOptions(chat_template="nowhere.jinja")
    with pytest.raises(ConfigError, match=r"--generation-config: needs auto, vllm or a folder"):
        ServerOptions(generation_config="nowhere")


def test_a_schema_forbids_what_it_does_not_name(client: OpenAI) -> None:
    off = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": WORDS}}
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 100, "logit_bias": {"220": -50}, **off}
    answer = client.chat.completions.create(**asked, response_format=form).choices[0]
    assert answer.finish_reason == "stop"
    assert list(json.loads(answer.message.content or "")) == ["word"]


@pytest.mark.parametrize("made", [SystemExit(3), 7])
@pytest.mark.parametrize("stream", [False, True])
def test_a_parser_that_cannot_be_made_is_named(llm: LLM, made: object, stream: bool) -> None:
    def make(context: ChatContext) -> Any:
        if isinstance(made, BaseException):
            raise made
        return made

    options = ServerOptions(chat_parsers=[ChatParserInfo("mine", "fails", "reasoning", make)], reasoning_parser="mine")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": stream}
    with running(llm, options) as served:
        answers = [httpx.post(f"{served.url}{path}", json=body) for path in ("/v1/chat/completions", "/v1/messages")]
    for answer in answers:
        assert answer.status_code == 500
        assert "parser of reasoning mine cannot be made: " in answer.json()["error"]["message"]
