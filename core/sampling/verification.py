"""Which of a speculator's guesses hold: those that the model has sampled itself, up to the first that it has not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.contract.transfer import upload


class Verified(NamedTuple):
    """What a verification found, on the device."""

    tokens: Tensor
    """int64 [rows, drafts + 2]: the tokens sampled after the newest one and after each draft, and at the end how many of them
    hold: the drafts that do, and the token after them. One tensor, for a copy to the host costs more than what it carries."""
    newest: Tensor
    """int64 [rows]: the last token that holds."""


Hold = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(sampled int64 [rows, width], ids int64 [rows, width], fill, places int64 [rows], newest) -> tokens, like `hold`."""


def hold(sampled: Tensor, ids: Tensor, fill: Tensor, places: Tensor, newest: Tensor) -> Tensor:
    """Compare drafts with the tokens sampled in their places: `Verified.tokens`; what follows the width of a row is void.

    ids: the query tokens of each row; the first `fill` of them are no new ones. sampled: what came after each of them. The last
    token that holds goes to its row's place in newest.
    """
    width, fill = sampled.shape[1], fill[:, None]
    columns = torch.arange(width, device=sampled.device)
    holds = (sampled[:, :-1] == ids[:, 1:]) | (columns[:-1] < fill)
    counts = holds.long().cumprod(1).sum(1, keepdim=True) + 1 - fill
    newest.index_copy_(0, places, sampled.gather(1, fill + counts - 1)[:, 0])
    return torch.cat([sampled.gather(1, (fill + columns).clamp_max(width - 1)), counts], dim=1)


def verify(tokens: Tensor, drafts: Sequence[Sequence[int]]) -> Verified:
    """Compare drafts with the tokens sampled in their places, without waiting for the device.

    tokens: int64 [sum of drafts + 1], row by row. A draw depends on seed and position alone, so a draft that equals what is drawn
    in its place is what would have been drawn without drafts: neither greedy nor drawn tokens change, and no draft is accepted
    by chance (compare Leviathan et al. 2023, who accept more of them and keep the distribution only).
    """
    most = max(map(len, drafts))
    # One copy: where each row's tokens begin, and its drafts; a guess that nobody made equals no token.
    starts = torch.tensor([0, *(len(guessed) + 1 for guessed in drafts)])[:-1].cumsum(0)
    padded = torch.tensor([[*guessed, *[-2] * (most - len(guessed))] for guessed in drafts]).view(len(drafts), most)
    packed = upload(torch.cat([starts[:, None], padded], dim=1), tokens.device)
    places = packed[:, :1] + torch.arange(most + 1, device=tokens.device)
    sampled = tokens[places.clamp_max(len(tokens) - 1)]  # beyond a row's own tokens nothing holds
    counts = (sampled[:, :-1] == packed[:, 1:]).long().cumprod(1).sum(1, keepdim=True) + 1
    return Verified(torch.cat([sampled, counts], dim=1), sampled.gather(1, counts - 1)[:, 0])
