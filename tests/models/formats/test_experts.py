"""Tests that experts stay in the checkpoint's quantization format if requested, and match the dequantized ones otherwise."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, PretrainedConfig, Qwen2MoeConfig

from expert_layers import forms_of
from headway.core.contract.errors import ModelError
from headway.core.contract.spec import DTYPES
from headway.core.contract.weights import QuantizedWeight, WeightFormat
from headway.kernels.experts.weights import RoutedWeights, each_expert, reads_experts
from headway.kernels.linear.axes import Division
from headway.models.checkpoints.expert_weights import take_experts
from headway.models.checkpoints.formats.config import read_quantization
from headway.models.checkpoints.formats.rounding import ON_LOADING, float4, float8, int4, int8
from headway.models.checkpoints.weights import DummyWeights, QuantizeOnLoading, Weights
from headway.models.families.families import read_decoder_config
from headway.models.loader import load_model, read_config
from headway.models.shard import ModelShard
from quantized_models import FORMATS, GPT_OSS, QWEN3, QWEN3_MOE, SIZES, compressed, edit, save_both, save_mxfp4, write_config

CPU = torch.device("cpu")

NORMS = "model.layers.1.input", "model.layers.1.post"


def is_router(name: str) -> bool:
    return name.endswith(("mlp.gate", "shared_expert_gate"))


def qwen2_moe(shared: int) -> PretrainedConfig:
    return Qwen2MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, decoder_sparse_step=1,
                          shared_expert_intermediate_size=shared)  # fmt: skip


def take(folder: Path, rank: int = 0, size: int = 1) -> RoutedWeights:
    """The experts of the second layer, as a rank reads them."""
    config = read_decoder_config(read_config(folder))
    quantization = read_quantization(folder, json.loads((folder / "config.json").read_text()))
    weights = Weights(folder, torch.float32, CPU, config.names.aliases, quantization, supports_experts=lambda weight: True)
    cut = ModelShard(config, rank, size, by_expert=False)
    found = take_experts(cut.experts, config.names.experts, config.hidden_size, weights, "model.layers.1.")
    weights.finish(modules=("model.embed", "model.norm", "lm_head", "model.layers.0", "model.layers.1.self", *NORMS))
    return found


def check(found: RoutedWeights, plain: RoutedWeights) -> None:
    """Check that a format gives the numbers of the plain layer, also expert by expert."""
    for form, expected in ((found.gate_up, plain.gate_up), (found.down, plain.down)):
        assert isinstance(expected, Tensor)
        for one, other in zip(each_expert(form, len(expected)), expected, strict=True):
            whole = one if isinstance(one, Tensor) else one.dequantized(torch.float32)
            torch.testing.assert_close(whole, other, rtol=1e-6, atol=0)
    for bias in ("gate_up_bias", "down_bias"):
        torch.testing.assert_close(getattr(found, bias), getattr(plain, bias))


KEPT = {
    "fp8 blocks": "fp8 64x64",
    "fp8": "fp8 rows",
    "compressed fp8 rows": "fp8 rows",
    "compressed int8": "int8",
    "compressed int4": "int4 of 32",
    "compressed int4, zeros": "int4 of 32 with zeros",
    "awq": "int4 of 32 with zeros",
    "gptq": "int4 of 32 with zeros",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", KEPT)
def test_experts_keep_their_form_and_are_cut_in_it(tmp_path: Path, name: str, size: int) -> None:
    quantized, dense = save_both(tmp_path, FORMATS[name], QWEN3_MOE, plain=is_router)
    for rank in range(size):
        found = take(quantized, rank, size)
        assert forms_of(found) == (KEPT[name],) * 2
        check(found, take(dense, rank, size))


def test_what_ends_within_a_block_is_expanded_and_rows_are_not(tmp_path: Path) -> None:
    """A quarter of the down projection's 128 columns is half a block; gate and up have a scale per row there."""
    quantized, dense = save_both(tmp_path, FORMATS["fp8 blocks"], QWEN3_MOE, plain=is_router)
    for rank in range(4):
        found = take(quantized, rank, 4)
        assert forms_of(found) == ("fp8 1x64", "")
        check(found, take(dense, rank, 4))


