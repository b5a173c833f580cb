"""The filters top_k, top_p and min_p with torch operations, and a check of kernels that replace these operations.

Tokens are ordered by logit, and tokens with equal logits by id. Each parameter selects a prefix of this order. Probabilities are
compared as integers, with `UNIT_MASS` for the most likely token, so that sums do not depend on the order of additions.
"""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.contract.kernel import CompileAhead
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import NOT_A_TOKEN, Filter, draw

log = logging.getLogger("headway")

UNIT_MASS = 2**40
"""Integer mass of the most likely token. The masses of 2^22 tokens sum to less than 2^63, and rounding loses less than 2^-40 per
token."""
LOG2E = 1.4426950408889634


class TokenFilter(NamedTuple):
    """Filter parameters of a request, as numbers that a device compares with logits."""

    scale: float
    """Scale of the logits: 1 / temperature. 0 means no filter."""
    top_k: float
    """Number of most likely tokens to keep. 0 means all."""
    top_p: float
    log_min_p: float
    """Natural logarithm of min_p, compared with logits; -inf if min_p is 0."""

    @classmethod
    def of(cls, params: SamplingParams, scale: float, vocab_size: int) -> TokenFilter:
        """Return the filter of a request's parameters."""
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        return cls(scale, float(top_k), params.top_p, math.log(params.min_p) if params.min_p > 0 else -math.inf)


NO_FILTER = TokenFilter(0.0, 0.0, 1.0, -math.inf)
_CASES = (
    TokenFilter(1.4, 50, 1.0, -math.inf),
    TokenFilter(1.0, 0, 0.9, -math.inf),
    TokenFilter(1.0, 0, 1.0, math.log(0.05)),
    TokenFilter(2.0, 40, 0.8, math.log(0.01)),
    NO_FILTER,
    TokenFilter(0.5, 0, 0.3, -math.inf),
    TokenFilter(1.0, 1, 1.0, -math.inf),
    TokenFilter(0.1, 3000, 0.999, -math.inf),
)
"""Filter parameters with which kernels are verified."""


def keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return logits with -inf for tokens outside top_k, then for tokens outside top_p. The most likely token always remains.
    top_k < 1 and top_p = 1 exclude no token.

    logits: float32 [rows, vocab_size]; top_k, top_p: float32 [rows].
    """
    vocab = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    retained = torch.arange(vocab, device=logits.device) < torch.where(top_k > 0, top_k, vocab)[:, None]
    power = torch.where(ordered == ordered[:, :1], 0.0, (ordered - ordered[:, :1]) * LOG2E)
    masses = (power.exp2() * float(UNIT_MASS)).long().masked_fill(~retained, 0)
    sums = masses.cumsum(dim=-1)
    # A token stays if the tokens before it do not suffice.
    target = (top_p.double() * sums[:, -1].double()).long().clamp_min(1)
    retained &= (sums - masses < target[:, None]) | (top_p >= 1)[:, None]
    retained[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(retained).scatter(1, order, retained), -torch.inf)


def keep_above(logits: Tensor, log_min_p: Tensor) -> Tensor:
    """Return logits with -inf for tokens whose probability is less than min_p times the probability of the most likely token.
    log_min_p: float32 [rows]."""
    floor = logits.amax(-1, keepdim=True) + log_min_p[:, None]
    return logits.masked_fill(logits < floor, -torch.inf)


def torch_filter(logits: Tensor, others: Tensor, keys: Tensor, filters: Tensor) -> Tensor:
    """Filter with torch's operations: sort the tokens, then draw from those that remain; see `Filter`."""
    scales, top_k, top_p, log_min_p = filters
    likely = logits.float() * torch.where(scales > 0, scales, 1)[:, None]
    retained = keep_above(keep_top(likely, top_k, top_p), log_min_p)
    drawn = torch.where(logits.isnan().any(1), NOT_A_TOKEN, draw(retained, torch.ones_like(scales), keys))
    return torch.where(scales > 0, drawn, others)


def verified_filter(candidate: Filter, vocab_size: int, device: torch.device, ahead: CompileAhead | None = None) -> Filter | None:
    """Return the candidate filter if it chooses the same tokens as torch's operations. Otherwise log the reason and return None.

    The check runs at each start, because compilers and drivers vary, and a wrongly drawn token would go unnoticed. ahead: context
    in which the kernels are compiled in parallel, or None.
    """
    generator = torch.Generator(device).manual_seed(0)
    logits = 3 * torch.randn(len(_CASES), vocab_size, device=device, generator=generator)
    filters = torch.tensor(_CASES, dtype=torch.float32, device=device).T.contiguous()
    others = torch.arange(len(_CASES), device=device) % vocab_size
    keys = torch.arange(1, 1 + len(_CASES), device=device) * 0x9E3779B97F4A7C1
    try:
        with nullcontext() if ahead is None else ahead():
            candidate(logits, others, keys, filters)
        differing = int((candidate(logits, others, keys, filters) != torch_filter(logits, others, keys, filters)).sum())
        fault = f"{differing} of {len(_CASES)} tokens differ" if differing else ""
    except Exception as error:  # any error of a compiler or driver
        fault = f"{type(error).__name__}: {error}"
    if not fault:
        return candidate
    log.warning(
        "sampling: top_k, top_p and min_p use torch's operations, which are slower; the kernels failed their check (%s)", fault
    )
    return None
