"""Beam search by requests: what LLM.beam_search finds, in the answers of chats and completions."""

from __future__ import annotations

import time

import httpx
import pytest
from openai import OpenAI

from headway import LLM
from headway.beam_search import BeamSearchParams, BeamSearchSequence
from server_thread import Running

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
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
    prompt = llm.chat_prompt(ASK)
    beams = searched(llm, prompt, beam_width=4, max_tokens=5, ignore_eos=True)
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
        (TEXT, {"stream": True}, "stream: needs false beside use_beam_search"),
        (TEXT, {"stop": "a"}, "stop: needs nothing beside use_beam_search"),
        (TEXT, {"guided_choice": ["a"]}, "choice: needs nothing beside use_beam_search"),
        (TEXT, {"echo": True}, "echo: needs nothing beside"),
        (TEXT, {"repetition_penalty": 1.2}, "repetition_penalty: needs 1 beside"),
        (TEXT, {"length_penalty": "long"}, "length_penalty"),
        (TEXT, {"length_penalty": 1000}, "length_penalty"),
        (TEXT, {"length_penalty": "nan"}, "length_penalty"),
        (TEXT, {"n": 2, "best_of": 4}, "best_of: needs nothing beside"),
        (TEXT, {"n": 200}, "n"),
        (TEXT, {"n": 100}, "max_logprobs"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format: needs nothing beside use_beam_search"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools: needs nothing beside"),
    ],
)
def test_what_a_search_does_not_read_is_refused(
    served: Running, http: httpx.Client, path: str, more: dict[str, object], words: str
) -> None:
    body = {"prompt": "a"} if path == TEXT else {"messages": ASK}
    answer = http.post(path, json={**body, "use_beam_search": True, "max_tokens": 2, **more})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_neutral_values_are_taken(served: Running, http: httpx.Client) -> None:
    neutral = {"presence_penalty": 0, "stop": [], "repetition_penalty": 1, "temperature": 0.5, "stream": False}
    for path, body in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": ASK})):
        assert http.post(path, json={**body, "use_beam_search": True, "max_tokens": 2, **neutral}).status_code == 200


def test_a_search_whose_client_leaves_ends(served: Running, llm: LLM) -> None:
    body = {"prompt": "the quick", "n": 8, "max_tokens": 250, "ignore_eos": True, "use_beam_search": True}
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=served.url) as impatient:
        impatient.post(TEXT, json=body, timeout=0.3)
    deadline = time.monotonic() + 5
    while llm.engine.has_unfinished and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert not llm.engine.has_unfinished, "no further step is asked for"
