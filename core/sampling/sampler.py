"""Sampling of one token per row of logits, on the device of the logits and without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.compiled import upload
from headway.core.sampling.verification import AcceptDrafts, accept_drafts

NOT_A_TOKEN = -1
"""Stands for the token of a row whose logits hold a NaN."""
NO_TOKEN_LEFT = -2
"""Stands for the token of a row in which no token may come."""


def greedy(logits: Tensor) -> Tensor:
    """Most likely token of each row of logits [rows, vocab_size]: int64 [rows], NOT_A_TOKEN where a logit is NaN."""
    best, tokens = logits.max(dim=-1)  # NaN is the largest number to max
    return torch.where(best.isnan(), NOT_A_TOKEN, tokens)


Draw = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits [rows, vocab_size], scales float32 [rows], keys int64 [rows]) -> one token a row, int64, like `draw`."""


def draw(logits: Tensor, scales: Tensor, keys: Tensor) -> Tensor:
    """Draw from each row's softmax(logits * scale), the scale being 1 / temperature; equal keys draw equally."""
    # The largest of logit - log(e), e drawn from Exp(1), is a draw from the softmax (Gumbel-max), and needs no sum over rows.
    noise = exponential(keys, logits.shape[-1])
    return (logits.float() * scales[:, None] - noise.log_()).argmax(dim=-1)


Filter = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logits [rows, vocab_size], others int64 [rows], keys int64 [rows], filters float32 [4, rows]) -> tokens, int64 [rows].

A column of filters is a `filtering.TokenFilter`: the token is drawn (see `draw`) among those that the filter keeps of the logits
times its scale, NOT_A_TOKEN where a logit is NaN; a row of scale 0 has its token from `others`."""


BestOfPart = Callable[[Tensor, Tensor | None, Tensor | None, int], Tensor]
"""(logits [rows, part], scales and keys as `Draw` takes them or None, first token) -> int64 [rows], see `candidates`."""


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """Operations that choose tokens; kernels replace torch's where they are faster and choose the same."""

    greedy: Callable[[Tensor], Tensor] = greedy
    draw: Draw = draw
    choose: Draw | None = None
    """Both in one pass, where a kernel has it: like `draw`, but a row of scale 0 is greedy. NOT_A_TOKEN where a logit is NaN."""
    filter: Filter | None = None
    """A draw from what top_k, top_p and min_p keep; None: rows that want one are changed by torch's operations, then drawn."""
    best_of_part: BestOfPart | None = None
    """What a rank finds in its part of the vocabulary; None: `candidates.best_of_part` does."""
    winners: Callable[[Tensor], Tensor] | None = None
    """Chooses among what ranks have found; None: `candidates.winners` does."""
    accept_drafts: AcceptDrafts = accept_drafts
    """Compares drafts with the tokens sampled in their positions."""


TORCH_SAMPLING = SamplingOps()
"""torch's operations, on any device."""


class Draws(NamedTuple):
    """The scales, keys and filters by which the tokens of some rows are chosen."""

    scales: NDArray[numpy.float32]
    """[rows]: 1 / temperature, 0 for greedy, and for rows that `filters` serves."""
    keys: NDArray[numpy.int64]
    """[rows]: what decides the random numbers, see `keys_of`."""
    filters: NDArray[numpy.float32] | None = None
    """[4, rows]: a `TokenFilter` each, of scale 0 for rows that filter nothing; None: no row does, or no `SamplingOps.filter`
    is there."""


def sample(logits: Tensor, draws: Draws, ops: SamplingOps = TORCH_SAMPLING, best: Tensor | None = None) -> Tensor:
    """Next token of each row: int64 [rows], NOT_A_TOKEN where a logit is NaN.

    logits: [rows, vocab_size]; best: what `greedy` made of them, where that is known. A row's token depends on its own logits,
    scale and key only: neither batching, nor preemption, nor a token that is sampled in advance and dropped changes another.
    """
    if draws.filters is not None:
        return _filtered(logits, draws, draws.filters, ops, best)
    if not draws.scales.any():
        return ops.greedy(logits) if best is None else best
    if ops.choose is not None:
        packed = numpy.stack([draws.keys, draws.scales.astype(numpy.float64).view(numpy.int64)])
        keys, bits = upload(torch.from_numpy(packed), logits.device)
        return ops.choose(logits, bits.view(torch.float64).float(), keys)
    best = ops.greedy(logits) if best is None else best
    rows = numpy.flatnonzero(draws.scales)
    # One copy for all that the device needs of the host: a copy costs more than what it carries.
    packed = numpy.stack([rows, draws.keys[rows], draws.scales[rows].astype(numpy.float64).view(numpy.int64)])
    at, keys, bits = upload(torch.from_numpy(packed), logits.device)
    some = len(rows) < len(logits)
    drawn = ops.draw(logits.index_select(0, at) if some else logits, bits.view(torch.float64).float(), keys)
    drawn = torch.where((best.index_select(0, at) if some else best) == NOT_A_TOKEN, NOT_A_TOKEN, drawn)
    return best.index_copy(0, at, drawn) if some else drawn


