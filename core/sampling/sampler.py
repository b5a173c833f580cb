"""Sampling of one token per row of logits: needs that follow from each row's parameters, draws, and the vocabulary interface."""

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
    """Flags for operations and data that sampling a token needs, according to the request's parameters."""

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
"""Needs that change the logits before a token is sampled."""
FILTERING = Need.TOP | Need.MIN_P
"""Needs that a kernel may meet without changing the logits; see `SamplingOps.filter`."""
ON_HOST = Need.PROCESSOR | Need.GRAMMAR
"""Needs for which the host must know the previous tokens."""
OF_HISTORY = Need.PENALTY | Need.BAD_WORDS
"""Needs for which the device must know the previous tokens."""
OF_TOKENS = ON_HOST | OF_HISTORY | Need.PROMPT_LOGPROBS
"""Needs for which an executor receives the tokens of a sequence when the sequence begins in a row."""

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
"""Need -> name of the request parameter that causes it, for EngineStats."""


def scale_of(params: SamplingParams) -> float:
    """Return 1 / temperature, or 0 for greedy sampling. Without greedy sampling, the result is never 0 or infinite in float32,
    because it is multiplied by -inf and 0."""
    return 0.0 if params.greedy else max(1 / max(params.temperature, 2.0**-100), 2.0**-100)


def need_of(params: SamplingParams) -> Need:
    """Return all needs that the parameters cause."""
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
    """Return the names of the request parameters that cause these needs."""
    return tuple(text for need, text in REASONS.items() if needs & need)


NOT_A_TOKEN = -1
"""Value instead of a token for a row whose logits contain a NaN."""
NO_TOKEN_LEFT = -2
"""Value instead of a token for a row without any allowed token."""


def greedy(logits: Tensor) -> Tensor:
    """Return the most likely token of each row of logits [rows, vocab_size]: int64 [rows], NOT_A_TOKEN if a logit is NaN."""
    tokens = argmax(logits)  # NaN is treated as the largest number
    if _in_numpy(logits):
        found, scores = tokens.numpy(), logits.numpy()
        found[numpy.isnan(scores[numpy.arange(len(scores)), found])] = NOT_A_TOKEN
        return tokens
    best = logits.gather(-1, tokens[:, None])[:, 0]
    return torch.where(best.isnan(), NOT_A_TOKEN, tokens)


def argmax(scores: Tensor) -> Tensor:
    """Return the first of the largest elements of each row of scores [rows, vocab_size]: int64 [rows]."""
    return torch.from_numpy(scores.numpy().argmax(axis=-1)) if _in_numpy(scores) else scores.argmax(dim=-1)


def _in_numpy(scores: Tensor) -> bool:
    """Return whether NumPy searches the scores. On a CPU it is ten times as fast as torch."""
    return scores.device.type == "cpu" and scores.dtype == torch.float32


Draw = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function (logits [rows, vocab_size], scales float32 [rows], keys int64 [rows]) -> tokens int64 [rows], with the same meaning as
`draw`."""


def draw(logits: Tensor, scales: Tensor, keys: Tensor) -> Tensor:
    """Return a token for each row, drawn from softmax(logits * scale), where scale = 1 / temperature. Equal keys and logits give
    equal draws."""
    # The argmax of logit - log(e), with e from Exp(1), is a draw from the softmax (Gumbel-max), without a sum over the row.
    noise = exponential(keys, logits.shape[-1])
    return argmax(logits.float() * scales[:, None] - noise.log_())


Filter = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function (logits [rows, vocab_size], others int64 [rows], keys int64 [rows], filters float32 [4, rows]) -> tokens int64 [rows].

Each column of filters is a `filtering.TokenFilter`. The token is drawn (see `draw`) from the filtered logits times the scale. A
row with a NaN logit gets NOT_A_TOKEN. A row with scale 0 gets its token from `others`.
"""


BestOfPart = Callable[[Tensor, Tensor | None, Tensor | None, int], Tensor]
"""Function (logits [rows, shard], scales, keys, first token of the shard) -> int64 [rows], like `ranked_vocabulary.best_of_part`.
scales and keys are as for `Draw`, or None."""


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """Operations that sample tokens. Kernels replace torch's operations if they are faster and give the same tokens."""

    greedy: Callable[[Tensor], Tensor] = greedy
    draw: Draw = draw
    choose: Draw | None = None
    """Kernel that samples both drawn and greedy rows: like `draw`, but a row with scale 0 is greedy, and NOT_A_TOKEN if a logit
    is NaN. None if no such kernel is available."""
    filter: Filter | None = None
    """Kernel that draws from the tokens that remain after top_k, top_p and min_p. None means that torch's operations filter the
    logits first."""
    best_of_part: BestOfPart | None = None
    """Kernel that returns the best token in a rank's shard. None means `ranked_vocabulary.best_of_part`."""
    winners: Callable[[Tensor], Tensor] | None = None
    """Kernel that returns the best token over all ranks. None means `ranked_vocabulary.winners`."""
    accept_drafts: AcceptDrafts = accept_drafts
    """Function that compares drafts with the tokens sampled at their positions."""


