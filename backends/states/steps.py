"""Recurrences one token at a time, for sequences that decode."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headway.backends.states.chunks import widen
from headway.backends.states.operands import Operands


def step_tokens(inputs: Operands, state: Tensor, after: Callable[[int, Tensor], None]) -> Tensor:
    """Run the recurrence token by token and return the output, float32 [n, L, H, V].

    state: float32 [n, H, K, V], overwritten; after(i, state) is called with the state after token i, which must not be kept.
    """
    heads, v, beta = inputs.v.shape[2], inputs.v, inputs.beta
    q, k = widen(inputs.q, heads), widen(inputs.k, heads)
    decays = inputs.g.exp()[..., None] if inputs.g.dim() == 4 else inputs.g.exp()[..., None, None]  # [n, L, H, 1 or K, 1]
    rows = []
    for i in range(v.shape[1]):
        state.mul_(decays[:, i])
        added = v[:, i, :, None]  # [n, H, 1, V]
        if beta is not None:
            added = (added - k[:, i, :, None] @ state) * beta[:, i, :, None, None]
        state.addcmul_(k[:, i, :, :, None], added)
        rows.append(q[:, i, :, None] @ state)
        after(i, state)
    out = torch.cat(rows, dim=2).transpose(1, 2) if len(rows) > 1 else rows[0].transpose(1, 2)
    return out if inputs.skip is None else out + inputs.skip
