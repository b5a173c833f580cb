"""Whatever is read without transformers is what transformers reads, and what is unusual is left to it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.core.contract.errors import ModelError
from headway.models.families.families import read_decoder_config
from headway.models.families.plain_config import plain_config

COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
PLAIN = {
    "llama": {**COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "mistral": {**COMMON, "model_type": "mistral", "sliding_window": None},
    "qwen2": {**COMMON, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1},
    "qwen3": {**COMMON, "model_type": "qwen3", "head_dim": 32, "attention_bias": False, "rope_theta": 1000000},
    "qwen3_moe": {
        **COMMON,
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "sliding_window": None,
        "use_sliding_window": False,
    },
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
CHANGES = {
    "rope_theta": [None, 500000, "many", 1e4],
    "rope_scaling": [
        LLAMA3,
        {**LLAMA3, "extra": 1},
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"type": "yarn", "factor": 4.0},
    ],
    "rope_parameters": [
        {**LLAMA3, "rope_theta": 5e5},
        None,
        {"rope_theta": 5e5, "rope_type": "default"},
        {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0},
    ],
    "sliding_window": [None, 16],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 2],
    "layer_types": [None, ["full_attention"] * 2, ["sliding_attention", "full_attention"]],
    "head_dim": [None, 16, 32],
    "num_key_value_heads": [None, 4],
    "attention_bias": [True, None],
    "mlp_bias": [True],
    "tie_word_embeddings": [True, None],
    "eos_token_id": [None, [2, 3]],
    "dtype": ["float16", "float64", None],
    "hidden_act": ["gelu"],
    "rms_norm_eps": [1e-6, 1, 0.0],
    "partial_rotary_factor": [0.5],
    "use_cache": [False],
    "num_experts": [4, None],
    "decoder_sparse_step": [2, None],
    "norm_topk_prob": [False, None],
    "mlp_only_layers": [[], None],
}
_GONE = object()


def fields(config: Any) -> dict[str, Any]:
    """All that Headway reads of a configuration, or the reason why it refuses it."""
    try:
        decoder = dataclasses.asdict(read_decoder_config(config))
    except ModelError as error:
        return {"refused": str(error)}
    return {**decoder, "dtype": config.dtype, "eos": config.eos_token_id}


def by_transformers(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


@pytest.mark.parametrize("kind", PLAIN)
def test_an_ordinary_file_is_read_as_transformers_reads_it(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN[kind]))
    plain = plain_config(PLAIN[kind])
    assert plain is not None
    assert plain.dtype is torch.bfloat16
    assert fields(plain) == fields(by_transformers(tmp_path))


@pytest.mark.parametrize("spelling", [{"rope_scaling": LLAMA3}, {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}])
def test_llama_3_1s_frequencies_are_transformers(tmp_path: Path, spelling: dict[str, Any]) -> None:
    changed = {**PLAIN["llama"], "rope_theta": 500000.0, **spelling}
    if "rope_parameters" in spelling:
        del changed["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(changed))
    plain, whole = plain_config(changed), by_transformers(tmp_path)
    assert plain is not None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](whole, torch.device("cpu"))
    found = read_decoder_config(plain)
    assert torch.equal(torch.tensor(found.ropes[0].inv_freq), expected)
    assert set(found.ropes[0].factors) == {factor} == {1.0}
    ratios = (expected * 500000.0 ** (torch.arange(0, 16, 2) / 16)).tolist()
    assert ratios[0] == pytest.approx(1), "a short wave is kept"
    assert 0.13 < ratios[1] < 0.99, "one between is interpolated"
    assert ratios[2] == pytest.approx(1 / 8), "a long one is stretched"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(PLAIN)), st.dictionaries(st.sampled_from(sorted(CHANGES)), st.integers(0, 5), max_size=3))
def test_whatever_is_read_plainly_is_what_transformers_reads(tmp_path: Path, kind: str, chosen: dict[str, int]) -> None:
    changed = dict(PLAIN[kind])
    for name, number in chosen.items():
        value = [*CHANGES[name], _GONE][number % (len(CHANGES[name]) + 1)]
        changed.pop(name, None)
        if value is not _GONE:
            changed[name] = value
    plain = plain_config(changed)
    if plain is not None:
        (tmp_path / "config.json").write_text(json.dumps(changed))
        assert fields(plain) == fields(by_transformers(tmp_path)), changed


@pytest.mark.slow  # a process for each
@pytest.mark.parametrize("shape", ["llama-3-8b", "qwen3-0.6b", "qwen3-30b-a3b"])  # hybrids are read by transformers
def test_shipped_shapes_need_no_transformers(shape: str) -> None:
    code = (
        "import sys; from pathlib import Path; from headway.models import loader; "
        f"loader.read_config(Path(loader.__file__).parent / 'shapes' / {shape!r}); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
