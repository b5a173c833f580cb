"""Cache groups: layers that share one block table, and the pages through which all groups share one memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy
from numpy.typing import ArrayLike, NDArray

from headway.core.contract.layout import CacheGeometry, CacheLayout
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import CHECKPOINT_TOKENS

log = logging.getLogger("headway")

NULL_PAGE = 0
"""Stands in a windowed group's table for the pages behind the window. No sequence holds it, and it stays zero."""
_TYPICAL_LENGTHS = (1024, 8192)
"""Lengths of the sequences for which a page's size is chosen: a large page is filled in part, a small one leaves a rest that no
block fits."""
_LARGEST_PAGE = 4  # Largest size of a page, in blocks of the group with the most layers


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose cache has one block table. The pool gives it pages of `page_size` tokens, each one or several blocks."""

    page_size: int
    window: int | None = None
    """Keys that a query of these layers sees, itself included: pages behind them are given back. None: all, and no page is."""
    layers: tuple[int, ...] = ()
    blocks_per_page: int = 1
    page_stride: int = 1
    """Distance from the first block of a page to that of the next, in block numbers."""
    block_stride: int = 1
    """Distance from one block of a page to the next, in block numbers."""

    def blocks_of(self, pages: ArrayLike) -> NDArray[numpy.int32]:
        """The blocks of these pages, as the block table lists them."""
        first = numpy.asarray(pages, dtype=numpy.int32)[:, None] * self.page_stride
        blocks: NDArray[numpy.int32] = first + numpy.arange(self.blocks_per_page, dtype=numpy.int32) * self.block_stride
        return blocks.reshape(-1)

    def num_behind(self, position: int) -> int:
        """Pages at the start of a sequence that no query from this position on sees."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self.page_size

    def first_behind(self, count: int) -> int:
        """The position from which on `count` pages lie behind the window."""
        assert self.window is not None
        return count * self.page_size + self.window - 1

    def most_pages(self, length: int, chunk: int) -> int:
        """Pages that one sequence of `length` tokens holds at most, if a step computes up to `chunk` of them."""
        whole = -(-length // self.page_size)
        if self.window is None:
            return whole
        return min(whole, -(-(self.window - 1 + chunk) // self.page_size) + 1)


@dataclass(frozen=True, slots=True)
class PageFormat:
    """How a model's layers share the memory of the pool.

    With one group each layer has memory of its own, and a page is a block. With several, a page is a stretch of memory that any
    group may take: as many blocks of the group as it has room for. The layers are dealt out to `columns`, pieces of memory of
    equal structure, so that one layer's blocks lie closer together. In a column a page is a row of equal *cells*; a block of one
    layer takes one cell, or a whole number of them, so that every layer's cache is an ordinary tensor over the same memory that
    begins at another cell.
    """

    groups: tuple[CacheGroup, ...]
    block_size: int
    page_bytes: int
    """Bytes of a page, over all layers; 0 if no layer has a cache: pages then only count and name tokens."""
    columns: int = 1
    column_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of a page in one column, by the name of the tensor; empty: each layer has memory of its own."""

    @property
    def reserved(self) -> int:
        """Pages that are never handed out: the null page, where a group needs one."""
        return int(any(group.window is not None for group in self.groups))

    @property
    def checkpoint_interval(self) -> int:
        """Tokens between places where states may be kept: where whole pages end in every group."""
        return math.lcm(*[CHECKPOINT_TOKENS, *(group.page_size for group in self.groups)])

    def pages_for(self, length: int, chunk: int) -> int:
        """Pages that one sequence of `length` tokens needs, if its steps may be as small as `chunk` tokens."""
        return sum(group.most_pages(length, chunk) for group in self.groups)


def page_format(
    specs: Sequence[AttentionSpec], layouts: Sequence[CacheLayout], block_size: int, max_model_len: int, give_back: bool = True
) -> PageFormat:
    """Group the layers by window; one beyond max_model_len is none. give_back: False keeps every token, in one group."""
    bytes_of = [_block_bytes(spec, layout, block_size) for spec, layout in zip(specs, layouts, strict=True)]
    total = sum(sum(each.values()) for each in bytes_of)
    windows = [_window(spec, max_model_len) if give_back else None for spec in specs]
    whole = CacheGroup(block_size, None, tuple(range(len(specs))))
    if not specs:  # pages take only the host's time: as few as prefix hits need, which end where checkpoints may lie
        blocks = math.lcm(block_size, CHECKPOINT_TOKENS) // block_size
        return PageFormat((CacheGroup(blocks * block_size, None, (), blocks, blocks),), block_size, 0)
    if len(set(windows)) == 1:
        return PageFormat((CacheGroup(block_size, windows[0], whole.layers),), block_size, total)
    obstacle = _obstacle(specs, layouts, bytes_of)
    if obstacle:
        log.warning("cache groups: windowed layers keep every token, for %s", obstacle)
        return PageFormat((whole,), block_size, total)
    kinds: dict[tuple[int | None, int], list[int]] = {}
    for layer in sorted(range(len(specs)), key=lambda layer: windows[layer] is not None):
        kinds.setdefault((windows[layer], bytes_of[layer]["key"]), []).append(layer)
    return _shared(kinds, bytes_of, block_size, max_model_len)


def _block_bytes(spec: AttentionSpec, layout: CacheLayout, block_size: int) -> dict[str, int]:
    return dict(layout.tensor_bytes(CacheGeometry.of(spec, 1, block_size)))


def _window(spec: AttentionSpec, max_model_len: int) -> int | None:
    window = spec.sliding_window
    return window if window is not None and window < max_model_len else None


def _obstacle(specs: Sequence[AttentionSpec], layouts: Sequence[CacheLayout], bytes_of: Sequence[Mapping[str, int]]) -> str:
    """Why these layers cannot take turns in one memory; empty if they can."""
    if len({spec.cache_dtype for spec in specs}) > 1:  # what one leaves could be a NaN to another
        return "the layers' caches have several element types"
    if len(set(layouts)) > 1 or not layouts[0].contiguous_blocks:
        return f"blocks are not one piece of memory in one layout ({', '.join(sorted({each.name for each in layouts}))})"
    first = bytes_of[0]
    if any(each[name] * first["key"] != first[name] * each["key"] for each in bytes_of for name in first):
        return "the tensors of the layers' caches are in different proportions"
    return ""


def _shared(
    kinds: Mapping[tuple[int | None, int], list[int]], bytes_of: Sequence[Mapping[str, int]], block_size: int, max_model_len: int
) -> PageFormat:
    """Make groups of layers that share pages. kinds: layers by their window and the bytes of a block's key."""
    columns = math.gcd(*map(len, kinds.values()))
    unit = math.gcd(*(key for _, key in kinds))
    widths = [key // unit for _, key in kinds]  # Cells that a block of one layer takes, for each kind
    counts = [len(layers) // columns for layers in kinds.values()]  # Layers in a column, for each kind
    step, most = math.lcm(*widths), max(width * count for width, count in zip(widths, counts, strict=True))

    def groups(cells: int) -> tuple[CacheGroup, ...]:
        made = []
        for (window, _), width, count, layers in zip(kinds, widths, counts, kinds.values(), strict=True):
            per_page = cells // (width * count)
            made.append(CacheGroup(per_page * block_size, window, tuple(layers), per_page, cells // width, count))
        return tuple(made)

    def cost(cells: int) -> int:
        lengths = [min(length, max_model_len) for length in _TYPICAL_LENGTHS]
        return cells * sum(group.most_pages(length, 1) for group in groups(cells) for length in lengths)

    cells = min(range(-(-most // step) * step, _LARGEST_PAGE * most + 1, step), key=cost)
    first = next(iter(kinds.values()))[0]
    column = {name: cells * unit * size // bytes_of[first]["key"] for name, size in bytes_of[first].items()}
    return PageFormat(groups(cells), block_size, columns * sum(column.values()), columns, column)
