"""Which model folders are refused before a weight is read, and that each refusal names its cause in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headway.core.contract.errors import ModelError
from headway.models.checkpoints.checkpoint import check_folder
from headway.models.checkpoints.formats.config import read_quantization
from headway.models.checkpoints.weights import Weights
from headway.models.families.families import read_decoder_config
from headway.models.loader import read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 300,
}


def write(folder: Path, name: str = "config.json", **content: object) -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_config(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_plain_checkpoint_is_accepted_with_or_without_its_architecture(tmp_path: Path) -> None:
    check_folder(write(tmp_path, **LLAMA))
    check_folder(write(tmp_path, **{**LLAMA, "architectures": None, "quantization_config": None, "sliding_window": None}))


def test_a_folder_with_a_gguf_file_alone_is_told_that_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "small-Q4_K_M.gguf").touch()
    assert refused(tmp_path).endswith(f"got none; a .gguf file is named itself, such as {tmp_path / 'small-Q4_K_M.gguf'}")


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


@pytest.mark.parametrize("scheme", [SCHEME, {**SCHEME, "dynamic": False, "observer": "minmax"}], ids=["short", "long"])
def test_a_checkpoint_whose_cache_alone_is_quantised_is_accepted(tmp_path: Path, scheme: dict[str, Any]) -> None:
    only_cache = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    assert read_quantization(tmp_path, {"quantization_config": only_cache}) is None
    for change in ({"num_bits": 4}, {"type": "int"}, {"strategy": "attn_head"}, {"dynamic": True}):
        other = {**only_cache, "kv_cache_scheme": {**scheme, **change}}
        with pytest.raises(ModelError, match="needs an fp8 cache with a scale for each layer"):
            read_quantization(tmp_path, {"quantization_config": other})


def test_modelopts_file_may_tell_of_the_cache_alone(tmp_path: Path) -> None:
    write(tmp_path, "hf_quant_config.json", quantization={"quant_algo": None, "kv_cache_quant_algo": "FP8"})
    assert read_quantization(tmp_path, {}) is None
    write(tmp_path, "hf_quant_config.json", quantization={"quant_algo": None, "kv_cache_quant_algo": "NVFP4"})
    with pytest.raises(ModelError, match="got 'NVFP4' for its cache"):
        read_quantization(tmp_path, {})


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_weights_that_are_no_plain_numbers_are_refused_when_they_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.ones(2).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"a needs float32, bfloat16 or float16 elements, got {str(dtype)[6:]}: .*quantised"):
        Weights(tmp_path, torch.float32, torch.device("cpu")).take("a", (2,))


@pytest.mark.parametrize("with_config", [True, False])
def test_an_adapter_is_refused_with_its_base_model(tmp_path: Path, with_config: bool) -> None:
    if with_config:
        write(tmp_path, **LLAMA)
    text = refused(write(tmp_path, "adapter_config.json", base_model_name_or_path="Qwen/Qwen3-0.6B", peft_type="LORA"))
    assert "needs a whole model, got an adapter (LoRA) for Qwen/Qwen3-0.6B" in text
    assert "merge_and_unload" in text


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("LlamaBidirectionalModel", "bidirectional"),
        ("LlamaEncoderModel", "bidirectional"),
        ("LlamaModel", "embedding"),
        ("LlamaForSequenceClassification", "scores texts"),
        ("Qwen2ForCausalLM", "got Qwen2ForCausalLM"),
    ],
)
def test_an_architecture_that_is_not_the_decoders_is_refused(tmp_path: Path, architecture: str, words: str) -> None:
    text = refused(write(tmp_path, **{**LLAMA, "architectures": [architecture]}))
    assert "needs LlamaForCausalLM for model_type llama" in text
    assert f"got {architecture}" in text
    assert words in text


@pytest.mark.parametrize("key", [{"is_causal": False}, {"use_bidirectional_attention": True}], ids=str)
def test_a_bidirectional_model_is_refused_by_its_switch(tmp_path: Path, key: dict[str, bool]) -> None:
    assert "needs causal attention" in refused(write(tmp_path, **LLAMA, **key))


def test_an_embedding_model_is_refused_by_its_files(tmp_path: Path) -> None:
    (write(tmp_path, **LLAMA) / "modules.json").write_text("[]")
    assert "got an embedding model by its modules.json" in refused(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads needs a whole number of at least 1, got 0"),
        ({"num_hidden_layers": -2}, "num_hidden_layers needs a whole number of at least 1, got -2"),
        ({"vocab_size": 3.5}, "vocab_size needs a whole number of at least 1, got 3.5"),
        ({"head_dim": 0}, "head_dim needs a whole number of at least 1, got 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads needs a multiple of num_key_value_heads=3, got 4"),
        ({"hidden_size": 33}, "hidden_size needs a multiple of num_attention_heads=4"),
        ({"head_dim": 7}, "head_dim needs an even number for RoPE, got 7"),
        ({"sliding_window": -1}, "sliding_window needs a whole number of at least 1, got -1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_impossible_size_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    assert words in refused(write(tmp_path, **{**LLAMA, **change}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rms_norm_eps": -1.0}, "rms_norm_eps needs a number above 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, "rope_theta: needs a number above 0"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_number_that_shapes_do_not_show_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_decoder_config(read_config(write(tmp_path, **{**LLAMA, **change})))


def test_code_of_the_models_own_is_never_run_and_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*arguments: object) -> str:
        raise AssertionError("somebody was asked")

    monkeypatch.setattr("builtins.input", ask)
    code = "raise SystemExit('the code of the model was run')"
    (tmp_path / "custom.py").write_text(code)
    auto_map = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
    assert read_config(write(tmp_path, **LLAMA, auto_map=auto_map)).hidden_size == 32
    text = refused(write(tmp_path, model_type="custom", architectures=["CustomForCausalLM"], auto_map=auto_map))
    assert "got CustomForCausalLM" in text