TORCH_SAMPLING = SamplingOps()
"""Sampling operations of torch, for any device."""


class Draws(NamedTuple):
    """Scales, keys and filters for sampling some rows."""

    scales: NDArray[numpy.float32]
    """float32 [rows]: 1 / temperature. 0 for greedy rows, and for rows with `filters`."""
    keys: NDArray[numpy.int64]
    """int64 [rows]: keys of the random numbers, see `keys_of`."""
    filters: NDArray[numpy.float32] | None = None
    """float32 [4, rows]: one `TokenFilter` per row, with scale 0 for rows that do not filter. None if no rows filter, or without
    a filter kernel."""


def sample(logits: Tensor, draws: Draws, ops: SamplingOps = TORCH_SAMPLING, best: Tensor | None = None) -> Tensor:
    """Return the next token of each row: int64 [rows], NOT_A_TOKEN if a logit is NaN.

    logits: [rows, vocab_size]. best: result of `greedy`, if known. A row's token depends only on the row's logits, scale, key and
    filter. Batching, preemption, and dropped tokens that were sampled in advance do not change it.
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
    # One copy for all host data: a copy costs more than its content.
    packed = numpy.stack([rows, draws.keys[rows], draws.scales[rows].astype(numpy.float64).view(numpy.int64)])
    at, keys, bits = upload(torch.from_numpy(packed), logits.device)
    some = len(rows) < len(logits)
    drawn = ops.draw(logits.index_select(0, at) if some else logits, bits.view(torch.float64).float(), keys)
    drawn = torch.where((best.index_select(0, at) if some else best) == NOT_A_TOKEN, NOT_A_TOKEN, drawn)
    return best.index_copy(0, at, drawn) if some else drawn


def _filtered(logits: Tensor, draws: Draws, filters: NDArray[numpy.float32], ops: SamplingOps, best: Tensor | None) -> Tensor:
    assert ops.filter is not None
    # Contiguous copies of the selected columns, because kernels read rows.
    bits = filters.astype(numpy.float64, order="C").view(numpy.int64)
    keys, *numbers = upload(torch.from_numpy(numpy.concatenate([draws.keys[None], bits])), logits.device)
    others = keys if filters[0].all() else sample(logits, draws._replace(filters=None), ops, best)
    return ops.filter(logits, others, keys, torch.stack(numbers).view(torch.float64).float())


LANES = 128
"""Distance in columns between consecutive numbers of one counter. Neighbouring columns thus use neighbouring counters, which
suits kernels."""


def exponential(keys: Tensor, num_tokens: int, first: int = 0) -> Tensor:
    """Return Exp(1) random numbers, float32 [rows, num_tokens], from counters instead of a generator's state (Salmon et al.
    2011).

    Each number depends only on its row's key and its token, so a draw can be repeated, dropped or batched without changing any
    other draw. first: token of the first column.
    """
    before, skipped = divmod(first, 4 * LANES)
    groups = -(-(skipped + num_tokens) // (4 * LANES))
    zero = torch.zeros((), dtype=torch.int64, device=keys.device)
    counter = torch.arange(before * LANES, (before + groups) * LANES, device=keys.device), zero, zero, zero
    words = philox(counter, (keys[:, None] & _WORD, (keys[:, None] >> 32) & _WORD))
    bits = torch.stack([word.view(-1, groups, LANES) for word in words], dim=2).flatten(1)[:, skipped : skipped + num_tokens]
    # All 32 bits, though a float32 near 1 holds only 24: small numbers keep their digits, and they decide the argmax. The step is
    # slightly below 2^-32, or the largest number would round to 1, and the half step excludes 0: neither has a finite logarithm.
    uniform = bits.float() * (2.0**-32 - 2.0**-56) + 2.0**-33
    return -torch.log1p(-uniform)  # log1p keeps the digits of small numbers, which log(1 - u) loses


_WORD = 0xFFFFFFFF
_Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: _Words, key: tuple[Tensor, Tensor]) -> _Words:
    """Return Philox4x32-7 random numbers (Salmon et al. 2011). Seven rounds are the fewest that pass every test of BigCrush.

    A counter gives four numbers. Each round takes two 32-bit multiplications, which are fast on a GPU. Words are int64 from 0 to
    2^32 - 1, because torch has no uint32 arithmetic. A multiplication may overflow, but the bits that are used are correct.
    """
    (a, b, c, d), (left, right) = counter, key
    for _ in range(7):
        first, third = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = ((third >> 32) & _WORD) ^ b ^ left, third & _WORD
        c, d = ((first >> 32) & _WORD) ^ d ^ right, first & _WORD
        left, right = (left + 0x9E3779B9) & _WORD, (right + 0xBB67AE85) & _WORD
    return a, b, c, d


def keys_of(seeds: Sequence[int] | NDArray[numpy.uint64], positions: Sequence[int] | NDArray[Any]) -> NDArray[numpy.uint64]:
    """Return the keys of the random numbers for draws: SplitMix64 (Steele et al. 2014) of seed and position, uint64 [rows]."""

    def mix(x: NDArray[Any]) -> NDArray[Any]:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        mixed: NDArray[Any] = x ^ (x >> 31)
        return mixed

    golden = 0x9E3779B97F4A7C15
    return mix(mix(_unsigned(seeds) * golden) + _unsigned(positions) * golden)


def seed_of(seed: int, index: int) -> int:
    """Return the seed of one completion. The first completion uses the request's seed. The others use keys of unused positions,
    because seed + index could be the seed of a different request."""
    return seed if index == 0 else int(keys_of([seed], [-index])[0])


def _unsigned(values: Sequence[int] | NDArray[Any]) -> NDArray[numpy.uint64]:
    if isinstance(values, numpy.ndarray):
        return values.astype(numpy.uint64)
    # Seeds are integers of any sign, and a derived one may exceed an int64.
    return numpy.array([each % 2**64 for each in values], dtype=numpy.uint64)


class ChangingRows(NamedTuple):
    """Rows whose logits change before their tokens are sampled; the arrays are in host memory."""

    at: NDArray[numpy.int64]
    """int64 [number of changing rows]: index of each row among the step's rows of logits."""
    needs: NDArray[numpy.int32]
    """int32 [number of changing rows]: `Need` flags."""
    filters: NDArray[numpy.float32]
    """float32 [4, number of columns]: one `TokenFilter` per column."""
    columns: NDArray[numpy.int64]
    """int64 [number of changing rows]: column of `filters` for each row."""

    @property
    def scales(self) -> NDArray[numpy.float32]:
        """float32 [number of changing rows]: scale of each row's `TokenFilter`. 0 for rows that do not filter."""
        scales: NDArray[numpy.float32] = self.filters[0, self.columns]
        return scales

    @property
    def top_k(self) -> NDArray[numpy.float32]:
        """float32 [number of changing rows]: number of most likely tokens from which each row's token is sampled. 0 means
        all tokens."""
        top_k: NDArray[numpy.float32] = self.filters[1, self.columns] * (self.needs & SHAPING & ~FILTERING == 0)
        return top_k

    def only(self, some: NDArray[numpy.bool_]) -> ChangingRows:
        """Return the rows for which `some` is True."""
        return ChangingRows(self.at[some], self.needs[some], self.filters, self.columns[some])


