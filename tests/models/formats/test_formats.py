"""Tests that every quantization format is read correctly: weight by weight, and by logits compared with the plain model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config, Qwen3MoeConfig

from dense_attention import logits_of_text
from engine_logits import save_random
from headway import LLM
from headway.core.contract.errors import ConfigError, ModelError
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.contract.weights import QuantizedWeight
from headway.kernels.linear.axes import Axis
from headway.models.checkpoints.formats.config import read_quantization
from headway.models.checkpoints.formats.rounding import float8, int4, int8
from headway.models.checkpoints.weights import Weights
from headway.models.loader import LoadOptions, load_model
from quantized_models import FORMATS, QWEN3, Format, edit, gpt_oss, pack_quantized, save_both, save_mxfp4, write_config
from thread_ranks import on_ranks

CPU = torch.device("cpu")


def open_weights(folder: Path, keep: bool = False, dtype: torch.dtype = torch.float32) -> Weights:
    quantization = read_quantization(folder, json.loads((folder / "config.json").read_text()))
    return Weights(folder, dtype, CPU, quantization=quantization, supports=lambda weight: keep)


def logits_of(folder: Path, ranks: Ranks = ONE_RANK, **options: Any) -> Tensor:
    model: Any = load_model(str(folder), "float32", skip_tokenizer_init=True, ranks=ranks, **options).decoder
    return logits_of_text(model, torch.randint(0, model.vocab_size, (9,), generator=torch.Generator().manual_seed(1)), ranks)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_and_logits_are_those_of_the_plain_checkpoint(tmp_path: Path, name: str) -> None:
    quantized, dense = save_both(tmp_path, FORMATS[name])
    weights = open_weights(quantized)
    for tensor, expected in load_file(dense / "model.safetensors").items():
        torch.testing.assert_close(weights.take(tensor, expected.shape), expected, rtol=1e-6, atol=0)
    weights.finish()
    torch.testing.assert_close(logits_of(quantized), logits_of(dense), rtol=0, atol=1e-4)


MERGED = {
    "fp8": "fp8",
    "fp8 blocks": "fp8",
    "compressed int8": "int8",
    "compressed int4, ordered": "int4",
    "awq": "int4",
    "gptq, ordered": "int4",
    "gptq, rows": "int4",
}


@pytest.mark.parametrize("name", MERGED)
def test_products_get_the_forms_of_what_is_to_be_kept(tmp_path: Path, name: str) -> None:
    quantized, dense = save_both(tmp_path, FORMATS[name])
    stored = load_file(dense / "model.safetensors")
    qkv = {f"model.layers.0.self_attn.{which}_proj.weight": rows for which, rows in (("q", 128), ("k", 64), ("v", 64))}
    weight = open_weights(quantized, keep=True).take_product(qkv, 128)
    assert isinstance(weight, QuantizedWeight)
    assert (weight.kind, weight.shape) == (MERGED[name], (256, 128))
    expected = torch.cat([stored[part] for part in qkv])
    torch.testing.assert_close(weight.dequantized(torch.float32), expected, rtol=1e-6, atol=0)


def test_parts_of_different_forms_or_plain_ones_are_expanded(tmp_path: Path) -> None:
    quantized, dense = save_both(tmp_path, FORMATS["gptq, ordered"], plain=lambda name: name.endswith("gate_proj"))
    stored = load_file(dense / "model.safetensors")
    weights = open_weights(quantized, keep=True)
    names = {f"model.layers.0.mlp.{which}_proj.weight": 256 for which in ("gate", "up")}
    weight = weights.take_product(names, 128)
    assert isinstance(weight, Tensor)
    torch.testing.assert_close(weight, torch.cat([stored[name] for name in names]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_expanded_is_told_with_its_size(tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: torch.dtype) -> None:
    quantized, _ = save_both(tmp_path, FORMATS["fp8 blocks"])
    with caplog.at_level(logging.INFO, "headway"):
        load_model(str(quantized), str(dtype).removeprefix("torch."), skip_tokenizer_init=True)
    (line,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("weights:")]
    assert line == f"weights: fp8 (blocks of 64 x 64), dequantized to {str(dtype)[6:]}: 0.6 MB instead of 0.3 MB"


@pytest.mark.parametrize("name", FORMATS)
def test_any_part_of_a_weight_is_cut_out(tmp_path: Path, name: str) -> None:
    """Also one that begins and ends within groups, blocks and words."""
    quantized, dense = save_both(tmp_path, FORMATS[name])
    module = "model.layers.0.mlp.down_proj.weight"
    expected = load_file(dense / "model.safetensors")[module]
    weights = open_weights(quantized)
    for rows in (range(128), range(13, 77)):
        for columns in (range(64, 128), range(96, 160), range(37, 219)):
            found = weights.take(module, (Axis(128, (rows,)), Axis(256, (columns,))))
            held = expected[rows.start : rows.stop, columns.start : columns.stop]
            torch.testing.assert_close(found, held, rtol=1e-6, atol=0)


LIKELY = ["fp8 blocks", "compressed fp8", "compressed int4, zeros", "gptq, rows"]


@pytest.mark.parametrize("name", [*LIKELY, "gptq, ordered", "awq", "compressed nvfp4", "compressed int8"])
def test_ranks_read_their_parts(tmp_path: Path, name: str) -> None:
    quantized, dense = save_both(tmp_path, FORMATS[name])
    expected = logits_of(dense)
    for found in on_ranks(2, lambda ranks: logits_of(quantized, ranks)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_rows_are_cut_within_a_block_and_columns_by_expanding_it(tmp_path: Path) -> None:
    quantized, dense = save_both(tmp_path, FORMATS["fp8 blocks"])
    name = "model.layers.0.mlp.gate_proj.weight"
    expected = load_file(dense / "model.safetensors")[name]
    rows = Axis(256, (range(40, 72), range(200, 230)))
    weights = open_weights(quantized, keep=True)
    weight = weights.take_product({name: rows}, 128)
    assert isinstance(weight, QuantizedWeight)
    held = torch.cat([expected[40:72], expected[200:230]])
    torch.testing.assert_close(weight.dequantized(torch.float32), held, rtol=1e-6, atol=0)
    cut = weights.take_product({name: 256}, Axis(128, (range(8, 20), range(40, 100))))
    torch.testing.assert_close(cut, torch.cat([expected[:, 8:20], expected[:, 40:100]], dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "inner", "size"), [("fp8 blocks", 128, 1), ("fp8 blocks", 128, 4), ("compressed fp8 rows", 130, 4)]
)
def test_experts_are_expanded_one_by_one(tmp_path: Path, name: str, inner: int, size: int) -> None:
    """Cut by columns, within a block too; where these do not divide, by expert."""
    sizes = {key: value for key, value in QWEN3.to_dict().items() if key not in ("architectures", "model_type")}
    config = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=inner, decoder_sparse_step=1)
    quantized, dense = save_both(tmp_path, FORMATS[name], config, plain=lambda module: module.endswith("mlp.gate"))
    expected = logits_of(dense)
    for found in on_ranks(size, lambda ranks: logits_of(quantized, ranks)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


GPT_OSS = gpt_oss(64)


@pytest.mark.parametrize("size", [1, 4])
def test_experts_of_gpt_oss_are_expanded(tmp_path: Path, size: int) -> None:
    quantized, dense = save_mxfp4(tmp_path, GPT_OSS)
    expected = logits_of(dense)
    for found in on_ranks(size, lambda ranks: logits_of(quantized, ranks)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "way"), [("fp8 blocks", FineGrainedFP8Config), ("fp8 of transformers", FineGrainedFP8Config), ("mxfp4", Mxfp4Config)]
)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str, way: Any) -> None:
    quantized = (save_mxfp4(tmp_path, GPT_OSS) if name == "mxfp4" else save_both(tmp_path, FORMATS[name]))[0]
    model: Any = AutoModelForCausalLM.from_pretrained(quantized, quantization_config=way(dequantize=True), dtype=torch.float32)
    ids = torch.randint(0, model.config.vocab_size, (9,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    torch.testing.assert_close(logits_of(quantized), expected, rtol=1e-4, atol=1e-4)


def test_a_head_of_its_own_may_be_quantised_and_a_tied_one_is_the_embedding(tmp_path: Path) -> None:
    config = type(QWEN3)(**{**QWEN3.to_dict(), "tie_word_embeddings": False, "vocab_size": 64})
    quantized, dense = save_both(tmp_path, FORMATS["gptq"], config)
    assert "lm_head.qweight" in load_file(quantized / "model.safetensors")
    write_config(quantized, tie_word_embeddings=True)  # as some checkpoints say, that bring a head all the same
    torch.testing.assert_close(logits_of(quantized), logits_of(dense), rtol=0, atol=1e-4)


def test_modules_that_are_left_out_are_plain(tmp_path: Path) -> None:
    form = FORMATS["awq"]
    config = {**form.config, "modules_to_not_convert": ["self_attn", "model.layers.1"]}
    quantized, dense = save_both(
        tmp_path, Format(config, form.draw), plain=lambda name: "self_attn" in name or "layers.1" in name
    )
    torch.testing.assert_close(logits_of(quantized), logits_of(dense), rtol=0, atol=1e-4)


def test_biases_of_zeros_that_gptq_adds_are_passed_over_and_others_are_not(tmp_path: Path) -> None:
    quantized, dense = save_both(tmp_path, FORMATS["gptq"])
    name = "model.layers.0.mlp.up_proj.bias"
    edit(quantized, lambda tensors: tensors.update({name: torch.zeros(256).half()}))
    torch.testing.assert_close(logits_of(quantized), logits_of(dense), rtol=0, atol=1e-4)
    edit(quantized, lambda tensors: tensors.update({name: torch.ones(256).half()}))
    with pytest.raises(ModelError, match=f"1 tensors that this architecture does not use, first {name}"):
        logits_of(quantized)


def test_groups_of_modules_may_have_formats_of_their_own(tmp_path: Path) -> None:
    """Both formats have the same tensors, so only the configuration distinguishes them."""
    four, eight = FORMATS["compressed int4"], {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}
    turn = {256: pack_quantized(bits=8), 128: four.draw, 64: four.draw}
    config = json.loads(json.dumps(four.config))
    config["config_groups"]["group_0"]["targets"] = ["Linear"]
    config["config_groups"]["group_1"] = {"targets": ["re:.*(gate|up)_proj"], "weights": eight}
    quantized, dense = save_both(tmp_path, Format(config, lambda rows, columns: turn[rows](rows, columns)))
    torch.testing.assert_close(logits_of(quantized), logits_of(dense), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["fp8 blocks", "awq"])
def test_models_that_embed_texts_are_read_as_well(tmp_path: Path, name: str) -> None:
    vectors = []
    for folder in save_both(tmp_path, FORMATS[name]):
        options: Any = {"runner": "pooling", "autotune_budget": 0, "num_threads": 1, "skip_tokenizer_init": True}
        (output,) = LLM(str(folder), **options).embed([{"prompt_token_ids": [5, 3, 8]}], use_tqdm=False)
        vectors.append(torch.tensor(output.outputs.embedding))
    torch.testing.assert_close(vectors[0], vectors[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "name", "content"),
    [
        ("quantize_config.json", "gptq", {"bits": 4, "group_size": 32, "desc_act": False}),
        ("quant_config.json", "awq", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
        ("hf_quant_config.json", "modelopt fp8", {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}),
    ],
)
def test_files_of_other_tools_say_it_as_well(tmp_path: Path, file: str, name: str, content: dict[str, Any]) -> None:
    quantized, dense = save_both(tmp_path, FORMATS[name])
    write_config(quantized, quantization_config=None)
    (quantized / file).write_text(json.dumps(content))
    torch.testing.assert_close(logits_of(quantized), logits_of(dense), rtol=0, atol=1e-4)


def test_what_transformers_would_compute_is_refused_by_its_format(tmp_path: Path) -> None:
    quantized, _ = save_both(tmp_path, FORMATS["awq"])
    with pytest.raises(ModelError, match=r"needs plain weights .* got AWQ \(4 bits, groups of 32\) \(quantization_config in"):
        load_model(str(quantized), skip_tokenizer_init=True, model_impl="transformers")
    save_random(QWEN3, tmp_path / "plain")
    load_model(str(tmp_path / "plain"), skip_tokenizer_init=True, model_impl="transformers")


@pytest.mark.parametrize("shape", [(96, 256), (130, 200)])
def test_rounding_is_to_the_nearest_code_of_each_block(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    for form, steps in ((float8(weight), 16), (float8(weight, (64, 64)), 16), (int8(weight), 254)):
        error = (form.dequantized(torch.float64) - weight.double()).abs()
        if form.kind == "fp8" and form.block == (64, 64):
            assert float(error.norm() / weight.norm()) < 0.04
            continue
        assert bool((error <= weight.double().abs().amax(1, keepdim=True) / steps).all())
    groups = int4(weight[:, :192].contiguous(), 64)
    error = (groups.dequantized(torch.float64) - weight[:, :192].double()).abs().view(shape[0], 3, 64)
    assert bool((error <= weight[:, :192].double().abs().view(shape[0], 3, 64).amax(2, keepdim=True) / 13.9).all())
    assert not bool(float8(torch.zeros(4, 16)).dequantized(torch.float32).any())


def test_a_model_rounded_on_loading_is_the_model_of_the_rounded_weights(tmp_path: Path) -> None:
    _, dense = save_both(tmp_path, FORMATS["fp8"])
    with torch.inference_mode():
        rounded: Any = load_model(
            str(dense), "float32", skip_tokenizer_init=True, options=LoadOptions(quantization="fp8")
        ).decoder
    tensors = load_file(dense / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "embed" not in name and "lm_head" not in name:
            tensors[name] = float8(tensor).dequantized(torch.float32)
    save_file(tensors, dense / "model.safetensors")
    with torch.inference_mode():
        expected: Any = load_model(str(dense), "float32", skip_tokenizer_init=True).decoder
    for layer, plain in zip(rounded.layers, expected.layers, strict=True):
        for one, other in zip(layer.linears, plain.linears, strict=True):
            x = torch.randn(3, one.in_features)
            torch.testing.assert_close(one(x), other(x), rtol=1e-5, atol=1e-5)


def test_ranks_round_their_parts_as_well_as_one_rounds_all(tmp_path: Path) -> None:
    """A sharded row has a scale on each rank, so the bits differ from one rank's."""
    _, dense = save_both(tmp_path, FORMATS["fp8"])

    def logits(ranks: Ranks, quantization: str | None = "fp8") -> Tensor:
        return logits_of(dense, ranks, options=LoadOptions(quantization=quantization))

    (plain,) = on_ranks(1, lambda ranks: logits(ranks, None))
    (one,) = on_ranks(1, logits)
    for found in on_ranks(2, logits):
        assert 0 < float((found - plain).norm()) < 1.5 * float((one - plain).norm())


