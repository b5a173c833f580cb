"""The rule of who sees whom, in one place: causal from the bottom right, sliding window, ALiBi."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.core.contract.spec import AttentionSpec


def visible(query_positions: Tensor, key_positions: Tensor, spec: AttentionSpec) -> Tensor:
    """Whether a query at one position sees a key at another (positions broadcast): bool.

    Causal; with a window of w keys a query at p sees p - w + 1 .. p, itself included (transformers' and Mistral's meaning).
    """
    distance = query_positions - key_positions
    seen = distance >= 0
    if spec.sliding_window is not None:
        seen &= distance < spec.sliding_window
    return seen


def alibi(query_positions: Tensor, key_positions: Tensor, spec: AttentionSpec) -> Tensor:
    """ALiBi bias -slope * distance, float32 [num_heads, *broadcast positions]."""
    assert spec.alibi_slopes is not None
    distance = (query_positions - key_positions).float()
    slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=distance.device)
    return -slopes.view(-1, *[1] * distance.dim()) * distance
