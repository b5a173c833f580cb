"""What each sequence of a batch sees, in place of a mask of every query and key: transformers' rule, read and held against ours.

transformers asks for a mask by a rule (causal, or causal within a window) and a padding mask. What it gets is a tensor that holds
nothing and remembers the answer, so that all layers of a step share it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.integrations.dense import Sequences
from headway.integrations.rules import Rule, known, shows

OWN_WAY = 'attn_implementation="sdpa" or "eager" computes it'


@dataclass(eq=False)
class Sight:
    """Who sees whom in one call of a model, for layers of one kind."""

    batch: int
    q_length: int
    kv_length: int
    """Keys in the cache's tensors, those included that nobody wrote yet (a static cache)."""
    q_offset: int
    """Position of the first query."""
    kv_offset: int
    """Position of the first key: a window's cache has dropped those before."""
    window: int | None
    padding: NDArray[numpy.bool_] | None
    """[batch, positions]: False where a token is padding, as it was when the mask was made; None: nowhere."""
    refusal: str = ""
    """Why Headway cannot compute it; told when a layer asks, since some masks are made and never used."""
    calls: dict[Any, Any] = field(default_factory=dict)
    """What a step plans once for its layers, by all that the plan depends on."""
    metadata: dict[Any, Any] = field(default_factory=dict)
    """What plans of several kinds of layers are made of."""
    new_keys: Tensor | None = None
    """int64 [q_length]: where this call's tokens lie among the keys, if they are not the last ones of each row."""

    @cached_property
    def rows(self) -> Sequences:
        """The sequences of the batch, without padding; those with no query are left out.

        :raises ConfigError: padding in the middle of a sequence.
        """
        count, length = self.batch, self.q_offset + self.q_length
        seen = None if self.padding is None else self.padding[:, :length]
        if seen is None or (seen.shape[1] == length and seen.all()):  # nothing is padding
            queries, rows = list(range(0, count * self.q_length, self.q_length)), list(range(count))
            return Sequences(queries, [self.q_length] * count, [0] * count, [length - self.kv_offset] * count, rows)
        first, end = seen.argmax(1), seen.shape[1] - seen[:, ::-1].argmax(1)
        end = numpy.where(seen.any(1), end, first)
        if (seen.sum(1) != end - first).any():
            raise ConfigError("attention_mask", "padding before or behind a sequence", "padding inside it", OWN_WAY)
        query_first = numpy.maximum(first, self.q_offset)
        query_lens = numpy.maximum(end - query_first, 0)
        key_first = numpy.maximum(first - self.kv_offset, 0)
        kv_lens = end - self.kv_offset - key_first
        batch = numpy.arange(count)
        queries = batch * self.q_length + query_first - self.q_offset
        live = query_lens > 0
        return Sequences(*(each[live].tolist() for each in (queries, query_lens, key_first, kv_lens, batch)))

    @classmethod
    def packed(cls, ends_q: NDArray[numpy.int64], ends_k: NDArray[numpy.int64], q_length: int, kv_length: int) -> Sight:
        """Of sequences one behind the other in a batch of one row: ends_q and ends_k [n + 1] say where each begins and ends."""
        query_lens, kv_lens = numpy.diff(ends_q), numpy.diff(ends_k)
        live = query_lens > 0
        sight = cls(1, q_length, kv_length, 0, 0, None, None)
        starts = ends_q[:-1], query_lens, ends_k[:-1], kv_lens, numpy.zeros_like(query_lens)
        rows = Sequences(*(each[live].tolist() for each in starts))
        sight.__dict__["rows"] = rows
        new = numpy.zeros(q_length, dtype=numpy.int64)
        for query, count, key, length in zip(*rows[:4], strict=True):
            new[query : query + count] = numpy.arange(key + length - count, key + length)
        sight.new_keys = torch.from_numpy(new)
        return sight

    @cached_property
    def padded(self) -> bool:
        """Whether some queries are of padding, so that those that are not must be picked."""
        return sum(self.rows.query_lens) != self.batch * self.q_length


class SightMask(Tensor):
    """A mask [batch, 1, q_length, kv_length] without memory, which only carries its Sight from transformers to a layer."""

    sight: Sight

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """Itself: there is nothing to lay out, and transformers asks for it beside a static cache."""
        return self

    def to(self, *where: Any, **options: Any) -> SightMask:
        """Itself: there is nothing to move to a further device of a model that is spread over several."""
        return self


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Rule | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """What transformers calls for every kind of mask that a model asks for; the parameters are those of its `sdpa_mask`."""
    starts = int(q_offset), int(kv_offset)  # a static cache knows its length on the device alone
    sight = Sight(batch_size, q_length, kv_length, *starts, local_size, None)
    if use_vmap or (not allow_is_causal_skip and q_length > 1):
        sight.refusal = "a mask that is more than causal, with or without a window (packed sequences, images, a function)"
    elif attention_mask is not None and attention_mask.ndim != 2:
        sight.refusal = f"an attention_mask of {attention_mask.ndim} dimensions"
    elif mask_function is not None and not known(mask_function, local_size) and not _as_said(sight, mask_function):
        sight.refusal = "a rule that is neither causal nor causal within a window (chunks, bidirectional attention)"
    elif attention_mask is not None:  # read here, before a step's first kernel, and copied, since its memory may change
        sight.padding = attention_mask.to("cpu", torch.bool, copy=True).numpy()
    mask = torch.zeros((), dtype=torch.bool, device=device).expand(batch_size, 1, q_length, kv_length).as_subclass(SightMask)
    mask.sight = sight
    return mask


def _as_said(sight: Sight, rule: Rule) -> bool:
    """Whether a rule shows three queries of the call the keys that Headway would."""
    last = sight.q_offset + sight.q_length - 1
    queries = {last, max(last - 1, sight.q_offset), sight.q_offset + sight.q_length // 2}
    return all(shows(rule, query, sight.window) for query in queries)
