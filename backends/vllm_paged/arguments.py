"""What the kernels take besides tensors, in the types that they are declared with."""

from __future__ import annotations

import math
from pathlib import Path

import numpy
import torch
from torch import Tensor

from headway.core.contract.spec import AttentionSpec

CSRC = Path(__file__).parent / "csrc"
"""The sources of the kernels."""
TILE = 16
"""Keys of a tile, and tokens that a block of threads writes: TILE of layout.cuh."""
MAX_WARPS = 8
_LOG2E = math.log2(math.e)


def scoring_of(spec: AttentionSpec) -> tuple[numpy.float32, numpy.float32, numpy.int32]:
    """The members of struct Scoring of score.cuh for a layer: scale and cap in the base-2 domain, and the window."""
    scale, cap, window = spec.scale * spec.k_scale, spec.softcap, numpy.int32(spec.sliding_window or 0)
    if cap is None:
        return numpy.float32(scale * _LOG2E), numpy.float32(0.0), window
    return numpy.float32(scale / cap), numpy.float32(cap * _LOG2E), window


def per_head(values: tuple[float, ...] | None, device: torch.device) -> Tensor | None:
    """float32 [num_heads], times log2(e)."""
    if values is None:
        return None
    return torch.tensor([value * _LOG2E for value in values], dtype=torch.float32, device=device)


def address(tensor: Tensor | None) -> int:
    """Where a tensor begins; a null pointer for None."""
    return 0 if tensor is None else tensor.data_ptr()
