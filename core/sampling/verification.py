"""Verification of drafts. Drafts are accepted as long as the model sampled the same tokens, up to the first mismatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.contract.kernel import upload


class Verified(NamedTuple):
    """Outcome of a verification, on the device."""

    tokens: Tensor
    """int64 [rows, drafts + 2]: the tokens sampled after the newest token and after each draft, then the number of accepted
    tokens (drafts and the next token). Both are in one tensor, because starting a copy to the host costs more than copying these
    bytes."""
    newest: Tensor
    """int64 [rows]: the last accepted token."""


AcceptDrafts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function (sampled int64 [n, width], ids int64 [n, width], recomputed int64 [n], rows int64 [n], newest) -> tokens, with the
same meaning as `accept_drafts`."""


def accept_drafts(sampled: Tensor, ids: Tensor, recomputed: Tensor, rows: Tensor, newest: Tensor) -> Tensor:
    """Compare drafts with the tokens sampled at their positions. Returns `Verified.tokens`. Entries after the last query token of
    a row are invalid.

    ids: query tokens of each sequence, of which the first `recomputed` are not new. sampled: token sampled after each query
    token. rows: row of each sequence in `newest`. newest: receives the last accepted token of each row.
    """
    width, recomputed = sampled.shape[1], recomputed[:, None]
    columns = torch.arange(width, device=sampled.device)
    accepted = (sampled[:, :-1] == ids[:, 1:]) | (columns[:-1] < recomputed)
    counts = accepted.long().cumprod(1).sum(1, keepdim=True) + 1 - recomputed
    newest.index_copy_(0, rows, sampled.gather(1, recomputed + counts - 1)[:, 0])
    return torch.cat([sampled.gather(1, (recomputed + columns).clamp_max(width - 1)), counts], dim=1)


def verify(tokens: Tensor, drafts: Sequence[Sequence[int]]) -> Verified:
    """Return the verification of drafts against the tokens sampled at their positions, without waiting for the device.

    tokens: int64 [sum of drafts + 1], row by row. A draw depends only on seed and position, so an accepted draft is the token
    that would have been drawn without drafts. Greedy and drawn tokens thus stay the same, and no draft is accepted by chance.
    (Leviathan et al. 2023 accept more drafts, but preserve only the distribution.)
    """
    most = max(map(len, drafts))
    # One copy holds the start of each row's tokens, and its drafts; padding equals no token.
    starts = torch.tensor([0, *(len(guessed) + 1 for guessed in drafts)])[:-1].cumsum(0)
    padded = torch.tensor([[*guessed, *[-2] * (most - len(guessed))] for guessed in drafts]).view(len(drafts), most)
    packed = upload(torch.cat([starts[:, None], padded], dim=1), tokens.device)
    indices = packed[:, :1] + torch.arange(most + 1, device=tokens.device)
    sampled = tokens[indices.clamp_max(len(tokens) - 1)]  # tokens past a row's own are never accepted
    counts = (sampled[:, :-1] == packed[:, 1:]).long().cumprod(1).sum(1, keepdim=True) + 1
    return Verified(torch.cat([sampled, counts], dim=1), sampled.gather(1, counts - 1)[:, 0])
