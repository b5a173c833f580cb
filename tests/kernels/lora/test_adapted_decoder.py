"""A decoder with adapters computes what peft does, whatever its family merges, turns or scales."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_logits import logits_by_transformers, save_random
from headway import LLM, SamplingParams
from headway.core.contract.adapters import LoRARequest
from hybrid_models import ROWS as HYBRIDS
from plain_models import ROWS
from transformers_release import needs

peft = pytest.importorskip("peft", reason="needs peft, which the extra dev brings")

TARGETS: dict[str, Sequence[str]] = {
    "diffllama": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "gemma2": ("q_proj", "o_proj", "gate_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "granite": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "opt": ("q_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "phi3, rotated in part": ("qkv_proj", "down_proj"),
    "qwen3": ("q_proj", "k_proj", "up_proj"),
    "olmo2": ("q_proj", "k_proj", "v_proj", "down_proj"),
    "qwen3_moe": ("q_proj", "v_proj", "o_proj"),
    "deepseek_v2": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "llama, tied, biased, linear rope": ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"),
}
QUICK = ("gpt2", "granite", "phi3, rotated in part", "qwen3")


def train(model: Any, folder: Path, targets: Sequence[str], **options: Any) -> Any:
    """The model with an adapter of random numbers, which is saved."""
    torch.manual_seed(len(targets))
    wanted = peft.LoraConfig(lora_alpha=6, target_modules=[*targets], init_lora_weights=False, **{"r": 3, **options})
    made = peft.get_peft_model(model, wanted)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.25)
    made.save_pretrained(folder)
    return made.eval()


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TARGETS])
def test_logits_are_those_of_peft(tmp_path: Path, name: str) -> None:
    if name == "deepseek_v2":
        needs("DeepseekV2ForCausalLM")
    model = save_random({**ROWS, **HYBRIDS}[name], tmp_path / "model")
    options = {"rank_pattern": {TARGETS[name][0]: 5}, "use_rslora": True} if name in ("qwen3", "gpt2") else {}
    adapted = train(model, tmp_path / "adapter", TARGETS[name], **options)
    llm = LLM(
        str(tmp_path / "model"),
        enable_lora=True,
        max_lora_rank=5,
        max_loras=2,
        skip_tokenizer_init=True,
        kv_cache_memory="8MiB",
        num_threads=1,
        autotune_budget=0,
        max_model_len=100,
    )
    shown: list[Tensor] = []
    llm.engine.executor.observe(lambda _, logits: shown.append(logits.clone()))
    prompt, params = [5, 9, 60, 12, 33, 7, 41], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False, lora_request=LoRARequest("a", 1, str(tmp_path / "adapter")))
    tokens = output.outputs[0].token_ids
    expected = logits_by_transformers(adapted, prompt, tokens)
    assert tokens == expected.argmax(1).tolist()
    assert torch.allclose(torch.cat(shown), expected, atol=3e-4 * float(expected.abs().max()))
    with adapted.disable_adapter():
        alone = logits_by_transformers(adapted, prompt, tokens)
    assert (expected - alone).norm() > 0.1 * alone.norm(), "the adapter changes what is computed"
