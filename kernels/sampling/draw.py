"""One token per row in one pass over the logits, and the comparison of drafts with tokens in one launch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from headway.core.contract.compiled import AHEAD
from headway.core.sampling.sampler import LANES
from headway.kernels.runtime.triton_launch import FixedLauncher
from headway.kernels.sampling.draw_kernels import argmax_of_chunks, argmax_of_rows, verify_drafts

BLOCK = 4096
"""Logits per program: enough bytes in flight, and enough programs for one row."""


class FusedSampling:
    """`greedy` and `draw` of core.sampling.sampler, with the same noise, in two launches, `hold` in one; all can be captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        sizes = {"BLOCK": BLOCK, "LANES": LANES}
        self._plain, self._noisy = (FixedLauncher(argmax_of_chunks, 4, device, **sizes, NOISE=noise) for noise in (False, True))
        self._last: dict[int, FixedLauncher] = {}
        self._hold: dict[int, FixedLauncher] = {}

    def greedy(self, logits: Tensor) -> Tensor:
        """Most likely token of each row of logits [rows, vocab_size]: int64 [rows], -1 where a logit is NaN."""
        return self._choose(logits, None, None)

    def draw(self, logits: Tensor, scales: Tensor, keys: Tensor) -> Tensor:
        """A token per row: int64 [rows], -1 where a logit is NaN. scales: float32 [rows], 0 is greedy; keys: int64 [rows]."""
        return self._choose(logits, scales, keys)

    def accept_drafts(self, sampled: Tensor, ids: Tensor, fill: Tensor, places: Tensor, newest: Tensor) -> Tensor:
        """Compare drafts as core.sampling.verification.accept_drafts does: one launch in place of a dozen of torch's."""
        rows, width = sampled.shape
        found = torch.empty((rows, width + 1), dtype=torch.int64, device=self._device)
        if width not in self._hold:
            block = triton.next_power_of_2(width)
            self._hold[width] = FixedLauncher(verify_drafts, 1, self._device, WIDTH=width, BLOCK=block)
        self._hold[width]((rows, 1, 1), sampled, ids, fill, places, newest, found)
        return found

    def _choose(self, logits: Tensor, scales: Tensor | None, keys: Tensor | None) -> Tensor:
        """Choose by two launches. logits: rows may be strided, their elements may not."""
        rows, vocab_size = logits.shape
        # While kernels are compiled ahead nothing is launched, yet these tokens index tables.
        make = torch.empty if AHEAD.get() is None else torch.zeros
        chosen = make(rows, dtype=torch.int64, device=self._device)
        if rows == 0:
            return chosen
        chunks = triton.cdiv(vocab_size, BLOCK)
        scores = torch.empty((rows, chunks), dtype=torch.float32, device=self._device)
        tokens = torch.empty((rows, chunks), dtype=torch.int64, device=self._device)
        first = self._plain if scales is None else self._noisy
        noise = (scores if scales is None else scales, tokens if keys is None else keys)
        first((rows, chunks, 1), logits, *noise, scores, tokens, logits.stride(0), vocab_size)
        block = triton.next_power_of_2(chunks)
        if block not in self._last:
            self._last[block] = FixedLauncher(argmax_of_rows, 1, self._device, BLOCK=block)
        self._last[block]((rows, 1, 1), scores, tokens, chosen, chunks)
        return chosen
