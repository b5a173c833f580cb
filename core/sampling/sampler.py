"""Sampling of one token per row of logits: what each row's parameters need, and a vocabulary split over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.kernel import upload
from headway.core.sampling.logprobs import Scores, score
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.verification import AcceptDrafts, accept_drafts


class Need(IntFlag):
    """A part of what happens between a model's logits and a token."""

    TOP = 1
    MIN_P = 2
    PENALTY = 4
    BIAS = 8
    MIN_TOKENS = 16
    ALLOWED = 32
    BAD_WORDS = 64
    PROCESSOR = 128
    GRAMMAR = 256
    LOGPROBS = 512
    PROMPT_LOGPROBS = 1024


SHAPING = (
    Need.TOP
    | Need.MIN_P
    | Need.PENALTY
    | Need.BIAS
    | Need.MIN_TOKENS
    | Need.ALLOWED
    | Need.BAD_WORDS
    | Need.PROCESSOR
    | Need.GRAMMAR
)
"""Needs for which the logits change before a token is chosen."""
FILTERING = Need.TOP | Need.MIN_P
"""Needs that a kernel may serve in place of changed logits, see `SamplingOps.filter`."""
ON_HOST = Need.PROCESSOR | Need.GRAMMAR
"""Needs for which the host must have seen the tokens before."""
OF_HISTORY = Need.PENALTY | Need.BAD_WORDS
"""Needs for which the device must know the tokens before."""
OF_TOKENS = ON_HOST | OF_HISTORY | Need.PROMPT_LOGPROBS
"""Needs for which an executor is told the tokens with which a sequence begins in a row."""

REASONS = {
    Need.TOP: "top_k or top_p",
    Need.MIN_P: "min_p",
    Need.PENALTY: "penalties",
    Need.BIAS: "logit_bias",
    Need.MIN_TOKENS: "min_tokens",
    Need.ALLOWED: "allowed_token_ids",
    Need.BAD_WORDS: "bad_words",
    Need.PROCESSOR: "logits_processors",
    Need.GRAMMAR: "structured_outputs",
    Need.LOGPROBS: "logprobs",
    Need.PROMPT_LOGPROBS: "prompt_logprobs",
}
"""The words of a request for each need, for EngineStats."""


def scale_of(params: SamplingParams) -> float:
    """1 / temperature, 0 for greedy; kept where it is neither 0 nor infinite as a float32.

    Times a logit of -inf or of 0 those would be NaN.
    """
    return 0.0 if params.greedy else max(1 / max(params.temperature, 2.0**-100), 2.0**-100)


def need_of(params: SamplingParams) -> Need:
    """Everything that the parameters ask for."""
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    words = params.bad_words_token_ids or ()
    wanted_by = {
        Need.TOP: not params.greedy and (params.top_k > 0 or params.top_p < 1),
        Need.MIN_P: not params.greedy and params.min_p > 0,
        Need.PENALTY: penalties != (1, 0, 0),
        Need.BIAS: bool(params.logit_bias) or any(len(word) == 1 for word in words),
        Need.MIN_TOKENS: params.min_tokens > 0,
        Need.ALLOWED: params.allowed_token_ids is not None,
        Need.BAD_WORDS: any(len(word) > 1 for word in words),
        Need.PROCESSOR: bool(params.logits_processors),
        Need.GRAMMAR: params.structured_outputs is not None,
        Need.LOGPROBS: params.logprobs is not None or params.num_drawn > params.n,
        Need.PROMPT_LOGPROBS: params.prompt_logprobs is not None,
    }
    found = Need(0)
    for need, wanted in wanted_by.items():
        if wanted:
            found |= need
    return found


def reasons_of(needs: int) -> tuple[str, ...]:
    """The words of those that are set."""
    return tuple(text for need, text in REASONS.items() if needs & need)


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


