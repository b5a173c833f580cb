"""`suffix` of /v1/completions: what stands between two texts, where the model has tokens for that."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from headway import LLM
from headway.requests.validation import FAMILIES
from sandbox import save_tiny_model
from server_thread import Running, running

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def infilling(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("infill"), special=(*FAMILIES[0], "<|file_sep|>"))
    return LLM(str(folder), kv_cache_memory="8MiB", num_threads=1, block_size=16, autotune_budget=0)


def test_the_texts_stand_between_the_models_tokens(infilling: LLM) -> None:
    tokenizer = infilling.get_tokenizer()
    body = {"prompt": ["the ", "a"], "suffix": " fox", "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    with running(infilling) as own:
        answer = httpx.post(own.url + PATH, json={**body, "ignore_eos": True}).json()
        choices = answer["choices"]
        for choice, prefix in zip(choices, body["prompt"], strict=True):
            expected = tokenizer(f"<|fim_prefix|>{prefix}<|fim_suffix|> fox<|fim_middle|>")["input_ids"]
            assert choice["prompt_token_ids"] == expected
            assert len(choice["token_ids"]) == 3
        (whole,) = infilling.generate([{"prompt_token_ids": expected}], use_tqdm=False)
        assert whole.prompt_token_ids == expected
        ends = tokenizer.convert_tokens_to_ids("<|file_sep|>")
        ended = httpx.post(own.url + PATH, json={**body, "prompt": "a", "logit_bias": {str(ends): 100}}).json()["choices"][0]
        assert (ended["finish_reason"], ended["stop_reason"], ended["text"]) == ("stop", ends, "")
        for more, param in (({"prompt": [5, 6]}, "prompt"), ({"echo": True}, "echo")):
            error = httpx.post(own.url + PATH, json={**body, **more})
            assert (error.status_code, error.json()["error"]["param"]) == (400, param)


def test_a_model_without_such_tokens_refuses(served: Running, http: httpx.Client) -> None:
    error = http.post(PATH, json={"prompt": "a", "suffix": "z"})
    assert error.status_code == 400
    assert "fill-in-the-middle" in error.json()["error"]["message"]
