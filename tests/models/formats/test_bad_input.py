"""What is wrong with a quantised checkpoint is said in one line: the key of its configuration, or the tensor and its file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig

from headway.core.contract.errors import ModelError
from headway.models.loader import load_model
from quantized_models import FORMATS, QWEN3, compressed, edit, save_both, save_mxfp4, write_config

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
def test_a_tensor_that_cannot_be_is_named_with_its_file(
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
