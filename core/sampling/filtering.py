"""What top_k, top_p and min_p keep of a row's tokens, by torch's operations; kernels that keep the same may stand for them.

Tokens are in the order of their logits, of equal ones the smaller id first; each parameter keeps the first so many of them.
Probabilities are compared as whole numbers, `UNIT_MASS` for the most likely token, so that no order of adding changes a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.sampling.params import SamplingParams

UNIT_MASS = 2**40
"""A vocabulary of 2^22 tokens sums to less than 2^63; what a row leaves out for being too small is below 2^-40 a token."""
LOG2E = 1.4426950408889634

Filter = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logits [rows, vocab_size], others int64 [rows], keys int64 [rows], filters float32 [4, rows]) -> tokens, int64 [rows].

A column of filters is a `TokenFilter`: the token is drawn (see `sampler.draw`) among those that it keeps of the logits times its
scale, NOT_A_TOKEN where a logit is NaN; a row of scale 0 has its token from `others`."""


class TokenFilter(NamedTuple):
    """What a request keeps, in numbers that a device compares with."""

    scale: float
    """1 / temperature; 0: nothing is filtered."""
    top_k: float
    """0: all."""
    top_p: float
    log_min_p: float
    """Natural logarithm, -inf for 0: logits are compared."""

    @classmethod
    def of(cls, params: SamplingParams, scale: float, vocab_size: int) -> TokenFilter:
        """Read off parameters."""
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        return cls(scale, float(top_k), params.top_p, math.log(params.min_p) if params.min_p > 0 else -math.inf)


NO_FILTER = TokenFilter(0.0, 0.0, 1.0, -math.inf)


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
