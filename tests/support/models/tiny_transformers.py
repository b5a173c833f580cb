"""Tiny models of transformers, and their `generate` with Headway's attention and with their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, Qwen3Config

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": None, "eos_token_id": None}
CONFIGS = {
    "qwen3": (Qwen3Config(**SIZES, **HEADS), "sdpa"),
    "gemma2": (Gemma2Config(**SIZES, **HEADS, sliding_window=8, query_pre_attn_scalar=16), "eager"),
    "gpt2": (GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0), "sdpa"),
}


def a_model(name: str) -> tuple[Any, str]:
    """A tiny one, spread enough that attention decides its tokens; and what it is compared with."""
    config, own = CONFIGS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=own).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, 0, 0.3)
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    return model, own


def prompts(padding: tuple[int, ...], length: int = 13) -> dict[str, Tensor]:
    ids = torch.randint(1, 97, (len(padding), length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def same(model: Any, own: str, implementation: str, inputs: dict[str, Tensor], **options: Any) -> None:
    """Equal tokens, from logits that are equal up to rounding."""
    wanted = {"do_sample": False, "max_new_tokens": 14, "output_logits": True, "return_dict_in_generate": True, **options}
    model.set_attn_implementation(own)
    expected = model.generate(**inputs, **wanted)
    model.set_attn_implementation(implementation)
    found = model.generate(**inputs, **wanted)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(set(found.sequences[0].tolist())) > 4
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)
