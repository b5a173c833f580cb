"""Decoders of transformers through the engine, on our paged cache, against transformers' own attention over whole sequences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from driving import generate
from headway.core.engine.config import EngineConfig
from headway.core.engine.engine import Engine
from headway.core.sampling.params import SamplingParams
from headway.models.loader import load_model
from headway.registry import Registry

NEW_TOKENS = 21
"""One of the prompt, twenty of decode steps."""
VOCABULARY = 97
WINDOW = 6
PROMPT_LENS = (13, 10, 31)
"""Of prompts that pass the window; the last is cut into chunks, which run beside the decodes of the others."""

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large, so that attention is far from uniform and a wrong key shows
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.1] * 6,
    "long_factor": [4.0] * 6,
    "original_max_position_embeddings": 64,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"head_dim": 12, "sliding_window": WINDOW},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"head_dim": 16},
    "Gemma2ForCausalLM": {"head_dim": 16, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 3.0, **ALTERNATING},
    "Gemma3ForCausalLM": {"head_dim": 16, "query_pre_attn_scalar": 9, **ALTERNATING},
    "GPT2LMHeadModel": {},
    "OPTForCausalLM": {"ffn_dim": 80, "word_embed_proj_dim": 48, "init_std": 0.2},
    "GPTNeoXForCausalLM": {"rotary_pct": 0.5},
    "Phi3ForCausalLM": {"max_position_embeddings": 256, "rope_parameters": LONGROPE},
    "GraniteForCausalLM": {"attention_multiplier": 0.4, "logits_scaling": 3.0, "residual_multiplier": 0.7},
    "Olmo2ForCausalLM": {},
    "Starcoder2ForCausalLM": {"sliding_window": WINDOW},
    "CohereForCausalLM": {"logit_scale": 0.3},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 48},
    "Qwen3MoeForCausalLM": {**EXPERTS, "head_dim": 16},
    "GptOssForCausalLM": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **ALTERNATING},
    "DeepseekV2ForCausalLM": {**LATENT, "topk_method": "group_limited_greedy"},
    "DeepseekV3ForCausalLM": LATENT,
}
EVERYDAY = {"GPT2LMHeadModel": "sdpa", "Gemma2ForCausalLM": "sdpa.math", "GptOssForCausalLM": "sdpa"}


def config_of(architecture: str) -> PreTrainedConfig:
    config: PreTrainedConfig = getattr(transformers, architecture).config_class(**{**SIZES, **CONFIGS[architecture]})
    return config


def save_random(config: PreTrainedConfig, folder: Path) -> Any:
    """A model with weights of standard deviation 0.2, norms and biases too; it attends by transformers' eager code."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name or "ln_" in name or "sinks" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


def watched(engine: Engine) -> Callable[[], dict[tuple[int, ...], Tensor]]:
    """Have the engine's logits kept: what is returned gives them by the tokens that they chose, and begins anew."""
    seen: dict[int, list[Tensor]] = defaultdict(list)

    def look(rows: NDArray[numpy.int32], logits: Tensor) -> None:
        for row, own in zip(rows.tolist(), logits.clone(), strict=True):
            seen[row].append(own)

    def take() -> dict[tuple[int, ...], Tensor]:
        found = {tuple(torch.stack(own).argmax(-1).tolist()): torch.stack(own) for own in seen.values()}
        seen.clear()
        return found

    engine.executor.observe(look)
    return take


def logits_of(reference: Any, prompt: list[int], written: list[int]) -> Tensor:
    """[len(written), vocabulary]: what transformers computes before each token, over the whole sequence at once."""
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([prompt + written[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :]


CASES = [
    *((name, backend) for name, backend in EVERYDAY.items()),
    *(
        pytest.param(name, backend, marks=pytest.mark.slow)
        for name in CONFIGS
        for backend in ("sdpa", "sdpa.math")
        if EVERYDAY.get(name) != backend
    ),
]


@pytest.mark.parametrize(("architecture", "backend"), CASES)
def test_logits_equal_those_of_transformers(tmp_path: Path, registry: Registry, architecture: str, backend: str) -> None:
    reference = save_random(config_of(architecture), tmp_path)
    model = load_model(str(tmp_path), skip_tokenizer_init=True, model_impl="transformers")
    assert architecture in model.implementation
    config = EngineConfig(attn_backend=backend, max_num_batched_tokens=16, max_num_seqs=8, block_size=8, kv_cache_memory="8MiB")
    engine = Engine(model.decoder, registry, config)
    assert set(engine.selection.names.values()) == {backend}
    take = watched(engine)
    prompts = [torch.randint(1, VOCABULARY, (length,)).tolist() for length in PROMPT_LENS]
    for cached in (False, True):
        written = generate(engine, prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
        assert [one.error for one in written] == [None] * len(prompts)
        assert [one.num_cached_tokens for one in written] == [(length - 1) * cached for length in PROMPT_LENS]
        logits = take()
        for prompt, one in zip(prompts, written, strict=True):
            expected = logits_of(reference, prompt, one.token_ids)
            assert len(expected) == NEW_TOKENS
            torch.testing.assert_close(logits[tuple(one.token_ids)], expected, rtol=0, atol=1e-4)
