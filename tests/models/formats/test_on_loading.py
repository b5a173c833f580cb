"""`quantization`: plain weights that are rounded on loading, and random ones in the format that a configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dense_attention import DenseAttention
from headway.core.contract.errors import ConfigError
from headway.core.contract.ranks import Ranks
from headway.core.sampling.ranked_vocabulary import join_logits
from headway.models.checkpoints.formats.rounding import float8, int4, int8
from headway.models.loader import LoadOptions, load_model
from quantized_models import FORMATS, save_both
from thread_ranks import on_ranks


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
    """A row that is cut has a scale on each rank, so that no bits are those of one rank."""
    _, dense = save_both(tmp_path, FORMATS["fp8"])

    def logits(ranks: Ranks, quantization: str | None = "fp8") -> Tensor:
        options: Any = {"skip_tokenizer_init": True, "options": LoadOptions(quantization=quantization), "ranks": ranks}
        model: Any = load_model(str(dense), "float32", **options).decoder
        attention = DenseAttention(model)
        attention.begin([(0, 9)])
        return join_logits(model.compute_logits(model(torch.arange(9), torch.arange(9), attention)), model.vocab_size, ranks)

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
