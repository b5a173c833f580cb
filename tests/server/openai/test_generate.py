"""/generate as SGLang and vLLM's small server have it, other paths that their programs ask for, and beam search."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from openai import OpenAI

from headway import LLM, SamplingParams
from headway.beam_search import BeamSearchParams, BeamSearchSequence
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


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASK = [{"role": "user", "content": "the fox"}]


def searched(llm: LLM, prompt: object, **params: object) -> list[BeamSearchSequence]:
    (output,) = llm.beam_search([prompt], BeamSearchParams(**params))
    return output.sequences


def test_completions_are_the_likeliest_continuations(served: Running, client: OpenAI, llm: LLM) -> None:
    """The ends of a text, the length penalty, several prompts, and log-probabilities, as LLM.beam_search has them."""
    prompts = ["the quick", "jumps over"]
    for asked, more in (
        ({"beam_width": 3, "max_tokens": 6, "ignore_eos": True}, {"ignore_eos": True}),
        ({"beam_width": 4, "max_tokens": 12, "length_penalty": 0.2}, {"length_penalty": 0.2}),
        ({"beam_width": 4, "max_tokens": 9, "include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
    ):
        width = asked["beam_width"]
        answer = client.completions.create(
            model="tiny",
            prompt=prompts,
            n=width,
            max_tokens=asked["max_tokens"],
            logprobs=1,
            extra_body={"use_beam_search": True, "return_token_ids": True, **more},
        )
        found = [searched(llm, prompt, **asked) for prompt in prompts]
        lengths = [len(llm.get_tokenizer()(prompt)["input_ids"]) for prompt in prompts]
        expected = [(beam, length) for beams, length in zip(found, lengths, strict=True) for beam in beams]
        assert [choice.index for choice in answer.choices] == [*range(2 * width)]
        for choice, (beam, length) in zip(answer.choices, expected, strict=True):
            assert choice.model_extra["token_ids"] == beam.tokens[length:]
            assert choice.finish_reason == beam.finish_reason
            assert sum(choice.logprobs.token_logprobs) == pytest.approx(
                sum(each[token].logprob for each, token in zip(beam.logprobs, beam.tokens[length:], strict=False)), abs=1e-4
            )
        whole = [llm.get_tokenizer().decode(beam.tokens[length:], skip_special_tokens=True) for beam, length in expected]
        assert [choice.text for choice in answer.choices] == whole
        assert len(set(whole)) > width
        assert answer.usage.prompt_tokens == sum(lengths)
        assert answer.usage.completion_tokens == sum(len(beam.tokens) - length for beam, length in expected)


def test_a_chat_is_searched_too(served: Running, http: httpx.Client, llm: LLM) -> None:
    body = {"messages": ASK, "max_tokens": 5, "ignore_eos": True, "use_beam_search": True, "return_token_ids": True}
    beams = searched(llm, llm.chat_prompt(ASK), beam_width=4, max_tokens=5, ignore_eos=True)
    for more in ({}, {"logprobs": True, "top_logprobs": 2}):
        answer = http.post(CHAT, json={**body, "n": 4, **more}).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == [beam.tokens[-5:] for beam in beams]
        assert all(choice["message"]["role"] == "assistant" for choice in answer["choices"])
    listed = answer["choices"][-1]["logprobs"]["content"]
    assert [len(each["top_logprobs"]) for each in listed] == [2] * 5
    assert sum(each["logprob"] for each in listed) == pytest.approx(beams[-1].cum_logprob, abs=1e-4)
    (greedy,) = http.post(CHAT, json={**body, "n": 1}).json()["choices"]
    plain = {**body, "use_beam_search": False, "temperature": 0}
    assert greedy["token_ids"] == http.post(CHAT, json=plain).json()["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        (COMPLETIONS, {"stream": True}, "stream: needs false beside use_beam_search"),
        (COMPLETIONS, {"stop": "a"}, "stop: needs nothing beside use_beam_search"),
        (COMPLETIONS, {"guided_choice": ["a"]}, "choice: needs nothing beside use_beam_search"),
        (COMPLETIONS, {"echo": True}, "echo: needs nothing beside"),
        (COMPLETIONS, {"repetition_penalty": 1.2}, "repetition_penalty: needs 1 beside"),
        (COMPLETIONS, {"length_penalty": "long"}, "length_penalty"),
        (COMPLETIONS, {"length_penalty": 1000}, "length_penalty"),
        (COMPLETIONS, {"length_penalty": "nan"}, "length_penalty"),
        (COMPLETIONS, {"n": 2, "best_of": 4}, "best_of: needs nothing beside"),
        (COMPLETIONS, {"n": 200}, "n"),
        (COMPLETIONS, {"n": 100}, "max_logprobs"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format: needs nothing beside use_beam_search"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools: needs nothing beside"),
    ],
)
def test_what_a_search_does_not_read_is_refused(
    served: Running, http: httpx.Client, path: str, more: dict[str, object], words: str
) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": ASK}
    answer = http.post(path, json={**body, "use_beam_search": True, "max_tokens": 2, **more})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_neutral_values_are_taken(served: Running, http: httpx.Client) -> None:
    neutral = {"presence_penalty": 0, "stop": [], "repetition_penalty": 1, "temperature": 0.5, "stream": False}
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": ASK})):
        assert http.post(path, json={**body, "use_beam_search": True, "max_tokens": 2, **neutral}).status_code == 200


def test_a_search_whose_client_leaves_ends(served: Running, llm: LLM) -> None:
    body = {"prompt": "the quick", "n": 8, "max_tokens": 250, "ignore_eos": True, "use_beam_search": True}
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=served.url) as impatient:
        impatient.post(COMPLETIONS, json=body, timeout=0.3)
    deadline = time.monotonic() + 5
    while llm.engine.has_unfinished and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert not llm.engine.has_unfinished, "no further step is asked for"
