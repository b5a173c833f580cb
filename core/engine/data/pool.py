"""The pool: the paged KV caches of all layers, sized to the available memory."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import CacheGeometry, CacheLayout, LayerCache, zeros
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.data.groups import CacheGroup, PageFormat

GIB = 1024**3
SMALLEST_CHUNK = 128
"""Smallest chunk of a prompt, in tokens, if the windowed groups lack room for more."""
_LARGEST_SHARE = 0.4  # Default maximum share of free host memory for a CPU's cache
_DEFAULT_BYTES = 1 * GIB  # Default bytes of a CPU's cache, unless one sequence needs more


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Number and format of the pool's pages."""

    num_pages: int
    """Number of all pages, including reserved ones."""
    page_format: PageFormat
    smallest_chunk: int
    """Smallest chunk of a prompt, in tokens, if the windowed groups lack free pages for a larger one."""

    @property
    def num_bytes(self) -> int:
        """Size of all caches in bytes."""
        return self.num_pages * self.page_format.page_bytes

    def num_sequences(self, length: int) -> int:
        """Return the number of sequences of `length` tokens that fit at once, after all pages outside their windows are freed."""
        return (self.num_pages - self.page_format.reserved) // self.page_format.pages_for(length, 1)

    def num_tokens(self, length: int) -> int:
        """Return the total number of tokens that fit in the pool, in sequences of this length."""
        return (self.num_pages - self.page_format.reserved) * length // self.page_format.pages_for(length, 1)


def pool_size(page_format: PageFormat, max_model_len: int, max_num_seqs: int, chunk: int, memory: int | None) -> PoolSize:
    """Return the pool size that fits in `memory` bytes, without pages that sequences cannot fill.

    memory: None means a default size that depends on the free memory. chunk: smallest chunk of a prompt, in tokens.

    :raises ConfigError: if not even one sequence of max_model_len fits.
    """
    page_bytes, reserved = page_format.page_bytes, page_format.reserved
    one = page_format.pages_for(max_model_len, chunk)
    most = page_format.pages_for(max_model_len, max_model_len) * max_num_seqs
    budget = _default_memory((one + reserved) * page_bytes) if memory is None else memory
    fits = budget // page_bytes - reserved if page_bytes else most
    if fits < one:
        longest = longest_that_fits(page_format, chunk, budget, max_model_len)
        raise ConfigError(
            "kv_cache_memory",
            f"{size_text((one + reserved) * page_bytes, math.ceil)} for one sequence of max_model_len={max_model_len}",
            f"{size_text(budget)}, room for {longest} tokens",
            f"raise kv_cache_memory or set max_model_len to at most {longest}" if longest else "raise kv_cache_memory",
        )
    return PoolSize(min(fits, most) + reserved, page_format, chunk)


def longest_that_fits(page_format: PageFormat, chunk: int, memory: int | None, at_most: int) -> int:
    """Return the length of the longest sequence that fits in the pool, up to `at_most` tokens. The default of max_model_len is at
    most this length."""
    reserved = page_format.reserved
    if not page_format.page_bytes:
        return at_most
    wanted = (page_format.pages_for(at_most, chunk) + reserved) * page_format.page_bytes
    budget = _default_memory(wanted) if memory is None else memory
    pages = budget // page_format.page_bytes - reserved
    return bisect_right(range(1, at_most + 1), pages, key=lambda length: page_format.pages_for(length, chunk))


def allocate(specs: Sequence[AttentionSpec], layouts: Sequence[CacheLayout], size: PoolSize) -> list[LayerCache]:
    """Allocate one cache per layer. The layers of a group use the same block indices, so they share one block table."""
    shared = size.page_format
    if not shared.column_bytes:
        return allocate_layers(specs, layouts, size.num_pages, shared.block_size)
    memory = {
        name: zeros((shared.columns, size.num_pages * width), torch.uint8, specs[0].device)
        for name, width in shared.column_bytes.items()
    }
    caches: dict[int, LayerCache] = {}
    for group in shared.groups:
        for number, layer in enumerate(group.layers):
            place, column = divmod(number, shared.columns)
            caches[layer] = _view(
                specs[layer], layouts[layer], {name: each[column] for name, each in memory.items()}, group, place, size
            )
    return [caches[layer] for layer in range(len(specs))]


def allocate_layers(
    specs: Sequence[AttentionSpec], layouts: Sequence[CacheLayout], num_blocks: int, block_size: int
) -> list[LayerCache]:
    """Allocate one cache of `num_blocks` blocks per layer. Tensors of equal shape share one allocation."""
    geometries = [CacheGeometry.of(spec, num_blocks, block_size) for spec in specs]
    kinds: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[int, str]]] = {}
    for layer, (layout, geometry) in enumerate(zip(layouts, geometries, strict=True)):
        for name in layout.tensors:
            dtype = layout.dtype_of(name, geometry.dtype)
            kinds.setdefault((layout.shape(name, geometry), dtype), []).append((layer, name))
    tensors: list[dict[str, Tensor]] = [{} for _ in specs]
    for (shape, dtype), places in kinds.items():
        for (layer, name), tensor in zip(places, zeros((len(places), *shape), dtype, specs[0].device), strict=True):
            tensors[layer][name] = tensor
    return [
        LayerCache(tensors[layer], layouts[layer], geometry, specs[layer].k_scale, specs[layer].v_scale)
        for layer, geometry in enumerate(geometries)
    ]


def page_memory(caches: Sequence[LayerCache], size: PoolSize) -> list[Tensor]:
    """Return uint8 views [count, num_pages, bytes] of the pool's memory, with one row per page. The caches must have contiguous
    blocks."""
    views: dict[int, Tensor] = {}
    for cache in caches:
        assert cache.layout.contiguous_blocks, "blocks in pieces"
        for name, tensor in cache.tensors.items():
            storage = tensor.untyped_storage()
            width = size.page_format.column_bytes.get(name) or tensor.nbytes // size.num_pages
            if storage.data_ptr() not in views:
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                views[storage.data_ptr()] = flat.view(-1, size.num_pages, width)
    return list(views.values())


def _view(
    spec: AttentionSpec, layout: CacheLayout, memory: dict[str, Tensor], group: CacheGroup, place: int, size: PoolSize
) -> LayerCache:
    """Return the cache of a group's layer at index `place` of a column: a view of the column's memory that begins at the layer's
    first cell."""
    block_size = size.page_format.block_size
    num_blocks = (size.num_pages - 1) * group.page_stride + (group.blocks_per_page - 1) * group.block_stride + 1
    geometry = CacheGeometry.of(spec, num_blocks, block_size)
    tensors = {}
    for name, flat in memory.items():
        cells = flat.view(layout.dtype_of(name, geometry.dtype)).view((-1, *layout.shape(name, geometry)[1:]))
        tensors[name] = cells[place : place + num_blocks]
    return LayerCache(tensors, layout, geometry, spec.k_scale, spec.v_scale)


def _default_memory(one_sequence: int) -> int:
    most = int(psutil.virtual_memory().available * _LARGEST_SHARE)
    return min(most, max(_DEFAULT_BYTES, one_sequence))


def size_text(num_bytes: int, rounded: Callable[[float], int] = math.floor) -> str:
    """Return a size in bytes as readable text. rounded: math.ceil for a requirement, so that the size shown suffices."""
    unit, name = next(
        (unit, name) for unit, name in ((GIB, "GiB"), (1024**2, "MiB"), (1024, "KiB"), (1, "B")) if num_bytes >= unit / 10
    )
    return f"{rounded(num_bytes / unit * 100) / 100:.2f} {name}"
