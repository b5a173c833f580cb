"""Decoders of transformers on a GPU: compiled layers in CUDA graphs write what the layers as they are write."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from headway import LLM, SamplingParams
from plain_models import sizes

pytestmark = pytest.mark.gpu

SIZES = sizes(
    211, 256, 256, 4, max_position_embeddings=512, initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=0
)
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"head_dim": 64},
    "Gemma3ForCausalLM": {"head_dim": 64, "query_pre_attn_scalar": 50, **ALTERNATING},
    "GPTNeoXForCausalLM": {},
    "GPT2LMHeadModel": {},
}
PROMPTS = [[Random(length).randrange(1, 211) for _ in range(length)] for length in (3, 40, 17, 130, 64)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def tokens_of(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("architecture", MODELS)
def test_compiled_layers_in_graphs_write_the_same_tokens(tmp_path: Path, architecture: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, architecture).config_class(**{**SIZES, **MODELS[architecture]})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    common = {
        "dtype": "float32",
        "device": "cuda",
        "model_impl": "transformers",
        "skip_tokenizer_init": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 96,
        "kv_cache_memory": "256MiB",
    }
    plain = tokens_of(LLM(str(tmp_path), torch_compile=False, enforce_eager=True, **common))
    fast = LLM(str(tmp_path), torch_compile=True, **common)
    written = tokens_of(fast)
    same = sum(a == b for ours, theirs in zip(written, plain, strict=True) for a, b in zip(ours, theirs, strict=True))
    assert same >= 0.9 * GREEDY.max_tokens * len(PROMPTS), "near-ties may flip a token and so the rest of a text, rarely"
    stats = fast.engine.stats
    assert stats.num_graph_steps > 0
    assert stats.steps_in_pieces.total() > 0
    assert not stats.compilations, "nothing is compiled after the engine is ready"
