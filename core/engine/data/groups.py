"""Cache groups: layers that share one block table, and the page format through which all groups share one memory."""

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
"""Page that replaces pages outside the window in a windowed group's table. It is never allocated, and stays zero."""
_TYPICAL_LENGTHS = (1024, 8192)
"""Sequence lengths, in tokens, for which the page size is optimized. Large pages waste memory in the partially filled last page;
small pages waste a remainder in each page."""
_LARGEST_PAGE = 4  # Maximum page size, in blocks of the group with the most layers


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose caches share one block table. A page of the group has `page_size` tokens, in one or several blocks."""

    page_size: int
    window: int | None = None
    """Number of keys that a query sees, its own included; earlier pages are freed. None means all keys, so no page is freed."""
    layers: tuple[int, ...] = ()
    blocks_per_page: int = 1
    page_stride: int = 1
    """Difference in block index between the first blocks of consecutive pages."""
    block_stride: int = 1
    """Difference in block index between consecutive blocks of a page."""

    def blocks_of(self, pages: ArrayLike) -> NDArray[numpy.int32]:
        """Return int32 block indices of these pages, as the block table lists them."""
        first = numpy.asarray(pages, dtype=numpy.int32)[:, None] * self.page_stride
        blocks: NDArray[numpy.int32] = first + numpy.arange(self.blocks_per_page, dtype=numpy.int32) * self.block_stride
        return blocks.reshape(-1)

    def num_pages_before_window(self, position: int) -> int:
        """Return the number of pages at the start of a sequence that queries from this position on do not see."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self.page_size

    def position_past_pages(self, count: int) -> int:
        """Return the position from which `count` pages are outside the window."""
        assert self.window is not None
        return count * self.page_size + self.window - 1

    def most_pages(self, length: int, chunk: int) -> int:
        """Return the maximum number of pages of one sequence of `length` tokens, if a step computes up to `chunk` of them."""
        whole = -(-length // self.page_size)
        if self.window is None:
            return whole
        return min(whole, -(-(self.window - 1 + chunk) // self.page_size) + 1)


@dataclass(frozen=True, slots=True)
class PageFormat:
    """Division of the pool's memory among a model's layers.

    With one group, each layer has separate memory, and a page is a block. With several groups, a page is a range of memory that
    any group may use, for as many of its blocks as fit. The layers are divided among `columns`, memory areas of equal structure,
    so that the blocks of one layer are closer together. In a column, a page is a row of equal *cells*. A block of one layer takes
    one or more whole cells, so every layer's cache is an ordinary tensor over the same memory, with a different first cell.
    """

    groups: tuple[CacheGroup, ...]
    block_size: int
    page_bytes: int
    """Size of a page in bytes, over all layers. 0 if no layer has a cache: pages then only count and name tokens."""
    columns: int = 1
    column_bytes: Mapping[str, int] = field(default_factory=dict)
    """Size of a page in one column in bytes, by tensor name. Empty if each layer has separate memory."""

    @property
    def reserved(self) -> int:
        """Number of pages that are never allocated: the null page, if a group needs it."""
        return int(any(group.window is not None for group in self.groups))

    @property
    def checkpoint_interval(self) -> int:
        """Number of tokens between positions where states may be saved, which are the common page ends of all groups."""
        return math.lcm(*[CHECKPOINT_TOKENS, *(group.page_size for group in self.groups)])

    def pages_for(self, length: int, chunk: int) -> int:
        """Return the number of pages that a sequence of `length` tokens needs, if its steps may be as small as `chunk` tokens."""
        return sum(group.most_pages(length, chunk) for group in self.groups)


def page_format(
    specs: Sequence[AttentionSpec],
    layouts: Sequence[CacheLayout],
    block_size: int,
    max_model_len: int,
    free_before_window: bool = True,
) -> PageFormat:
    """Return the page format, with layers grouped by window. A window longer than max_model_len is ignored.
    free_before_window: False to free no tokens before windows, with all layers in one group."""
    geometries = [CacheGeometry.of(spec, 1, block_size) for spec in specs]
    bytes_of = [dict(layout.tensor_bytes(each)) for each, layout in zip(geometries, layouts, strict=True)]
    total = sum(sum(each.values()) for each in bytes_of)
    windows = [_window(spec, max_model_len) if free_before_window else None for spec in specs]
    whole = CacheGroup(block_size, None, tuple(range(len(specs))))
    if not specs:  # pages cost only host time: as few as prefix hits need, which end where checkpoints may be
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


def _window(spec: AttentionSpec, max_model_len: int) -> int | None:
    window = spec.sliding_window
    return window if window is not None and window < max_model_len else None


def _obstacle(specs: Sequence[AttentionSpec], layouts: Sequence[CacheLayout], bytes_of: Sequence[Mapping[str, int]]) -> str:
    """Return the reason why these layers cannot share memory. Empty if they can."""
    if len({spec.cache_dtype for spec in specs}) > 1:  # data of one layer could be a NaN to another
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
    """Return a format whose groups share pages. kinds: layers, grouped by window and key bytes per block."""
    columns = math.gcd(*map(len, kinds.values()))
    unit = math.gcd(*(key for _, key in kinds))
    widths = [key // unit for _, key in kinds]  # Cells per block of one layer, for each kind
    counts = [len(layers) // columns for layers in kinds.values()]  # Layers per column, for each kind
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
