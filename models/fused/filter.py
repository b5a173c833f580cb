"""A token a row out of what top_k, top_p and min_p keep, without a sort."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from headway.core.contract.compiled import AHEAD
from headway.core.sampling.sampler import LANES
from headway.models.fused.cut_kernels import cut_rows
from headway.models.fused.filter_kernels import best_of_kept, gather_between, race_kept
from headway.models.fused.launch import Launcher
from headway.models.fused.level_kernels import LEVELS, bracket_rows, measure_levels, sample_levels

_BLOCK = 1024
"""Logits of a program, which is one warp: a row of 151,936 has more programs than a GPU has multiprocessors."""
_ROOM = 20480
"""Keys of a row that are put side by side: four deviations more than lie between two levels of 151,936 equally likely tokens."""
_SLICE = 256
"""Rows of one round, which bounds the memory for keys at 40 MiB."""
_VECTOR = 8


class FusedFilter:
    """core.sampling.filtering's `Filter` in seven launches that a CUDA graph can capture.

    Rows are measured at a few levels taken from a sample, the tokens between two of them are put side by side, and the last one
    that is kept is searched for among these; then the kept ones are raced. So logits are read three times, wherever the cut lies.
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
        chunks = triton.cdiv(vocab, _BLOCK)
        width, bits, room = triton.next_power_of_2(chunks), max((vocab - 1).bit_length(), 1), min(_ROOM, vocab)
        stride, apart = logits.stride(0), filters.stride(0)
        unit = _VECTOR if stride % _VECTOR == vocab % _VECTOR == 0 else 1
        read = (stride // unit, apart, vocab // unit)

        def room_for(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((rows, *shape), dtype=dtype, device=self._device)

        levels, masses, mosts = room_for(LEVELS), room_for(chunks, LEVELS), room_for(chunks)
        counts, offsets = room_for(chunks, LEVELS, dtype=torch.int32), room_for(chunks, dtype=torch.int32)
        brackets, found, sums = (room_for(*shape, dtype=torch.int64) for shape in ((4,), (room,), (chunks, 2)))
        cuts, tokens = room_for(dtype=torch.int64), room_for(chunks, dtype=torch.int64)
        most, floors, scores = room_for(), room_for(), room_for(chunks)
        one, all_chunks = (rows, 1, 1), (rows, chunks, 1)

        self._get(sample_levels, 8)(one, logits, filters, levels, stride, apart, vocab)
        self._get(measure_levels, 1, BLOCK=_BLOCK, UNIT=unit)(all_chunks, logits, filters, levels, counts, masses, mosts, *read)
        self._get(bracket_rows, 8, BLOCK=_BLOCK, CHUNKS=width, COLUMN_BITS=bits)(
            one, filters, levels, counts, masses, mosts, brackets, most, offsets, apart, chunks, vocab
        )
        self._get(gather_between, 1, BLOCK=_BLOCK, UNIT=unit, ROOM=room, COLUMN_BITS=bits)(
            all_chunks, logits, filters, brackets, most, offsets, found, sums, *read
        )
        self._get(cut_rows, 8, BLOCK=1024, PIVOTS=8, CHUNKS=width, ROOM=room, COLUMN_BITS=bits)(
            one, logits, filters, brackets, most, found, sums, cuts, floors, stride, apart, chunks, vocab
        )
        self._get(race_kept, 1, BLOCK=_BLOCK, LANES=LANES, COLUMN_BITS=bits)(
            all_chunks, logits, filters, keys, counts, mosts, cuts, floors, scores, tokens, stride, apart, vocab
        )
        self._get(best_of_kept, 1, BLOCK=width)(one, scores, tokens, filters, others, chosen, chunks)

    def _get(self, kernel: triton.JITFunction, num_warps: int, **constants: int) -> Launcher:
        """The launcher of a kernel with these compile-time constants."""
        key = kernel.__name__, tuple(constants.items())
        if key not in self._launchers:
            self._launchers[key] = Launcher(kernel, num_warps, self._device, **constants)
        return self._launchers[key]