def test_random_weights_have_the_format_that_the_configuration_says(tmp_path: Path) -> None:
    quantized, _ = save_both(tmp_path, FORMATS["compressed int4"])
    (quantized / "model.safetensors").unlink()
    with torch.inference_mode():
        model: Any = load_model(str(quantized), "bfloat16", load_format="dummy", skip_tokenizer_init=True).decoder
    kept = [linear for layer in model.layers for linear in layer.linears if linear.expanded_bytes == 0]
    assert kept


def test_what_cannot_be_is_said_in_a_line(tmp_path: Path) -> None:
    quantized, dense = save_both(tmp_path, FORMATS["fp8"])
    with pytest.raises(ConfigError, match="quantization: needs none or fp8, got 'int3'"):
        load_model(str(dense), options=LoadOptions(quantization="int3"))
    with pytest.raises(ConfigError, match=r"checkpoint's own method, got awq for weights in fp8 \(a scale for each"):
        load_model(str(quantized), options=LoadOptions(quantization="awq"))
    with pytest.raises(ConfigError, match=r"checkpoint's own method, got gptq_marlin for plain weights"):
        load_model(str(dense), options=LoadOptions(quantization="gptq_marlin"))
    assert (
        load_model(str(quantized), options=LoadOptions(quantization="fp8")).eos_token_ids
        == load_model(str(quantized)).eos_token_ids
    )
    with pytest.raises(ConfigError, match="quantization: needs none, or a model that Headway's decoder computes"):
        load_model(str(dense), options=LoadOptions(quantization="fp8"), model_impl="transformers")
