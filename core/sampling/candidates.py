"""Tokens that ranks compare: each as one whole number, its score in the upper half and its id in the lower.

The larger number is the better token, and of equal scores the smaller id: ranks that take the largest of all numbers choose as
one rank does that sees the whole vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.core.sampling.sampler import NOT_A_TOKEN, exponential

_LOW = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF


def pack(scores: Tensor, tokens: Tensor) -> Tensor:
    """Make numbers of float32 scores and of tokens, int64 of the same shape. NaN is the largest score, as it is to max."""
    # Adding 0 turns -0 into 0, its equal; a NaN has many bits, with either sign.
    bits = torch.where(scores.isnan(), torch.nan, scores + 0.0).view(torch.int32).long()
    return (_in_order(bits) << 32) | (_LOW - tokens)


def tokens_of(numbers: Tensor) -> Tensor:
    """Read the tokens back, int64."""
    return _LOW - (numbers & _LOW)


def scores_of(numbers: Tensor) -> Tensor:
    """Read the scores back, float32."""
    return _in_order(numbers >> 32).to(torch.int32).view(torch.float32)


def _in_order(bits: Tensor) -> Tensor:
    """Turn the bits of floats into whole numbers in the floats' order, and back."""
    return bits ^ ((bits >> 31) & _MAGNITUDE)


def best_of_part(logits: Tensor, scales: Tensor | None, keys: Tensor | None, first: int) -> Tensor:
    """Find each row's best token of some consecutive ones of the vocabulary, from `first` on: int64 [rows], see `pack`.

    logits: [rows, part]. The score is the logit where scales is None or the row's scale is 0, else that of `sampler.draw`.
    """
    scores = logits.float()
    if scales is not None and keys is not None:
        drawn = scores * scales[:, None] - exponential(keys, logits.shape[1], first).log_()
        scores = torch.where(scales[:, None] > 0, drawn, scores)
    best, tokens = scores.max(dim=-1)
    return pack(best, tokens + first)


def winners(numbers: Tensor) -> Tensor:
    """Choose among ranks: int64 [rows], NOT_A_TOKEN where a score is NaN. numbers: int64 [ranks, rows]."""
    best = numbers.amax(dim=0)
    return torch.where(scores_of(best).isnan(), NOT_A_TOKEN, tokens_of(best))


def most_likely(logits: Tensor, k: int, first: int, scales: Tensor | None = None) -> Tensor:
    """Find the k most likely tokens of each row's part, as numbers of their logits: int64 [rows, k], best first.

    scales: float32 [rows], by which logits are multiplied before they are compared: products of unequal logits may be equal.
    """
    own = logits.float()
    tokens = torch.arange(first, first + own.shape[1], device=own.device)
    at = pack(own if scales is None else own * scales[:, None], tokens).topk(k, dim=-1).indices
    return pack(own.gather(1, at), at + first)
