"""The short causal convolution before a recurrence: its outputs, and the inputs that it has to remember."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from headway.core.contract.state import StateParameters, StateSpec


def convolve(spec: StateSpec, parameters: StateParameters, x: Tensor) -> Tensor:
    """Convolve each channel with its taps and apply the activation.

    x: float32 [n, conv_width - 1 + L, channels], a token's predecessors first; returns float32 [n, L, channels].
    """
    assert parameters.conv_weight is not None
    first, *taps = parameters.conv_weight.float().unbind(1)
    length, bias = x.shape[1] - spec.conv_width + 1, parameters.conv_bias
    out = x[:, :length] * first if bias is None else torch.addcmul(bias.float(), x[:, :length], first)
    for place, tap in enumerate(taps, start=1):
        out.addcmul_(x[:, place : place + length], tap)
    return silu(out, inplace=True) if spec.activation == "silu" else out


def remembered(history: Tensor, x: Tensor, at: Tensor, from_history: Tensor) -> Tensor:
    """Return the inputs that a convolution's state holds after some tokens, for each of M states.

    history: [num_seqs, conv_width - 1, channels], what was remembered before the step; x: [num_tokens, channels];
    at: int64 [M, conv_width - 1], rows of x, or of history seen as [num_seqs * (conv_width - 1), channels] where
    from_history, bool [M, conv_width - 1], says so. Returns [M, channels, conv_width - 1].
    """
    flat = at.flatten()
    new = x.index_select(0, flat.clamp(max=x.shape[0] - 1))
    old = history.flatten(0, 1)
    old = old.index_select(0, flat.clamp(max=old.shape[0] - 1))
    rows = torch.where(from_history.flatten()[:, None], old, new)
    return torch.unflatten(rows, 0, at.shape).transpose(1, 2)