@pytest.mark.parametrize(
    ("inner", "unit", "whole"),
    [(768, 128, {1: True, 2: True, 3: True, 4: False, 6: True}), (2880, 32, {2: True, 4: False, 5: True})],
)
def test_which_numbers_of_ranks_divide_the_blocks_of_published_experts(inner: int, unit: int, whole: dict[int, bool]) -> None:
    """Blocks of 128 (Qwen3-30B-A3B-FP8) and groups of 32 (gpt-oss): a rank holds whole ones, or its shard is dequantized."""
    for size, expected in whole.items():
        axes = [Division(rank, size).even(inner) for rank in range(size)]
        assert all(axis.rounded(unit) == axis for axis in axes) == expected


@pytest.mark.parametrize("size", [1, 2, 4])
def test_experts_of_gpt_oss_keep_their_form(tmp_path: Path, size: int) -> None:
    quantized, dense = save_mxfp4(tmp_path, GPT_OSS)
    for rank in range(size):
        found = take(quantized, rank, size)
        assert forms_of(found) == ("mxfp4", "mxfp4")
        check(found, take(dense, rank, size))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("shared", "forms"), [(256, ("fp8 64x64",) * 2), (128, ("fp8 64x64",) * 2), (192, ("", ""))])
def test_shared_experts_of_the_same_form_stand_behind_the_others(tmp_path: Path, shared: int, forms: tuple[str, str]) -> None:
    quantized, dense = save_both(tmp_path, FORMATS["fp8 blocks"], qwen2_moe(shared), plain=is_router)
    found = take(quantized)
    assert forms_of(found) == forms
    check(found, take(dense))


def test_plain_shared_experts_expand_the_others_which_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantized, dense = save_both(
        tmp_path, FORMATS["compressed int4"], qwen2_moe(256), plain=lambda name: is_router(name) or "shared_expert" in name
    )
    with caplog.at_level(logging.INFO, "headway"):
        found = take(quantized)
    assert forms_of(found) == ("", "")
    check(found, take(dense))
    (line,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("weights:")]
    assert "dequantized to float32: 0.8 MB instead of 0.1 MB" in line
    assert "kept" not in line


def test_a_cpu_and_what_kernels_do_not_read_expand_them() -> None:
    gpu, bf16 = torch.device("cuda"), torch.bfloat16
    weight = torch.randn(64, 256)
    assert reads_experts(float8(weight, (64, 64)), bf16, gpu)
    assert reads_experts(float4(weight), bf16, gpu)
    assert not reads_experts(float4(weight), torch.float16, gpu)
    assert not reads_experts(replace(int4(weight, 64), order=torch.arange(256).int()), bf16, gpu)
    assert not reads_experts(float8(weight, (48, 48)), bf16, gpu)
    for dtype in DTYPES.values():
        assert not reads_experts(float8(weight), dtype, CPU)
    assert not reads_experts(float8(weight), torch.float32, gpu)


