"""A token a row out of what top_k, top_p and min_p keep, without a sort."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from headway.core.contract.compiled import AHEAD
from headway.core.sampling.sampler import LANES
from headway.models.fused.cut_kernels import cut_rows
from headway.models.fused.filter_kernels import list_between, race_kept
from headway.models.fused.launch import Launcher
from headway.models.fused.level_kernels import LEVELS, TALLIES, TURN, measure_levels, survey_rows

_PROGRAMS = 924
"""At most about so many share a launch: seven a multiprocessor, all at once, with logits enough to pay for their start."""
_ROOM = 1024, 16384
"""Tokens that a list has room for, at least and at most."""
_SHARE = 20
"""Of this part of the vocabulary there is room: twice to three times what lies between two levels."""
_SLICE = 256
"""Rows of one round, which bounds the memory for lists at 32 MiB."""


class FusedFilter:
    """core.sampling.filtering's `Filter` in nine launches that a CUDA graph can capture.

    Each row's tokens are counted above some levels out of a sample, then above some between two of these; the tokens between two
    are listed, and the last one that is kept is searched for among them. A second such search, for a top_p after a large top_k,
    costs other rows its launches alone. Then the kept ones are raced, by the search itself where they are all in the list.
    What decides is whole numbers: no row's token depends on its neighbours, or on how many programs share it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launchers: dict[tuple[str, tuple[tuple[str, int], ...]], Launcher] = {}

    def __call__(self, logits: Tensor, others: Tensor, keys: Tensor, filters: Tensor) -> Tensor:
        """See core.sampling.filtering. The elements of a row of logits lie side by side; all else may lie as it likes."""
        others, keys = others.contiguous(), keys.contiguous()
        filters = filters if filters.stride(1) == 1 else filters.contiguous()
        make = torch.empty if AHEAD.get() is None else torch.zeros  # see FusedSampling
        chosen = make(len(logits), dtype=torch.int64, device=self._device)
        for first in range(0, len(logits), _SLICE):
            part = slice(first, first + _SLICE)
            self._choose(logits[part], others[part], keys[part], filters[:, part], chosen[part])
        return chosen

    def _choose(self, logits: Tensor, others: Tensor, keys: Tensor, filters: Tensor, chosen: Tensor) -> None:
        rows, vocab = logits.shape
        turns = triton.cdiv(vocab, TURN)
        size = triton.cdiv(turns * rows, _PROGRAMS) * TURN
        parts = triton.cdiv(vocab, size)
        room = min(max(triton.next_power_of_2(triton.cdiv(vocab, _SHARE)), _ROOM[0]), _ROOM[1])
        limits = {"ROOM": room, "PARTS": triton.next_power_of_2(turns)}

        def room_for(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty((rows, *shape), dtype=dtype, device=self._device)

        mosts, ties, counts, lasts = room_for(parts), room_for(parts), room_for(TALLIES), room_for()
        levels, floors = room_for(LEVELS, dtype=torch.float32), room_for(dtype=torch.float32)
        masses, found = room_for(TALLIES, dtype=torch.int64), room_for(room, dtype=torch.int64)
        goals, best = room_for(dtype=torch.int64), room_for(dtype=torch.int64)
        tallies, read, grid = (levels, counts, masses), (logits.stride(0), filters.stride(0), size), (rows, parts, 1)

        survey = self._get(survey_rows, 4)
        survey((rows, 1 + parts, 1), logits, filters, mosts, levels, counts, masses, best, *read, vocab)
        self._get(measure_levels, 4, ROUND=0, **limits)(grid, logits, filters, mosts, *tallies, goals, *read, vocab)
        for stage in (0, 1):
            measure = self._get(measure_levels, 4, ROUND=1 + stage, **limits)
            measure(grid, logits, filters, mosts, *tallies, goals, *read, vocab)
            between = self._get(list_between, 4, STAGE=stage, **limits, LANES=LANES)
            between(grid, logits, filters, mosts, *tallies, goals, found, ties, *read, vocab)
            cut = self._get(cut_rows, 16, STAGE=stage, **limits, LANES=LANES)
            given = logits, filters, keys, others, mosts, *tallies, found, ties
            cut((rows, 1, 1), *given, goals, floors, lasts, chosen, *read, parts, vocab)
        race = self._get(race_kept, 4, LANES=LANES)
        race(grid, logits, filters, keys, counts, floors, lasts, best, chosen, *read, vocab)

    def _get(self, kernel: triton.JITFunction, num_warps: int, **constants: int) -> Launcher:
        """The launcher of a kernel with these compile-time constants."""
        key = kernel.__name__, tuple(constants.items())
        if key not in self._launchers:
            self._launchers[key] = Launcher(kernel, num_warps, self._device, **constants)
        return self._launchers[key]
