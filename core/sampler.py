"""From logits to one token a row, on the device of the logits and without waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
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


Draw = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits [rows, vocab_size], temperatures float32 [rows], keys int64 [rows]) -> one token a row, int64, like `draw`."""


def draw(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """Draw from each row's softmax(logits / temperature); equal keys draw equally."""
    # The largest of logit - log(e), e drawn from Exp(1), is a draw from the softmax (Gumbel-max), and needs no sum over rows.
    noise = _exponential(keys, logits.shape[-1])
    return (logits.float() / temperatures[:, None] - noise.log_()).argmax(dim=-1)


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """The two ways to choose a token; others may stand for torch's where they are faster and choose the same."""

    greedy: Callable[[Tensor], Tensor] = greedy
    draw: Draw = draw


TORCH_SAMPLING = SamplingOps()
"""torch's operations, on any device."""


def sample(
    logits: Tensor,
    best: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    draw: Draw = draw,
) -> Tensor:
    """Next token of each row: int64 [rows], NOT_A_TOKEN where a logit is NaN.

    logits: [rows, vocab_size]; best: what `greedy` made of them. seeds, positions: of each row its request's seed and the place
    of the token in its sequence. A row's token depends on its own logits, parameters, seed and position only: neither batching,
    nor preemption, nor a token that is sampled in advance and dropped changes another.
    """
    rows = [row for row, wish in enumerate(params) if not wish.greedy]
    if not rows:
        return best
    wishes = [params[row] for row in rows]
    # One copy for all that the device needs of the host: a copy costs more than what it carries.
    packed = numpy.empty((3, len(rows)), dtype=numpy.int64)
    packed[0] = rows
    packed[1] = _keys([seeds[row] for row in rows], [positions[row] for row in rows]).view(numpy.int64)
    packed[2] = numpy.array([wish.temperature for wish in wishes]).view(numpy.int64)
    at, keys, bits = upload(torch.from_numpy(packed), logits.device)
    temperatures = bits.view(torch.float64).float()
    some = len(rows) < len(params)
    chosen = logits.index_select(0, at) if some else logits
    if any(wish.top_k > 0 or wish.top_p < 1 or wish.min_p > 0 for wish in wishes):
        chosen, temperatures = _keep_likely(chosen.float() / temperatures[:, None], wishes), torch.ones_like(temperatures)
    drawn = draw(chosen, temperatures, keys)
    drawn = torch.where((best.index_select(0, at) if some else best) == NOT_A_TOKEN, NOT_A_TOKEN, drawn)
    return best.index_copy(0, at, drawn) if some else drawn


def _keep_likely(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set what top_k, top_p and min_p leave out to -inf."""

    def column(values: list[float]) -> Tensor:
        return upload(torch.tensor(values, dtype=logits.dtype), logits.device)[:, None]

    if any(wish.top_k > 0 or wish.top_p < 1 for wish in params):
        logits = _keep_top(logits, params, column([wish.top_p for wish in params]))
    if any(wish.min_p > 0 for wish in params):
        floor = logits.amax(-1, keepdim=True) + column([wish.min_p for wish in params]).log()
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def _keep_top(logits: Tensor, params: Sequence[SamplingParams], top_p: Tensor) -> Tensor:
    """Set what top_k and top_p leave out to -inf; top_k first, then top_p over what it kept. The most likely token stays."""
    vocab = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True)
    kept = torch.tensor([wish.top_k if wish.top_k > 0 else vocab for wish in params])
    dropped = torch.arange(vocab, device=logits.device) >= upload(kept, logits.device)[:, None]
    likely = ordered.masked_fill(dropped, -torch.inf).softmax(dim=-1)
    # The sum before a token already suffices. It may round up to 1, which must cut no row that is here for its neighbours only.
    dropped |= (likely.cumsum(dim=-1) - likely >= top_p) & (top_p < 1)
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -torch.inf)


def _exponential(keys: Tensor, vocab_size: int) -> Tensor:
    """Exp(1) numbers, float32 [rows, vocab_size], from counters instead of a generator's state (Salmon et al. 2011).

    Each is the SplitMix64 hash (Steele et al. 2014) of key and column, so that a draw can be repeated, dropped, or made beside
    others without changing any other.
    """
    columns = torch.arange(vocab_size, device=keys.device) * _signed(_GOLDEN)
    bits = _shifted(_mix(keys[:, None] + columns), 32)
    uniform = (bits + 0.5) * 2.0**-32
    # -log(1 - u) keeps its digits for small u, which decide the race; the bounds keep its logarithm finite.
    return -torch.log1p(-uniform.clamp_max(1 - 2.0**-24))


_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer over int64, whose products wrap around."""
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits of the unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The int64 with the bits of a uint64."""
    return x - (1 << 64) if x >> 63 else x


def _keys(seeds: Sequence[int], positions: Sequence[int]) -> numpy.ndarray:
    """SplitMix64 of seed and position: uint64 [rows]."""

    def mix(x: numpy.ndarray) -> numpy.ndarray:
        x = (x ^ (x >> 30)) * _FIRST
        x = (x ^ (x >> 27)) * _SECOND
        mixed: numpy.ndarray = x ^ (x >> 31)
        return mixed

    # Seeds are whole numbers of any sign, and the largest one plus an index is more than an int64 holds.
    seed, position = (numpy.array([each % 2**64 for each in values], dtype=numpy.uint64) for values in (seeds, positions))
    return mix(mix(seed * _GOLDEN) + position * _GOLDEN)
