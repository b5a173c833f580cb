"""Models with layers that keep a state, from .gguf files in the layouts of llama.cpp's converter, against transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from dense_attention import logits_of_text
from engine_logits import save_random
from gguf_models import architecture, converted, keys_of, save_gguf
from headway.core.contract.errors import ModelError
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.models.checkpoints.gguf import gguf
from headway.models.families.families import FAMILIES
from headway.models.loader import load_model
from hybrid_models import ROWS
from plain_models import VOCAB
from thread_ranks import on_ranks
from transformers_release import needs

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

NAMES = [
    "bamba, biased",
    "falcon_h1",
    "falcon_h1, normed",
    "granitemoehybrid",
    "granitemoehybrid, dense",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "nemotron_h, experts",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
]
"""Models without what the converter omits: RoPE with Mamba in Granite, LFM2's biases, Qwen3-Next's dense layers."""


def config_of(name: str) -> PretrainedConfig:
    config = copy.deepcopy(ROWS[name if name in ROWS else "granitemoehybrid, dense, rope"])
    if name == "granitemoehybrid, dense":
        config.position_embedding_type = None
    if name == "qwen3_next":
        config.mlp_only_layers = []
    return config


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def written(tmp_path: Path, name: str, change: Change = lambda keys, tensors: None, **tokenizer: Any) -> tuple[Path, Any]:
    """A file of a tiny random model, changed before it is written, and transformers' model."""
    config = config_of(name)
    needs(FAMILIES[config.model_type].architecture)
    folder, path = tmp_path / "checkpoint", tmp_path / "tiny.gguf"
    folder.mkdir()
    reference = save_random(config, folder)
    keys, tensors = keys_of(reference.config), converted(reference.config, folder)
    change(keys, tensors)
    save_gguf(path, architecture(reference.config), keys, tensors, **tokenizer)
    return path, reference


