"""Layers of quantized experts for CUDA C++ kernels without a GPU: shapes, formats, and float64 references."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from expert_layers import CONFIGS, FORMS, Layer
from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.weights import merged
from headway.kernels.experts.plain import Routed, Routing
from headway.kernels.experts.weights import RoutedWeights
from headway.kernels.linear.forms import WeightBytes
from quantized_weights import float8

CLAMPED = dataclasses.replace(CONFIGS["gpt_oss"], num_experts=6, top_k=3, intermediate_size=96)
PLAIN = ExpertsConfig(9, 3, 96)
BLOCKS = {"fp8 blocks": lambda weight, rows: merged([float8(part, (128, 128)) for part in weight.split(rows)])}
"""Blocks as published ones are, which hold whole slices."""
SHAPES = {
    "fp8 blocks": (dataclasses.replace(PLAIN, intermediate_size=128), 256),
    "fp8 rows": (PLAIN, 336),
    "mxfp4": (CLAMPED, 160),
    "int4": (PLAIN, 160),
    "int4, zeros": (PLAIN, 160),
    "int8": (PLAIN, 336),
}
"""Experts and hidden size for each format: rows end within a slice, if the format allows it."""
QWEN3 = ExpertsConfig(128, 8, 768)
GPT_OSS = ExpertsConfig(32, 4, 2880, biases=True, swiglu_alpha=1.702, swiglu_limit=7.0)
PUBLISHED = {"qwen3": (QWEN3, 2048), "gpt_oss": (GPT_OSS, 2880), "rank": (dataclasses.replace(QWEN3, intermediate_size=96), 2048)}
"""Experts and hidden size of published models, and of one rank of eight."""
Add = Callable[[Tensor, Routed, RoutedWeights, ExpertsConfig], None]
"""(residual, routed, weights, config): adds what the experts give, in place."""


def described(form: str, columns: int) -> tuple[WeightBytes, torch.dtype]:
    """Return the kernel's description of a format, and the dtype of its scales."""
    if form == "fp8 blocks":
        return WeightBytes("fp8", columns, 0, -(-columns // 128), 128, 128, False, 64), torch.float32
    if form == "fp8 rows":
        return WeightBytes("fp8", columns, 0, 1, columns, 1, False, 64), torch.float32
    if form == "mxfp4":
        return WeightBytes("mxfp4", columns // 2, 16, columns // 32, 16, 1, False, 16), torch.uint8
    return WeightBytes("int4", columns // 2, 16, columns // 32, 16, 1, True, 16), torch.float16


def check(
    monkeypatch: pytest.MonkeyPatch,
    add: Add,
    form: str,
    config: ExpertsConfig,
    hidden: int,
    tokens: int,
    alike: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Compute one layer with new random weights and rows. alike: True routes every token to the same experts."""
    monkeypatch.setitem(FORMS, "fp8 blocks", BLOCKS["fp8 blocks"])
    seed = torch.seed() % 2**32
    layer = Layer(config, dtype, seed, hidden)
    weights, x = layer.quantized(form), layer.draw(tokens, hidden)
    routing = layer.routing(x)
    experts = torch.arange(config.num_slots).expand(tokens, -1) if alike else routing.experts
    routed = routed_of(layer, x, experts, routing.weights)
    found = x.to(dtype)
    add(found, routed, weights, config)
    expected = layer.reference(x, Routing(routed.experts, routed.weights.double()))
    bound = 4e-3 if dtype == torch.bfloat16 else 1e-3
    assert (found.double() - expected).norm() < bound * expected.norm(), f"seed {seed}"


def routed_of(layer: Layer, x: Tensor, experts: Tensor, weights: Tensor) -> Routed:
    """Return the router's output for x, float64 [tokens, hidden]."""
    return Routed(layer.normed(x).to(layer.dtype), experts.int().contiguous(), weights.float().contiguous(), None, block_t=0)
