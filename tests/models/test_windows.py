"""Models with sliding windows through the engine, whose windowed layers give their blocks back: what transformers writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, GptOssConfig, MistralConfig, PretrainedConfig, Qwen2Config

from engine_logits import logits_by_transformers, observed, save_random
from headway.core.engine.data.config import EngineConfig
from headway.core.sampling.params import SamplingParams
from headway.models.loader import load_model
from headway.registry import Registry
from made_engine import made_engine
from run_engine import generate

VOCAB = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large, so that attention is far from uniform and a wrong key shows
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "mistral": MistralConfig(**SMALL, sliding_window=19),
    "qwen2, one layer sees all": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "gemma3": Gemma3TextConfig(**{**SMALL, "num_hidden_layers": 6}, sliding_window=13, query_pre_attn_scalar=20),
    "gpt_oss": GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=11),
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
CONFIG = EngineConfig(attn_backend="sdpa", block_size=8, max_model_len=320, max_num_batched_tokens=64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_sequences_of_many_windows_are_continued_as_transformers_does(tmp_path: Path, registry: Registry, name: str) -> None:
    """In chunks, beside each other, after a prefix hit, and after preemption."""
    reference = save_random(CONFIGS[name], tmp_path)
    decoder = load_model(str(tmp_path), "float32", skip_tokenizer_init=True).decoder
    random = Random(1)
    shared = [random.randrange(3, VOCAB) for _ in range(130)]
    tails = ([], [3, 4], [random.randrange(3, VOCAB) for _ in range(150)])
    prompts = [[*shared, *tail] for tail in tails] + [[5] * 3, shared[:40]]
    engine = made_engine(decoder, registry, replace(CONFIG, kv_cache_memory=2**22))
    written = []
    for _ in range(2):
        again = observed(engine, prompts, 24)
        for prompt, (tokens, logits, _) in zip(prompts, again, strict=True):
            torch.testing.assert_close(logits, logits_by_transformers(reference, prompt, tokens), rtol=0, atol=1e-4)
            written.append(tokens)
    assert [hit for _, _, hit in again] == [129, 131, 279, 0, 39]
    assert sum(usage.given_back for usage in engine.cache_usage().groups) > 40
    pages = engine.capacity.pool.page_format
    tight = replace(CONFIG, kv_cache_memory=(pages.pages_for(320, 71) + 4) * pages.page_bytes)
    short = made_engine(decoder, registry, replace(tight, async_scheduling=True))
    crowd = [*range(5), *[3, 4] * 3]
    crowded = generate(short, [prompts[number] for number in crowd], GREEDY)
    assert [each.token_ids for each in crowded] == [written[number] for number in crowd]
    assert short.stats.num_preemptions > 0
