"""Which of a speculator's guesses hold: those that the model has sampled itself, up to the first that it has not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.contract.transfer import upload


@dataclass(frozen=True, slots=True)
class Verified:
    """What a verification found, on the device."""

    tokens: Tensor
    """int64 [rows, drafts + 1]: the tokens sampled after the newest one and after each draft; `counts` of them hold."""
    counts: Tensor
    """int64 [rows]: the drafts that hold, and the token after them."""
    newest: Tensor
    """int64 [rows]: the last token that holds."""


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
    counts = (sampled[:, :-1] == packed[:, 1:]).long().cumprod(1).sum(1) + 1
    return Verified(sampled, counts, sampled.gather(1, counts[:, None] - 1)[:, 0])
