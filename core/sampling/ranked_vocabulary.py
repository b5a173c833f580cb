"""Vocabulary sharded over ranks. Each rank chooses among the tokens of its shard. If possible, only one number per row is
exchanged."""

from __future__ import annotations

from dataclasses import replace

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.kernel import upload
from headway.core.contract.ranks import Ranks
from headway.core.sampling.logprobs import Scores, score
from headway.core.sampling.sampler import (
    NOT_A_TOKEN,
    REASONS,
    SHAPING,
    ChangingRows,
    Draws,
    Gathers,
    Need,
    SamplingOps,
    Vocabulary,
    WholeVocabulary,
    exponential,
    sample,
)

_LOW = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF


def pack(scores: Tensor, tokens: Tensor) -> Tensor:
    """Pack float32 scores and int64 tokens into int64 numbers that are ordered like the scores. The tokens are in the low bits,
    and NaN is the largest score."""
    # Adding 0 turns -0 into 0; NaNs have many bit patterns, with either sign.
    bits = torch.where(scores.isnan(), torch.nan, scores + 0.0).view(torch.int32).long()
    return (_in_order(bits) << 32) | (_LOW - tokens)


def tokens_of(numbers: Tensor) -> Tensor:
    """Return the tokens in packed numbers, int64."""
    return _LOW - (numbers & _LOW)


def scores_of(numbers: Tensor) -> Tensor:
    """Return the scores in packed numbers, float32."""
    return _in_order(numbers >> 32).to(torch.int32).view(torch.float32)


def _in_order(bits: Tensor) -> Tensor:
    """Convert the bits of floats to integers in the order of the floats, or back. The function is its own inverse."""
    return bits ^ ((bits >> 31) & _MAGNITUDE)


def best_of_part(logits: Tensor, scales: Tensor | None, keys: Tensor | None, first: int) -> Tensor:
    """Return each row's best token in a rank's shard, int64 [rows], packed by `pack`.

    logits: [rows, shard]. first: first token of the shard. The score of a token is its logit if `scales` is None or the row's
    scale is 0. Otherwise, it is the score that `sampler.draw` computes.
    """
    scores = logits.float()
    if scales is not None and keys is not None:
        drawn = scores * scales[:, None] - exponential(keys, logits.shape[1], first).log_()
        scores = torch.where(scales[:, None] > 0, drawn, scores)
    best, tokens = scores.max(dim=-1)
    return pack(best, tokens + first)


def winners(numbers: Tensor) -> Tensor:
    """Return the best token over all ranks: int64 [rows], NOT_A_TOKEN if a score is NaN. numbers: int64 [ranks, rows], packed by
    `pack`."""
    best = numbers.amax(dim=0)
    return torch.where(scores_of(best).isnan(), NOT_A_TOKEN, tokens_of(best))


def most_likely(logits: Tensor, k: int, first: int, scales: Tensor | None = None) -> Tensor:
    """Return each row's k most likely tokens in the shard, int64 [rows, k], packed by `pack`, best first. first: first token of
    the shard. scales: float32 [rows], or None."""
    own = logits.float()
    tokens = torch.arange(first, first + own.shape[1], device=own.device)
    at = pack(own if scales is None else own * scales[:, None], tokens).topk(k, dim=-1).indices
    return pack(own.gather(1, at), at + first)


_NUMBER = 8  # Bytes per candidate


def vocabulary_of(sampling: SamplingOps, size: int, ranks: Ranks) -> Vocabulary:
    """Return a vocabulary of `size` tokens for one or several ranks. sampling: operations on logits of all tokens."""
    return WholeVocabulary(sampling) if ranks.size == 1 else RankedVocabulary(sampling, size, ranks)


def join_logits(own: Tensor, size: int, ranks: Ranks) -> Tensor:
    """Return the logits gathered from all ranks: [rows, size]. own: this rank's logits, [rows, width]; see
    `Model.compute_logits`."""
    parts, width = ranks.all_gather(own.contiguous()), own.shape[1]
    return torch.cat([part[:, : size - rank * width] for rank, part in enumerate(parts) if rank * width < size], 1)


