"""From logits to one token a row; every request draws from a generator of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.core.sampling_params import SamplingParams


def sample(logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]) -> Tensor:
    """Next token of each row: int64 [rows].

    logits: float32 [rows, vocab_size], overwritten. generators: of the rows that are not greedy, on the device of `logits`.
    A row's token depends on its own logits, parameters and generator only, so neither batching nor preemption changes it.
    """
    tokens = logits.argmax(dim=-1)
    rows = [row for row, wish in enumerate(params) if not wish.greedy]
    if rows:
        tokens[rows] = _draw(logits[rows], [params[row] for row in rows], [generators[row] for row in rows])
    return tokens


def _draw(logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]) -> Tensor:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)[:, None]

    logits = logits / column([wish.temperature for wish in params])
    if any(wish.top_k > 0 or wish.top_p < 1 for wish in params):
        logits = _keep_top(logits, params, column([wish.top_p for wish in params]))
    if any(wish.min_p > 0 for wish in params):
        floor = logits.amax(-1, keepdim=True) + column([wish.min_p for wish in params]).log()
        logits = logits.masked_fill(logits < floor, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    # argmax(p / e) with e from Exp(1) is a draw from p (the exponential race), and needs no sum over rows.
    noise = torch.empty_like(probabilities)
    for row, generator in enumerate(generators):
        noise[row].exponential_(generator=generator)
    return (probabilities / noise.clamp_min(torch.finfo(noise.dtype).tiny)).argmax(dim=-1)


def _keep_top(logits: Tensor, params: Sequence[SamplingParams], top_p: Tensor) -> Tensor:
    """Set what top_k and top_p leave out to -inf; top_k first, then top_p over what it kept. The most likely token stays."""
    vocab = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True)
    top_k = torch.tensor([wish.top_k if wish.top_k > 0 else vocab for wish in params], device=logits.device)[:, None]
    dropped = torch.arange(vocab, device=logits.device) >= top_k
    likely = ordered.masked_fill(dropped, -torch.inf).softmax(dim=-1)
    dropped |= likely.cumsum(dim=-1) - likely >= top_p  # the sum before a token already suffices
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -torch.inf)
