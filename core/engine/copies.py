"""Copies between pages of the pool: the part of a cached page that a new sequence shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from headway.core.contract.layout import LayerCache
from headway.core.contract.transfer import upload
from headway.core.engine.groups import CacheGroup
from headway.core.engine.step import PageCopy


def copy_slots(caches: Sequence[LayerCache], groups: Sequence[CacheGroup], copies: Sequence[PageCopy]) -> None:
    """Copy the first slots of pages, in the caches of their groups' layers. No page is a source and a target.

    Works on any layout and element type through the logical view, with the same few launches for one copy as for many.
    """
    for number, group in enumerate(groups):
        own = [copy[1:] for copy in copies if copy.group == number]
        if not own:
            continue
        cache = caches[group.layers[0]]
        sources, targets, counts = numpy.array(own, dtype=numpy.int64).T
        tokens = numpy.arange(counts.sum()) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
        blocks, slots = numpy.divmod(tokens, cache.block_size)
        within = blocks * group.block_stride
        source_blocks, target_blocks = (numpy.repeat(each, counts) * group.page_stride + within for each in (sources, targets))
        places = numpy.stack([source_blocks, target_blocks, slots])
        source, target, slot = upload(torch.from_numpy(places), cache.key.device)
        for layer in group.layers:
            cache = caches[layer]
            tensors = (cache.logical_key, cache.logical_value) if cache.layout.has_value else (cache.logical_key,)
            for logical in tensors:
                rows = _indexable(logical)
                rows[target, slot] = rows[source, slot]


def _indexable(logical: Tensor) -> Tensor:
    """The same memory in an element type that torch can index, which fp8 is not."""
    return logical.view(torch.uint8) if logical.dtype.itemsize == 1 else logical
