"""Models with sliding windows through the engine, whose windowed layers give their blocks back: what transformers writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
import transformers
from transformers import MistralConfig, PretrainedConfig, Qwen2Config

from driving import generate
from headway.core.engine.config import EngineConfig
from headway.core.engine.engine import Engine
from headway.core.sampling.params import SamplingParams
from headway.models.config import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.weights import Weights
from headway.registry import Registry

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large, so that attention is far from uniform and a wrong key shows
}
CONFIGS: dict[str, PretrainedConfig] = {
    "mistral": MistralConfig(**SMALL, head_dim=12, sliding_window=19),
    "qwen2, one layer sees all": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=1),
}
NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
CONFIG = EngineConfig(attn_backend="sdpa", block_size=8, max_model_len=320, max_num_batched_tokens=64)


@pytest.mark.parametrize("name", CONFIGS)
def test_long_sequences_are_continued_as_transformers_does(tmp_path: Path, registry: Registry, name: str) -> None:
    """Ten and more windows long: in chunks, beside each other, after a prefix hit, and after preemption."""
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    reference.save_pretrained(tmp_path)
    reference.generation_config.eos_token_id = None
    decoder = Decoder(DecoderConfig.from_transformers(reference.config), Weights(tmp_path, torch.float32, torch.device("cpu")))
    random = Random(1)
    shared = [random.randrange(97) for _ in range(130)]
    tails = ([], [3, 1], [random.randrange(97) for _ in range(150)])
    prompts = [[*shared, *tail] for tail in tails] + [[5] * 3, shared[:40]]
    expected = []
    for prompt in prompts:
        with torch.inference_mode():
            out = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS)
        expected.append(out[0, len(prompt) :].tolist())
    engine = Engine(decoder, registry, replace(CONFIG, kv_cache_memory=2**22))
    assert [each.token_ids for each in generate(engine, prompts, GREEDY)] == expected
    again = generate(engine, prompts, GREEDY)
    assert [each.token_ids for each in again] == expected
    assert [each.num_cached_tokens for each in again] == [129, 131, 279, 0, 39]
    assert sum(usage.given_back for usage in engine.blocks.usage([])) > 40
    pages = engine.capacity.pool.page_format
    tight = replace(CONFIG, kv_cache_memory=(pages.pages_for(320, 71) + 4) * pages.page_bytes)
    short = Engine(decoder, registry, replace(tight, async_scheduling=True))
    crowd = [*prompts, *prompts[3:], *prompts[3:]]
    assert [each.token_ids for each in generate(short, crowd, GREEDY)] == [*expected, *expected[3:], *expected[3:]]
    assert short.scheduler.num_preemptions > 0
