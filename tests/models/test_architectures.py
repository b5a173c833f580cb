"""Every architecture that the decoder computes, against transformers, through the real loader and engine.

One row each (those with a state have theirs in `hybrid_models`): prompts of different lengths in chunks beside decoding
sequences, twenty decode steps and more, then prefix hits. Windows are shorter than the sequences.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Phi3Config

import hybrid_models
from backend_cases import LAYOUTS
from engine_logits import logits_by_transformers, observed, save_random
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineLoop
from headway.models.families.families import FAMILIES
from headway.models.loader import load_model
from headway.registry import Registry
from made_engine import made_engine
from plain_models import ROWS, SMALL, VOCAB
from transformers_release import needs

BATCHED_TOKENS = 24
"""Most tokens of a step: less than the longest prompt, which so goes in chunks beside sequences that decode."""
PROMPT_LENS = (13, 41, 5)
MAX_TOKENS = 24


def test_every_family_has_a_row() -> None:
    both = [*ROWS.values(), *hybrid_models.ROWS.values()]
    assert {config.model_type for config in both} == set(FAMILIES)


# Layouts differ in attention only, so two models show it.
CASES = [*((name, "auto") for name in ROWS), *((name, other.name) for name in ("llama", "mistral") for other in LAYOUTS[1:])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_logits_equal_transformers(tmp_path: Path, registry: Registry, name: str, layout: str) -> None:
    needs(FAMILIES[ROWS[name].model_type].architecture)
    reference = save_random(ROWS[name], tmp_path)
    engine = made_engine(
        load_model(str(tmp_path), "float32", skip_tokenizer_init=True).decoder,
        registry,
        EngineConfig(block_size=8, kv_layout=layout, kv_cache_memory=2**20, max_num_batched_tokens=BATCHED_TOKENS),
    )
    draw = random.Random(0)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in PROMPT_LENS]
    before = engine.stats.snapshot()
    compare(reference, engine, prompts, [0, 0, 0])
    steps = (engine.stats - before).num_steps
    assert steps < MAX_TOKENS + 4, "prompts were served beside decoding sequences"
    # The first two go on as they were, and the third turns away within a block.
    goes_on, turns = prompts[1] + [5, 6, 7], [*prompts[1][:19], 3, 4, 5]
    compare(reference, engine, [goes_on, turns], [len(prompts[1]), 19])


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.3, 1.1],
    "long_factor": [2.0, 5.0, 9.0],
    "original_max_position_embeddings": 32,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("implementation", ["headway", "transformers"])
@pytest.mark.parametrize(("longest", "lengths"), [(None, (33, 70, 41)), (32, (5, 7, 3))], ids=["long", "short"])
def test_longrope_takes_one_set_of_factors(
    tmp_path: Path, registry: Registry, implementation: str, longest: int | None, lengths: tuple[int, ...]
) -> None:
    """Beyond the original length the long ones, as transformers does for a sequence that is so long; chunks and hits included."""
    reference = save_random(Phi3Config(**SMALL, original_max_position_embeddings=32, rope_parameters=LONGROPE), tmp_path)
    config = EngineConfig(block_size=8, max_num_batched_tokens=BATCHED_TOKENS, max_model_len=longest)
    options = {"skip_tokenizer_init": True, "model_impl": implementation, "max_model_len": longest}
    loaded = load_model(str(tmp_path), "float32", **options)
    assert loaded.long_factors is (longest is None)
    engine = made_engine(loaded.decoder, registry, config)
    draw = random.Random(0)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
    compare(reference, engine, prompts, [0, 0, 0])
    compare(reference, engine, prompts, [length - 1 if length > 8 else 0 for length in lengths])


def compare(reference: Any, engine: EngineLoop, prompts: list[list[int]], cached: list[int]) -> None:
    for prompt, (tokens, logits, hit), expected_hit in zip(prompts, observed(engine, prompts, MAX_TOKENS), cached, strict=True):
        assert len(tokens) == MAX_TOKENS
        assert hit == expected_hit
        expected = logits_by_transformers(reference, prompt, tokens)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
