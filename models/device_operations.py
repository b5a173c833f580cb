"""The operations of a decoder and of sampling that are fastest on a device."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from headway.core.contract.compiled import CompileAhead
from headway.core.contract.compiled import compile_ahead as compile_all_ahead
from headway.core.sampling.proof import proved
from headway.core.sampling.sampler import TORCH_SAMPLING, SamplingOps
from headway.models.operations import Operations, Plain

log = logging.getLogger("headway")


def operations_for(inv_freq: Tensor, factors: Tensor) -> Operations:
    """The fused kernels on a GPU with Triton, else torch's operations.

    inv_freq, factors: float32 [ropes, head_dim / 2] on the model's device, see `rope.rope_tables`.
    """
    if inv_freq.device.type != "cuda":
        return Plain(inv_freq, factors)
    try:
        from headway.models.fused.operations import Fused
    except ImportError:  # torch for a GPU brings Triton, but not on every system
        return Plain(inv_freq, factors)
    return Fused(inv_freq, factors)


def fastest_sampling(device: torch.device, vocab_size: int, ahead: CompileAhead | None = None) -> SamplingOps:
    """What chooses tokens fastest. ahead: in which kernels are compiled at the same time."""
    if device.type == "cuda":
        try:
            from headway.models.fused.draw import FusedSampling
            from headway.models.fused.filter import FusedFilter
        except ImportError as error:
            log.warning("tokens are chosen by torch's operations: %s (pip install 'headway[triton]')", error)
        else:
            fused = FusedSampling(device)
            filtering = proved(FusedFilter(device), vocab_size, device, ahead)
            return SamplingOps(fused.greedy, fused.draw, choose=fused.draw, filter=filtering, hold=fused.hold)
    return TORCH_SAMPLING


def compile_ahead(device: torch.device) -> CompileAhead | None:
    """What the kernels of a device are compiled in before an engine is ready, many at a time; None where nothing is compiled."""
    if device.type != "cuda":
        return None
    try:
        from headway.backends.triton import ahead
    except ImportError:
        return compile_all_ahead
    ahead.prepare()
    return ahead.compile_ahead
