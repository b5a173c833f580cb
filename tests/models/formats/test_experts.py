"""Experts keep the form in which a checkpoint has them, where that is wanted, and stand for the plain ones whatever is kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig, Qwen2MoeConfig

from headway.core.contract.spec import DTYPES
from headway.kernels.experts.weights import ExpertWeights, each_expert, forms_of, reads_experts
from headway.kernels.linear.axes import Division
from headway.kernels.linear.forms import QuantizedWeight, columns_of, dequantized_stack, form_name, rows_of
from headway.models.checkpoints.expert_weights import take_experts
from headway.models.checkpoints.formats.config import read_quantization
from headway.models.checkpoints.formats.rounding import ON_LOADING, float4, float8, int4, int8
from headway.models.checkpoints.rounded_weights import QuantizeOnLoading
from headway.models.checkpoints.weights import DummyWeights, Weights
from headway.models.cut import ModelCut
from headway.models.families.families import read_decoder_config
from headway.models.loader import read_config
from quantized_models import FORMATS, GPT_OSS, QWEN3_MOE, SIZES, save_both, save_mxfp4

CPU = torch.device("cpu")

NORMS = "model.layers.1.input", "model.layers.1.post"


def is_router(name: str) -> bool:
    return name.endswith(("mlp.gate", "shared_expert_gate"))


def qwen2_moe(shared: int) -> PretrainedConfig:
    return Qwen2MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, decoder_sparse_step=1,
                          shared_expert_intermediate_size=shared)  # fmt: skip


def take(folder: Path, rank: int = 0, size: int = 1) -> ExpertWeights:
    """The experts of the second layer, as a rank reads them."""
    config = read_decoder_config(read_config(folder))
    quantization = read_quantization(folder, json.loads((folder / "config.json").read_text()))
    weights = Weights(folder, torch.float32, CPU, config.names.aliases, quantization, keeps_experts=lambda weight: True)
    cut = ModelCut(config, rank, size, by_expert=False)
    found = take_experts(cut.experts, config.names.experts, config.hidden_size, weights, "model.layers.1.")
    weights.finish(modules=("model.embed", "model.norm", "lm_head", "model.layers.0", "model.layers.1.self", *NORMS))
    return found


def check(found: ExpertWeights, plain: ExpertWeights) -> None:
    """A form stands for the numbers of the plain layer, also expert by expert."""
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
    """A quarter of 128 columns is half a block: the down product's; gate and up have a scale for each row there."""
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
    """Qwen3-30B-A3B-FP8's in blocks of 128, gpt-oss's in groups of 32: a rank holds whole ones, or what it holds is expanded."""
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
    assert "expanded to float32: 0.8 MB instead of 0.1 MB" in line
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
        return QuantizeOnLoading(drawn, quantize, lambda weight: True, lambda weight: keeps, experts_alone=alone)

    rows = {"gate": 64, "up": 64}
    plain = DummyWeights(torch.bfloat16, CPU).take_experts(rows, 96)
    kept = source(ON_LOADING["fp8"], keeps=True).take_experts(rows, 96)
    assert not isinstance(kept, Tensor)
    assert form_name(kept) == "fp8 rows"
    torch.testing.assert_close(kept.dequantized(torch.bfloat16), plain, rtol=0.08, atol=1e-3)
    assert torch.equal(source(ON_LOADING["fp8"], keeps=False).take_experts(rows, 96), kept.dequantized(torch.bfloat16))

    stacked = source(float4, keeps=True, alone=True)
    found = stacked.take_stacked("gate_up", (2, 64, 48), transposed=True)
    assert not isinstance(found, Tensor)
    assert (found.kind, found.shape) == ("mxfp4", (96, 64))
    expected = source(float4, keeps=False, alone=True).take_stacked("gate_up", (2, 64, 48), transposed=True)
    assert torch.equal(expected, dequantized_stack(found, 2, torch.bfloat16).mT)
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
    ids=form_name,
)
def test_any_rows_and_whole_groups_of_columns_are_cut_out(form: QuantizedWeight) -> None:
    whole = form.dequantized(torch.float32)
    for rows in (range(32, 96), range(7, 50), range(96)):
        assert torch.equal(rows_of(form, rows).dequantized(torch.float32), whole[rows.start : rows.stop])
    right = columns_of(form, range(64, 128))
    assert right is not None
    assert torch.equal(right.dequantized(torch.float32), whole[:, 64:])
    within = columns_of(form, range(48, 112))
    assert within is None or torch.equal(within.dequantized(torch.float32), whole[:, 48:112])
