"""Triton kernels for sampling on CUDA devices: greedy, temperature, top_k, top_p, min_p and verification of draft tokens.

Unlike in FlashInfer's kernels, a token depends only on its row's logits, filters and key. Probability masses are added as
integers, and noise is a hash of key and column. The token is therefore the same for any batch, and for any path of a step (eager,
graph, verify).
"""

from __future__ import annotations

import logging

import torch

from headway.core.contract.kernel import CompileAhead
from headway.core.sampling.filtering import verified_filter
from headway.core.sampling.sampler import TORCH_SAMPLING, SamplingOps

log = logging.getLogger("headway")


def fastest_sampling(device: torch.device, vocab_size: int, ahead: CompileAhead | None = None) -> SamplingOps:
    """Return the fastest sampling operations for a device: Triton kernels on CUDA devices, else torch's operations.

    ahead: context in which the kernels are compiled in parallel.
    """
    if device.type == "cuda":
        try:
            from headway.kernels.sampling.draw_kernels import FusedPart, FusedSampling
            from headway.kernels.sampling.top_k_top_p_kernels import TopKTopPSampler
        except ImportError as error:
            log.warning("sampling: using torch's operations, which are slower: %s (pip install 'headway[triton]')", error)
        else:
            fused, part = FusedSampling(device), FusedPart(device)
            filtering = verified_filter(TopKTopPSampler(device), vocab_size, device, ahead)
            return SamplingOps(
                fused.greedy,
                fused.draw,
                choose=fused.draw,
                filter=filtering,
                best_of_part=part.best_of_part,
                winners=part.winners,
                accept_drafts=fused.accept_drafts,
            )
    return TORCH_SAMPLING