def test_experts_are_rounded_on_loading_and_drawn_in_a_form() -> None:
    def source(quantize: Callable[[Tensor], QuantizedWeight | Tensor], keeps: bool, alone: bool = False) -> QuantizeOnLoading:
        drawn = DummyWeights(torch.bfloat16, CPU)
        return QuantizeOnLoading(drawn, quantize, lambda weight: True, lambda weight: keeps, experts_only=alone)

    rows = {"gate": 64, "up": 64}
    plain = DummyWeights(torch.bfloat16, CPU).take_experts(rows, 96)
    kept = source(ON_LOADING["fp8"], keeps=True).take_experts(rows, 96)
    assert not isinstance(kept, Tensor)
    assert str(WeightFormat.of(kept)) == "fp8 rows"
    torch.testing.assert_close(kept.dequantized(torch.bfloat16), plain, rtol=0.08, atol=1e-3)
    assert torch.equal(source(ON_LOADING["fp8"], keeps=False).take_experts(rows, 96), kept.dequantized(torch.bfloat16))

    stacked = source(float4, keeps=True, alone=True)
    found = stacked.take_stacked("gate_up", (2, 64, 48), transposed=True)
    assert not isinstance(found, Tensor)
    assert (found.kind, found.shape) == ("mxfp4", (96, 64))
    expected = source(float4, keeps=False, alone=True).take_stacked("gate_up", (2, 64, 48), transposed=True)
    assert torch.equal(expected, found.dequantized_stack(2, torch.bfloat16).mT)
    assert isinstance(stacked.take_product(rows, 96), Tensor), "MXFP4 is for experts alone"


def test_float4_is_rounded_to_the_nearest_code() -> None:
    weight = torch.randn(40, 96) * torch.logspace(-6, 6, 40)[:, None]
    error = (float4(weight).dequantized(torch.float64) - weight.double()).abs().view(40, 3, 32)
    largest = weight.double().abs().view(40, 3, 32).amax(2, keepdim=True)
    assert bool((error <= largest / 4).all()), "what is above 6 of 8 is rounded down to it"
    small = weight.double().abs().view(40, 3, 32) <= largest / 4
    assert bool((error[small] <= (largest / 8).expand_as(error)[small]).all())
    assert not bool(float4(torch.zeros(4, 32)).dequantized(torch.float32).any())


@pytest.mark.parametrize(
    "form",
    [
        float8(torch.randn(96, 128), (32, 64)),
        float8(torch.randn(96, 128)),
        int8(torch.randn(96, 128)),
        int4(torch.randn(96, 128), 32),
        replace(int4(torch.randn(96, 128), 64), zeros=torch.arange(192).view(96, 2).to(torch.uint8) % 16),
        float4(torch.randn(96, 128)),
    ],
    ids=lambda weight: str(WeightFormat.of(weight)),
)
def test_any_rows_and_whole_groups_of_columns_are_cut_out(form: QuantizedWeight) -> None:
    whole = form.dequantized(torch.float32)
    for rows in (range(32, 96), range(7, 50), range(96)):
        assert torch.equal(form.rows(rows).dequantized(torch.float32), whole[rows.start : rows.stop])
    assert torch.equal(form.columns(range(64, 128)).dequantized(torch.float32), whole[:, 64:])
    within = form.columns(range(48, 112))
    assert within is None or torch.equal(within.dequantized(torch.float32), whole[:, 48:112])


Q = "model.layers.0.self_attn.q_proj"


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(folder), "float32", skip_tokenizer_init=True)
    assert "\n" not in str(caught.value)
    return str(caught.value)


