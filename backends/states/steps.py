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
    heads = inputs.v.shape[2]
    q, k = widen(inputs.q, heads), widen(inputs.k, heads)
    decays = inputs.g.exp() if inputs.g.dim() == 4 else inputs.g.exp()[..., None]  # [n, L, H, 1 or K]
    # S^T k and S^T q of the decayed state, in one reading of the state: (decay k)^T S and (decay q)^T S.
    reads = torch.stack((k, q), dim=3) * decays[..., None, :]
    shares = (q * k).sum(-1, keepdim=True)  # what the token itself adds to its output
    out = torch.empty_like(inputs.v)
    for i in range(out.shape[1]):
        known, answer = (reads[:, i] @ state).unbind(2)  # [n, H, V] each
        value = inputs.v[:, i]
        added = value if inputs.beta is None else (value - known) * inputs.beta[:, i, :, None]
        torch.addcmul(answer, shares[:, i], added, out=out[:, i])
        state.mul_(decays[:, i, :, :, None]).addcmul_(k[:, i, :, :, None], added[:, :, None, :])
        after(i, state)
    return out if inputs.skip is None else out.add_(inputs.skip)
