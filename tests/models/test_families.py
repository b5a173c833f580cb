"""What a family's configuration may not ask for is refused by its key, in one line."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from headway.core.contract.errors import ModelError
from headway.models.families.families import read_decoder_config

HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def changed(config: PretrainedConfig, **values: Any) -> PretrainedConfig:
    for key, value in values.items():
        setattr(config, key, value)
    return config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPT2Config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx: needs false, got true"),
        (GPT2Config(scale_attn_weights=False), "scale_attn_weights: needs true, got false"),
        (GPT2Config(n_embd=100, n_head=12), "num_attention_heads: needs a divisor of hidden_size=100, got 12"),
        (GPT2Config(activation_function="quick_gelu"), "activation_function: needs one of silu, .*got quick_gelu"),
        (OPTConfig(do_layer_norm_before=False), "do_layer_norm_before: needs true, got false"),
        (OPTConfig(hidden_size=768, word_embed_proj_dim=512), "word_embed_proj_dim: needs hidden_size=768, got 512"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type: needs default, linear, llama3, yarn or longrope, got dynamic",
        ),
        (OPTConfig(activation_function="quick_gelu"), "activation_function: needs one of silu, .*got quick_gelu"),
        (LlamaConfig(rope_parameters=HALF), "partial_rotary_factor: needs 1 in LlamaForCausalLM, got 0.5"),
        (
            changed(Phi3Config(), rope_parameters={**HALF, "partial_rotary_factor": 0.27}),
            "partial_rotary_factor: needs an even part",
        ),
        (changed(Qwen3Config(), layer_types=["full_attention"]), "layer_types: needs one for each of the 32 layers, got 1"),
        (
            changed(Gemma3TextConfig(), layer_types=["linear_attention"] * 26),
            "layer_types: needs sliding_attention or full_attention, got linear_attention",
        ),
        (changed(LlamaConfig(), rms_norm_eps=0.0), "rms_norm_eps: needs a number above 0, got 0.0"),
        (Qwen3MoeConfig(num_experts=4, num_experts_per_tok=8), "num_experts_per_tok: needs .*4.*, got 8"),
        (changed(Qwen3MoeConfig(), decoder_sparse_step=0), "decoder_sparse_step: needs a whole number of at least 1, got 0"),
        (changed(LlamaConfig(), model_type="bloom"), "model architecture: needs one of .*LlamaForCausalLM.*, got bloom"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else value.partition(":")[0],
)
def test_what_the_decoder_does_not_compute_is_refused(config: PretrainedConfig, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        read_decoder_config(config)
    assert "\n" not in str(caught.value)


def test_a_window_counts_only_where_the_family_obeys_it() -> None:
    assert set(read_decoder_config(changed(LlamaConfig(), sliding_window=7)).sliding_windows) == {None}
    assert set(read_decoder_config(Phi3Config(sliding_window=7)).sliding_windows) == {7}


def test_equal_rotary_embeddings_are_computed_once() -> None:
    same = {"rope_type": "default", "rope_theta": 1e4}
    config = Gemma3TextConfig(rope_parameters={"full_attention": same, "sliding_attention": dict(same)})
    assert len(read_decoder_config(config).ropes) == 1
    different = read_decoder_config(Gemma3TextConfig())
    assert len(different.ropes) == 2
    assert [layer.rope for layer in different.layers[:7]] == [0, 0, 0, 0, 0, 1, 0]