FLOAT = {"num_bits": 8, "type": "float"}
AWQ, GPTQ = dict(FORMATS["awq"].config), dict(FORMATS["gptq"].config)
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "torchao"}, "needs weights in one of fp8, compressed-tensors, .* got weights quantised with torchao"),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        r"got weights quantised with bitsandbytes, 4 bits \(quantization_co",
    ),
    ({"load_in_8bit": True}, "got weights quantised with bitsandbytes, 8 bits"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, r'quantization_config in config.json: fmt needs "e4m3", got \'e5m2\''),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, 'expert_dtype needs "fp8"'),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size needs two numbers above 0, got \[128\]"),
    ({**AWQ, "bits": 8}, "bits needs 4, got 8"),
    ({**AWQ, "version": "gemv"}, 'version needs "gemm"'),
    ({**AWQ, "group_size": 48}, "group_size needs -1 or 16 or 32 or 64 .*, got 48"),
    ({**GPTQ, "bits": 3}, "bits needs 4 or 8, got 3"),
    ({**GPTQ, "checkpoint_format": "marlin"}, 'checkpoint_format needs "gptq" or "gptq_v2"'),
    ({**GPTQ, "dynamic": {"-:.*gate": {}, "+:.*up": {"bits": 8}}}, r"dynamic needs modules that are left out alone"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo needs FP8 or NVFP4, got 'W4A8_AWQ'"),
    ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}}, "format needs float-quantized or .*, got None"),
    (compressed("marlin-24", **FLOAT), "format needs .*, got 'marlin-24'"),
    (compressed("float-quantized", **FLOAT, strategy="group"), 'weights: strategy needs "channel" or "tensor" or "block", got'),
    (compressed("int-quantized", **FLOAT, strategy="channel"), "group_0, weights: type needs \"int\", got 'float'"),
    (compressed("pack-quantized", num_bits=3, type="int"), "num_bits needs 4 or 8, got 3"),
    (
        {**compressed("float-quantized", **FLOAT, strategy="tensor"), "transform_config": {"a": 1}},
        "transform_config needs nothing",
    ),
    (
        {**compressed("float-quantized", **FLOAT, strategy="tensor"), "kv_cache_scheme": {"num_bits": 4}},
        "needs an fp8 cache with",
    ),
]


