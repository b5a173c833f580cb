"""Weights of a layer of experts (MoE): their formats, and the shard of one rank."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig, ExpertsSpec, ExpertsWeights
from headway.core.contract.weights import Float4Weight, Int4Weight, QuantizedWeight, Weight, WeightFormat
from headway.kernels.linear.axes import Axis, Division
from headway.kernels.linear.forms import weight_bytes


class ExpertsShard:
    """Shard of the experts on one rank: some columns of each expert, or some complete experts.

    Experts are split by columns if the number of ranks divides an expert's inner size, so that every rank reads the same number
    of bytes whichever experts are selected. Otherwise, whole experts are assigned to ranks if the number of ranks divides the
    number of experts. Shared experts, used by every token, are always split by columns. The router is replicated, so all ranks
    select the same experts.
    """

    def __init__(self, config: ExpertsConfig, division: Division | None = None) -> None:
        """Compute the shard. config: configuration of the whole layer, which must meet all requirements of `needs`. division:
        None means one rank."""
        division = division or Division(0, 1)
        self.first = division.rank == 0
        by_columns = config.intermediate_size % division.size == 0
        self.experts = Axis.all(config.num_experts) if by_columns else division.even(config.num_experts)
        """Axis of the routed experts, with the rank's shard."""
        self.inner = division.even(config.intermediate_size) if by_columns else Axis.all(config.intermediate_size)
        """Axis of the columns of a routed expert's down projection, with the rank's shard."""
        self.shared = division.even(config.shared_intermediate_size)
        """Axis of the down projections' columns for all shared experts together, with the rank's shard."""
        self.own = replace(
            config,
            intermediate_size=self.inner.size,
            shared_intermediate_size=self.shared.size,
            held=None if by_columns else self.experts.held[0],
        )
        """Configuration of the rank's shard."""


def needs(config: ExpertsConfig, size: int, by_expert: bool) -> list[str]:
    """Return texts of the requirements that a number of ranks does not meet. Empty if the layer can be split."""
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
    """Weights of a layer's experts on this rank, and of the router before them."""

    router: Tensor
    """[num_logits, hidden_size]: weight of the router."""
    router_bias: Tensor | None = None
    """float32 [num_logits]: bias of the router's logits."""
    correction_bias: Tensor | None = None
    """float32 [num_experts]: bias added to scores only to select experts."""


def spec_of(config: ExpertsConfig, weights: RoutedWeights) -> ExpertsSpec:
    """Return the spec of a layer, for calls of kernels' `supports`."""
    router, first, last = weights.router, WeightFormat.of(weights.gate_up), WeightFormat.of(weights.down)
    return ExpertsSpec(config, router.shape[1], router.dtype, router.device, first, last)


def examples_of(spec: ExpertsSpec) -> tuple[QuantizedWeight | None, QuantizedWeight | None]:
    """Return examples of a layer's two quantized weights, without elements. None for a dense weight."""
    config, hidden = spec.config, spec.hidden_size
    first = spec.gate_up.sample(config.num_all * config.up_size, hidden)
    return first, spec.down.sample(config.num_all * hidden, config.intermediate_size)


def each_expert(stacked: Tensor | QuantizedWeight, count: int) -> list[Weight]:
    """Return the weight [N, K] of each expert. count: number of experts in `stacked`."""
    if isinstance(stacked, Tensor):
        return list(stacked)
    rows = stacked.shape[0] // count
    return [stacked.rows(range(number * rows, (number + 1) * rows)) for number in range(count)]


def reads_experts(weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether MoE kernels read a quantized weight [experts * out, in] directly: on a GPU, for x in half precision.

    On a CPU, experts are computed one by one over dense weights, and on GPUs other element types of x are rare. In both cases,
    weights are dequantized when they are loaded; the log reports the memory for that.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return reads_form(weight, dtype) and weight_bytes(weight) is not None


def reads_form(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Return whether kernels can multiply the weight by x of type `dtype`: float16 cannot represent MXFP4 scales, and columns
    must not be reordered.
    """
    if isinstance(weight, Float4Weight):
        return dtype == torch.bfloat16
    ordered = isinstance(weight, Int4Weight) and weight.order is not None
    return dtype in (torch.bfloat16, torch.float16) and not ordered
