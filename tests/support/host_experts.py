"""Layers of quantised experts for kernels in CUDA C++ on the host, held to float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from expert_layers import CONFIGS, FORMS, Layer
from headway.models.experts.config import ExpertsConfig
from headway.models.experts.router import Routed
from headway.models.experts.routing import Routing
from headway.models.experts.weights import ExpertWeights
from headway.models.quantization.forms import merged
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
"""For each form, experts and hidden size: rows that end within a slice, where the form allows it."""
Add = Callable[[Tensor, Routed, ExpertWeights, ExpertsConfig], None]
"""(residual, routed, weights, config): adds what the experts give, in place."""


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
    """Compute one layer of fresh random weights and rows. alike: all tokens go to the same experts."""
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
    """What a router hands on for x, float64 [tokens, hidden]."""
    return Routed(layer.normed(x).to(layer.dtype), experts.int().contiguous(), weights.float().contiguous(), None, block_t=0)
