"""From logits to one token a row, on the device of the logits and without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.core.sampling_params import SamplingParams
from headway.core.transfer import upload

NOT_A_TOKEN = -1
"""Stands for the token of a row whose logits hold a NaN."""


def greedy(logits: Tensor) -> Tensor:
    """Most likely token of each row of logits [rows, vocab_size]: int64 [rows], NOT_A_TOKEN where a logit is NaN."""
    best, tokens = logits.max(dim=-1)  # NaN is the largest number to max
    return torch.where(best.isnan(), NOT_A_TOKEN, tokens)


def sample(logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Next token of each row: int64 [rows], NOT_A_TOKEN where a logit is NaN.

    logits: [rows, vocab_size]. seeds, positions: of each row its request's seed and the place of the token in its sequence.
    A row's token depends on its own logits, parameters, seed and position only: neither batching, nor preemption, nor a token
    that is sampled in advance and dropped changes another.
    """
    tokens = greedy(logits)
    rows = [row for row, wish in enumerate(params) if not wish.greedy]
    if not rows:
        return tokens
    wishes = [params[row] for row in rows]
    where = upload(torch.tensor([[seeds[row], positions[row], row] for row in rows]), logits.device)
    chosen = logits if len(rows) == len(params) else logits.index_select(0, where[:, 2])
    drawn = _draw(chosen.float(), wishes, where[:, 0], where[:, 1])
    drawn = torch.where(tokens[where[:, 2]] == NOT_A_TOKEN, NOT_A_TOKEN, drawn)
    return tokens.index_copy(0, where[:, 2], drawn)


def _draw(logits: Tensor, params: Sequence[SamplingParams], seeds: Tensor, positions: Tensor) -> Tensor:
    def column(values: list[float]) -> Tensor:
        return upload(torch.tensor(values, dtype=logits.dtype), logits.device)[:, None]

    logits = logits / column([wish.temperature for wish in params])
    if any(wish.top_k > 0 or wish.top_p < 1 for wish in params):
        logits = _keep_top(logits, params, column([wish.top_p for wish in params]))
    if any(wish.min_p > 0 for wish in params):
        floor = logits.amax(-1, keepdim=True) + column([wish.min_p for wish in params]).log()
        logits = logits.masked_fill(logits < floor, -torch.inf)
    # The largest of logit - log(e), e drawn from Exp(1), is a draw from the softmax (Gumbel-max), and needs no sum over rows.
    return (logits - _exponential(seeds, positions, logits.shape[-1]).log()).argmax(dim=-1)


def _keep_top(logits: Tensor, params: Sequence[SamplingParams], top_p: Tensor) -> Tensor:
    """Set what top_k and top_p leave out to -inf; top_k first, then top_p over what it kept. The most likely token stays."""
    vocab = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True)
    kept = torch.tensor([wish.top_k if wish.top_k > 0 else vocab for wish in params])
    dropped = torch.arange(vocab, device=logits.device) >= upload(kept, logits.device)[:, None]
    likely = ordered.masked_fill(dropped, -torch.inf).softmax(dim=-1)
    dropped |= likely.cumsum(dim=-1) - likely >= top_p  # the sum before a token already suffices
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -torch.inf)


_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number


def _exponential(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Exp(1) numbers, float32 [rows, vocab_size], from counters instead of a generator's state (Salmon et al. 2011).

    Each is the SplitMix64 hash (Steele et al. 2014) of seed, position and column, so that a draw can be repeated, dropped, or
    made beside others without changing any other.
    """
    keys = _mix(_mix(seeds * _GOLDEN) + positions * _GOLDEN)
    columns = torch.arange(vocab_size, device=seeds.device) * _GOLDEN
    bits = _shifted(_mix(keys[:, None] + columns), 32)
    uniform = (bits + 0.5) * 2.0**-32
    # -log(1 - u) keeps its digits for small u, which decide the race; the bounds keep its logarithm finite.
    return -torch.log1p(-uniform.clamp_max(1 - 2.0**-24))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer; int64 products wrap around."""
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits of the unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
