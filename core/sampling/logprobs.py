"""Log-probabilities of tokens, and their ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a candidate token, with vLLM's field names."""

    logprob: float
    """Log-softmax of the model's own logits, before temperature, penalties and any other change."""
    rank: int | None = None
    """Rank of the token: 1 for the most likely token."""
    decoded_token: str | None = None


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position of a sequence, as plain data. First comes the token at the position, then the most likely
    tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int
    """Rank of the token at the position. The ranks of the other tokens are 1, 2, 3, ..."""


class Scores(NamedTuple):
    """Log-probabilities at several positions, as tensors."""

    token_ids: Tensor
    """int64 [n, k + 1]: the token at each position, then the k most likely tokens."""
    logprobs: Tensor
    """float32 [n, k + 1]: log-probabilities of `token_ids`."""
    ranks: Tensor
    """int64 [n]: rank of the token at each position."""

    def at(self, index: int, k: int) -> TokenLogprobs:
        """Return the log-probabilities of one position, with the k most likely tokens, on the host."""
        ids, logprobs = self.token_ids[index, : k + 1], self.logprobs[index, : k + 1]
        return TokenLogprobs(tuple(ids.tolist()), tuple(logprobs.tolist()), int(self.ranks[index]))


def score(logits: Tensor, tokens: Tensor, k: int) -> Scores:
    """Return log-probabilities and ranks of `tokens`, int64 [rows], and log-probabilities of the k most likely tokens. logits:
    [rows, vocab_size]."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, tokens.clamp_min(0)[:, None])
    ranks = (logprobs >= own).sum(-1)
    values, ids = logprobs.topk(k, dim=-1)
    return Scores(torch.cat([tokens[:, None], ids], 1), torch.cat([own, values], 1), ranks)
