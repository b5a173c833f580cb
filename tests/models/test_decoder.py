"""The packed decoder against transformers: tiny random models, prefill and twenty paged decode steps, two sequences at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from grid import LAYOUTS
from headway.core.contract.layout import NHD, CacheLayout
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.engine import pool
from headway.core.engine.attention import PagedAttention
from headway.core.select.selector import Selector
from headway.models.decoder import Decoder
from headway.models.families import read_decoder_config
from headway.models.weights import Weights
from headway.registry import Registry

BLOCK_SIZE = 8
DECODE_STEPS = 20
PROMPT_LENS = (13, 5)

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large, so that attention is far from uniform and a wrong key shows
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL, head_dim=12),
    "llama, tied, biased": LlamaConfig(**SMALL, head_dim=16, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama, llama3 rope": LlamaConfig(**SMALL, head_dim=12, rope_parameters=LLAMA3_ROPE),
    "llama, yarn": LlamaConfig(**SMALL, head_dim=12, rope_parameters=YARN),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2, window in some layers": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "mistral, window": MistralConfig(**SMALL, head_dim=12, sliding_window=7),
    "gemma2": Gemma2Config(**SMALL, head_dim=12, sliding_window=7, query_pre_attn_scalar=20, final_logit_softcapping=3.0),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=12, sliding_window=7, query_pre_attn_scalar=20, sliding_window_pattern=2),
}


def save_random(config: PretrainedConfig, folder: Path) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


# Layouts differ in attention only, so two models show it.
MODELS = [*((name, NHD) for name in CONFIGS), *((name, other) for name in ("llama", "mistral, window") for other in LAYOUTS[1:])]


@pytest.mark.parametrize("backend", ["sdpa", "sdpa.math"])
@pytest.mark.parametrize(("name", "layout"), MODELS, ids=[f"{name}-{layout.name}" for name, layout in MODELS])
def test_logits_equal_transformers(tmp_path: Path, registry: Registry, name: str, layout: CacheLayout, backend: str) -> None:
    reference = save_random(CONFIGS[name], tmp_path)
    decoder = Decoder(read_decoder_config(reference.config), Weights(tmp_path, torch.float32, torch.device("cpu")))
    tokens = [torch.randint(0, SMALL["vocab_size"], (length + DECODE_STEPS,)) for length in PROMPT_LENS]
    with torch.inference_mode():
        expected = [reference(ids[None]).logits[0] for ids in tokens]
        outputs = paged_logits(decoder, registry, tokens, layout, backend)
    for ours, theirs, length in zip(outputs, expected, PROMPT_LENS, strict=True):
        assert ours.shape == (length + DECODE_STEPS, SMALL["vocab_size"])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def paged_logits(
    decoder: Decoder, registry: Registry, tokens: list[torch.Tensor], layout: CacheLayout, backend: str
) -> list[torch.Tensor]:
    """Logits at every position: the prompts in one packed prefill, then one decode step a token, both sequences in each."""
    specs = decoder.attention_specs
    selector = Selector(registry, specs, backend, layout.name, BLOCK_SIZE)
    caches = pool.allocate(specs, [layout] * len(specs), pool.PoolSize(12, BLOCK_SIZE, 0))
    attention = PagedAttention(specs, caches, registry.layout(layout.name).load_writer(torch.device("cpu")))
    tables = [[7, 2, 9, 0, 5], [3, 11, 1, 8, 4]]

    def step(ids: torch.Tensor, query_lens: list[int], contexts: list[int]) -> list[torch.Tensor]:
        metadata = AttentionMetadata.build(query_lens, contexts, tables, BLOCK_SIZE)
        attention.begin(metadata, selector.backends_for(Phase.PREFILL), selector.backends_for(Phase.DECODE))
        positions = torch.cat([torch.arange(c, c + q) for q, c in zip(query_lens, contexts, strict=True)])
        return list(decoder.compute_logits(decoder(ids, positions, attention)).split(query_lens))

    prompts = [ids[:length] for ids, length in zip(tokens, PROMPT_LENS, strict=True)]
    rows = [[part] for part in step(torch.cat(prompts), list(PROMPT_LENS), [0, 0])]
    for number in range(DECODE_STEPS):
        contexts = [length + number for length in PROMPT_LENS]
        new = torch.stack([ids[context] for ids, context in zip(tokens, contexts, strict=True)])
        for row, part in zip(rows, step(new, [1, 1], contexts), strict=True):
            row.append(part)
    return [torch.cat(row) for row in rows]
