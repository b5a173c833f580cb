"""The tensors of a layer of experts: their forms, and the part that one rank holds."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig, ExpertsSpec, ExpertsWeights
from headway.core.contract.weights import Float4Weight, Int4Weight, QuantizedWeight, Weight, WeightFormat
from headway.kernels.linear.axes import Axis, Division
from headway.kernels.linear.forms import weight_bytes


class ExpertsCut:
    """The experts of one rank: some columns of each expert, or some experts whole.

    By columns where the ranks divide an expert's inner size, so that every rank reads equally many bytes whichever experts the
    tokens choose; else by expert, where they divide the number of experts. Shared experts, which every token passes, are cut by
    columns in both. The router is every rank's: all of them choose alike.
    """

    def __init__(self, config: ExpertsConfig, division: Division | None = None) -> None:
        """config: the whole layer's, of which `needs` has nothing to say. division: None: there is one rank."""
        division = division or Division(0, 1)
        self.first = division.rank == 0
        by_columns = config.intermediate_size % division.size == 0
        self.experts = Axis.all(config.num_experts) if by_columns else division.even(config.num_experts)
        """Routed experts."""
        self.inner = division.even(config.intermediate_size) if by_columns else Axis.all(config.intermediate_size)
        """Columns of a routed expert's last product."""
        self.shared = division.even(config.shared_intermediate_size)
        """Columns of the shared experts' last products together."""
        self.own = replace(
            config,
            intermediate_size=self.inner.size,
            shared_intermediate_size=self.shared.size,
            held=None if by_columns else self.experts.held[0],
        )
        """The rank's layer."""


def needs(config: ExpertsConfig, size: int, by_expert: bool) -> list[str]:
    """Say what the number of ranks would have to be where it does not suit a layer of experts."""
    inner, experts, shared = config.intermediate_size, config.num_experts, config.shared_intermediate_size
    found = []
    if inner % size and (experts % size or not by_expert):
        also = f" or of their number {experts}" if by_expert else " (on a GPU they are not divided by expert)"
        found.append(f"a divisor of the experts' inner size {inner}{also}")
    if shared % size:
        found.append(f"a divisor of the shared experts' inner size {shared}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedWeights(ExpertsWeights):
    """The weights of a layer's experts, and those of the router before them. Of several ranks, those that this one holds."""

    router: Tensor
    """[num_logits, hidden_size]"""
    router_bias: Tensor | None = None
    """float32 [num_logits]"""
    correction_bias: Tensor | None = None
    """float32 [num_experts]"""


def spec_of(config: ExpertsConfig, weights: RoutedWeights) -> ExpertsSpec:
    """Return what kernels are asked for of a layer."""
    router, first, last = weights.router, WeightFormat.of(weights.gate_up), WeightFormat.of(weights.down)
    return ExpertsSpec(config, router.shape[1], router.dtype, router.device, first, last)


def examples_of(spec: ExpertsSpec) -> tuple[QuantizedWeight | None, QuantizedWeight | None]:
    """Return weights as a layer's two, without memory; None for a plain one."""
    config, hidden = spec.config, spec.hidden_size
    first = spec.gate_up.sample(config.num_all * config.up_size, hidden)
    return first, spec.down.sample(config.num_all * hidden, config.intermediate_size)


def each_expert(stacked: Tensor | QuantizedWeight, count: int) -> list[Weight]:
    """Return the weights of single experts, [N, K]. count: of how many the weight is."""
    if isinstance(stacked, Tensor):
        return list(stacked)
    rows = stacked.shape[0] // count
    return [stacked.rows(range(number * rows, (number + 1) * rows)) for number in range(count)]


def reads_experts(weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels of experts read a weight [experts * out, in] as it is: on a GPU, for x in half precision.

    A CPU computes experts one after the other over plain weights, and a GPU's other element types are rare: there weights are
    expanded as they are read, which the log tells with the memory that it takes.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return reads_form(weight, dtype) and weight_bytes(weight) is not None


def reads_form(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether x of a type can be multiplied: float16 has no place for MXFP4's scales, and columns lie as the inputs do."""
    if isinstance(weight, Float4Weight):
        return dtype == torch.bfloat16
    ordered = isinstance(weight, Int4Weight) and weight.order is not None
    return dtype in (torch.bfloat16, torch.float16) and not ordered