def same_logits(path: Path, reference: Any, ranks: Ranks = ONE_RANK) -> None:
    model = load_model(str(path), "float32", skip_tokenizer_init=True, ranks=ranks).decoder
    text = torch.randint(3, VOCAB, (33,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(logits_of_text(model, text, ranks), reference(text[None]).logits[0], rtol=0, atol=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(cache: Path, tmp_path: Path, name: str) -> None:
    same_logits(*written(tmp_path, name))


def test_answers_end_at_the_ends_of_texts_turns_and_messages(cache: Path, tmp_path: Path) -> None:
    path, _ = written(tmp_path, "lfm2", eos_token_id=3, eot_token_id=4, eom_token_id=5, bos_token_id=6)
    assert load_model(str(path), skip_tokenizer_init=True).eos_token_ids == {3, 4, 5}


@pytest.mark.parametrize(("token", "told"), [("x", "eot_token_id"), (2.5, "eot_token_id"), (2**32 - 1, "")])
def test_a_damaged_end_is_told(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, token: Any, told: str) -> None:
    path, _ = written(tmp_path, "lfm2", eos_token_id=3, eot_token_id=token)
    if told:
        with pytest.raises(ModelError, match=told):
            load_model(str(path), skip_tokenizer_init=True)
    else:
        assert load_model(str(path), skip_tokenizer_init=True).eos_token_ids == {3}
        assert "tokenizer.ggml.eot_token_id" in caplog.text


def test_each_rank_takes_its_part_of_a_file(cache: Path, tmp_path: Path) -> None:
    path, reference = written(tmp_path, "qwen3_next")
    on_ranks(2, lambda ranks: same_logits(path, reference, ranks))


def in_the_older_layout(keys: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Qwen3-Next with one projection for q, k, v and z, as in the checkpoint, and without a list of recurrent layers."""
    del keys["attention.recurrent_layers"]
    keys["full_attention_interval"] = 2
    for layer in (0, 2):
        qkv, z = (tensors.pop(f"blk.{layer}.{name}.weight") for name in ("attn_qkv", "attn_gate"))
        q, k, v = qkv.split([16, 16, 48])
        rows = [part.unflatten(0, (2, -1)) for part in (q, k, v, z)]
        tensors[f"blk.{layer}.ssm_in.weight"] = torch.cat(rows, dim=1).flatten(0, 1)


def with_fused_experts(keys: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Experts with merged gate and up, as `--fuse-gate-up-exps` writes them."""
    for layer in range(4):
        halves = [tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = torch.cat(halves, dim=1)


def with_drafts(keys: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """A last block that proposes drafts, which is left unread."""
    keys |= {"block_count": 5, "nextn_predict_layers": 1}
    keys["attention.recurrent_layers"] = [*keys["attention.recurrent_layers"], False]
    tensors |= {"blk.4.attn_norm.weight": torch.ones(48), "blk.4.nextn.eh_proj.weight": torch.ones(48, 96)}


@pytest.mark.parametrize(
    ("name", "change"), [("qwen3_next", in_the_older_layout), ("qwen3_next", with_fused_experts), ("qwen3_5", with_drafts)]
)
def test_files_of_other_converters_and_with_drafts(cache: Path, tmp_path: Path, name: str, change: Change) -> None:
    same_logits(*written(tmp_path, name, change))


def test_quantised_tensors_and_those_of_half_the_size_are_dequantised(cache: Path, tmp_path: Path) -> None:
    config = config_of("lfm2_moe")
    config.hidden_size = config.moe_intermediate_size = 64
    reference = save_random(config, tmp_path)
    keys, tensors = keys_of(reference.config), converted(reference.config, tmp_path)
    stored, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() > 1 and tensor.shape[-1] % 32 == 0:
            quantised = quantize(tensor.numpy(), GGMLQuantizationType.Q8_0)
            stored[name] = torch.from_numpy(quantised)
            plain[name] = torch.from_numpy(dequantize(quantised, GGMLQuantizationType.Q8_0))
        elif tensor.dim() > 1:
            stored[name], plain[name] = tensor.half(), tensor.half().float()
    assert sum(tensor.dtype == torch.uint8 for tensor in stored.values()) > 20
    found = []
    for kind, tensors in (("stored", stored), ("plain", plain)):
        save_gguf(tmp_path / f"{kind}.gguf", "lfm2moe", keys, tensors)
        found.append(load_file(gguf.convert(tmp_path / f"{kind}.gguf") / "model-00001.safetensors"))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def lacking(name: str) -> Change:
    return lambda keys, tensors: tensors.pop(name)


def adding(**tensors: Tensor) -> Change:
    return lambda keys, found: found.update({name.replace("__", "."): tensor for name, tensor in tensors.items()})


def stating(key: str, value: object) -> Change:
    return lambda keys, tensors: keys.update({key: value})


REFUSED: list[tuple[str, Change, str]] = [
    ("lfm2", lacking("blk.2.ffn_down.weight"), r"it has no tensor blk\.2\.ffn_down\.weight, which its header implies"),
    ("lfm2", lacking("token_embd.weight"), r"it has no tensor token_embd\.weight"),
    ("lfm2", adding(rope_freqs__weight=torch.ones(6)), r"1 tensors that Headway does not read of lfm2, first rope_freqs\.weight"),
    (
        "lfm2",
        stating("shortconv.l_cache", 5),
        r"blk\.0\.shortconv\.conv\.weight .* needs shape \[48, 1, 5\] by its header, got \[48, 1, 3\]",
    ),
    ("lfm2", stating("rope.scaling.type", "yarn"), r"lfm2\.rope\.scaling\.type needs none, got yarn"),
    (
        "lfm2",
        stating("attention.head_count_kv", [0, 2]),
        r"head_count_kv needs a whole number for each of the 4 layers, got \[0, 2\]",
    ),
    (
        "lfm2",
        lambda keys, tensors: keys.pop("shortconv.l_cache"),
        r"lfm2\.shortconv\.l_cache needs a whole number, got no such key",
    ),
    ("lfm2_moe", stating("expert_gating_func", 1), r"lfm2moe\.expert_gating_func needs 2, got 1"),
    ("falcon_h1", lacking("output.weight"), r"falcon-h1 needs a tensor output\.weight .*, got none"),
    (
        "jamba",
        stating("attention.head_count_kv", [2, 2, 0, 2]),
        r"jamba: layers with attention\.head_count_kv needs one distance",
    ),
    (
        "lfm2",
        stating("block_count", 2**31),
        r"lfm2\.block_count needs a whole number of at most 4096 for tensors .*, got 2147483648",
    ),
    ("lfm2", stating("attention.head_count", 0), r"lfm2\.attention\.head_count needs a whole number of at least 1, got 0"),
    (
        "lfm2_moe",
        stating("expert_count", 2**31),
        r"expert_count needs a whole number of at most 65536 for tensors whose longest axis is .*, got 2147483648",
    ),
    ("nemotron_h, experts", stating("moe_latent_size", 16), "moe_latent_size: needs null, got 16"),
]


@pytest.mark.parametrize(("name", "change", "words"), REFUSED)
def test_what_a_file_lacks_or_adds_is_refused(cache: Path, tmp_path: Path, name: str, change: Change, words: str) -> None:
    path, _ = written(tmp_path, name, change)
    with pytest.raises(ModelError, match=words):
        gguf.convert(path)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("unknown", ["minimax-01", "olmo-hybrid"])
def test_an_architecture_that_nobody_reads_is_refused_with_those_that_are(cache: Path, tmp_path: Path, unknown: str) -> None:
    save_gguf(tmp_path / "tiny.gguf", unknown, {"block_count": 2}, {"token_embd.weight": torch.ones(4, 4)})
    words = (
        f"general.architecture needs falcon-h1, .*qwen3next, or one that transformers .* reads, got {unknown}; use the model's"
    )
    with pytest.raises(ModelError, match=words):
        gguf.convert(tmp_path / "tiny.gguf")


TOKENS = [chr(number) for number in range(33, 97)]
SIZES: dict[str, Any] = {"vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS, KV_HEADS = 2, 1
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}


def written_plain(tmp_path: Path, change: Change = lambda keys, tensors: None, **rope: Any) -> tuple[Path, Any]:
    """Return a changed .gguf file of a tiny random Llama, and transformers' model. rope: entries of `rope_parameters`."""
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


def stating_plain(**values: Any) -> Change:
    return lambda keys, tensors: keys.update({f"rope.scaling.{name}": value for name, value in values.items()})


def lacking_plain(key: str) -> Change:
    return lambda keys, tensors: keys.pop(key)


def adding_plain(name: str, tensor: Tensor) -> Change:
    return lambda keys, tensors: tensors.update({name: tensor})


def divisors(factor: float) -> Tensor:
    """As llama.cpp's converter writes them of Llama 3."""
    waves = 2 * torch.pi * 500000.0 ** (torch.arange(0, 32, 2) / 32)
    smooth = ((8192 / waves - 1) / 3).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


SCALED: list[tuple[dict[str, Any], Change]] = [
    ({}, lambda keys, tensors: None),
    ({"rope_type": "linear", "factor": 4.0}, stating_plain(type="linear", factor=4.0)),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        stating_plain(type="yarn", factor=4.0, original_context_length=64),
    ),
    ({**LLAMA3, "factor": 32.0}, adding_plain("rope_freqs.weight", divisors(32.0))),
]


@pytest.mark.parametrize(("rope", "change"), SCALED, ids=["none", "linear", "yarn", "llama3"])
def test_positions_are_scaled_as_the_file_says(tmp_path: Path, rope: dict[str, Any], change: Change) -> None:
    path, reference = written_plain(tmp_path, change, **rope)
    model = load_model(str(path), "float32", skip_tokenizer_init=True).decoder
    text = torch.randint(3, len(TOKENS), (200,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(logits_of_text(model, text), reference(text[None]).logits[0], rtol=0, atol=1e-4)


REFUSED_PLAIN: list[tuple[Change, str]] = [
    (stating_plain(type="longrope", factor=4.0), r"llama\.rope\.scaling\.type needs none, linear, or yarn .*, got longrope"),
    (stating_plain(type="linear"), r"llama\.rope\.scaling\.factor needs a number, got no such key"),
    (stating_plain(type="yarn", factor=4.0, original_context_length=64, attn_factor=2.0), r"got llama\.rope\.scaling\.attn_"),
    (lacking_plain("context_length"), r"llama\.context_length needs a whole number of at least 1, got no such key"),
    (lacking_plain("attention.head_count"), r"llama\.attention\.head_count needs a whole number of at least 1, got no such key"),
    (
        lacking_plain("attention.layer_norm_rms_epsilon"),
        r"llama\.attention\.layer_norm_rms_epsilon needs a number, got no such key",
    ),
    (
        stating("feed_forward_length", 128),
        r"layers\.0\.mlp\.down_proj\.weight needs shape \[64, 128\] by its header, got \[64, 96\]",
    ),
    (adding_plain("rope_freqs.weight", torch.linspace(1, 9, 16)), r"got rope_freqs\.weight, without which it would be another"),
    (adding_plain("rope_factors_long.weight", torch.ones(16)), r"got rope_factors_long\.weight, without which"),
    (adding_plain("blk.1.attn_q.bias", torch.ones(64)), r"reads of llama, got blk\.1\.attn_q\.bias, .*use the model"),
    (lambda keys, tensors: keys.update(block_count=1), r"got blk\.1\..* and 8 more, without which it would be another model"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED_PLAIN)
def test_what_would_make_another_model_is_refused(cache: Path, tmp_path: Path, change: Change, words: str) -> None:
    path, _ = written_plain(tmp_path, change)
    with pytest.raises(ModelError, match=words):
        gguf.convert(path)
    assert not list(cache.iterdir())


def test_a_part_of_a_split_file_is_refused_with_what_joins_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = written_plain(tmp_path)
    general = gguf.Header.general
    monkeypatch.setattr(
        gguf.Header, "general", lambda header, key, default=None: 3 if key == "split.count" else general(header, key, default)
    )
    with pytest.raises(ModelError, match=r"split\.count needs one file \(llama-gguf-split --merge makes it\), got one of 3"):
        gguf.convert(path)
