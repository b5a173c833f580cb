"""Backends of a paged cache on somebody else's dense tensors: a block begins at every slot, so any sequence is a list of blocks.

A view whose blocks overlap names each run of `block_size` slots by its first one. So a sequence may begin anywhere, behind the
padding of its row or in the middle of a tensor, and nothing is copied. Only the last block of the memory's last head must not end
behind that memory; where it would, keys and values are copied to where there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from headway.core.contract.backend import Backends
from headway.core.contract.layout import NHD, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.select.costs import Shape
from headway.core.select.request import parse_backend_request
from headway.core.select.selector import Selector
from headway.registry import Registry, create_registry
from headway.tuning.autotune import TableRequest, costs_for
from headway.tuning.named import check_named

_GPU_BLOCK = 16
"""Slots of a block on a GPU, unless a backend wants more: what most of them read."""


@cache
def registry() -> Registry:
    """Headway's backends and those of its plugins."""
    return create_registry()


@cache
def selector_of(spec: AttentionSpec, request: str) -> Selector:
    """What serves a kind of layer. `auto` obeys the crossover table that is kept for it, and measures none itself.

    :raises HeadwayError: the request cannot be served, with the reasons.
    """
    names = [name for name in dict.fromkeys(parse_backend_request(request).values()) if name != "auto"]
    multiples = [registry().backend(name).capabilities.block_multiple for name in names]
    check_named(registry(), names, [spec])
    costs = costs_for([spec], registry(), request, TableRequest(budget=0.0))
    block_size = max(1 if spec.device.type == "cpu" else _GPU_BLOCK, *multiples, 1)
    return Selector(registry(), [spec], request, NHD.name, block_size, costs=costs)


@dataclass(frozen=True)
class Part:
    """Sequences that are computed together, all decodes or all prompts."""

    backends: Backends
    plan: Any
    decodes: bool
    index: Tensor | None
    """Which of the packed tokens are theirs; None: all."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of a call: for each its packed new tokens, and where its keys begin."""

    query_starts: NDArray[numpy.int64]
    query_lens: NDArray[numpy.int64]
    first_slots: NDArray[numpy.int64]
    """The slot of its first key, counted through the memory."""
    kv_lens: NDArray[numpy.int64]


@dataclass(frozen=True)
class Slots:
    """Keys or values as rows of one memory: slot n begins n * `step` elements behind the first."""

    tensor: Tensor
    """[rows, num_kv_heads, length, head_dim]"""

    @property
    def step(self) -> int:
        """Elements from a slot to the next."""
        return self.tensor.stride(2)

    @property
    def row(self) -> int | None:
        """Slots from a row of the batch to the next; None: no whole number of them."""
        whole = self.tensor.stride(3) == 1 and self.step > 0 and self.tensor.stride(0) % self.step == 0
        return self.tensor.stride(0) // self.step if whole else None

    def num_blocks(self, block_size: int) -> int:
        """Slots at which a whole block of all heads begins."""
        tensor = self.tensor
        room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        heads = (tensor.shape[1] - 1) * tensor.stride(1) + tensor.shape[3]
        return max((room - heads) // self.step + 2 - block_size, 0)

    def blocks(self, block_size: int) -> Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim], overlapping."""
        _, heads, _, dim = self.tensor.shape
        shape = (self.num_blocks(block_size), block_size, heads, dim)
        return self.tensor.as_strided(shape, (self.step, self.step, self.tensor.stride(1), 1))


def slots_of(
    key: Tensor, value: Tensor, rows: NDArray[numpy.int64], keys: NDArray[numpy.int64], kv_lens: NDArray[numpy.int64], size: int
) -> tuple[Slots, Slots, NDArray[numpy.int64]]:
    """Keys and values, and the slot of each sequence's first key: in their own memory, or in copies with room for whole blocks.

    key, value: [batch, num_kv_heads, length, head_dim or v_head_dim]. rows, keys: [n], a sequence's row of the batch and its
    first key there. size: slots of a block.
    """

    def firsts(found: Slots) -> NDArray[numpy.int64]:
        return rows * (found.row or 0) + keys

    found = Slots(key), Slots(value)
    if found[0].row is not None and found[0].row == found[1].row:
        last = int((firsts(found[0]) + (kv_lens - 1) // size * size).max())
        if all(each.num_blocks(size) > last for each in found):
            return *found, firsts(found[0])
    found = tuple(Slots(pad(tensor, (0, 0, 0, size - 1)).contiguous()) for tensor in (key, value))  # type: ignore[assignment]
    return *found, firsts(found[0])


def cache_over(keys: Slots, values: Slots, spec: AttentionSpec, block_size: int) -> LayerCache:
    """The overlapping blocks of keys and values as a cache."""
    key, value = keys.blocks(block_size), values.blocks(block_size)
    count = min(len(key), len(value))
    return LayerCache.wrap({"key": key[:count], "value": value[:count]}, NHD, spec)


def plan_parts(sequences: Sequences, selector: Selector, spec: AttentionSpec, num_blocks: int, padded: bool) -> list[Part]:
    """Plan a call: its decodes and its prompts apart, as backends want them. padded: not every packed token is a sequence's."""
    decodes = (sequences.query_lens == 1) & (sequences.kv_lens > 1)
    whole = not padded and bool(decodes.all() or not decodes.any())
    return [
        _plan(sequences, numpy.flatnonzero(chosen), selector, spec, num_blocks, whole)
        for chosen in (~decodes, decodes)
        if chosen.any()
    ]


def _plan(
    sequences: Sequences, chosen: NDArray[numpy.int64], selector: Selector, spec: AttentionSpec, num_blocks: int, whole: bool
) -> Part:
    size = selector.selection.block_size
    query_lens, kv_lens, firsts = (each[chosen] for each in (sequences.query_lens, sequences.kv_lens, sequences.first_slots))
    tables = [(first + numpy.arange(0, length, size)).astype(numpy.int32) for first, length in zip(firsts, kv_lens, strict=True)]
    metadata = AttentionMetadata.build(
        query_lens.tolist(), (kv_lens - query_lens).tolist(), tables, size, spec.device, num_blocks=num_blocks
    )
    shape = Shape.of(metadata.phase, metadata.query_lens, metadata.kv_lens)
    backends = selector.backends_for(metadata.phase, shape.batch, shape.query_len, shape.kv_len)
    index = None
    if not whole:
        tokens = _ranges(sequences.query_starts[chosen], query_lens)
        index = torch.from_numpy(tokens).to(spec.device)
    return Part(backends, backends[spec].plan(metadata), metadata.phase is Phase.DECODE, index)


def _ranges(starts: NDArray[numpy.int64], lens: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    return numpy.concatenate([numpy.arange(start, start + length) for start, length in zip(starts, lens, strict=True)])


def attend(parts: Sequence[Part], spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, out: Tensor) -> None:
    """q, out: [num_tokens, num_heads, head_dim or v_head_dim] of all sequences; k, v: the same tokens' [.., num_kv_heads, ..]."""
    for part in parts:
        backend, index = part.backends[spec], part.index
        queries, result = (q, out) if index is None else (q[index], out.new_empty(len(index), *out.shape[1:]))
        if part.decodes:
            backend.decode(queries, cache, part.plan, result)
        else:
            new = (k, v) if index is None else (k[index], v[index])
            backend.prefill(queries, *new, cache, part.plan, result)
        if index is not None:
            out[index] = result
