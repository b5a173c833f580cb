"""Prompts as rows of embeddings: the tokens of the same prompt by ids, and what is refused."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config

from headway import LLM, SamplingParams
from headway.core.contract.errors import ConfigError, PromptError
from headway.server.options import ServerOptions
from server_thread import running

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [list(range(1, 60)), [5], list(range(1, 40))]


@pytest.fixture(scope="module")
def own(tiny_model_folder: Path) -> LLM:
    options = {"kv_cache_memory": "8MiB", "num_threads": 1, "block_size": 16, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    return LLM(str(tiny_model_folder), enable_prompt_embeds=True, **options)


@pytest.fixture(scope="module")
def table(tiny_model_folder: Path) -> Tensor:
    return load_file(tiny_model_folder / "model.safetensors")["model.embed_tokens.weight"]


def test_rows_of_the_embedding_write_what_their_ids_write(own: LLM, table: Tensor) -> None:
    plain = own.generate(PROMPTS, GREEDY, use_tqdm=False)
    own.reset_prefix_cache()
    both = [{"prompt_embeds": table[ids]} if number % 2 == 0 else ids for number, ids in enumerate(PROMPTS)]
    found = own.generate(both, GREEDY, use_tqdm=False)  # in chunks of 32 tokens, beside a prompt of ids
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
    assert len(found[0].prompt_token_ids) == 59


def test_equal_rows_share_the_cache_and_others_do_not(own: LLM, table: Tensor) -> None:
    own.reset_prefix_cache()
    rows = table[PROMPTS[0]]
    first, again, other, zeros = (
        own.generate(each, GREEDY, use_tqdm=False)[0]
        for each in ({"prompt_embeds": rows}, {"prompt_embeds": rows[None]}, {"prompt_embeds": rows.flip(0)}, [0] * 59)
    )
    assert (first.num_cached_tokens, other.num_cached_tokens, zeros.num_cached_tokens) == (0, 0, 0)
    assert again.num_cached_tokens > 40
    assert first.outputs[0].token_ids == again.outputs[0].token_ids != other.outputs[0].token_ids


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (torch.zeros(4, 64), r"needs \[num_tokens, 32\], got \[4, 64\]"),
        (torch.zeros(4), r"needs a dense tensor \[num_tokens, hidden_size\].* got \[4\] of float32"),
        (torch.zeros(4, 32, dtype=torch.int64), "got .*int64"),
        (torch.zeros(0, 32), "at least one token"),
        (torch.full((4, 32), torch.nan), "needs finite numbers"),
        ("text", "needs a torch.Tensor .* got a str"),
    ],
    ids=str,
)
def test_other_rows_are_refused(own: LLM, rows: object, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        own.generate({"prompt_embeds": rows}, GREEDY, use_tqdm=False)
    assert not own.engine.has_unfinished


def test_parameters_that_read_ids_are_refused(own: LLM, llm: LLM, table: Tensor) -> None:
    for params in (SamplingParams(prompt_logprobs=1), SamplingParams(repetition_penalty=1.5)):
        with pytest.raises(ConfigError, match="prompt_embeds: needs no prompt_logprobs and no repetition_penalty"):
            own.generate({"prompt_embeds": table[:3]}, params, use_tqdm=False)
    with pytest.raises(PromptError, match="prompt 0: needs an engine with enable_prompt_embeds=True"):
        llm.generate({"prompt_embeds": table[:3]}, GREEDY, use_tqdm=False)


def test_a_prompt_is_cut_at_its_end(own: LLM, table: Tensor) -> None:
    cut = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, truncate_prompt_tokens=5)
    (found,) = own.generate({"prompt_embeds": table[PROMPTS[0]]}, cut, use_tqdm=False)
    (plain,) = own.generate([PROMPTS[0]], cut, use_tqdm=False)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids


SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, max_position_embeddings=64),
        GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    ],
    ids=lambda config: config.model_type,
)
def test_rows_are_those_that_the_embedding_gives(config: Gemma2Config | GPT2Config, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    options = {"kv_cache_memory": "8MiB", "num_threads": 1, "skip_tokenizer_init": True, "dtype": "float32"}
    own = LLM(str(tmp_path), enable_prompt_embeds=True, model_impl="headway", **options)
    ids = list(range(1, 20))
    rows = model.get_input_embeddings()(torch.tensor(ids))
    (plain,) = own.generate([ids], GREEDY, use_tqdm=False)
    (found,) = own.generate({"prompt_embeds": rows}, GREEDY, use_tqdm=False)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids


def encoded(value: object) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def test_a_server_takes_embeddings(own: LLM, table: Tensor) -> None:
    body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    rows = [encoded(table[ids]) for ids in PROMPTS[:2]]
    with running(own, ServerOptions(served_model_names=("tiny",))) as server, httpx.Client(base_url=server.url) as http:

        def post(**more: object) -> httpx.Response:
            return http.post("/v1/completions", json={**body, **more}, timeout=30)

        plain = post(prompt=PROMPTS[:2]).json()
        found = post(prompt="", prompt_embeds=rows).json()
        assert [each["text"] for each in found["choices"]] == [each["text"] for each in plain["choices"]]
        assert found["usage"]["prompt_tokens"] == 60
        assert post(prompt_embeds=rows[0]).json()["choices"][0]["text"] == plain["choices"][0]["text"]
        mixed = post(prompt=[PROMPTS[1]], prompt_embeds=rows[0]).json()
        assert [each["text"] for each in mixed["choices"]] == [each["text"] for each in plain["choices"]]
        for more, words in (
            (
                {"prompt_embeds": "no base64!"},
                r"needs base64 of torch\.save\(tensor\), floating point .*, got text that is not base64$",
            ),
            ({"prompt_embeds": "AAAA"}, r"got 3 bytes in which torch\.load\(weights_only=True\) finds no tensor$"),
            ({"prompt_embeds": rows[0][:400]}, "got 300 bytes in which"),
            ({"prompt_embeds": encoded(torch.zeros(2, 32, dtype=torch.int64))}, r"of float32, .*, got \[2, 32\] of int64$"),
            ({"prompt_embeds": encoded(torch.zeros(2, 32).to(torch.float8_e4m3fn))}, r"got \[2, 32\] of float8_e4m3fn$"),
            ({"prompt_embeds": encoded(torch.zeros(2, 32, device="meta"))}, r"got \[2, 32\] of float32 without elements"),
            ({"prompt_embeds": encoded(torch.zeros(2, 32).to_sparse())}, r"got \[2, 32\] of float32, sparse_coo"),
            ({"prompt_embeds": encoded(torch.zeros(32))}, r"got \[32\] of float32"),
            ({"prompt_embeds": encoded(torch.zeros(2, 31))}, r"needs \[num_tokens, 32\], got \[2, 31\]"),
            ({"prompt_embeds": encoded({"a": 1})}, "needs a torch.Tensor"),
            ({"prompt_embeds": encoded(torch.zeros(2, 1).expand(2, 32))}, "whose rows follow one another"),
            ({"prompt_embeds": rows[0], "echo": True}, "needs no echo"),
            ({}, "prompt: needs a text, token ids, or prompt_embeds"),
        ):
            refused = post(**more)
            assert refused.status_code == 400
            assert re.search(words, refused.json()["error"]["message"])
