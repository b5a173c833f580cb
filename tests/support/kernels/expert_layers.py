"""Random MoE layers, and functions to compare kernels with a plain float64 implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.weights import QuantizedWeight, WeightFormat, merged
from headway.core.oracle.weight_cases import on_device
from headway.kernels.experts.bound import BoundExperts, ExpertsOptions
from headway.kernels.experts.plain import Product, Routing, TorchExperts, route
from headway.kernels.experts.weights import RoutedWeights, spec_of
from headway.kernels.step.operations import Norm
from headway.models.checkpoints.formats.rounding import float4, float8, int4, int8

HIDDEN = 48
SMALL = ExpertsConfig(num_experts=8, top_k=2, intermediate_size=40, renormalize=False)
CONFIGS = {
    "mixtral": dataclasses.replace(SMALL, renormalize=True),
    "qwen2_moe": dataclasses.replace(SMALL, top_k=3, shared_intermediate_size=70, shared_gate=True),
    "qwen3_moe": dataclasses.replace(SMALL, num_experts=12, top_k=4, renormalize=True),
    "gpt_oss": dataclasses.replace(
        SMALL, renormalize=True, router_bias=True, biases=True, swiglu_alpha=1.702, swiglu_limit=7.0
    ),
    "deepseek_v2": dataclasses.replace(SMALL, num_experts=10, top_k=3, num_groups=5, top_k_groups=2, scale=16.0,
                                       shared_intermediate_size=80),
    "deepseek_v3": dataclasses.replace(SMALL, num_experts=16, top_k=4, num_groups=4, top_k_groups=2, group_score="top2",
                                       scoring="sigmoid", correction_bias=True, renormalize=True, scale=2.5,
                                       shared_intermediate_size=40),
}  # fmt: skip
"""One of each kind of routing."""
UNGATED = dataclasses.replace(CONFIGS["deepseek_v3"], gated=False)
"""As in Nemotron-H."""


BLOCK = 32
"""Rows and columns of blocks here."""


def _blocks(weight: Tensor, rows: int) -> QuantizedWeight:
    """Blocks that end with an expert, as in a checkpoint: of rows, where they would not."""
    parts = [float8(part, (BLOCK, BLOCK)) for part in weight.split(rows)]
    return merged(parts)


def _zeros(weight: Tensor, rows: int) -> QuantizedWeight:
    """Groups with zeros other than 8."""
    form = int4(weight, BLOCK)
    zeros = torch.arange(form.scales.numel()).view(form.scales.shape) % 5 + 6
    return dataclasses.replace(form, zeros=zeros.to(torch.uint8))


FORMS: dict[str, Callable[[Tensor, int], QuantizedWeight]] = {
    "fp8 blocks": _blocks,
    "fp8 rows": lambda weight, rows: float8(weight),
    "mxfp4": lambda weight, rows: float4(weight),
    "int4": lambda weight, rows: int4(weight, BLOCK),
    "int4, zeros": _zeros,
    "int8": lambda weight, rows: int8(weight),
}
"""From the rows of all experts, and how many of them each has."""


class Layer:
    """A layer with random weights, drawn once in float64 and handed out in any type: a reference sees the very numbers."""

    def __init__(self, config: ExpertsConfig, dtype: torch.dtype, seed: int = 0, hidden: int = HIDDEN) -> None:
        self.config, self.dtype = config, dtype
        self._generator = torch.Generator().manual_seed(seed)
        inner, count = config.intermediate_size, config.num_all
        self.norm = 1 + 0.3 * self.draw(hidden)
        self.tensors = {
            "router": self.draw(config.num_logits, hidden) * hidden**-0.5 * 2,
            "router_bias": self.draw(config.num_logits) if config.router_bias else None,
            "correction_bias": self.draw(config.num_experts) * 0.3 if config.correction_bias else None,
            "gate_up": self.draw(count, config.up_size, hidden) * hidden**-0.5 * (4 if config.swiglu_limit else 1),
            "gate_up_bias": self.draw(count, 2 * inner) if config.biases else None,
            "down": self.draw(count, hidden, inner) * inner**-0.5,
            "down_bias": self.draw(count, hidden) if config.biases else None,
        }
        self.norm = self.norm.to(dtype).double()

    def draw(self, *shape: int) -> Tensor:
        """Normal numbers that the layer's type can hold."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(self.dtype).double()

    def weights(self, dtype: torch.dtype, device: str = "cpu") -> RoutedWeights:
        """Its tensors in a type; what is float32 by contract stays so, or is float64 for a reference."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def put(name: str) -> Tensor | None:
            tensor = self.tensors[name]
            return None if tensor is None else tensor.to(device, wide if name in ("router_bias", "correction_bias") else dtype)

        return RoutedWeights(**{name: put(name) for name in self.tensors})  # type: ignore[arg-type]

    def quantized(self, form: str, device: str = "cpu") -> RoutedWeights:
        """Return the tensors with the experts' weights quantized to a format of FORMS; `reference` then uses the quantized
        ones.
        """
        stacked: dict[str, QuantizedWeight] = {}
        for name in ("gate_up", "down"):
            plain = self.tensors[name]
            count, rows, columns = plain.shape
            stacked[name] = FORMS[form](plain.reshape(count * rows, columns).to(self.dtype), rows)
            self.tensors[name] = stacked[name].dequantized_stack(count, torch.float64)
        placed = {name: on_device(weight, torch.device(device)) for name, weight in stacked.items()}
        return dataclasses.replace(self.weights(self.dtype, device), **placed)  # type: ignore[arg-type]

    def norm_of(self, dtype: torch.dtype, device: str = "cpu") -> Norm:
        return Norm(self.norm.to(device, dtype), 1e-5)

    def reference(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """The residual stream after the layer, in float64. x: float64 [num_tokens, hidden_size], before the norm.

        routing: which experts, where that is not the question; its weights are float64.
        """
        return x + plain_experts(self.config, self.weights(torch.float64), self.normed(x), routing or self.routing(x))

    def routing(self, x: Tensor) -> Routing:
        """Return the chosen experts and their weights, in float64."""
        weights = self.weights(torch.float64)
        bias = 0 if weights.router_bias is None else weights.router_bias
        return route(self.normed(x) @ weights.router.T + bias, self.config, weights.correction_bias)

    def normed(self, x: Tensor) -> Tensor:
        """Return the experts' input, rounded to the layer's dtype. x: float64 [num_tokens, hidden_size]."""
        return torch.nn.functional.rms_norm(x, self.norm.shape, self.norm, 1e-5).to(self.dtype).double()


def plain_experts(
    config: ExpertsConfig, weights: RoutedWeights, x: Tensor, routing: Routing | None = None, product: Product | None = None
) -> Tensor:
    """Return the experts' outputs for normed rows, one expert after another. routing: None means the router's choice."""
    if routing is None:
        logits = torch.nn.functional.linear(x, weights.router, weights.router_bias)
        routing = route(logits, config, weights.correction_bias)
    kernel, out = TorchExperts(spec_of(config, weights), product), torch.zeros_like(x)
    kernel.apply(x, routing.experts, routing.weights, kernel.prepare(weights), out)
    return out


def forms_of(weights: RoutedWeights) -> tuple[str, str]:
    """The formats of a layer's two weights in words; empty: plain."""
    first, second = ("" if isinstance(each, Tensor) else str(WeightFormat.of(each)) for each in (weights.gate_up, weights.down))
    return first, second


def fused_layer(config: ExpertsConfig, weights: RoutedWeights, norm: Norm, invariant: bool = False) -> BoundExperts:
    """A layer as a GPU, or Triton's interpreter, computes it, with all kernels that can serve."""
    from headway.kernels.step.fused import fused_experts, invariant_experts

    make = invariant_experts if invariant else fused_experts
    return make(ExpertsOptions(), weights.router.device).bind(config, weights, norm)
