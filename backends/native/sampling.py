"""The most likely tokens of logits on a CPU by our C: torch's maximum with its place takes a row number by number."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.backends.native.library import TYPES, Functions, GreedyStruct
from headway.core.sampling.sampler import NOT_A_TOKEN, greedy


class NativeGreedy:
    """What `core.sampling.sampler.greedy` computes, ties decided alike: the first token of the largest logits."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions

    def __call__(self, logits: Tensor) -> Tensor:
        """See `greedy`. Other element types, and rows that do not lie side by side in memory, are left to torch."""
        if logits.dtype not in TYPES or logits.dim() != 2 or logits.stride(1) != 1 or not logits.shape[1]:
            return greedy(logits)
        rows, size = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        self._functions.greedy(
            GreedyStruct(logits.data_ptr(), tokens.data_ptr(), rows, logits.stride(0), size, NOT_A_TOKEN, TYPES[logits.dtype])
        )
        return tokens
