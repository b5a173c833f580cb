"""Kernels for linear layers and for experts that read like the definition, and kernels with one planted mistake each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsCapabilities, ExpertsKernel, ExpertsWeights
from headway.core.contract.kernel import GraphLevel, Kernel
from headway.core.contract.linear import LinearCapabilities, LinearKernel
from headway.core.contract.weights import FORMATS, Int4Weight, Weight
from headway.core.oracle.weight_cases import activated, dequantized, dequantized_experts

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PlainLinear(LinearKernel):
    """Expands the weight once, and multiplies in float32."""

    name = "plain-linear"
    capabilities = LinearCapabilities(frozenset(FORMATS), dtypes=_DTYPES, devices=("cpu",), order=True)
    graph_level = GraphLevel.ANY

    def prepare(self, weight: Weight) -> Tensor:
        """Return the weight in float64, [in_features, out_features]."""
        return dequantized(weight).t()

    def apply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Multiply."""
        out.copy_(x.double() @ weight)


class PlainExperts(ExpertsKernel):
    """Computes one expert after the other."""

    name = "plain-experts"
    capabilities = ExpertsCapabilities(
        frozenset(FORMATS), dtypes=_DTYPES, devices=("cpu",), biases=True, ungated=True, clamped=True
    )
    graph_level = GraphLevel.ANY

    def prepare(self, weights: ExpertsWeights) -> tuple[Any, ...]:
        """Return the weights of each expert in float64, and the biases."""
        count = self.spec.config.num_all
        own = (dequantized_experts(each, count) for each in (weights.gate_up, weights.down))
        return (*own, weights.gate_up_bias, weights.down_bias)

    def apply(self, x: Tensor, experts: Tensor, scores: Tensor, weights: tuple[Any, ...], out: Tensor) -> None:
        """Add to each token what its experts give."""
        found, (ups, downs, up_bias, down_bias) = out.double(), weights
        for expert in range(self.spec.config.num_all):
            tokens, slots = self.pairs(experts, scores, expert)
            hidden = activated(self.add(x[tokens].double() @ ups[expert].t(), up_bias, expert), self.spec.config)
            added = self.add(hidden @ downs[expert].t(), down_bias, expert)
            found.index_add_(0, tokens, added * scores[tokens, slots, None])
        out.copy_(found)

    def pairs(self, experts: Tensor, scores: Tensor, expert: int) -> tuple[Tensor, ...]:
        """Return the tokens of an expert, and the slot of each."""
        return (experts == expert).nonzero(as_tuple=True)

    def add(self, rows: Tensor, bias: Tensor | None, expert: int) -> Tensor:
        """Add the bias of an expert."""
        return rows if bias is None else rows + bias[expert].double()


def _misread(change: Any) -> Any:
    """Return a `prepare` that reads weights of 4 bits with a mistake."""

    def prepare(self: PlainLinear, weight: Weight) -> Tensor:
        return PlainLinear.prepare(self, change(weight) if isinstance(weight, Int4Weight) else weight)

    return prepare


def _zeros_and_one(weight: Int4Weight) -> Weight:
    zeros = torch.full_like(weight.scales, 8, dtype=torch.uint8) if weight.zeros is None else weight.zeros
    return replace(weight, zeros=zeros + 1)


def _late_last_group(self: PlainLinear, weight: Weight) -> Tensor:
    found = PlainLinear.prepare(self, weight)
    if isinstance(weight, Int4Weight) and weight.order is None and weight.scales.shape[1] > 1:
        first = weight.shape[1] - weight.group_size
        scales = weight.scales.double()
        zeros = 8.0 if weight.zeros is None else weight.zeros[:, -1].double()
        before = 8.0 if weight.zeros is None else weight.zeros[:, -2].double()
        found[first] = (found[first] / scales[:, -1] + zeros - before) * scales[:, -2]
    return found


def _in_half(self: PlainLinear, x: Tensor, weight: Tensor, out: Tensor) -> None:
    short = torch.bfloat16 if out.dtype == torch.float32 else out.dtype
    sums = torch.zeros(out.shape, dtype=short)
    for column in range(x.shape[1]):
        sums = (sums.double() + x[:, column, None].double() * weight[column]).to(short)
    out.copy_(sums)


def _first_prepared(self: Any, weight: Weight) -> Tensor:
    self.kept = getattr(self, "kept", None)
    if self.kept is None:
        self.kept = PlainLinear.prepare(self, weight)
    kept: Tensor = self.kept
    return kept


def _of_equal_scores(self: PlainExperts, experts: Tensor, scores: Tensor, expert: int) -> tuple[Tensor, ...]:
    first = (scores[:, :, None] == scores[:, None, :]).int().argmax(2)
    return (experts.gather(1, first) == expert).nonzero(as_tuple=True)


_LINEAR: dict[str, dict[str, Any]] = {
    # A zero is stored less one, as old GPTQ files have it.
    "wrong-zeros": {"prepare": _misread(_zeros_and_one)},
    # The first column of the last group has the scale and zero of the group before.
    "late-last-group": {"prepare": _late_last_group},
    "ignores-order": {"prepare": _misread(lambda weight: replace(weight, order=None))},
    # The low bits of a byte are taken for the high ones.
    "exchanged-halves": {"prepare": _misread(lambda weight: replace(weight, packed=weight.packed >> 4 | weight.packed << 4))},
    "sums-in-half": {"apply": _in_half},
    # Rows after the last whole tile of 16 are left.
    "whole-tiles": {
        "apply": lambda self, x, weight, out: PlainLinear.apply(self, x[: len(x) // 16 * 16], weight, out[: len(x) // 16 * 16])
    },
    # What `out` held is added, but for NaN.
    "stale-out": {"apply": lambda self, x, weight, out: out.copy_(out.nan_to_num(0.0).double() + x.double() @ weight)},
    # An instance keeps the first layer that it has prepared.
    "first-layer": {"prepare": _first_prepared},
}
_EXPERTS: dict[str, dict[str, Any]] = {
    "drops-last-token": {"pairs": lambda self, *given: tuple(each[:-1] for each in PlainExperts.pairs(self, *given))},
    "ignores-scores": {
        "apply": lambda self, x, experts, scores, weights, out: PlainExperts.apply(
            self, x, experts, torch.ones_like(scores), weights, out
        )
    },
    "overwrites-out": {
        "apply": lambda self, x, experts, scores, weights, out: PlainExperts.apply(self, x, experts, scores, weights, out.zero_())
    },
    # A slot is looked for by its score.
    "wrong-expert-of-a-tie": {"pairs": _of_equal_scores},
    "adds-bias-twice": {"add": lambda self, rows, *bias: PlainExperts.add(self, PlainExperts.add(self, rows, *bias), *bias)},
}
PLANTED_KERNELS: dict[str, type[Kernel]] = {
    name: type(name.title().replace("-", ""), (base,), {"name": name, "__module__": __name__, **changes})
    for base, mistakes in ((PlainLinear, _LINEAR), (PlainExperts, _EXPERTS))
    for name, changes in mistakes.items()
}
"""Eight ways to get linear layers wrong, and five to get experts wrong, by name."""
