"""Kernels that draw from what top_k, top_p and min_p keep are held to torch's operations before an engine relies on them."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext

import torch
from torch import Tensor

from headway.core.contract.compiled import CompileAhead
from headway.core.sampling.filtering import NO_FILTER, Filter, TokenFilter, keep_above, keep_top
from headway.core.sampling.sampler import NOT_A_TOKEN, draw

log = logging.getLogger("headway")

_WISHES = (
    TokenFilter(1.4, 50, 1.0, -math.inf),
    TokenFilter(1.0, 0, 0.9, -math.inf),
    TokenFilter(1.0, 0, 1.0, math.log(0.05)),
    TokenFilter(2.0, 40, 0.8, math.log(0.01)),
    NO_FILTER,
    TokenFilter(0.5, 0, 0.3, -math.inf),
    TokenFilter(1.0, 1, 1.0, -math.inf),
    TokenFilter(0.1, 3000, 0.999, -math.inf),
)


def filter_kept(logits: Tensor, others: Tensor, keys: Tensor, filters: Tensor) -> Tensor:
    """A `Filter` by torch's operations: a sort, and a draw from what is kept."""
    scales, top_k, top_p, log_min_p = filters
    likely = logits.float() * torch.where(scales > 0, scales, 1)[:, None]
    kept = keep_above(keep_top(likely, top_k, top_p), log_min_p)
    drawn = torch.where(logits.isnan().any(1), NOT_A_TOKEN, draw(kept, torch.ones_like(scales), keys))
    return torch.where(scales > 0, drawn, others)


def proved(candidate: Filter, vocab_size: int, device: torch.device, ahead: CompileAhead | None = None) -> Filter | None:
    """The candidate, if it chooses here what torch's operations choose; None if it fails or differs, which the log says.

    Versions of compilers and drivers are many, and nobody sees a token that was drawn from the wrong ones. ahead: in which its
    kernels are compiled at the same time.
    """
    generator = torch.Generator(device).manual_seed(0)
    logits = 3 * torch.randn(len(_WISHES), vocab_size, device=device, generator=generator)
    filters = torch.tensor(_WISHES, dtype=torch.float32, device=device).T.contiguous()
    others = torch.arange(len(_WISHES), device=device) % vocab_size
    keys = torch.arange(1, 1 + len(_WISHES), device=device) * 0x9E3779B97F4A7C1
    try:
        with nullcontext() if ahead is None else ahead():
            candidate(logits, others, keys, filters)
        differing = int((candidate(logits, others, keys, filters) != filter_kept(logits, others, keys, filters)).sum())
        fault = f"{differing} of {len(_WISHES)} tokens differ" if differing else ""
    except Exception as error:  # whatever a compiler or driver has to say
        fault = f"{type(error).__name__}: {error}"
    if not fault:
        return candidate
    log.warning(
        "top_k, top_p and min_p are served by torch's operations, which takes longer: their kernels failed here (%s)", fault
    )
    return None
