"""Filters of a row's tokens, top_k, top_p and min_p, by torch's operations; kernels replace them once they are verified.

Tokens are in the order of their logits, of equal ones the smaller id first; each parameter keeps a number of the first.
Probabilities are compared as whole numbers, `UNIT_MASS` for the most likely token, so that no order of adding changes a sum.
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
"""A vocabulary of 2^22 tokens sums to less than 2^63; what a row leaves out for being too small is below 2^-40 a token."""
LOG2E = 1.4426950408889634


class TokenFilter(NamedTuple):
    """The filters of a request, as numbers that a device compares logits with."""

    scale: float
    """1 / temperature; 0: nothing is filtered."""
    top_k: float
    """0: all."""
    top_p: float
    log_min_p: float
    """Natural logarithm, -inf for 0: logits are compared."""

    @classmethod
    def of(cls, params: SamplingParams, scale: float, vocab_size: int) -> TokenFilter:
        """The filter of a request's parameters."""
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
"""Filters with which kernels are verified."""


def keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set what top_k and top_p leave out to -inf; top_k first, then top_p over what it kept. The most likely token stays.

    logits: float32 [rows, vocab_size]; top_k, top_p: float32 [rows]. A top_k below 1 keeps all tokens, as a top_p of 1 does.
    """
    vocab = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    kept = torch.arange(vocab, device=logits.device) < torch.where(top_k > 0, top_k, vocab)[:, None]
    power = torch.where(ordered == ordered[:, :1], 0.0, (ordered - ordered[:, :1]) * LOG2E)
    masses = (power.exp2() * float(UNIT_MASS)).long().masked_fill(~kept, 0)
    sums = masses.cumsum(dim=-1)
    # A token stays if those before it do not suffice.
    target = (top_p.double() * sums[:, -1].double()).long().clamp_min(1)
    kept &= (sums - masses < target[:, None]) | (top_p >= 1)[:, None]
    kept[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(kept).scatter(1, order, kept), -torch.inf)


def keep_above(logits: Tensor, log_min_p: Tensor) -> Tensor:
    """Set tokens that are less likely than min_p times the most likely one to -inf. log_min_p: float32 [rows]."""
    floor = logits.amax(-1, keepdim=True) + log_min_p[:, None]
    return logits.masked_fill(logits < floor, -torch.inf)


def torch_filter(logits: Tensor, others: Tensor, keys: Tensor, filters: Tensor) -> Tensor:
    """A `Filter` by torch's operations: a sort, and a draw from what is kept."""
    scales, top_k, top_p, log_min_p = filters
    likely = logits.float() * torch.where(scales > 0, scales, 1)[:, None]
    kept = keep_above(keep_top(likely, top_k, top_p), log_min_p)
    drawn = torch.where(logits.isnan().any(1), NOT_A_TOKEN, draw(kept, torch.ones_like(scales), keys))
    return torch.where(scales > 0, drawn, others)


def verified_filter(candidate: Filter, vocab_size: int, device: torch.device, ahead: CompileAhead | None = None) -> Filter | None:
    """Return the candidate filter if its choices equal those of torch's operations; else None, and the log says why.

    Versions of compilers and drivers are many, and a token drawn from the wrong ones goes unnoticed. ahead: context in which the
    kernels are compiled at the same time.
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
    except Exception as error:  # whatever a compiler or driver has to say
        fault = f"{type(error).__name__}: {error}"
    if not fault:
        return candidate
    log.warning(
        "top_k, top_p and min_p are served by torch's operations, which takes longer: their kernels failed here (%s)", fault
    )
    return None