def _filtered(logits: Tensor, draws: Draws, filters: NDArray[numpy.float32], ops: SamplingOps, best: Tensor | None) -> Tensor:
    assert ops.filter is not None
    # Columns that were picked lie one after another: what kernels read are rows.
    bits = filters.astype(numpy.float64, order="C").view(numpy.int64)
    keys, *numbers = upload(torch.from_numpy(numpy.concatenate([draws.keys[None], bits])), logits.device)
    others = keys if filters[0].all() else sample(logits, draws._replace(filters=None), ops, best)
    return ops.filter(logits, others, keys, torch.stack(numbers).view(torch.float64).float())


LANES = 128
"""Columns from one number of a counter to its next: neighbouring counters are neighbouring columns, as a kernel reads them."""


def exponential(keys: Tensor, num_tokens: int, first: int = 0) -> Tensor:
    """Exp(1) numbers, float32 [rows, num_tokens], from counters instead of a generator's state (Salmon et al. 2011).

    Each depends on its row's key and its token alone, so that a draw can be repeated, dropped, or made beside others without
    changing any other. first: token of the first column.
    """
    before, skipped = divmod(first, 4 * LANES)
    groups = -(-(skipped + num_tokens) // (4 * LANES))
    zero = torch.zeros((), dtype=torch.int64, device=keys.device)
    counter = torch.arange(before * LANES, (before + groups) * LANES, device=keys.device), zero, zero, zero
    words = philox(counter, (keys[:, None] & _WORD, (keys[:, None] >> 32) & _WORD))
    bits = torch.stack([word.view(-1, groups, LANES) for word in words], dim=2).flatten(1)[:, skipped : skipped + num_tokens]
    # All 32 bits, though a float32 near 1 holds only 24: small numbers keep their digits, and they decide the race. The step is
    # a little under 2^-32, or the largest would round to 1, and the half step keeps 0 out: both have no finite logarithm.
    uniform = bits.float() * (2.0**-32 - 2.0**-56) + 2.0**-33
    return -torch.log1p(-uniform)  # which has the digits of a small number, where log(1 - u) has lost them


_WORD = 0xFFFFFFFF
_Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: _Words, key: tuple[Tensor, Tensor]) -> _Words:
    """Philox4x32-7 (Salmon et al. 2011): 7 rounds are the fewest that its authors found to pass every test of BigCrush.

    A counter gives four numbers with two products of 32 bits a round, which a GPU multiplies at once. Words are int64 from 0 to
    2^32 - 1, for torch has no arithmetic of uint32; a product wraps around, but the bits that are read of it are right.
    """
    (a, b, c, d), (left, right) = counter, key
    for _ in range(7):
        first, third = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = ((third >> 32) & _WORD) ^ b ^ left, third & _WORD
        c, d = ((first >> 32) & _WORD) ^ d ^ right, first & _WORD
        left, right = (left + 0x9E3779B9) & _WORD, (right + 0xBB67AE85) & _WORD
    return a, b, c, d


def keys_of(seeds: Sequence[int] | NDArray[numpy.uint64], positions: Sequence[int] | NDArray[Any]) -> NDArray[numpy.uint64]:
    """Keys, which decide the draws of rows: SplitMix64 (Steele et al. 2014) of seed and position, uint64 [rows]."""

    def mix(x: NDArray[Any]) -> NDArray[Any]:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        mixed: NDArray[Any] = x ^ (x >> 31)
        return mixed

    golden = 0x9E3779B97F4A7C15
    return mix(mix(_unsigned(seeds) * golden) + _unsigned(positions) * golden)


def seed_of(seed: int, index: int) -> int:
    """Return the seed of one completion of a request; that of the first is the request's own.

    The others are keys of positions that no token has, and so no other request's seeds: with seed + index, the second completion
    of one seed would be the first of the next.
    """
    return seed if index == 0 else int(keys_of([seed], [-index])[0])


def _unsigned(values: Sequence[int] | NDArray[Any]) -> NDArray[numpy.uint64]:
    if isinstance(values, numpy.ndarray):
        return values.astype(numpy.uint64)
    # Seeds are whole numbers of any sign, and a derived one may be more than an int64 holds.
    return numpy.array([each % 2**64 for each in values], dtype=numpy.uint64)