class ChangingRows(NamedTuple):
    """Rows of logits that change before their tokens are chosen, in host memory."""

    at: NDArray[numpy.int64]
    """[changing]: which of the step's rows each is."""
    needs: NDArray[numpy.int32]
    """[changing]: its `Need`s."""
    filters: NDArray[numpy.float32]
    """[4, any]: columns that are a `TokenFilter` each."""
    columns: NDArray[numpy.int64]
    """[changing]: which of them is its own."""

    @property
    def scales(self) -> NDArray[numpy.float32]:
        """1 / temperature, of rows that filter: float32 [changing]."""
        scales: NDArray[numpy.float32] = self.filters[0, self.columns]
        return scales

    @property
    def top_k(self) -> NDArray[numpy.float32]:
        """How many of the most likely tokens are all that a row's token depends on, float32 [changing]; 0: it depends on all."""
        top_k: NDArray[numpy.float32] = self.filters[1, self.columns] * (self.needs & SHAPING & ~FILTERING == 0)
        return top_k

    def only(self, some: NDArray[numpy.bool_]) -> ChangingRows:
        """Return some of them."""
        return ChangingRows(self.at[some], self.needs[some], self.filters, self.columns[some])


@dataclass
class Gathers:
    """Counts of what ranks have put together so that tokens could be chosen."""

    rows: int = 0
    """Rows whose logits were gathered whole."""
    candidates: int = 0
    """Rows of which each rank has sent its most likely tokens alone."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Rows that were gathered whole, by what asked for it; a row with several reasons counts under each."""


class Vocabulary(Protocol):
    """What chooses tokens from the logits that a model computes, [rows, width]."""

    @property
    def sampling(self) -> SamplingOps:
        """Operations on such logits, which may be captured."""

    def sample(self, logits: Tensor, draws: Draws, best: Tensor | None = None) -> Tensor:
        """Choose a token for each row: see `sampler.sample`."""

    def changing(self, logits: Tensor, rows: ChangingRows) -> Tensor:
        """Return logits of the whole vocabulary: of the rows that change, or of all of them.

        What a row's token does not depend on may be -inf.
        """

    def sample_changed(self, logits: Tensor, draws: Draws) -> Tensor:
        """Choose a token for each row of logits of the whole vocabulary."""

    def score(self, logits: Tensor, tokens: Tensor, k: int, reason: str) -> Scores:
        """Score tokens: see `logprobs.score`. reason: what asks for it."""

    def whole(self, logits: Tensor, reason: str) -> Tensor:
        """Return the logits of all rows over the whole vocabulary. reason: what asks for it."""

    def filtered_in_graph(self, filters: NDArray[numpy.float32], num_rows: int) -> None:
        """Take note that a graph of num_rows rows filters. filters: float32 [4, rows], see `Draws`."""

    def take_gathers(self) -> Gathers | None:
        """Return what ranks have put together since the last call; None where there is one rank."""


class WholeVocabulary:
    """The vocabulary of one rank: logits are those of all tokens."""

    def __init__(self, sampling: SamplingOps) -> None:
        self.sampling = sampling
        self.sample: Callable[..., Tensor] = partial(sample, ops=sampling)
        """See `Vocabulary`: nothing stands between a step and its choice."""
        self.sample_changed = self.sample

    def changing(self, logits: Tensor, rows: ChangingRows) -> Tensor:
        """See `Vocabulary`; all rows, as they are."""
        return logits

    def score(self, logits: Tensor, tokens: Tensor, k: int, reason: str) -> Scores:
        """See `Vocabulary`."""
        return score(logits, tokens, k)

    def whole(self, logits: Tensor, reason: str) -> Tensor:
        """See `Vocabulary`."""
        return logits

    def filtered_in_graph(self, filters: NDArray[numpy.float32], num_rows: int) -> None:
        """See `Vocabulary`."""

    def take_gathers(self) -> Gathers | None:
        """See `Vocabulary`."""
        return None
