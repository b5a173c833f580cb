"""Parameters that transformers' generate has too: the same tokens, and the log-probabilities of the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headway import LLM, SamplingParams

PROMPTS = [[7, 8, 9], [40, 41, 42, 43, 44, 45, 46, 47], [100] * 20, [5]]
LENGTH = 16


@pytest.fixture(scope="module")
def llm(tiny_model_folder: Path) -> LLM:
    return LLM(str(tiny_model_folder), kv_cache_memory="4MiB", num_threads=1, dtype="float32", async_scheduling=True)


@pytest.fixture(scope="module")
def theirs(tiny_model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("ours", "hf"),
    [
        ({}, {}),
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        ({"logit_bias": {30: 9.0, 31: -50.0}}, {"sequence_bias": {(30,): 9.0, (31,): -50.0}}),
        (
            {"min_tokens": 12, "ignore_eos": False, "stop_token_ids": list(range(60, 160))},
            {"min_new_tokens": 12, "eos_token_id": list(range(60, 160))},
        ),
        ({"bad_words_token_ids": [[each] for each in range(150, 290)]}, {"bad_words_ids": [[each] for each in range(150, 290)]}),
        (
            {"allowed_token_ids": list(range(50, 90)), "repetition_penalty": 1.2},
            {"suppress_tokens": [each for each in range(300) if not 50 <= each < 90], "repetition_penalty": 1.2},
        ),
    ],
    ids=["greedy", "penalty", "reward", "bias", "min_tokens", "bad words", "allowed"],
)
def test_greedy_tokens_and_scores_are_transformers(llm: LLM, theirs: Any, ours: dict[str, Any], hf: dict[str, Any]) -> None:
    params = SamplingParams(
        **{"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 0, **ours}
    )
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    settings = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **hf}
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        found = theirs.generate(ids, **settings, return_dict_in_generate=True, output_logits=True)
        one = output.outputs[0]
        assert one.token_ids == found.sequences[0, len(prompt) :].tolist()
        for token, logits, choices in zip(one.token_ids, found.logits, one.logprobs or (), strict=True):
            expected = logits[0].log_softmax(-1)
            for each, logprob in choices.items():
                assert logprob.logprob == pytest.approx(float(expected[each]), abs=2e-3)
            assert choices[token].rank == int((expected >= expected[token]).sum())
        with torch.no_grad():
            scores = theirs(ids).logits[0].log_softmax(-1)
        for place, choices in enumerate((output.prompt_logprobs or ())[1:]):
            token = prompt[place + 1]
            assert choices[token].logprob == pytest.approx(float(scores[place, token]), abs=2e-3)