class RankedVocabulary:
    """`Vocabulary` of a rank that has the logits of its shard. All ranks call the same methods with the same rows."""

    def __init__(self, sampling: SamplingOps, size: int, ranks: Ranks) -> None:
        """sampling: operations on logits of the whole vocabulary. size: number of tokens in the vocabulary."""
        self._inner = sampling
        self._size = size
        self._ranks = ranks
        width = -(-size // ranks.size)
        self._first = ranks.rank * width
        self._held = min(max(size - self._first, 0), width)  # Tokens of this rank; further logits are -inf
        self._best = sampling.best_of_part or best_of_part
        self._winners = sampling.winners or winners
        self._gathers = Gathers()
        self.sampling = replace(
            sampling,
            greedy=lambda logits: self._agree(self._best(logits, None, None, self._first)),
            draw=self._draw,
            choose=None if sampling.choose is None else self._draw,
            filter=None if sampling.filter is None else self._filter,
        )

    def _draw(self, logits: Tensor, scales: Tensor, keys: Tensor) -> Tensor:
        return self._agree(self._best(logits, scales, keys, self._first))

    def _agree(self, best: Tensor) -> Tensor:
        # In the middle of a prompt no rank has rows.
        return best if len(best) == 0 else self._winners(self._ranks.all_gather(best))

    def _filter(self, logits: Tensor, others: Tensor, keys: Tensor, filters: Tensor) -> Tensor:
        """Filter and draw for all rows, in fixed shapes for CUDA graphs; see `Filter`."""
        assert self._inner.filter is not None
        return self._inner.filter(join_logits(logits, self._size, self._ranks), others, keys, filters)

    def sample(self, logits: Tensor, draws: Draws, best: Tensor | None = None) -> Tensor:
        if draws.filters is None:
            return sample(logits, draws, self.sampling, best)
        at = numpy.flatnonzero(draws.filters[0])
        filters = draws.filters[:, at]
        rows = self.changing(logits, ChangingRows(at, _needs_of(filters), draws.filters, at))
        drawn = sample(rows, Draws(draws.scales[at], draws.keys[at], filters), self._inner)
        if len(at) == len(logits):
            return drawn
        others = sample(logits, draws._replace(filters=None), self.sampling, best)
        return others.index_copy(0, self._up(at, logits), drawn)

    def sample_changed(self, logits: Tensor, draws: Draws) -> Tensor:
        return sample(logits, draws, self._inner)

    def changing(self, logits: Tensor, rows: ChangingRows) -> Tensor:
        """Return logits of only the changing rows; see `Vocabulary.changing`."""
        top_k = rows.top_k
        few = (top_k > 0) & self._fits(top_k, logits)
        self._gathers.candidates += int(few.sum())
        self._count(rows.needs[~few])
        if few.all():
            return self._candidates(logits, rows)
        if not few.any():
            return join_logits(self._some(logits, rows.at), self._size, self._ranks)
        out = logits.new_empty(len(rows.at), self._size)
        out.index_copy_(0, self._up(numpy.flatnonzero(few), logits), self._candidates(logits, rows.only(few)))
        whole = join_logits(self._some(logits, rows.at[~few]), self._size, self._ranks)
        return out.index_copy_(0, self._up(numpy.flatnonzero(~few), logits), whole)

    def _candidates(self, logits: Tensor, rows: ChangingRows) -> Tensor:
        """Return logits of all tokens, which are -inf except for each rank's most likely tokens. These include the most likely
        tokens overall."""
        scales = upload(torch.from_numpy(rows.scales), logits.device)
        k = int(rows.top_k.max())
        numbers = torch.cat(self._ranks.all_gather(most_likely(self._some(logits, rows.at), k, self._first, scales)).unbind(), 1)
        # A rank with few tokens sends some beyond the vocabulary.
        out = logits.new_full((len(numbers), self._ranks.size * logits.shape[1]), -torch.inf)
        return out.scatter_(1, tokens_of(numbers), scores_of(numbers).to(out.dtype))[:, : self._size]

    def score(self, logits: Tensor, tokens: Tensor, k: int, reason: str) -> Scores:
        """Return the scores of tokens; see `Vocabulary.score`. Ranks exchange the k best tokens and a sum of exponentials if
        these take fewer bytes than the logits."""
        if not self._fits(k, logits):
            return score(self.whole(logits, reason), tokens, k)
        own = logits.float()
        at = tokens.clamp_min(0)[:, None] - self._first
        is_own = (at >= 0) & (at < own.shape[1])
        picked = own.gather(1, at.clamp(0, own.shape[1] - 1))
        facts = self._ranks.all_gather(torch.stack([torch.where(is_own, picked, -torch.inf)[:, 0], own.logsumexp(-1)]))
        total = facts[:, 1].logsumexp(0)
        of_token = facts[:, 0].amax(0) - total
        likely = (own[:, : self._held] - total[:, None] >= of_token[:, None]).sum(-1)
        ranks = self._ranks.all_gather(likely).sum(0)
        if k == 0:
            return Scores(tokens[:, None], of_token[:, None], ranks)
        numbers = torch.cat(self._ranks.all_gather(most_likely(logits, k, self._first)).unbind(), 1).topk(k, dim=-1).values
        ids, values = tokens_of(numbers), scores_of(numbers) - total[:, None]
        return Scores(torch.cat([tokens[:, None], ids], 1), torch.cat([of_token[:, None], values], 1), ranks)

    def whole(self, logits: Tensor, reason: str) -> Tensor:
        self._gathers.rows += len(logits)
        self._gathers.reasons[reason] += len(logits)
        return join_logits(logits, self._size, self._ranks)

    def filtered_in_graph(self, filters: NDArray[numpy.float32], num_rows: int) -> None:
        """Count a graph's gathers; see `Vocabulary.filtered_in_graph`. A graph gathers all its rows."""
        needs = numpy.bitwise_or.reduce(_needs_of(filters))
        self._count(numpy.full(num_rows, needs, dtype=numpy.int32))

    def take_gathers(self) -> Gathers | None:
        taken = self._gathers
        self._gathers = Gathers()
        return taken

    def _count(self, needs: NDArray[numpy.int32]) -> None:
        self._gathers.rows += len(needs)
        for need, reason in REASONS.items():
            if need & SHAPING and (count := int(numpy.count_nonzero(needs & need))):
                self._gathers.reasons[reason] += count

    def _fits(self, k: NDArray[numpy.float32] | int, logits: Tensor) -> NDArray[numpy.bool_] | bool:
        """Return whether k candidates per rank take fewer bytes than the rank's shard of a row of logits."""
        fits: NDArray[numpy.bool_] | bool = _NUMBER * k <= logits.shape[1] * logits.element_size()
        return fits

    def _some(self, logits: Tensor, at: NDArray[numpy.int64]) -> Tensor:
        return logits if len(at) == len(logits) else logits.index_select(0, self._up(at, logits))

    def _up(self, numbers: NDArray[numpy.int64], logits: Tensor) -> Tensor:
        return upload(torch.from_numpy(numbers), logits.device)


def _needs_of(filters: NDArray[numpy.float32]) -> NDArray[numpy.int32]:
    """Return int32 [rows]: the needs that filters imply. filters: float32 [4, rows], one `TokenFilter` per column."""
    active, top_k, top_p, log_min_p = filters
    top = numpy.where((active > 0) & ((top_k > 0) | (top_p < 1)), int(Need.TOP), 0)
    likely = numpy.where((active > 0) & (log_min_p > -numpy.inf), int(Need.MIN_P), 0)
    return (top | likely).astype(numpy.int32)
