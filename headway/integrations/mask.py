"""The keys that each sequence of a batch sees, instead of a mask of every query and key: transformers' rule, compared with ours.

transformers asks for a mask by a rule (causal, or causal within a window) and a padding mask. The answer is a tensor without
memory that carries a Visibility, so that all layers of a step share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import FunctionType
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import masking_utils

from headway.core.contract.errors import ConfigError
from headway.integrations.dense import Sequences

OWN_WAY = 'attn_implementation="sdpa" or "eager" computes it'


@dataclass(eq=False)
class Visibility:
    """The queries and keys of one call of a model, for layers of one kind, and which queries see which keys."""

    batch: int
    q_length: int
    kv_length: int
    """Keys in the cache's tensors, with those that were not written yet (a static cache)."""
    q_offset: int
    """Position of the first query."""
    kv_offset: int
    """Position of the first key: the cache of a window has dropped earlier ones."""
    window: int | None
    padding: NDArray[numpy.bool_] | None
    """[batch, positions]: False where a token is padding, as it was when the mask was made; None: nowhere."""
    refusal: str = ""
    """Reason why Headway cannot compute it; raised when a layer asks, since some masks are made and never used."""
    calls: dict[Any, Any] = field(default_factory=dict)
    """Plans that the layers of a step share, by all that they depend on."""
    metadata: dict[Any, Any] = field(default_factory=dict)
    """Metadata that the plans of several kinds of layers share."""
    new_keys: Tensor | None = None
    """int64 [q_length]: places of this call's tokens among the keys, if they are not the last ones of each row."""

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
    def packed(cls, ends_q: NDArray[numpy.int64], ends_k: NDArray[numpy.int64], q_length: int, kv_length: int) -> Visibility:
        """Make the visibility of sequences packed in one row. ends_q, ends_k: [n + 1], where each begins and the last ends."""
        query_lens, kv_lens = numpy.diff(ends_q), numpy.diff(ends_k)
        live = query_lens > 0
        visibility = cls(1, q_length, kv_length, 0, 0, None, None)
        starts = ends_q[:-1], query_lens, ends_k[:-1], kv_lens, numpy.zeros_like(query_lens)
        rows = Sequences(*(each[live].tolist() for each in starts))
        visibility.__dict__["rows"] = rows
        new = numpy.zeros(q_length, dtype=numpy.int64)
        for query, count, key, length in zip(*rows[:4], strict=True):
            new[query : query + count] = numpy.arange(key + length - count, key + length)
        visibility.new_keys = torch.from_numpy(new)
        return visibility

    @cached_property
    def padded(self) -> bool:
        """Whether some queries are padding, so that the others must be gathered."""
        return sum(self.rows.query_lens) != self.batch * self.q_length


class VisibilityMask(Tensor):
    """A mask [batch, 1, q_length, kv_length] without memory, which only carries its Visibility from transformers to a layer."""

    visibility: Visibility

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """Return the mask itself: it has no memory, and transformers asks for this beside a static cache."""
        return self

    def to(self, *where: Any, **options: Any) -> VisibilityMask:
        """Return the mask itself: it has no memory to move to another device of a model that is spread over several."""
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
    """Make a mask; transformers calls this for every kind of mask that a model asks for, with the parameters of `sdpa_mask`."""
    starts = int(q_offset), int(kv_offset)  # a static cache knows its length on the device alone
    visibility = Visibility(batch_size, q_length, kv_length, *starts, local_size, None)
    if use_vmap or (not allow_is_causal_skip and q_length > 1):
        visibility.refusal = "a mask that is more than causal, with or without a window (packed sequences, images, a function)"
    elif attention_mask is not None and attention_mask.ndim != 2:
        visibility.refusal = f"an attention_mask of {attention_mask.ndim} dimensions"
    elif mask_function is not None and not is_known_rule(mask_function, local_size) and not _as_said(visibility, mask_function):
        visibility.refusal = "a rule that is neither causal nor causal within a window (chunks, bidirectional attention)"
    elif attention_mask is not None:  # read here, before a step's first kernel, and copied, since its memory may change
        visibility.padding = attention_mask.to("cpu", torch.bool, copy=True).numpy()
    mask = torch.zeros((), dtype=torch.bool, device=device).expand(batch_size, 1, q_length, kv_length).as_subclass(VisibilityMask)
    mask.visibility = visibility
    return mask


def _as_said(visibility: Visibility, rule: Rule) -> bool:
    """Whether a rule lets three queries of the call see the keys that Headway would let them see."""
    last = visibility.q_offset + visibility.q_length - 1
    queries = {last, max(last - 1, visibility.q_offset), visibility.q_offset + visibility.q_length // 2}
    return all(allows(rule, query, visibility.window) for query in queries)


Rule = Callable[..., Tensor]
"""(batch, head, query, key) -> whether the query sees the key; the last two are positions and may be tensors."""

_DEPTH = 6
"""Most levels of functions in functions that are compared."""


def is_known_rule(rule: Rule, window: int | None) -> bool:
    """Whether a rule is the one that transformers makes for causal attention, or for causal attention within a window.

    Rules are compared by their code, since trying one out costs more than a layer; transformers' own was tried once.
    """
    if torch.compiler.is_dynamo_compiling():  # dynamo would trace the comparison
        return False
    causal = _causal(window)
    return causal is not None and bool(_written(rule) == causal)


def allows(rule: Rule, query: int, window: int | None) -> bool:
    """Whether a rule lets a query see its own key and those before it, within the window, and no others."""
    keys, zero = torch.arange(query + 1), torch.tensor(0)
    expected = keys <= query
    if window is not None:
        expected &= keys > query - window
    try:
        seen = rule(zero, zero, torch.tensor(query), keys)
    except (RuntimeError, IndexError, TypeError):  # the rule reads the tokens themselves
        return False
    return torch.equal(seen.expand(query + 1).cpu(), expected)


@cache
def _causal(window: int | None) -> Any:
    """The code of transformers' rule; None: this version has none of that name, or one that does something else."""
    name = "causal_mask_function" if window is None else "sliding_window_causal_mask_function"
    rule = getattr(masking_utils, name, None)
    if rule is not None and window is not None:
        rule = rule(window)
    around = 64 if window is None else window
    tried = (0, 1, around - 1, around, around + 1, 2 * around + 1)
    return _written(rule) if rule is not None and all(allows(rule, max(query, 0), window) for query in tried) else None


def _written(part: Any, depth: int = 0) -> Any:
    """The code and closure of a function: equal ones compute the same. Anything mutable equals itself alone."""
    if isinstance(part, FunctionType) and depth < _DEPTH:
        held = tuple(_written(cell.cell_contents, depth + 1) for cell in part.__closure__ or ())
        plain = part.__defaults__ is None and part.__kwdefaults__ is None
        return (part.__code__, id(part.__globals__), held) if plain else object()
    if isinstance(part, tuple) and depth < _DEPTH:
        return tuple(_written(each, depth + 1) for each in part)
    return (type(part), part) if part is None or isinstance(part, (bool, int, float, str)) else object()
