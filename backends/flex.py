"""The attention backend `flex`: torch's FlexAttention for layers with an attention rule.

A prompt without context is one packed sequence, whose block mask torch computes from the rule. Other steps read the paged cache
as in Dong et al. 2024 (arXiv 2412.05496, section on paged attention): the keys of the whole pool are one long sequence, the
block mask lists the pages that a query tile reads, and a table maps a page to its position in the sequence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as memo
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, Options
from headway.core.contract.capabilities import ALL_PHASES, Capabilities
from headway.core.contract.kernel import announce_compilation
from headway.core.contract.layout import NHD, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES, Support

BLOCK = 128
"""Number of queries per block of a mask, and of keys in a prompt. FlexAttention's default."""
MASK_ELEMENTS = 2**24
"""Maximum number of elements of a mask that are computed at once."""
Places = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function of (tile, query, slot) that returns the positions of the query and of the key, -1 if the slot is not of the
sequence."""


class _Parameters:
    """The object that a rule's functions get as `params`. torch.compile does not trace `types.SimpleNamespace`."""


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """Plan of a step, whose queries are in tiles of `tile` queries. A prompt without context is one tile."""

    mods: Callable[[int], tuple[Any, Any]]
    """Function from the number of pages in the pool, 0 for a prompt without context, to the block mask, and FlexAttention's
    score_mod or None."""
    rows: Tensor
    """int64 [num_tiles * tile]: token of each query; 0 for padding."""
    places: Tensor
    """int64 [num_tokens]: index of each token in `rows`."""
    tile: int
    paged: bool


