"""/generate as SGLang and vLLM's small server have it, and other paths that their programs ask for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from headway import LLM, SamplingParams
from headway.server.options import ServerOptions
from server_thread import Running, running

TEXT = "the quick brown"
PARAMS = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def own(llm: LLM) -> Iterator[Running]:
    with running(llm, ServerOptions(served_model_names=("tiny",), operator_paths=True)) as found:
        yield found


@pytest.fixture
def http(own: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=own.url, timeout=30) as client:
        yield client


def offline(llm: LLM, **params: Any) -> Any:
    return llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, **params), use_tqdm=False)[0]


def test_a_text_is_continued_as_offline(llm: LLM, http: httpx.Client) -> None:
    wanted = offline(llm)
    found = http.post("/generate", json={"text": TEXT, "sampling_params": PARAMS, "rid": "mine"}).json()
    assert (found["text"], found["output_ids"]) == (wanted.outputs[0].text, wanted.outputs[0].token_ids)
    meta = found["meta_info"]
    assert (meta["id"], meta["finish_reason"]) == ("mine", {"type": "length", "length": 6})
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(wanted.prompt_token_ids), 6)
    ids = http.post("/generate", json={"input_ids": wanted.prompt_token_ids, "sampling_params": PARAMS}).json()
    assert ids["text"] == found["text"]
    several = http.post("/generate", json={"text": [TEXT, "fox"], "sampling_params": {**PARAMS, "n": 2}}).json()
    assert [each["text"] for each in several[:2]] == [found["text"]] * 2
    assert len(several) == 4


def test_a_stream_has_the_whole_text_so_far(llm: LLM, http: httpx.Client) -> None:
    body = {"text": TEXT, "sampling_params": PARAMS, "stream": True}
    with http.stream("POST", "/generate", json=body) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    told = [json.loads(each) for each in events]
    assert told[-1]["text"] == offline(llm).outputs[0].text
    assert all(later["text"].startswith(before["text"]) for before, later in pairwise(told))
    assert told[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert len(told) == 1 or told[0]["meta_info"]["finish_reason"] is None


def test_log_probabilities_are_the_engines(llm: LLM, http: httpx.Client) -> None:
    wanted = offline(llm, logprobs=2, prompt_logprobs=2)
    body = {"text": TEXT, "sampling_params": PARAMS, "return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2}
    meta = http.post("/generate", json={**body, "return_text_in_logprobs": True}).json()["meta_info"]
    new = wanted.outputs[0]
    assert [each[1] for each in meta["output_token_logprobs"]] == new.token_ids
    assert meta["output_token_logprobs"][0][0] == pytest.approx(new.logprobs[0][new.token_ids[0]].logprob, abs=1e-5)
    assert meta["output_token_logprobs"][0][2] == new.logprobs[0][new.token_ids[0]].decoded_token
    assert [each[1] for each in meta["input_token_logprobs"]] == wanted.prompt_token_ids[1:]
    assert [len(each) for each in meta["output_top_logprobs"]] == [2] * 6
    whole = http.post("/generate", json={**body, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}).json()
    assert whole["meta_info"]["input_token_logprobs"][0][:2] == [None, wanted.prompt_token_ids[0]]


def test_a_stop_text_is_named(llm: LLM, http: httpx.Client) -> None:
    stop = offline(llm).outputs[0].text[2:4]
    found = http.post("/generate", json={"text": TEXT, "sampling_params": {**PARAMS, "stop": stop}}).json()
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_forms_are_served(http: httpx.Client) -> None:
    pytest.importorskip("llguidance")
    params = {"max_new_tokens": 20, "temperature": 1.0, "regex": "(fox|dog)"}
    assert http.post("/generate", json={"text": TEXT, "sampling_params": params}).json()["text"] in ("fox", "dog")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "text: needs a text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "and not both, got both"),
        ({"text": "a", "sampling_params": {"max_tokenz": 3}}, "sampling_params: needs n, temperature"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search: needs false"),
        ({"prompt": "a", "frob": 1}, "a field of SamplingParams"),
        ([1], "needs a JSON object, got a JSON array"),
    ],
    ids=str,
)
def test_a_body_that_cannot_be_served_is_refused_in_one_line(http: httpx.Client, body: Any, words: str) -> None:
    refused = http.post("/generate", json=body)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert words in message
    assert "\n" not in message


def test_vllms_small_server_answers_prompt_and_completion(llm: LLM, http: httpx.Client) -> None:
    body = {"prompt": TEXT, "n": 2, "temperature": 0, "max_tokens": 6, "ignore_eos": True, "use_beam_search": False}
    text = TEXT + offline(llm).outputs[0].text
    assert http.post("/generate", json=body).json() == {"text": [text, text]}
    with http.stream("POST", "/generate", json={**body, "n": 1, "stream": True}) as answer:
        lines = [json.loads(line)["text"] for line in answer.iter_lines() if line]
    assert lines[-1] == [text]


def test_token_ids_come_for_token_ids(llm: LLM, http: httpx.Client) -> None:
    wanted = offline(llm, logprobs=1)
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 1, "detokenize": False, "prompt_logprobs": 0}
    body = {"request_id": "mine", "token_ids": wanted.prompt_token_ids, "sampling_params": params}
    found = http.post("/inference/v1/generate", json=body).json()
    assert (found["request_id"], sorted(found)) == ("mine", ["choices", "prompt_logprobs", "request_id"])
    assert [place and list(place) for place in found["prompt_logprobs"]] == [
        None,
        *([str(token)] for token in wanted.prompt_token_ids[1:]),
    ]
    (choice,) = found["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (wanted.outputs[0].token_ids, "length")
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    refused = http.post("/inference/v1/generate", json={**body, "sampling_params": {"frob": 1}})
    assert refused.json()["error"]["message"].startswith("sampling_params: needs fields of SamplingParams, got")


def test_what_programs_ask_of_the_model(llm: LLM, http: httpx.Client) -> None:
    info = http.get("/get_model_info").json()
    assert (info["model_path"], info["is_generation"]) == (llm.model.name, True)
    assert http.get("/model_info").json() == info
    assert http.get("/get_server_info").json()["max_total_num_tokens"] > 0
    assert http.get("/health_generate").status_code == 200
    assert http.post("/flush_cache").text == "Cache flushed.\n"


def test_one_path_takes_chats_and_completions(http: httpx.Client) -> None:
    more = {"max_tokens": 4, "temperature": 0}
    chat = http.post("/invocations", json={"messages": [{"role": "user", "content": "fox"}], **more}).json()
    assert chat["object"] == "chat.completion"
    assert http.post("/invocations", json={"prompt": "fox", **more}).json()["object"] == "text_completion"
    assert http.post("/invocations", json={"x": 1}).json()["error"]["message"].startswith("this path: needs messages or a prompt")
