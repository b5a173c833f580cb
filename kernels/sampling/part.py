"""The choice among several ranks' tokens: two launches for what a rank finds in its part, and one for the best of all."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from headway.core.contract.compiled import AHEAD
from headway.core.sampling.sampler import LANES
from headway.kernels.runtime.triton_launch import FixedLauncher
from headway.kernels.sampling.draw import BLOCK
from headway.kernels.sampling.part_kernels import argmax_of_part_chunks, choose_winners, pack_best_of_rows


class FusedPart:
    """`best_of_part` and `winners` of core.sampling.candidates, with the noise of their ids; all can be captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        sizes = {"BLOCK": BLOCK, "LANES": LANES}
        self._plain, self._noisy = (
            FixedLauncher(argmax_of_part_chunks, 4, device, **sizes, NOISE=noise) for noise in (False, True)
        )
        self._reduce: dict[tuple[Callable[..., object], int], FixedLauncher] = {}

    def best_of_part(self, logits: Tensor, scales: Tensor | None, keys: Tensor | None, first: int) -> Tensor:
        """See core.sampling.candidates.best_of_part. logits: rows may be strided, their elements may not."""
        rows, width = logits.shape
        numbers = torch.empty(rows, dtype=torch.int64, device=self._device)
        if rows == 0:
            return numbers
        chunks = triton.cdiv(first % (4 * LANES) + width, BLOCK)
        scores = torch.empty((rows, chunks), dtype=torch.float32, device=self._device)
        tokens = torch.empty((rows, chunks), dtype=torch.int64, device=self._device)
        kernel = self._plain if scales is None else self._noisy
        noise = (scores if scales is None else scales, tokens if keys is None else keys)
        kernel((rows, chunks, 1), logits, *noise, scores, tokens, logits.stride(0), first, first + width)
        self._of(pack_best_of_rows, chunks)((rows, 1, 1), scores, tokens, numbers, chunks)
        return numbers

    def winners(self, numbers: Tensor) -> Tensor:
        """See core.sampling.candidates.winners."""
        ranks, rows = numbers.shape
        # While kernels are compiled ahead nothing is launched, yet these tokens index tables.
        make = torch.empty if AHEAD.get() is None else torch.zeros
        chosen = make(rows, dtype=torch.int64, device=self._device)
        self._of(choose_winners, ranks)((rows, 1, 1), numbers, chosen, rows, ranks)
        return chosen

    def _of(self, kernel: Callable[..., object], count: int) -> FixedLauncher:
        """Return the launcher of a kernel that reduces so many numbers."""
        key = kernel, triton.next_power_of_2(count)
        if key not in self._reduce:
            self._reduce[key] = FixedLauncher(kernel, 1, self._device, BLOCK=key[1])
        return self._reduce[key]