@pytest.mark.parametrize(("config", "words"), CONFIGS, ids=[words[:40] for _, words in CONFIGS])
def test_a_configuration_that_nothing_serves_is_refused_by_its_key(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    QWEN3.save_pretrained(tmp_path)
    write_config(tmp_path, quantization_config=config)
    assert re.search(words, refused(tmp_path))


def changed(suffix: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def edited(tensors: dict[str, Tensor]) -> None:
        found = change(tensors.pop(Q + suffix))
        if found is not None:
            tensors[Q + suffix] = found

    return edited


def first_is(value: float) -> Callable[[Tensor], Tensor]:
    def change(scales: Tensor) -> Tensor:
        scales.flatten()[0] = value
        return scales

    return change


def nothing(tensor: Tensor) -> None:
    return None


TENSORS: list[tuple[str, Callable[[dict[str, Tensor]], None], str]] = [
    *(
        (name, changed(suffix, nothing), rf"q_proj is quantised, and .* has no tensor '.*q_proj\{suffix}'")
        for name, suffix in (
            ("fp8 blocks", ".weight_scale_inv"),
            ("fp8 of transformers", ".weight_scale_inv"),
            ("fp8", ".weight_scale"),
            ("compressed fp8 rows", ".weight_scale"),
        )
    ),
    (
        "fp8 blocks",
        changed(".weight_scale_inv", first_is(0)),
        r"_inv \(model\.safetensors\) needs finite scales above 0, got 0\.0",
    ),
    ("fp8 blocks", changed(".weight_scale_inv", first_is(-1)), r"needs finite scales above 0, got -1\.0"),
    ("fp8 blocks", changed(".weight_scale_inv", lambda it: it[:1]), r"needs shape \[2, 2\], got \[1, 2\]"),
    ("fp8", changed(".weight_scale", first_is(float("nan"))), r"q_proj\.weight_scale \(model\.safetensors\) .* got nan"),
    ("fp8", changed(".weight_scale", lambda it: torch.ones(3)), r"needs shape \[1\], got \[3\]"),
    ("compressed fp8 rows", changed(".weight_scale", lambda it: it[:7]), r"needs shape \[128, 1\], got \[7, 1\]"),
    ("compressed int8", changed(".weight_scale", first_is(float("inf"))), "needs finite scales above 0, got inf"),
    ("compressed int8", changed(".weight_scale", nothing), r"has no tensor '.*q_proj\.weight_scale'"),
    ("awq", changed(".qzeros", nothing), r"has no tensor '.*q_proj\.qzeros'"),
    ("awq", changed(".scales", first_is(0)), r"scales \(model\.safetensors\) needs finite scales other than 0"),
    ("awq", changed(".qweight", lambda it: it[:64]), r"needs shape \[128, 16\], got \[64, 16\]"),
    ("gptq", changed(".scales", lambda it: it.int()), r"needs float64 or .* elements, got int32"),
    ("gptq, ordered", changed(".g_idx", lambda it: it + 1), r"g_idx \(model\.safetensors\) needs groups from 0 to 3, got 1 to 4"),
    ("compressed int4, zeros", changed(".weight_zero_point", nothing), r"has no tensor '.*weight_zero_point'"),
    ("compressed nvfp4", changed(".weight_global_scale", nothing), r"has no tensor '.*weight_global_scale'"),
    ("compressed nvfp4", changed(".weight_scale", lambda it: (-it.float()).to(it.dtype)), "needs finite scales, none below 0"),
    ("modelopt nvfp4", changed(".weight_scale_2", first_is(0)), r"weight_scale_2 \(model\.safetensors\) .* got 0\.0"),
]


@pytest.mark.parametrize(("name", "change", "words"), TENSORS)
def test_an_impossible_tensor_is_named(
    tmp_path: Path, name: str, change: Callable[[dict[str, Tensor]], None], words: str
) -> None:
    quantized, _ = save_both(tmp_path, FORMATS[name])
    edit(quantized, change)
    text = refused(quantized)
    assert re.search(words, text), text
    assert Q in text


def test_groups_that_do_not_divide_the_input_are_refused(tmp_path: Path) -> None:
    quantized, _ = save_both(tmp_path, FORMATS["gptq"])
    write_config(quantized, quantization_config={**GPTQ, "group_size": 256})
    assert "q_proj needs in_features of a multiple of group_size=256, got 128" in refused(quantized)


def test_exponents_that_are_no_number_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = GptOssConfig(vocab_size=61, num_hidden_layers=1, num_local_experts=2, num_experts_per_tok=1, **sizes)
    quantized, _ = save_mxfp4(tmp_path, config)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    edit(quantized, lambda tensors: tensors[name].fill_(255))
    assert f"{name} (model.safetensors) needs exponents below 255" in refused(quantized)


def test_a_configuration_without_quantised_tensors_is_refused(tmp_path: Path) -> None:
    _, dense = save_both(tmp_path, FORMATS["fp8 blocks"])
    write_config(dense, quantization_config=FORMATS["fp8 blocks"].config)
    assert "needs weights in fp8 (blocks of 64 x 64) by quantization_config in config.json, got none: its tensors" in refused(
        dense
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "fp8 blocks",
            r"q_proj\.weight needs float32, bfloat16 or float16 elements, got float8_e4m3fn: it is quantised, and config",
        ),
        (
            "gptq",
            r"q_proj\.weight is not there, and .*q_proj\.qweight is: it is quantised, and config\.json has no quantization_con",
        ),
        ("compressed int4", r"q_proj\.weight_packed is: it is quantised, and config\.json has no"),
    ],
)
def test_quantised_tensors_without_a_configuration_are_refused(tmp_path: Path, name: str, words: str) -> None:
    quantized, _ = save_both(tmp_path, FORMATS[name])
    write_config(quantized, quantization_config=None)
    assert re.search(words, refused(quantized))


def test_tensors_of_another_format_than_the_configurations_are_refused(tmp_path: Path) -> None:
    quantized, _ = save_both(tmp_path, FORMATS["gptq"])
    write_config(quantized, quantization_config=FORMATS["fp8 blocks"].config)
    assert re.search(
        r"qweight is: it is quantised, and not in fp8 \(blocks of 64 x 64\), as quantization_config", refused(quantized)
    )


def test_scales_that_every_module_lacks_have_the_methods_own_name(tmp_path: Path) -> None:
    quantized, _ = save_both(tmp_path, FORMATS["fp8 blocks"])
    edit(quantized, lambda tensors: [tensors.pop(name) for name in [*tensors] if name.endswith("_scale_inv")])
    assert re.search(r"has no tensor '.*q_proj\.weight_scale_inv'", refused(quantized))
