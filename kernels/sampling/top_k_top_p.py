"""One token per row, drawn from what top_k, top_p and min_p keep, without a sort."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from headway.core.contract.compiled import AHEAD
from headway.core.sampling.sampler import LANES
from headway.kernels.runtime.triton_launch import FixedLauncher
from headway.kernels.sampling.candidate_kernels import draw_kept, list_candidates
from headway.kernels.sampling.cutoff_kernels import find_cutoffs
from headway.kernels.sampling.threshold_kernels import COUNTERS, THRESHOLDS, TILE, count_above_thresholds, sample_thresholds

MAX_PROGRAMS = 924
"""Most programs per launch, about: seven per multiprocessor run at once, each with enough logits to pay for its start."""
LIST_CAPACITY = 1024, 16384
"""Smallest and largest capacity of a candidate list, in tokens."""
_CAPACITY_SHARE = 20
"""A list holds 1 / 20 of the vocabulary: two to three times as many tokens as lie between two thresholds."""
_MAX_ROWS = 256
"""Rows served together, which bounds the memory for lists at 32 MiB."""


class TopKTopPSampler:
    """`Filter` of core.sampling.filtering in nine launches that a CUDA graph can capture.

    Each row's tokens are counted above a few thresholds from a sample of the row, then above a few between two of these. The
    tokens between two thresholds are listed, and the last kept one is searched for in the list. A second such search, for a top_p
    after a large top_k, costs the other rows no more than its launches. Then a token is drawn from the kept ones, by the search
    itself where the list holds all of them. Counts and masses are integers: no row's token depends on its neighbours or on the
    number of programs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launchers: dict[tuple[str, tuple[tuple[str, int], ...]], FixedLauncher] = {}

    def __call__(self, logits: Tensor, others: Tensor, keys: Tensor, filters: Tensor) -> Tensor:
        """Draw as core.sampling.filtering says. The elements of a row of logits must be contiguous; other strides are free."""
        others, keys = others.contiguous(), keys.contiguous()
        filters = filters if filters.stride(1) == 1 else filters.contiguous()
        make = torch.empty if AHEAD.get() is None else torch.zeros  # see FusedSampling
        chosen = make(len(logits), dtype=torch.int64, device=self._device)
        for first in range(0, len(logits), _MAX_ROWS):
            part = slice(first, first + _MAX_ROWS)
            self._choose(logits[part], others[part], keys[part], filters[:, part], chosen[part])
        return chosen

    def _choose(self, logits: Tensor, others: Tensor, keys: Tensor, filters: Tensor, chosen: Tensor) -> None:
        rows, vocab = logits.shape
        tiles = triton.cdiv(vocab, TILE)
        part_size = triton.cdiv(tiles * rows, MAX_PROGRAMS) * TILE
        parts = triton.cdiv(vocab, part_size)
        capacity = min(max(triton.next_power_of_2(triton.cdiv(vocab, _CAPACITY_SHARE)), LIST_CAPACITY[0]), LIST_CAPACITY[1])
        limits = {"CAPACITY": capacity, "PARTS": triton.next_power_of_2(tiles)}

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty((rows, *shape), dtype=dtype, device=self._device)

        part_max_keys, ties, counts, last_ids = buffer(parts), buffer(parts), buffer(COUNTERS), buffer()
        thresholds, cutoffs = buffer(THRESHOLDS, dtype=torch.float32), buffer(dtype=torch.float32)
        masses, candidates = buffer(COUNTERS, dtype=torch.int64), buffer(capacity, dtype=torch.int64)
        targets, best = buffer(dtype=torch.int64), buffer(dtype=torch.int64)
        strides, grid = (logits.stride(0), filters.stride(0), part_size), (rows, parts, 1)
        row_state = logits, filters, part_max_keys, thresholds, counts, masses
        """The arguments with which the next kernels begin."""

        self._get(sample_thresholds, 4)((rows, 1 + parts, 1), *row_state, best, *strides, vocab)
        self._get(count_above_thresholds, 4, ROUND=0, **limits)(grid, *row_state, targets, *strides, vocab)
        for stage in (0, 1):
            self._get(count_above_thresholds, 4, ROUND=1 + stage, **limits)(grid, *row_state, targets, *strides, vocab)
            list_kernel = self._get(list_candidates, 4, STAGE=stage, **limits, LANES=LANES)
            list_kernel(grid, *row_state, targets, candidates, ties, *strides, vocab)
            cutoff_kernel = self._get(find_cutoffs, 16, STAGE=stage, **limits, LANES=LANES)
            cutoff_kernel(
                (rows, 1, 1), logits, filters, keys, others, part_max_keys, thresholds, counts, masses, candidates, ties,
                targets, cutoffs, last_ids, chosen, *strides, parts, vocab,
            )  # fmt: skip
        draw_kernel = self._get(draw_kept, 4, LANES=LANES)
        draw_kernel(grid, logits, filters, keys, counts, cutoffs, last_ids, best, chosen, *strides, vocab)

    def _get(self, kernel: triton.JITFunction, num_warps: int, **constants: int) -> FixedLauncher:
        """Return the launcher of a kernel with these compile-time constants."""
        key = kernel.__name__, tuple(constants.items())
        if key not in self._launchers:
            self._launchers[key] = FixedLauncher(kernel, num_warps, self._device, **constants)
        return self._launchers[key]
