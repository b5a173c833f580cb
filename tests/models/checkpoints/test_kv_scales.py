"""The scales of an fp8 cache come from the checkpoint, by every name that they have there."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from engine_logits import logits_by_transformers, observed, save_random
from headway.core.contract.errors import ModelError
from headway.core.engine.data.config import EngineConfig
from headway.core.select.layer_specs import LayerSpecs
from headway.models.layers.decoder import Decoder
from headway.models.loader import load_model
from headway.registry import Registry
from made_engine import made_engine

LAYERS, VOCAB = 2, 53
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=2,
    num_key_value_heads=1,
    initializer_range=0.2,
)
NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "ModelOpt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "both at once": ("self_attn.kv_scale", "self_attn.kv_scale"),
}


def add(folder: Path, names: tuple[str, ...], scales: list[float]) -> None:
    """Scales to the layers of a saved model, and the note that its cache is quantised."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in range(LAYERS):
        for name, scale in zip(names, scales, strict=True):
            tensors[f"model.layers.{layer}.{name}"] = torch.tensor([scale * (layer + 1)])
    save_file(tensors, path)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(config))


def load(folder: Path) -> Decoder:
    return load_model(str(folder), "float32", skip_tokenizer_init=True).decoder


@pytest.mark.parametrize("way", NAMES)
def test_scales_are_read_and_used(tmp_path: Path, registry: Registry, way: str) -> None:
    reference = save_random(CONFIG, tmp_path)
    for layer in reference.model.layers:  # values that fp8 holds only with the scale
        layer.self_attn.v_proj.weight.data *= 1e4
        layer.self_attn.o_proj.weight.data /= 1e4
    reference.save_pretrained(tmp_path)
    add(tmp_path, NAMES[way], [100.0, 100.0])
    decoder = load(tmp_path)
    assert decoder.kv_scales == [(100.0, 100.0), (200.0, 200.0)]
    stored = LayerSpecs.of(decoder, "fp8_e4m3", decoder.kv_scales).cached
    assert [(spec.k_scale, spec.v_scale) for spec in stored] == decoder.kv_scales
    assert {spec.k_scale for spec in LayerSpecs.of(decoder, "auto", decoder.kv_scales).cached} == {1.0}
    prompt = random.Random(0).choices(range(VOCAB), k=20)
    errors = []
    for scales in (decoder.kv_scales, None):
        config = EngineConfig(block_size=8, kv_cache_memory=2**18, max_model_len=64, kv_cache_dtype="fp8_e4m3")
        layers = LayerSpecs.of(decoder, "fp8_e4m3", scales)
        engine = made_engine(decoder, registry, config, layers=layers)
        ((tokens, logits, _),) = observed(engine, [prompt], 8)
        expected = logits_by_transformers(reference, prompt, tokens)
        errors.append(float((logits - expected).norm() / expected.norm()))
    assert errors[0] < 0.1 < 0.3 < errors[1], errors


@pytest.mark.parametrize(
    ("names", "scales", "words"),
    [
        (("self_attn.k_scale",), [0.5], r"model\.layers\.0\. has a k_scale for its cache, but no v_scale"),
        (("self_attn.v_proj.v_scale",), [0.5], r"has a v_scale for its cache, but no k_scale"),
        (NAMES["compressed-tensors"], [0.5, -1.0], r"layers\.0\.self_attn\.v_scale needs a number above 0, got -1\.0"),
        (NAMES["compressed-tensors"], [float("inf"), 1.0], r"layers\.0\.self_attn\.k_scale needs a number above 0, got inf"),
    ],
)
def test_impossible_scales_are_refused(tmp_path: Path, names: tuple[str, ...], scales: list[float], words: str) -> None:
    save_random(CONFIG, tmp_path)
    add(tmp_path, names, scales)
    with pytest.raises(ModelError, match=words):
        load(tmp_path)


def test_a_model_without_scales_has_ones(tmp_path: Path) -> None:
    save_random(CONFIG, tmp_path)
    assert load(tmp_path).kv_scales == [(1.0, 1.0)] * LAYERS
