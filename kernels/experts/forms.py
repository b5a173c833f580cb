"""Which forms of quantised experts are read as they are, and the names that tell kinds of layers apart by them."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from headway.kernels.experts.weights import ExpertWeights
from headway.kernels.linear.forms import Float4Weight, Int4Weight, QuantizedWeight, form_name


def reads_experts(weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels of experts read a weight [experts * out, in] as it is: on a GPU, for x in half precision.

    A CPU computes experts one after the other over plain weights, and a GPU's other element types are rare: there weights are
    expanded as they are read, which the log tells with the memory that it takes.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    from headway.kernels.linear.quantized import weight_bytes

    return reads_form(weight, dtype) and weight_bytes(weight) is not None


def reads_form(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether x of a type can be multiplied: float16 has no place for MXFP4's scales, and columns lie as the inputs do."""
    if isinstance(weight, Float4Weight):
        return dtype == torch.bfloat16
    ordered = isinstance(weight, Int4Weight) and weight.order is not None
    return dtype in (torch.bfloat16, torch.float16) and not ordered


def forms_of(weights: ExpertWeights) -> tuple[str, str]:
    """Name the forms of a layer's two weights; "" of a plain one."""
    gate_up, down = weights.gate_up, weights.down
    return "" if isinstance(gate_up, Tensor) else form_name(gate_up), "" if isinstance(down, Tensor) else form_name(down)
