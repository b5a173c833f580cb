"""What transformers leaves unread of a .gguf file is put into the model's configuration, or refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from dense_attention import DenseAttention
from engine_logits import save_random
from headway.core.contract.errors import ModelError
from headway.models.checkpoints.gguf import gguf
from headway.models.loader import load_model

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
from gguf_models import converted, save_gguf

TOKENS = [chr(number) for number in range(33, 97)]
SIZES: dict[str, Any] = {"vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS, KV_HEADS = 2, 1
Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def nothing(keys: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    return None


def written(tmp_path: Path, change: Change = nothing, **rope: Any) -> tuple[Path, Any]:
    """A file of a tiny random Llama, changed before it is written, and transformers' model. rope: of `rope_parameters`."""
    parameters = {"rope_type": "default", "rope_theta": 500000.0, **rope}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 256}
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    reference = save_random(LlamaConfig(**SIZES, **heads, rope_parameters=parameters, tie_word_embeddings=False), folder)
    tensors = converted(reference.config, folder)
    for name, tensor in tensors.items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            count = HEADS if "attn_q" in name else KV_HEADS
            tensors[name] = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    keys = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": reference.config.rms_norm_eps,
        "rope.freq_base": parameters["rope_theta"],
        "rope.dimension_count": 32,
        "vocab_size": len(TOKENS),
    }
    change(keys, tensors)
    tokenizer = {"model": "gpt2", "pre": "gpt-2", "tokens": TOKENS, "token_type": [1] * len(TOKENS), "merges": ["! !"]}
    tokenizer |= {"tokens": [*TOKENS[:-1], "!!"]}
    save_gguf(tmp_path / "tiny.gguf", "llama", keys, tensors, **tokenizer)
    return tmp_path / "tiny.gguf", reference


def stating(**values: Any) -> Change:
    return lambda keys, tensors: keys.update({f"rope.scaling.{name}": value for name, value in values.items()})


def stated(key: str, value: object) -> Change:
    return lambda keys, tensors: keys.update({key: value})


def lacking(key: str) -> Change:
    return lambda keys, tensors: keys.pop(key)


def adding(name: str, tensor: Tensor) -> Change:
    return lambda keys, tensors: tensors.update({name: tensor})


def divisors(factor: float) -> Tensor:
    """As llama.cpp's converter writes them of Llama 3."""
    waves = 2 * torch.pi * 500000.0 ** (torch.arange(0, 32, 2) / 32)
    smooth = ((8192 / waves - 1) / 3).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


SCALED: list[tuple[dict[str, Any], Change]] = [
    ({}, nothing),
    ({"rope_type": "linear", "factor": 4.0}, stating(type="linear", factor=4.0)),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        stating(type="yarn", factor=4.0, original_context_length=64),
    ),
    ({**LLAMA3, "factor": 32.0}, adding("rope_freqs.weight", divisors(32.0))),
]


@pytest.mark.parametrize(("rope", "change"), SCALED, ids=["none", "linear", "yarn", "llama3"])
def test_positions_are_scaled_as_the_file_says(tmp_path: Path, rope: dict[str, Any], change: Change) -> None:
    path, reference = written(tmp_path, change, **rope)
    model = load_model(str(path), "float32", skip_tokenizer_init=True).decoder
    text = torch.randint(3, len(TOKENS), (200,), generator=torch.Generator().manual_seed(1))
    attention = DenseAttention(model)
    attention.begin([(0, len(text))])
    with torch.inference_mode():
        logits = model.compute_logits(model(text, torch.arange(len(text)), attention))
        torch.testing.assert_close(logits, reference(text[None]).logits[0], rtol=0, atol=1e-4)


REFUSED: list[tuple[Change, str]] = [
    (stating(type="longrope", factor=4.0), r"llama\.rope\.scaling\.type needs none, linear, or yarn .*, got longrope"),
    (stating(type="linear"), r"llama\.rope\.scaling\.factor needs a number, got no such key"),
    (stating(type="yarn", factor=4.0, original_context_length=64, attn_factor=2.0), r"got llama\.rope\.scaling\.attn_factor, "),
    (lacking("context_length"), r"llama\.context_length needs a whole number of at least 1, got no such key"),
    (lacking("attention.head_count"), r"llama\.attention\.head_count needs a whole number of at least 1, got no such key"),
    (lacking("attention.layer_norm_rms_epsilon"), r"llama\.attention\.layer_norm_rms_epsilon needs a number, got no such key"),
    (
        stated("feed_forward_length", 128),
        r"layers\.0\.mlp\.down_proj\.weight needs shape \[64, 128\] by its header, got \[64, 96\]",
    ),
    (adding("rope_freqs.weight", torch.linspace(1, 9, 16)), r"got rope_freqs\.weight, without which it would be another model"),
    (adding("rope_factors_long.weight", torch.ones(16)), r"got rope_factors_long\.weight, without which"),
    (adding("blk.1.attn_q.bias", torch.ones(64)), r"reads of llama, got blk\.1\.attn_q\.bias, .*use the model's safetensors"),
    (lambda keys, tensors: keys.update(block_count=1), r"got blk\.1\..* and 8 more, without which it would be another model"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_would_make_another_model_is_refused(cache: Path, tmp_path: Path, change: Change, words: str) -> None:
    path, _ = written(tmp_path, change)
    with pytest.raises(ModelError, match=words):
        gguf.convert(path)
    assert not list(cache.iterdir())


def test_a_part_of_a_split_file_is_refused_with_what_joins_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = written(tmp_path)
    general = gguf.Header.general
    monkeypatch.setattr(
        gguf.Header, "general", lambda header, key, default=None: 3 if key == "split.count" else general(header, key, default)
    )
    with pytest.raises(ModelError, match=r"split\.count needs one file \(llama-gguf-split --merge makes it\), got one of 3"):
        gguf.convert(path)
