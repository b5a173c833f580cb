"""Plan and launch of the prefill kernel."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headway.backends.triton.configs import ANY_PROMPT, Architecture, PrefillConfig, prefill_config
from headway.backends.triton.launch import Launcher, aligned
from headway.backends.triton.layer import Addressing, Layer
from headway.backends.triton.prefill_kernel import varlen_attention
from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.transfer import upload


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One step's prefill or extend."""

    dense: bool
    """No sequence has a context: this step's k and v are all the keys there are."""
    tiles: Tensor
    """int32 [num_tiles, 2]: sequence and tile number of each program.

    Sequence by sequence, the longest first, so that programs side by side share keys in the L2 cache. In each the last tile,
    which has most keys, comes first, so that no long one starts last.
    """
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    config: PrefillConfig
    checked: AttentionMetadata | None = None
    """In debug mode: what the cache must be compared with before a launch."""


class Prefill:
    """Prefill and extend of one layer kind."""

    def __init__(self, spec: AttentionSpec, layer: Layer, block_size: int, arch: Architecture) -> None:
        self._spec = spec
        self._layer = layer
        self._block_size = block_size
        self._arch = arch
        self._scalars = tuple(layer.scalars.values())
        self._launch = Launcher(varlen_attention)
        self._variants: dict[Hashable, _Variant] = {}
        self._descriptors: dict[Hashable, tuple[TensorDescriptor, TensorDescriptor]] = {}

    def plan(self, metadata: AttentionMetadata) -> PrefillPlan:
        """List the query tiles of all sequences."""
        # An fp8 cache is read back even so, or the answer would hang on how a prompt was cut into chunks.
        # A batch invariant answer is read back too: whether the step is PREFILL or EXTEND hangs on all of its sequences.
        rereads = self._spec.cache_dtype != self._spec.dtype or self._spec.batch_invariant
        dense = metadata.phase is Phase.PREFILL and not rereads
        paged = 0 if dense else self._block_size
        row = (max(self._layer.block_d, self._layer.block_dv), self._spec.dtype.itemsize)
        longest = ANY_PROMPT if self._spec.batch_invariant else metadata.max_query_len
        config = prefill_config(self._arch, *row, longest, self._spec.group_size, paged)
        tiles = self._tiles(metadata, config.block_m)
        return PrefillPlan(
            dense=dense,
            tiles=upload(tiles, metadata.seq_lens.device),
            block_table=metadata.block_table,
            seq_lens=metadata.seq_lens,
            query_start_loc=metadata.query_start_loc,
            config=config,
        )

    def _tiles(self, metadata: AttentionMetadata, block_m: int) -> Tensor:
        group = self._spec.group_size
        kv_lens = metadata.seq_lens_cpu.long()
        query_lens = metadata.query_start_loc_cpu.diff().long()
        counts = -(-(query_lens * group) // block_m) * (kv_lens > 0)
        longest_first = kv_lens.argsort(descending=True, stable=True)
        counts = counts[longest_first]
        seqs = torch.repeat_interleave(longest_first, counts)
        numbers = torch.repeat_interleave(counts.cumsum(0), counts) - 1 - torch.arange(len(seqs))
        return torch.stack([seqs, numbers], 1).int()

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: PrefillPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """q, out: [num_tokens, num_heads, head_dim or v_head_dim]; lse: float32 [num_heads, num_tokens].

        k, v: [num_tokens, num_kv_heads, head_dim or v_head_dim], read where there is no context.
        """
        if plan.tiles.shape[0] == 0:
            return
        config = plan.config
        keys, values = (k, v) if plan.dense else (cache.key, cache.value)
        pointers = aligned(q.data_ptr(), out.data_ptr(), keys.data_ptr(), values.data_ptr())
        key = (plan.dense, config, keys.stride(), values.stride(), q.stride(), out.stride(), pointers, lse is not None)
        variant = self._variants.get(key)
        if variant is None:
            variant = self._variants[key] = self._variant(keys, values, None if plan.dense else cache, config, lse is not None)
        read: tuple[Any, Any] = (keys, values)
        if variant.tma:
            read = self._describe(_one_block(keys, values), config) if plan.dense else self._paged_descriptors(cache, config)
        arguments = (
            q,
            *read,
            out,
            plan.tiles if lse is None else lse,
            plan.tiles,
            plan.block_table,
            plan.seq_lens,
            plan.query_start_loc,
            self._layer.slopes,
            self._layer.sinks,
            *self._scalars,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            0 if lse is None else lse.stride(0),
            plan.block_table.stride(0),
            *variant.strides,
        )
        grid = (self._spec.num_kv_heads, plan.tiles.shape[0], 1)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        self._launch(key, grid, arguments, variant.constants, **options)

    def _variant(self, keys: Tensor, values: Tensor, cache: LayerCache | None, config: PrefillConfig, lse: bool) -> _Variant:
        """Strides, and all that is compiled in, for one way to read keys; cache: None where they are this step's own."""
        if cache is None:
            strides = tuple(s for t in (keys, values) for s in (0, t.stride(0), t.stride(1), 1, 1))
            k_x = v_x = 1
            views = _one_block(keys, values)
        else:
            addressing = Addressing.of(cache)
            strides, k_x, v_x = addressing.strides, addressing.k_x, addressing.v_x
            views = _blocks(cache) if k_x == v_x == 1 else []
        whole = cache is None or self._block_size % config.block_n == 0
        equal = self._spec.head_dim == self._spec.v_head_dim and not self._spec.value_in_key
        tma = config.tma and whole and equal and bool(views) and all(map(_describable, views))
        constants = {
            **self._layer.constants,
            "BLOCK_SIZE": self._block_size,
            "K_X": k_x,
            "V_X": v_x,
            "V_SLOTS_INNER": cache is not None and cache.logical_value.stride(1) == 1,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "PAGED": cache is not None,
            "TMA": tma,
            "HAS_LSE": lse,
            "STAGES": config.num_stages,
        }
        return _Variant(tma, strides, constants)

    def _paged_descriptors(self, cache: LayerCache, config: PrefillConfig) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Those of a cache, made once: it lies where it lies."""
        key = (cache.key.data_ptr(), cache.value.data_ptr(), config.block_n)
        if key not in self._descriptors:
            self._descriptors[key] = self._describe(_blocks(cache), config)
        return self._descriptors[key]

    def _describe(self, views: list[Tensor], config: PrefillConfig) -> tuple[TensorDescriptor, TensorDescriptor]:
        box = [1, 1, config.block_n, self._layer.block_d]
        key, value = (TensorDescriptor(t, list(t.shape), list(t.stride()), box) for t in views)
        return key, value


@dataclass(frozen=True, slots=True)
class _Variant:
    """One compiled way to read keys."""

    tma: bool
    strides: tuple[int, ...]
    constants: Mapping[str, Any]


def _one_block(k: Tensor, v: Tensor) -> list[Tensor]:
    """Views [1, head, token, dim]: one block that holds every token."""
    return [t.transpose(0, 1).unsqueeze(0) for t in (k, v)]


def _blocks(cache: LayerCache) -> list[Tensor]:
    """Views [block, head, slot, dim] of a cache whose head_dim is not split."""
    return [t.squeeze(4).transpose(1, 2) for t in (cache.logical_key, cache.logical_value)]


def _describable(view: Tensor) -> bool:
    """Whether the tensor memory accelerator can address it: 16-byte aligned rows, elements side by side."""
    size = view.element_size()
    return view.stride(3) == 1 and view.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in view.stride()[:3])
