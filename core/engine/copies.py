"""Copies between blocks of the pool: the part of a cached block that a new sequence shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from headway.core.contract.layout import LayerCache
from headway.core.contract.transfer import upload
from headway.core.engine.step import BlockCopy


def copy_slots(caches: Sequence[LayerCache], copies: Sequence[BlockCopy]) -> None:
    """Copy the first slots of blocks, in every layer's cache; all are read before any is written.

    Works on any layout and element type through the logical view, with the same few launches for one copy as for many.
    """
    sources, targets, counts = numpy.array(copies, dtype=numpy.int64).T
    slots = numpy.arange(counts.sum()) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
    places = numpy.stack([numpy.repeat(sources, counts), numpy.repeat(targets, counts), slots])
    source, target, slot = upload(torch.from_numpy(places), caches[0].key.device)
    for cache in caches:
        tensors = (cache.logical_key, cache.logical_value) if cache.layout.has_value else (cache.logical_key,)
        for logical in tensors:
            rows = _indexable(logical)
            rows[target, slot] = rows[source, slot]


def _indexable(logical: Tensor) -> Tensor:
    """The same memory in an element type that torch can index, which fp8 is not."""
    return logical.view(torch.uint8) if logical.dtype.itemsize == 1 else logical
