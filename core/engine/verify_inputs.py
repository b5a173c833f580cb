"""The inputs of steps that verify drafts: one buffer on the device, and what it is filled from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.engine.graph import GraphStep
from headway.core.engine.sent_tables import SentTables
from headway.core.sampling.filtering import NO_FILTER

_ALIGN = 4
"""Fields begin at multiples of 16 bytes, which kernels may rely on."""


class VerifyFields(NamedTuple):
    """The inputs of a step in one piece of int32 memory. n sequences of w query tokens, g cache groups."""

    ids: Tensor
    """int64 [n, w]; the host knows all of them, for guesses are made from tokens that have been read."""
    keys: Tensor
    """int64 [n, w]: of the draws."""
    slots: Tensor
    """int64 [g, n, w]"""
    rows: Tensor
    """int64 [n]: places in `newest`."""
    fill: Tensor
    """int64 [n]: how many of a sequence's tokens stand before its new ones."""
    positions: Tensor
    """int32 [n, w]"""
    scales: Tensor
    """float32 [n, w]: of the draws."""
    filters: Tensor
    """float32 [4, n, w]: a `TokenFilter` each."""
    seq_lens: Tensor
    """int32 [n]"""
    context_lens: Tensor
    """int32 [n]"""
    tables: Tensor
    """int32 [g, n, blocks]"""

    @classmethod
    def of(cls, flat: Tensor, size: int, width: int, groups: int, blocks: int) -> tuple[VerifyFields, int]:
        """Views of a flat buffer, and how much of it they take."""
        shapes: list[tuple[torch.dtype, tuple[int, ...]]] = [
            *[(torch.int64, (size, width))] * 2,
            (torch.int64, (groups, size, width)),
            *[(torch.int64, (size,))] * 2,
            (torch.int32, (size, width)),
            (torch.float32, (size, width)),
            (torch.float32, (len(NO_FILTER), size, width)),
            *[(torch.int32, (size,))] * 2,
            (torch.int32, (groups, size, blocks)),
        ]
        views, end = [], 0
        for dtype, shape in shapes:
            length = math.prod(shape) * dtype.itemsize // 4
            views.append(flat[end : end + length].view(dtype).view(shape))
            end += -(-length // _ALIGN) * _ALIGN
        return cls(*views), end


class _HostBuffer:
    """Host memory from which a step's inputs are sent, as arrays for one graph at a time."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self._shape: tuple[int, int, int, int] | None = None

    def lay_out(self, shape: tuple[int, int, int, int]) -> None:
        """Become arrays for (size, width, groups, blocks), if it is not that already."""
        if self._shape != shape:
            self._shape = shape
            self.fields, length = VerifyFields.of(self.flat, *shape)
            self.arrays = [field.numpy() for field in self.fields]
            self.sent, self.sent_tables = self.flat[:length], SentTables(self.arrays[-1])


class VerifyInputs:
    """One device buffer for the inputs of every graph, and two in pinned memory: one may be on its way while one is filled."""

    def __init__(self, largest: Sequence[tuple[int, int]], step: GraphStep) -> None:
        """largest: (size, width) of graphs, none of which may need more than the buffer has."""
        blocks = -(-step.max_model_len // step.block_size)
        self.groups, self.blocks = len(step.num_blocks), -(-blocks // _ALIGN) * _ALIGN
        tokens, fields = max(size * width for size, width in largest), 11
        most = max(size for size, _ in largest)
        length = (
            (2 * (2 + self.groups) + 2 + len(NO_FILTER)) * tokens
            + (2 * 2 + 2 + self.groups * self.blocks) * most
            + fields * _ALIGN
        )
        device = step.newest.device
        self.device = torch.zeros(length, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        assert step.logits is not None, "decode is captured first"
        self.logits = step.logits if len(step.logits) >= tokens else step.logits.new_empty(tokens, step.logits.shape[1])
        """[tokens of the largest, vocab_size]: every graph computes its own into its first rows."""
        self.host = [_HostBuffer(torch.zeros(length, dtype=torch.int32, pin_memory=pinned)) for _ in range(2)]
