"""Verification of drafts: those are accepted that the model has sampled itself, up to the first that it has not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.contract.kernel import upload


class Verified(NamedTuple):
    """The outcome of a verification, on the device."""

    tokens: Tensor
    """int64 [rows, drafts + 2]: the tokens sampled after the newest one and after each draft, and at the end how many of them
    are accepted: drafts, and the token after them. One tensor, for a copy to the host costs more than what it carries."""
    newest: Tensor
    """int64 [rows]: the last accepted token."""


AcceptDrafts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(sampled int64 [n, width], ids int64 [n, width], recomputed, rows int64 [n], newest) -> tokens, like `accept_drafts`."""


def accept_drafts(sampled: Tensor, ids: Tensor, recomputed: Tensor, rows: Tensor, newest: Tensor) -> Tensor:
    """Compare drafts with the tokens sampled in their positions: `Verified.tokens`; what follows the width of a row is void.

    ids: the query tokens of each sequence; the first `recomputed` of them are not new. sampled: what came after each of them. The
    last accepted token goes to the sequence's row of newest.
    """
    width, recomputed = sampled.shape[1], recomputed[:, None]
    columns = torch.arange(width, device=sampled.device)
    accepted = (sampled[:, :-1] == ids[:, 1:]) | (columns[:-1] < recomputed)
    counts = accepted.long().cumprod(1).sum(1, keepdim=True) + 1 - recomputed
    newest.index_copy_(0, rows, sampled.gather(1, recomputed + counts - 1)[:, 0])
    return torch.cat([sampled.gather(1, (recomputed + columns).clamp_max(width - 1)), counts], dim=1)


def verify(tokens: Tensor, drafts: Sequence[Sequence[int]]) -> Verified:
    """Compare drafts with the tokens sampled in their positions, without waiting for the device.

    tokens: int64 [sum of drafts + 1], row by row. A draw depends on seed and position alone, so a draft that equals what is drawn
    in its position is what would have been drawn without drafts: neither greedy nor drawn tokens change, and no draft is accepted
    by chance (compare Leviathan et al. 2023, who accept more of them and keep the distribution only).
    """
    most = max(map(len, drafts))
    # One copy: where each row's tokens begin, and its drafts; what fills up a row equals no token.
    starts = torch.tensor([0, *(len(guessed) + 1 for guessed in drafts)])[:-1].cumsum(0)
    padded = torch.tensor([[*guessed, *[-2] * (most - len(guessed))] for guessed in drafts]).view(len(drafts), most)
    packed = upload(torch.cat([starts[:, None], padded], dim=1), tokens.device)
    indices = packed[:, :1] + torch.arange(most + 1, device=tokens.device)
    sampled = tokens[indices.clamp_max(len(tokens) - 1)]  # beyond a row's own tokens nothing is accepted
    counts = (sampled[:, :-1] == packed[:, 1:]).long().cumprod(1).sum(1, keepdim=True) + 1
    return Verified(torch.cat([sampled, counts], dim=1), sampled.gather(1, counts - 1)[:, 0])
