"""Attention of one kind of layer in one step: planned at the first such layer, a few operators for each further one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, Plan
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES
from headway.core.select.selector import Selector
from headway.integrations.dense import BackendShare, Blocks, Sequences
from headway.integrations.mask import Visibility


class PlannedPart(NamedTuple):
    """The planned attention of one share of the sequences."""

    backend: AttentionBackend
    plan: Plan
    decodes: bool
    tokens: Tensor | None
    """int64: indices of the share's tokens among the packed ones; None: all."""
    reads: bool
    """Whether the backend reads the cache."""


@dataclass(slots=True)
class StepAttention:
    """The plans that the layers of one kind share in a step. Each layer brings its own tensors."""

    spec: AttentionSpec
    blocks: Blocks
    parts: list[PlannedPart]
    shape: tuple[int, int, int, int]
    """Shape of the result: batch, q_length, num_heads, v_head_dim."""
    padded: bool
    """Whether some queries are padding, whose results are zero."""
    in_place: bool
    """Whether each query is a single token whose heads are contiguous."""
    new: slice | Tensor
    """Places of this call's tokens among the keys: in each row of the batch, or (int64 [q_length]) in the only one."""
    kind: LayerCache | None = None
    """The checked cache of the first layer, without its tensors."""

    @classmethod
    def of(
        cls, visibility: Visibility, spec: AttentionSpec, selector: Selector, query: Tensor, key: Tensor, value: Tensor
    ) -> StepAttention:
        """Choose backends, lay out blocks, and plan.

        query: [batch, num_heads, q_length, head_dim]. key, value: the cache's tensors as they are.
        """
        shares = BackendShare.all_of(visibility.rows, selector, spec)
        blocks = Blocks.of(key, value, shares, selector.selection.block_size)
        padded = visibility.padded
        whole = len(shares) == 1 and not padded
        parts = []
        for share in shares:
            place = share.phase, blocks, spec.device
            metadata = visibility.metadata.get(place)
            if metadata is None:  # shared by kinds that differ in a number alone, such as their sinks
                metadata = visibility.metadata[place] = blocks.metadata(share, spec.device)
            index = None if whole else _tokens(share.sequences).to(spec.device)
            plan = share.backend.plan(metadata)
            parts.append(PlannedPart(share.backend, plan, share.phase is Phase.DECODE, index, share.reads))
        first = visibility.q_offset - visibility.kv_offset
        new = slice(first, first + visibility.q_length) if visibility.new_keys is None else visibility.new_keys.to(spec.device)
        in_place = visibility.q_length == 1 and by_token(query).data_ptr() == query.data_ptr()
        return cls(
            spec, blocks, parts, (visibility.batch, visibility.q_length, spec.num_heads, spec.v_head_dim), padded, in_place, new
        )

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention of a layer of this kind; returns [batch, q_length, num_heads, v_head_dim].

        :raises UnsupportedError: a backend that cannot read such a cache, with the reasons.
        """
        batch, length, heads, dim = self.shape
        out = query.new_empty((batch * length, heads, dim))
        if self.padded:
            out.zero_()
        if self.parts:
            q = query.select(2, 0) if self.in_place else by_token(query)
            cache = self._cache(key, value)
            for part in self.parts:
                if part.decodes and part.tokens is None:
                    part.backend.decode(q, cache, part.plan, out)
                else:
                    self._run(part, q, key, value, cache, out)
        return out.view(self.shape)

    def _run(self, part: PlannedPart, q: Tensor, key: Tensor, value: Tensor, cache: LayerCache, out: Tensor) -> None:
        """Run a part that has some of the tokens, or needs the new keys and values."""
        index = part.tokens
        queries, result = (q, out) if index is None else (q[index], out.new_empty((len(index), *out.shape[1:])))
        if part.decodes:
            part.backend.decode(queries, cache, part.plan, result)
        else:
            k, v = self._new_rows(key), self._new_rows(value)
            new = (k, v) if index is None else (k[index], v[index])
            part.backend.prefill(queries, *new, cache, part.plan, result)
        if index is not None:
            out[index] = result

    def _new_rows(self, tensor: Tensor) -> Tensor:
        """The rows [batch * q_length, heads, dim] of this call's tokens among all that are cached."""
        if isinstance(self.new, slice):
            return by_token(tensor[:, :, self.new])
        return by_token(tensor)[self.new]

    def _cache(self, key: Tensor, value: Tensor) -> LayerCache:
        if self.kind is None:  # the first layer's is checked, for all
            cache = self.blocks.cache(key, value, self.spec)
            for part in self.parts:
                support = part.backend.accepts(cache) if part.reads else YES
                if not support:
                    raise UnsupportedError(f"attention backend {part.backend.name} over dense tensors", support.reasons)
            self.kind = cache.over({})
            return cache
        return self.kind.over(self.blocks.views(key, value))


def by_token(tensor: Tensor) -> Tensor:
    """Reshape [batch, heads, length, dim] to [batch * length, heads, dim] with contiguous heads: a view where they are."""
    batch, heads, length, dim = tensor.shape
    tokens = tensor.select(2, 0) if length == 1 else tensor.transpose(1, 2).reshape(batch * length, heads, dim)
    token, head, element = tokens.stride()
    return tokens if element == 1 and token >= head * (heads - 1) + dim else tokens.contiguous()


def _tokens(sequences: Sequences) -> Tensor:
    """int64: indices of the packed tokens of these sequences."""
    spans = zip(sequences.queries, sequences.query_lens, strict=True)
    return torch.from_numpy(numpy.concatenate([numpy.arange(start, start + length) for start, length in spans]))
