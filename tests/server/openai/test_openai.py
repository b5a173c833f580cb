"""The calls of OpenAI's own client: answers have its types, and say what the engine says offline."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headway import LLM, SamplingParams
from headway.core.contract.errors import ConfigError
from headway.requests.validation import FAMILIES
from headway.server import launch
from headway.server.launch import ready_lines
from headway.server.options import ServerOptions, bound_socket
from sandbox import save_tiny_model
from server_clients import posted
from server_thread import Running, running

ASK = [{"role": "user", "content": "the quick fox"}]
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def offline(llm: LLM, prompt: str, **params: object) -> list[str]:
    (output,) = llm.generate(prompt, SamplingParams(ignore_eos=True, **params), use_tqdm=False)
    return [each.text for each in output.outputs]


def test_models_are_listed_by_their_served_names(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "small"]
    assert client.models.retrieve("small").object == "model"


def test_the_links_and_the_call_shown_at_the_start_work_as_printed(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServerOptions(served_model_names=("tiny",))
    listening, page, docs, _, call = ready_lines(served.url, served.llm, options)
    assert listening == f"listening on {served.url} (Ctrl-C stops it)"
    for link in (page, docs):
        answer = httpx.get(link.rpartition(" ")[2])
        assert answer.status_code == 200
        assert "text/html" in answer.headers["content-type"]
    assert posted(call)["choices"][0]["message"]["role"] == "assistant"
    monkeypatch.setattr(launch, "chat_format_of", lambda llm, options: SimpleNamespace(template=""))
    assert posted(ready_lines(served.url, served.llm, options)[-1])["object"] == "text_completion"


def test_the_lines_at_the_start_fit_keys_hosts_and_names(served: Running) -> None:
    def lines(url: str, **options: object) -> list[str]:
        return ready_lines(url, served.llm, ServerOptions(served_model_names=("it's \u00fc",), **options))

    *_, page, docs, _, call = lines("http://0.0.0.0:80")
    assert (page, docs) == ("web UI: http://127.0.0.1:80/", "API docs: http://127.0.0.1:80/docs")
    assert json.loads(shlex.split(call)[-1])["model"] == "it's \u00fc"
    assert "http://[::1]:80/v1/" in lines("http://[::]:80")[-1]
    *_, intro, call = secret = lines("http://127.0.0.1:80", api_key="secret")
    assert intro == "example, with the API key in HEADWAY_API_KEY:"
    assert '-H "Authorization: Bearer $HEADWAY_API_KEY"' in call
    assert not [line for line in secret if "secret" in line or "/docs" in line]
    assert len(lines("http://127.0.0.1:80", allowed_hosts=("example.org",))) == 1


def test_a_chat_answers_as_the_engine_does_offline(llm: LLM, served: Running, client: OpenAI) -> None:
    (whole,) = llm.chat(ASK, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    answer = client.chat.completions.create(model="tiny", messages=ASK, max_completion_tokens=8, **GREEDY)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", whole.outputs[0].text, "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(whole.prompt_token_ids), 8)
    assert answer.usage.total_tokens == len(whole.prompt_token_ids) + 8
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "tiny", "chatcmpl-")


def test_a_stream_of_a_chat_is_its_answer_in_pieces(served: Running, client: OpenAI) -> None:
    asked = {"model": "small", "messages": ASK, "max_tokens": 12, "n": 2, "seed": 7, "temperature": 1.0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        mine = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(each.delta.content or "" for each in mine) == choice.message.content
        assert [each.delta.role for each in mine] == ["assistant", *[None] * (len(mine) - 1)]
        assert [each.finish_reason for each in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == choice.finish_reason
    assert {(chunk.id, chunk.model, chunk.object) for chunk in chunks} == {(chunks[0].id, "small", "chat.completion.chunk")}
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens  # type: ignore[union-attr]


def test_every_event_of_a_stream_is_of_openais_type(served: Running, http: httpx.Client) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": ASK, "max_tokens": 4, "stream": True, "logprobs": True, "top_logprobs": 2, "stream_options": usage}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    places, text, counts = [], "", []
    for each in events[:-1]:
        chunk = ChatCompletionChunk.model_validate_json(each, strict=True)
        counts += [chunk.usage.completion_tokens] if chunk.usage else []
        places += [place for choice in chunk.choices if choice.logprobs for place in choice.logprobs.content or []]
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert len(places) == 4
    assert counts == sorted(counts)
    assert len(counts) > 1, "as chunks come, and at the end"
    assert b"".join(bytes(place.bytes or ()) for place in places) == text.encode()
    assert all(len(place.top_logprobs) == 2 and place.bytes is not None for place in places)
    assert all(place.top_logprobs[0].logprob >= place.top_logprobs[1].logprob for place in places)


def test_several_prompts_come_back_in_order(llm: LLM, served: Running, client: OpenAI) -> None:
    prompts = ["the quick", "brown fox", "lazy dog"]
    alone = [offline(llm, prompt, temperature=0, max_tokens=6)[0] for prompt in prompts]
    whole = client.completions.create(model="tiny", prompt=prompts, max_tokens=6, n=2, **GREEDY)
    assert [(choice.index, choice.text) for choice in whole.choices] == [
        (2 * number + copy, text) for number, text in enumerate(alone) for copy in range(2)
    ]
    texts = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(model="tiny", prompt=prompts, max_tokens=6, n=2, stream=True, **GREEDY):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [text for text in alone for _ in range(2)]


def test_prompts_may_be_token_ids_and_a_completion_has_16_tokens(llm: LLM, served: Running, client: OpenAI) -> None:
    (whole,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    more = {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
    for prompt in ([5, 6, 7], [[5, 6, 7]]):
        (choice,) = client.completions.create(model="tiny", prompt=prompt, temperature=0, **more).choices
        assert choice.text == whole.outputs[0].text
        assert choice.model_extra["token_ids"] == whole.outputs[0].token_ids  # type: ignore[index]
        assert choice.model_extra["prompt_token_ids"] == [5, 6, 7]  # type: ignore[index]


def test_echo_and_logprobs_cover_the_prompt(llm: LLM, served: Running, client: OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "the quick", "echo": True, "logprobs": 1, **GREEDY}
    (choice,) = client.completions.create(max_tokens=3, **asked).choices
    found = choice.logprobs
    assert choice.text.startswith("the quick")
    assert "".join(found.tokens or []) == choice.text
    assert found.token_logprobs[0] is None  # type: ignore[index]
    assert all(value <= 0 for value in found.token_logprobs[1:])  # type: ignore[index]
    assert [choice.text[offset:][: len(token)] for offset, token in zip(found.text_offset, found.tokens, strict=True)] == (
        found.tokens
    )
    (prompt,) = client.completions.create(max_tokens=0, **asked).choices
    assert (prompt.text, prompt.logprobs.tokens) == ("the quick", found.tokens[:-3])  # type: ignore[union-attr,index]
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(max_tokens=3, stream=True, **asked))
    assert text == choice.text


def test_log_probabilities_of_a_prompt_are_told_as_in_vllm(llm: LLM, served: Running, client: OpenAI, http: httpx.Client) -> None:
    wanted = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    more = {"ignore_eos": True, "prompt_logprobs": 1}
    (choice,) = client.completions.create(model="tiny", prompt="the quick", max_tokens=2, temperature=0, extra_body=more).choices
    answer = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=2, temperature=0, extra_body=more)
    (text,), (chat,) = llm.generate("the quick", wanted, use_tqdm=False), llm.chat(ASK, wanted, use_tqdm=False)
    for found, output in ((choice, text), (answer, chat)):
        first, *told = found.model_extra["prompt_logprobs"]  # type: ignore[index]
        assert (first, len(told)) == (None, len(output.prompt_token_ids) - 1)
        for place, (offline_place, token) in zip(
            told, zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True), strict=True
        ):
            assert place[str(token)]["rank"] == offline_place[token].rank
            assert place[str(token)]["logprob"] == pytest.approx(offline_place[token].logprob, abs=1e-4)
            assert place[str(token)]["decoded_token"] == offline_place[token].decoded_token
    refused = http.post("/v1/completions", json={"prompt": "the", "prompt_logprobs": 1, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_an_echo_of_a_chat_is_of_the_assistants_words_alone(served: Running, client: OpenAI) -> None:
    begun = [*ASK, {"role": "assistant", "content": "the lazy"}]
    unfinished = {"echo": True, "ignore_eos": True, "add_generation_prompt": False, "continue_final_message": True}
    asked = {"model": "tiny", "max_tokens": 3, "temperature": 0}
    plain = client.chat.completions.create(messages=ASK, **asked, extra_body={"ignore_eos": True}).choices[0].message.content
    users = client.chat.completions.create(messages=ASK, **asked, extra_body={"echo": True, "ignore_eos": True})
    assert users.choices[0].message.content == plain
    own = client.chat.completions.create(messages=begun, **asked, extra_body=unfinished)
    assert (own.choices[0].message.content or "").startswith("the lazy")


def test_parameters_reach_the_engine(llm: LLM, served: Running, client: OpenAI) -> None:
    def text(**asked: object) -> str:
        return (
            client.completions.create(**{"model": "tiny", "prompt": "the quick", "max_tokens": 12, **GREEDY, **asked})
            .choices[0]
            .text
        )

    plain = text()
    assert plain == offline(llm, "the quick", temperature=0, max_tokens=12)[0]
    assert text(stop=plain[4:6]) == plain[: plain.index(plain[4:6])]
    assert text(stop=[plain[4:6]], extra_body={"include_stop_str_in_output": True}).endswith(plain[4:6])
    assert text(logit_bias={"50": 100}, max_tokens=3) == llm.tokenizer.decode([50]) * 3
    assert text(extra_body={"allowed_token_ids": [60], "ignore_eos": True}, max_tokens=2) == llm.tokenizer.decode([60]) * 2
    drawn = {"temperature": 1.0, "seed": 3, "extra_body": {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2}}
    assert text(**drawn) == text(**drawn)
    ours = {"temperature": 1.0, "seed": 3, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2}
    (output,) = llm.generate("the quick", SamplingParams(max_tokens=12, **ours), use_tqdm=False)
    assert text(**drawn) == output.outputs[0].text
    assert text(best_of=3, temperature=1.0, seed=1)
    assert text(extra_body={"priority": 5, "ignore_eos": True}) == plain


def test_what_a_request_leaves_out_is_as_the_model_recommends(llm: LLM, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llm.model.name, tmp_path / "model"))
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 1, "max_new_tokens": 5, "eos_token_id": 0}')
    own = LLM(str(folder), kv_cache_memory="1MiB", num_threads=1)
    default = own.get_default_sampling_params()
    assert (default.temperature, default.top_k, default.max_tokens) == (0.6, 1, 5)
    for where, count in (("auto", 1), ("vllm", 3)):
        with running(own, ServerOptions(generation_config=where)) as found:
            asked = [{"prompt": "a", "ignore_eos": True, "seed": seed} for seed in range(3)]
            answers = [httpx.post(f"{found.url}/v1/completions", json=body, timeout=30).json() for body in asked]
            assert len({each["choices"][0]["text"] for each in answers}) == count


def test_texts_to_tokens_and_back(llm: LLM, served: Running, http: httpx.Client) -> None:
    found = http.post("/tokenize", json={"prompt": "the quick", "return_token_strs": True}).json()
    assert found["tokens"] == llm.tokenizer("the quick")["input_ids"]
    assert (found["count"], found["max_model_len"], len(found["token_strs"])) == (3, 256, 3)
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "the quick"}
    chat = http.post("/tokenize", json={"messages": ASK}).json()
    assert chat["tokens"] == llm.chat_prompt(ASK)["prompt_token_ids"]  # type: ignore[index]


def test_control_tokens_in_a_text_are_text_where_it_is_asked_for(llm: LLM, served: Running, http: httpx.Client) -> None:
    eos = llm.get_tokenizer().eos_token_id
    split = {"split_special_tokens": True}
    for asked in ({"prompt": "a<eos>"}, {"messages": [{"role": "user", "content": "a<eos>"}]}):
        assert eos in http.post("/tokenize", json=asked).json()["tokens"]
        tokens = http.post("/tokenize", json={**asked, **split}).json()["tokens"]
        assert eos not in tokens
        path = "/v1/completions" if "prompt" in asked else "/v1/chat/completions"
        answer = http.post(path, json={**asked, **split, "max_tokens": 1, "return_token_ids": True}).json()
        assert (answer["choices"][0].get("prompt_token_ids") or answer.get("prompt_token_ids")) == tokens
    with running(llm, ServerOptions(split_special_tokens=True)) as careful:
        for given, kept in (({}, False), ({"split_special_tokens": False}, True)):
            messages = [{"role": "user", "content": "a<eos>"}]
            found = httpx.post(f"{careful.url}/tokenize", json={"messages": messages, **given}).json()["tokens"]
            assert (eos in found) is kept
        assert (
            eos in httpx.post(f"{careful.url}/tokenize", json={"prompt": "a<eos>"}).json()["tokens"]
        )  # a prompt is its caller's


def test_several_conversations_are_answered_as_each_is_by_itself(served: Running, http: httpx.Client) -> None:
    conversations = [ASK, [{"role": "user", "content": "a lazy dog"}], ASK * 2]
    common = {"max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    answer = http.post("/v1/chat/completions/batch", json={**common, "messages": conversations, "model": "small"}).json()
    singles = [http.post("/v1/chat/completions", json={**common, "messages": each}).json() for each in conversations]
    assert ChatCompletion.model_validate(answer).model == "small"
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2]
    for mine, single in zip(answer["choices"], singles, strict=True):
        (own,) = single["choices"]
        assert (mine["message"], mine["token_ids"]) == (own["message"], own["token_ids"])
        assert mine["prompt_token_ids"] == single["prompt_token_ids"]
    assert answer["usage"]["total_tokens"] == sum(each["usage"]["total_tokens"] for each in singles)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stream": True}, "stream: needs false"),
        ({"n": 2}, "n: needs 1"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: needs none"),
        ({"messages": ASK}, "messages.0: input should be an array"),
        ({"messages": [ASK, []]}, "messages.1: needs at least one message"),
    ],
)
def test_what_several_conversations_cannot_have_is_refused(http: httpx.Client, fields: dict[str, object], words: str) -> None:
    refused = http.post("/v1/chat/completions/batch", json={"messages": [ASK], "max_tokens": 2, **fields})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(words)


def test_a_port_that_is_taken_is_refused_with_the_option_that_helps(served: Running) -> None:
    with pytest.raises(ConfigError, match=r"an address of this machine that is free, .*in use\) \(--port 0 takes a free port\)"):
        bound_socket("127.0.0.1", served.server.port)
    with pytest.raises(ConfigError, match=r"\(--host 127\.0\.0\.1 serves this machine\)"):
        bound_socket("192.0.2.1", 0)  # an address that documentation reserves


COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def infilling(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("infill"), special=(*FAMILIES[0], "<|file_sep|>"))
    return LLM(str(folder), kv_cache_memory="8MiB", num_threads=1, block_size=16, autotune_budget=0)


def test_the_texts_stand_between_the_models_tokens(infilling: LLM) -> None:
    tokenizer = infilling.get_tokenizer()
    body = {"prompt": ["the ", "a"], "suffix": " fox", "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    with running(infilling) as own:
        choices = httpx.post(own.url + COMPLETIONS, json={**body, "ignore_eos": True}).json()["choices"]
        for choice, prefix in zip(choices, body["prompt"], strict=True):
            expected = tokenizer(f"<|fim_prefix|>{prefix}<|fim_suffix|> fox<|fim_middle|>")["input_ids"]
            assert choice["prompt_token_ids"] == expected
            assert len(choice["token_ids"]) == 3
        (whole,) = infilling.generate([{"prompt_token_ids": expected}], use_tqdm=False)
        assert whole.prompt_token_ids == expected
        ends = tokenizer.convert_tokens_to_ids("<|file_sep|>")
        ended = httpx.post(own.url + COMPLETIONS, json={**body, "prompt": "a", "logit_bias": {str(ends): 100}}).json()["choices"][
            0
        ]
        assert (ended["finish_reason"], ended["stop_reason"], ended["text"]) == ("stop", ends, "")
        for more, param in (({"prompt": [5, 6]}, "prompt"), ({"echo": True}, "echo")):
            error = httpx.post(own.url + COMPLETIONS, json={**body, **more})
            assert (error.status_code, error.json()["error"]["param"]) == (400, param)