def block_mask(visible: Callable[..., Tensor], heads: int, length: int, device: torch.device) -> Any:
    """Return the block mask of a sequence: the blocks of keys that a block of queries sees in part, and those that it sees whole.

    The mask is computed in parts, without torch.compile: for 16,384 tokens, `create_block_mask` makes a kernel that compiles for
    minutes.

    visible: FlexAttention's mask_mod. heads: number of heads with their own masks.
    """
    from torch.nn.attention.flex_attention import BlockMask

    keys, step = torch.arange(length, device=device), BLOCK * max(MASK_ELEMENTS // (BLOCK * length), 1)
    some, whole = torch.empty(2, 1, heads, length // BLOCK, length // BLOCK, dtype=torch.bool, device=device)
    for head in range(heads):
        for number, queries in enumerate(keys[:, None].split(step)):
            seen = visible(keys[:1], torch.full_like(keys[:1], head), queries, keys)
            blocks = seen.expand(len(queries), -1).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
            rows = slice(number * step // BLOCK, number * step // BLOCK + len(blocks))
            some[0, head, rows] = blocks.any(3).any(1)
            whole[0, head, rows] = blocks.all(3).all(1)
    given: Any = []
    for part in (some & ~whole, whole):
        given += [part.sum(3, dtype=torch.int32), part.int().argsort(dim=3, descending=True, stable=True).int()]
    given += [(BLOCK, BLOCK), visible, (length, length), False]
    return BlockMask.from_kv_blocks(*given)


class FlexAttention(AttentionBackend):
    """All phases of layers with an attention rule. Sizes are rounded up, since torch compiles a kernel for each size."""

    name = "flex"
    # exact_host_lengths: tiles depend on the lengths on the host, so decode is not captured in a CUDA graph.
    capabilities = Capabilities(
        phases=ALL_PHASES,
        layouts=(NHD,),
        devices=("cpu", "cuda"),
        block_multiple=16,
        features=frozenset({"sliding_window", "softcap", "alibi_slopes", "rule"}),
        reads_whole_blocks=True,
        exact_host_lengths=True,
        dense_prefill=True,
    )

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        from torch.nn.attention.flex_attention import flex_attention

        assert spec.rule is not None
        self._compiles = spec.device.type == "cuda"
        self._attend: Any = flex_attention
        if self._compiles:
            config: Any = torch._dynamo.config
            config.recompile_limit = config.accumulated_recompile_limit = 2**16  # more shapes than 8
            self._attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        self._compiled: set[tuple[int, ...]] = set()
        self._rule = spec.rule
        self._slopes = None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes, device=spec.device)
        heads = torch.arange(spec.num_heads, device=spec.device)
        given = vars(spec.rule.params(heads))
        self._values = {name: (value, name in spec.rule.per_head) for name, value in given.items()}
        """Parameters of the rule, and True for those with one number for each head."""
        q_pos, k_pos = torch.zeros(1, 2, 1, dtype=torch.int64), torch.zeros(1, 1, 3, dtype=torch.int64)
        heads = heads.cpu()[:, None, None]
        shape = spec.rule.mask(q_pos, k_pos, heads, spec.rule.params(heads)).shape
        self._has_tables = any(isinstance(value, Tensor) for value, _ in self._values.values())
        self._mask_by_head = len(shape) == 3 and shape[0] > 1

    @classmethod
    def available(cls) -> Support:
        try:
            from torch.nn.attention.flex_attention import flex_attention  # noqa: F401
        except ImportError as error:
            return Support.no("torch", "a release with torch.nn.attention.flex_attention", error)
        return YES

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        support = super().supports(spec, layout, block_size, phase)
        if spec.rule is None:
            support &= Support.no("layer", "an attention rule", "none", "other backends compute plain attention")
        elif "gate" in spec.rule.parts:  # FlexAttention cannot change weights after the softmax
            support &= Support.no(f"rule {spec.rule.name}", "score and mask only", "gate", "name another backend")
        if (spec.device.type, spec.dtype) == ("cuda", torch.float32) and spec.head_dim > 128:  # exceeds shared memory
            support &= Support.no("head_dim", "at most 128 in float32 on a GPU", spec.head_dim, "--dtype bfloat16")
        return support

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        if all(each.stride(0) == each.shape[1] * each.stride(1) for each in (cache.key, cache.value)):
            return YES
        return Support.no("cache", "blocks that follow one another in memory", "gaps between them", "--attn-backend sdpa")

    def plan(self, metadata: AttentionMetadata) -> FlexPlan:
        """Return the tiles, and the blocks of keys that each tile reads."""
        return self._plan_dense(metadata) if metadata.phase is Phase.PREFILL else self._plan_paged(metadata)

    def _plan_dense(self, metadata: AttentionMetadata) -> FlexPlan:
        device, count = metadata.block_table.device, metadata.num_tokens
        padded = max(BLOCK, 1 << (count - 1).bit_length())
        owner, positions = torch.full((2, padded), -1).unbind()
        lengths = torch.tensor(metadata.query_lens)
        owner[:count] = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        positions[:count] = torch.arange(count) - metadata.query_start_loc_cpu[:-1].long()[owner[:count]]
        owner, positions = owner.to(device), positions.to(device)

        def places(tile: Tensor, query: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
            return positions[query], torch.where(owner[query] == owner[slot], positions[slot], -1)

        visible, changed = self._mods(places)
        mask = block_mask(visible, self.spec.num_heads if self._mask_by_head else 1, padded, device)
        tokens = torch.arange(padded, device=device)
        return FlexPlan(lambda _: (mask, changed), tokens.clamp(max=count - 1), tokens[:count], padded, paged=False)

    def _plan_paged(self, metadata: AttentionMetadata) -> FlexPlan:
        from torch.nn.attention.flex_attention import BlockMask

        size, window, device = self.block_size, self.spec.sliding_window, metadata.block_table.device
        tile = next(each for each in (1, 16, BLOCK) if metadata.max_query_len <= each or each == BLOCK)
        tiles = [(seq, first) for seq, n in enumerate(metadata.query_lens) for first in range(0, n, tile)]
        shape = next(8**power for power in range(1, 9) if len(tiles) <= 8**power)  # padding tiles read no page
        firsts, lasts, rows = torch.zeros(shape).long(), torch.zeros(shape).long(), torch.zeros(shape, tile).long()
        starts, places, reads = metadata.query_start_loc_cpu.tolist(), [torch.zeros(0, dtype=torch.int64)], []
        for number, (seq, first) in enumerate(tiles):
            n = min(tile, metadata.query_lens[seq] - first)
            places.append(torch.arange(n) + number * tile)
            rows[number, :n] = torch.arange(n) + starts[seq] + first
            firsts[number] = before = metadata.kv_lens[seq] - metadata.query_lens[seq] + first
            lasts[number] = max(metadata.kv_lens[seq] - 1, 0)
            oldest = 0 if window is None else max(before - window + 1, 0) // size  # pages before the window are not read
            reads.append((oldest, metadata.block_table_cpu[seq, oldest : max(-(-(before + n) // size), 0)]))
        firsts, lasts = firsts.to(device), lasts.to(device)

        @memo
        def mods(num_pages: int) -> tuple[Any, Any]:
            counts, pages = torch.zeros(shape, 1, 1, dtype=torch.int32), torch.zeros(shape, 1, 1, num_pages, dtype=torch.int32)
            found = torch.full((shape, num_pages), -1)  # page -> its index in the tile's sequence
            for number, (oldest, own) in enumerate(reads):
                counts[number], pages[number, 0, 0, : len(own)] = len(own), own
                found[number, own.long()] = torch.arange(oldest, oldest + len(own))
            back = found.to(device)

            def places_of(tile: Tensor, query: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
                page = back[tile, slot // size]
                q_pos = torch.minimum(firsts[tile] + query, lasts[tile])  # a rule gets no positions of padding
                return q_pos, torch.where(page < 0, -1, page * size + slot % size)

            visible, changed = self._mods(places_of)
            lengths = tile, num_pages * size
            given: Any = counts.to(device), pages.to(device), None, None, (BLOCK, size), visible, lengths, False
            return BlockMask.from_kv_blocks(*given), changed  # without the mask of the backward pass

        if metadata.num_blocks:
            mods(metadata.num_blocks)
        return FlexPlan(mods, rows.flatten().to(device), torch.cat(places).to(device), tile, paged=True)

    def _mods(self, places: Places) -> tuple[Any, Any]:
        """Return FlexAttention's mask_mod, and its score_mod or None."""
        rule, slopes, values = self._rule, self._slopes, self._values
        window, softcap = self.spec.sliding_window, self.spec.softcap

        def params(head: Tensor) -> Any:
            found = _Parameters()
            for name, (value, by_head) in values.items():
                setattr(found, name, value[head] if by_head else value)
            return found

        def visible(tile: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            q_pos, k_pos = places(tile, query, slot)
            seen = (k_pos >= 0) & (k_pos <= q_pos)
            if window is not None:
                seen = seen & (q_pos - k_pos < window)
            if "mask" in rule.parts:  # the rule's functions get positions 0 <= k_pos <= q_pos only
                q_pos = q_pos.clamp(min=0)
                seen = seen & rule.mask(q_pos, torch.minimum(k_pos.clamp(min=0), q_pos), head, params(head))
            return seen

        def changed(score: Tensor, tile: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            q_pos, k_pos = places(tile, query, slot)
            score = score if softcap is None else softcap * torch.tanh(score / softcap)
            score = score if slopes is None else score - slopes[head] * (q_pos - k_pos)
            if "score" in rule.parts:
                q_pos = q_pos.clamp(min=0)
                score = rule.score(score, q_pos, torch.minimum(k_pos.clamp(min=0), q_pos), head, params(head))
            return score

        return visible, changed if softcap is not None or slopes is not None or "score" in rule.parts else None

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: FlexPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        if plan.paged:
            self.decode(q, cache, plan, out)
        else:
            key, value = (each.index_select(0, plan.rows).transpose(0, 1)[None] for each in (k, v))
            self._run(q, key, value, 0, plan, out)

    def decode(self, q: Tensor, cache: LayerCache, plan: FlexPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Attend with any number of new tokens per sequence."""
        assert lse is None, "not declared"
        key, value = (each.flatten(0, 1).transpose(0, 1)[None] for each in (cache.key, cache.value))
        self._run(q, key, value, len(cache.key), plan, out)

    def _run(self, q: Tensor, key: Tensor, value: Tensor, num_pages: int, plan: FlexPlan, out: Tensor) -> None:
        """Attend to keys and values [1, num_kv_heads, slots, head_dim]. num_pages: argument of `FlexPlan.mods`."""
        mask, changed = plan.mods(num_pages)
        tiles = q.index_select(0, plan.rows).unflatten(0, (-1, plan.tile)).transpose(1, 2)
        shape = (*tiles.shape, key.shape[2])
        if self._compiles and shape not in self._compiled:
            self._compiled.add(shape)
            announce_compilation(f"flex_attention {shape}")
        options: dict[str, int] = {}
        if self._compiles and plan.paged:
            options = {"BLOCK_N": min(self.block_size, 64)}
        elif self._compiles and self._has_tables:  # a third stage of their elements exceeds shared memory
            options = {"num_stages": 2}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
            gqa = self.spec.group_size > 1
            found = self._attend(tiles, key, value, changed, mask, self.spec.scale, gqa, False, options or None)
        out.copy_(found.transpose(1, 2).flatten(0, 1).index_select(0, plan.places))
