"""torch's FlexAttention over the paged cache as a backend: a block mask selects pages, and mask_mod and score_mod do the rest.

The method follows Dong et al. 2024 (arXiv 2412.05496, section on paged attention): the keys of the whole pool are one long
sequence, the block mask lists the pages that a query tile reads, and a table maps a page to its position in the sequence.
"""

from __future__ import annotations

from functools import cache as memo
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway import hookimpl
from headway.contract import ALL_PHASES, NHD, AttentionBackend, BackendInfo, Capabilities, Support, announce_compilation

Q_BLOCK = 128
"""Number of queries per block of the mask."""


class Step(NamedTuple):
    """Plan of a step, split into tiles of up to `tile` queries of one sequence."""

    mods: Any
    """Function from the number of pages in the pool to (block mask, score_mod)."""
    rows: Tensor
    """int64 [num_tiles * tile]: token of each query; 0 for padding."""
    places: Tensor
    """int64 [num_tokens]: index of each token in `rows`."""
    tile: int


class Flex(AttentionBackend):
    """All phases by one method. Sizes are rounded up, since torch compiles for each size, about four seconds on a CPU."""

    name = "flex"
    # exact_host_lengths: tiles depend on the lengths on the host, so decode is not captured in a CUDA graph.
    capabilities = Capabilities(
        phases=ALL_PHASES,
        layouts=(NHD,),
        devices=("cpu", "cuda"),
        block_multiple=16,
        features=frozenset({"sliding_window", "softcap", "alibi_slopes"}),
        reads_whole_blocks=True,
        exact_host_lengths=True,
    )

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 2**16  # more shapes than 8
        self._attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        self._compiled = set()
        self._slopes = self.spec.alibi_slopes and torch.tensor(self.spec.alibi_slopes, device=self.spec.device)

    @classmethod
    def available(cls):
        try:
            from torch._inductor.cpp_builder import get_cpp_compiler

            get_cpp_compiler()
        except Exception as error:
            return Support.no("torch.compile", "a C++ compiler", error, "apt install g++")
        return Support()

    @classmethod
    def supports(cls, spec, layout, block_size, phase):
        support = super().supports(spec, layout, block_size, phase)
        if (spec.device.type, spec.dtype) != ("cuda", torch.float32) or spec.head_dim <= 128:  # larger heads exceed shared memory
            return support
        return support & Support.no("head_dim", "at most 128 in float32 on a GPU", str(spec.head_dim), "--dtype bfloat16")

    @classmethod
    def accepts(cls, cache):
        if all(each.stride(0) == each.shape[1] * each.stride(1) for each in (cache.key, cache.value)):
            return Support()
        return Support.no("cache", "blocks that follow one another in memory", "gaps between them", "--attn-backend sdpa")

    def plan(self, metadata):
        """Once per step: return the tiles and the pages that each tile reads."""
        size, window, device = self.block_size, self.spec.sliding_window, metadata.block_table.device
        # A tile of 1 would suffice for decode, but does not compile on a CPU (torch 2.13).
        tile = next(each for each in (2, 16, Q_BLOCK) if metadata.max_query_len <= each or each == Q_BLOCK)
        tiles = [(seq, first) for seq, n in enumerate(metadata.query_lens) for first in range(0, n, tile)]
        shape = next(8**power for power in range(1, 9) if len(tiles) <= 8**power)  # padding tiles read no page
        positions, rows = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, tile, dtype=torch.int64)
        starts, places, reads = metadata.query_start_loc_cpu.tolist(), [torch.zeros(0, dtype=torch.int64)], []
        for number, (seq, first) in enumerate(tiles):
            n = min(tile, metadata.query_lens[seq] - first)
            places.append(torch.arange(n) + number * tile)
            rows[number, :n] = torch.arange(n) + starts[seq] + first
            positions[number] = before = metadata.kv_lens[seq] - metadata.query_lens[seq] + first
            oldest = 0 if window is None else max(before - window + 1, 0) // size  # pages before the window are not read
            reads.append((oldest, metadata.block_table_cpu[seq, oldest : max(-(-(before + n) // size), 0)]))
        positions = positions.to(device)

        @memo
        def mods(num_pages):
            counts, pages = torch.zeros(shape, 1, 1, dtype=torch.int32), torch.zeros(shape, 1, 1, num_pages, dtype=torch.int32)
            back = torch.full((shape, num_pages), -1, dtype=torch.int32)  # page -> its index in the tile's sequence
            for number, (oldest, own) in enumerate(reads):
                counts[number], pages[number, 0, 0, : len(own)] = len(own), own
                back[number, own.long()] = torch.arange(oldest, oldest + len(own), dtype=torch.int32)
            tensors = (each.to(device) for each in (counts, pages, back))
            return self._mods(*tensors, positions, (tile, num_pages * size))

        if metadata.num_blocks:
            mods(metadata.num_blocks)
        return Step(mods, rows.flatten().to(device), torch.cat(places).to(device), tile)

    def _mods(self, counts, pages, back, positions, lengths):
        from torch.nn.attention.flex_attention import BlockMask

        size, window, softcap, slopes = self.block_size, self.spec.sliding_window, self.spec.softcap, self._slopes

        def visible(tile, head, query, slot):
            page = back[tile, slot // size]
            distance = positions[tile] + query - (page * size + slot % size)
            seen = (page >= 0) & (distance >= 0)
            return seen if window is None else seen & (distance < window)

        def changed(score, tile, head, query, slot):
            score = score if softcap is None else softcap * torch.tanh(score / softcap)
            distance = positions[tile] + query - (back[tile, slot // size] * size + slot % size)
            return score if slopes is None else score - slopes[head] * distance

        mask = BlockMask.from_kv_blocks(counts, pages, None, None, (Q_BLOCK, size), visible, lengths, False)  # no backward pass
        return mask, None if softcap is None and slopes is None else changed

    def decode(self, q, cache, plan, out):
        """Attend with any number of new tokens per sequence."""
        mask, score_mod = plan.mods(len(cache.key))
        key, value = (each.flatten(0, 1).transpose(0, 1)[None] for each in (cache.key, cache.value))
        tiles = q.index_select(0, plan.rows).unflatten(0, (-1, plan.tile)).transpose(1, 2)
        if (shape := (*tiles.shape, key.shape[2])) not in self._compiled:
            self._compiled.add(shape)
            announce_compilation(f"flex_attention {shape}")
        options = {"BLOCK_N": min(self.block_size, 64)} if q.is_cuda else None
        found = self._attend(tiles, key, value, score_mod, mask, self.spec.scale, self.spec.group_size > 1, False, options)
        out.copy_(found.transpose(1, 2).flatten(0, 1).index_select(0, plan.places))

    def prefill(self, q, k, v, cache, plan, out):
        self.decode(q, cache, plan, out)


@hookimpl
def headway_register_backends():
    return [BackendInfo("flex", "torch's FlexAttention with a paged block mask", lambda: Flex, api_version=2)]