@dataclass
class Gathers:
    """Counts of logits rows that ranks gathered for sampling."""

    rows: int = 0
    """Number of rows whose logits were gathered in full."""
    candidates: int = 0
    """Number of rows for which each rank sent only its most likely tokens."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Parameter -> number of rows gathered in full because of it. A row counts for each of its parameters that need this."""


class Vocabulary(Protocol):
    """Interface that samples tokens from the logits that a model computes, [rows, width]."""

    @property
    def sampling(self) -> SamplingOps:
        """Operations on the model's logits, which may be captured in a CUDA graph."""

    def sample(self, logits: Tensor, draws: Draws, best: Tensor | None = None) -> Tensor:
        """Return a token for each row; see `sampler.sample`."""

    def changing(self, logits: Tensor, rows: ChangingRows) -> Tensor:
        """Return logits of all tokens, either for all rows or only for the changing rows. Logits on which a row's token does not
        depend may be -inf."""

    def sample_changed(self, logits: Tensor, draws: Draws) -> Tensor:
        """Return a token for each row of changed logits, which cover the whole vocabulary."""

    def score(self, logits: Tensor, tokens: Tensor, k: int, reason: str) -> Scores:
        """Return the scores of tokens; see `logprobs.score`. reason: name of the parameter that needs the scores."""

    def whole(self, logits: Tensor, reason: str) -> Tensor:
        """Return the logits of all rows over the whole vocabulary. reason: name of the parameter that needs the logits."""

    def filtered_in_graph(self, filters: NDArray[numpy.float32], num_rows: int) -> None:
        """Count the gathers of a graph that filters `num_rows` rows. filters: float32 [4, rows]; see `Draws.filters`."""

    def take_gathers(self) -> Gathers | None:
        """Return the counts of gathers since the last call, or None if there is only one rank."""


class WholeVocabulary:
    """Vocabulary of one rank, whose logits cover all tokens."""

    def __init__(self, sampling: SamplingOps) -> None:
        self.sampling = sampling
        self.sample: Callable[..., Tensor] = partial(sample, ops=sampling)
        """The function `sampler.sample` with this vocabulary's operations, without the cost of a wrapper."""
        self.sample_changed = self.sample

    def changing(self, logits: Tensor, rows: ChangingRows) -> Tensor:
        """Return all logits unchanged; see `Vocabulary.changing`."""
        return logits

    def score(self, logits: Tensor, tokens: Tensor, k: int, reason: str) -> Scores:
        """Return the scores of tokens; see `logprobs.score`."""
        return score(logits, tokens, k)

    def whole(self, logits: Tensor, reason: str) -> Tensor:
        """Return the logits unchanged."""
        return logits

    def filtered_in_graph(self, filters: NDArray[numpy.float32], num_rows: int) -> None:
        """Do nothing: one rank gathers nothing."""

    def take_gathers(self) -> Gathers | None:
        """Return None, because one rank gathers nothing."""
        return None
