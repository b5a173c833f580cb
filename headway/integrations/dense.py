"""Block views of another program's dense keys and values. A block begins at every slot, so that any sequence is a list of blocks.

The blocks of a view overlap: each run of `block_size` slots is identified by its first slot. A sequence may therefore begin
anywhere, after its row's padding or inside a tensor, without a copy. Only the last blocks of the last head extend past the end of
the memory (*open* blocks). A decode kernel that reads only live slots may use open blocks, and a prompt without context reads no
cache. In all other cases, keys and values are copied into padded memory if a block table would contain an open block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import compress
from types import FunctionType
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers import masking_utils

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.errors import ConfigError
from headway.core.contract.kernel import upload
from headway.core.contract.layout import NHD, CacheGeometry, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.select.costs import Shape
from headway.core.select.selector import Selector


class Sequences(NamedTuple):
    """Sequences of a call, as lists of Python numbers, which cost less than numpy arrays for few sequences."""

    queries: list[int]
    """Index of each sequence's first new token among the call's tokens."""
    query_lens: list[int]
    keys: list[int]
    """Index of each sequence's first key in its row of the key tensor."""
    kv_lens: list[int]
    rows: list[int]
    """Index of the batch row that contains each sequence."""

    def part(self, chosen: Sequence[bool]) -> Sequences:
        """Return the chosen sequences."""
        return Sequences(*(list(compress(each, chosen)) for each in self))

    def last_block(self, row: int, size: int) -> int:
        """Return the largest slot at which the last block of any sequence begins. row: number of slots per row of the batch."""
        every = zip(self.rows, self.keys, self.kv_lens, strict=True)
        return max(at * row + key + (length - 1) // size * size for at, key, length in every)


@dataclass(frozen=True, slots=True)
class BackendShare:
    """Sequences that one backend runs: only decodes or only prompts."""

    sequences: Sequences
    phase: Phase
    backend: AttentionBackend

    @classmethod
    def all_of(cls, sequences: Sequences, selector: Selector, spec: AttentionSpec) -> list[BackendShare]:
        """Split sequences into prompts and decodes, prompts first, each with the backend that `selector` chooses."""
        decodes = [query_len == 1 < kv_len for query_len, kv_len in zip(sequences.query_lens, sequences.kv_lens, strict=True)]
        if all(decodes):
            return [cls._of(sequences, Phase.DECODE, selector, spec)] if decodes else []
        prompts = sequences.part([not decode for decode in decodes])
        phase = Phase.PREFILL if prompts.query_lens == prompts.kv_lens else Phase.EXTEND
        shares = [cls._of(prompts, phase, selector, spec)]
        if any(decodes):
            shares.append(cls._of(sequences.part(decodes), Phase.DECODE, selector, spec))
        return shares

    @classmethod
    def _of(cls, sequences: Sequences, phase: Phase, selector: Selector, spec: AttentionSpec) -> BackendShare:
        shape = Shape.of(phase, sequences.query_lens, sequences.kv_lens)
        return cls(sequences, phase, selector.backends_of(shape)[spec])

    @property
    def reads(self) -> bool:
        """True if the backend reads the KV cache, not only the new tokens' keys."""
        return not (self.phase is Phase.PREFILL and self.backend.capabilities.dense_prefill)

    @property
    def reads_whole(self) -> bool:
        """True if the backend may read whole blocks, past a sequence's end."""
        return self.reads and not (self.phase is Phase.DECODE and self.backend.capabilities.reads_live_slots)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks over keys and values [batch, num_kv_heads, length, head_dim or v_head_dim] of one kind of layer."""

    block_size: int
    row: int
    """Number of slots per row of the batch."""
    num_blocks: int
    """Number of slots at which a complete block of all heads begins."""
    open_blocks: int
    """Number of additional slots whose blocks extend past the end of the memory."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    """Strides of the key and value views [num_blocks, block_size, num_kv_heads, head_dim or v_head_dim]."""
    room: int = 0
    """Number of padding slots after each row in a copy; 0 means no copy."""

    @classmethod
    def of(cls, key: Tensor, value: Tensor, shares: Sequence[BackendShare], size: int) -> Blocks:
        """Return blocks over the tensors' own memory if that memory contains all blocks to read, else over copies."""
        reading = [share for share in shares if share.reads]
        own = cls._over(key, value, size)
        if own is not None:
            whole = [share.sequences.last_block(own.row, size) for share in reading if share.reads_whole]
            if (own.num_blocks or not reading) and all(last < own.num_blocks for last in whole):
                return own
        if not reading:  # the tables number slots as if rows were contiguous
            batch, heads, length, _ = key.shape
            shapes = tuple((0, size, heads, tensor.shape[3]) for tensor in (key, value))
            strides = tuple((dim, dim, dim, 1) for dim in (key.shape[3], value.shape[3]))
            return cls(size, length, 0, batch * length, shapes, strides)  # type: ignore[arg-type]
        copies = cls._over(_with_room(key, size - 1), _with_room(value, size - 1), size)
        assert copies is not None
        return replace(copies, room=size - 1)

    @classmethod
    def _over(cls, key: Tensor, value: Tensor, size: int) -> Blocks | None:
        """Return blocks over this memory without a copy. None if the strides of keys and values differ or are not multiples of a
        slot."""
        row, whole, all_ = _row(key), [], []
        if row is None or row != _row(value):
            return None
        for tensor in (key, value):
            room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
            slots = (room - (tensor.shape[1] - 1) * tensor.stride(1) - tensor.shape[3]) // tensor.stride(2) + 1
            all_.append(slots)
            whole.append(max(slots + 1 - size, 0))
        count = min(whole)
        shapes = tuple((count, size, tensor.shape[1], tensor.shape[3]) for tensor in (key, value))
        strides = tuple((t.stride(2), t.stride(2), t.stride(1), 1) for t in (key, value))
        return cls(size, row, count, min(all_) - count, shapes, strides)  # type: ignore[arg-type]

    def views(self, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """Return the overlapping blocks of keys and values, over their own memory or over copies."""
        if self.room:
            key, value = _with_room(key, self.room), _with_room(value, self.room)
        return {
            "key": key.as_strided(self.shapes[0], self.strides[0]),
            "value": value.as_strided(self.shapes[1], self.strides[1]),
        }

    def cache(self, key: Tensor, value: Tensor, spec: AttentionSpec) -> LayerCache:
        """Return the blocks as a layer's cache, after checking it."""
        geometry = CacheGeometry.of(spec, self.num_blocks, self.block_size)
        return LayerCache(self.views(key, value), NHD, geometry, open_blocks=self.open_blocks)

    def metadata(self, share: BackendShare, device: torch.device) -> AttentionMetadata:
        """Return the attention metadata for the sequences of one backend, over these blocks."""
        size, sequences = self.block_size, share.sequences
        firsts = [at * self.row + key for at, key in zip(sequences.rows, sequences.keys, strict=True)]
        columns = [-(-length // size) for length in sequences.kv_lens]
        offsets = _offsets(max(columns), size)
        table = numpy.array(firsts, dtype=numpy.int32)[:, None] + offsets
        if min(columns) < len(offsets):
            table[offsets >= numpy.array(columns)[:, None] * size] = 0
        if share.phase is Phase.DECODE:
            newest = [(first, length - 1) for first, length in zip(firsts, sequences.kv_lens, strict=True)]
            slots = [(first + at // size * size) * size + at % size for first, at in newest]
            return single_tokens(sequences.kv_lens, slots, table, size, device, self.num_blocks)
        contexts = [length - new for length, new in zip(sequences.kv_lens, sequences.query_lens, strict=True)]
        blocks = [self.num_blocks]
        return AttentionMetadata.build_groups(sequences.query_lens, contexts, [table], size, device, 1, blocks)[0]


@lru_cache(64)
def _offsets(columns: int, size: int) -> NDArray[numpy.int32]:
    """Return the offsets of a sequence's blocks from its first slot. Cached, since many steps have the same number of blocks."""
    return numpy.arange(0, columns * size, size, dtype=numpy.int32)


def _row(tensor: Tensor) -> int | None:
    """Return the number of slots per row of the batch, or None if it is not an integer."""
    step = tensor.stride(2)
    whole = tensor.stride(3) == 1 and step > 0 and tensor.stride(0) % step == 0
    return tensor.stride(0) // step if whole else None


def _with_room(tensor: Tensor, slots: int) -> Tensor:
    return pad(tensor, (0, 0, 0, slots)).contiguous()


def single_tokens(
    kv_lens: Sequence[int],
    slots: Sequence[int],
    tables: NDArray[numpy.int32],
    block_size: int,
    device: torch.device,
    num_blocks: int = 0,
) -> AttentionMetadata:
    """Return the metadata for sequences with one new token each, twice as fast as `AttentionMetadata.build`.

    kv_lens: lengths including the new token, at least 2.
    slots: block * block_size + offset of each new token.
    tables: block tables [num_seqs, max_blocks], 0 past a sequence's end.
    """
    count, width = tables.shape
    fields = (
        _starts(count),
        numpy.array(kv_lens, dtype=numpy.int32),
        numpy.array([kv_len - 1 for kv_len in kv_lens], dtype=numpy.int32),
        numpy.array(slots, dtype=numpy.int64).view(numpy.int32),
        tables.reshape(-1),
    )
    # One allocation whose fields begin at multiples of 16 bytes, as in Packed.
    sizes = [size for values in fields for size in (len(values), -len(values) % 4)]
    host = numpy.zeros(sum(sizes), dtype=numpy.int32)
    at = 0
    for values in fields:
        host[at : at + len(values)] = values
        at += len(values) + -len(values) % 4
    on_host = torch.from_numpy(host)
    host_parts = on_host.split_with_sizes(sizes)[::2]
    on_device = upload(on_host, device)
    starts, seq_lens, context_lens, slot_mapping, table = (
        host_parts if on_device is on_host else on_device.split_with_sizes(sizes)[::2]
    )
    return AttentionMetadata(
        num_prefills=0,
        num_decodes=count,
        num_prefill_tokens=0,
        num_decode_tokens=count,
        query_start_loc=starts,
        seq_lens=seq_lens,
        context_lens=context_lens,
        block_table=table.view(count, width),
        slot_mapping=slot_mapping.view(torch.int64),
        block_size=block_size,
        max_query_len=1,
        max_seq_len=max(kv_lens),
        query_start_loc_cpu=host_parts[0],
        seq_lens_cpu=host_parts[1],
        block_table_cpu=host_parts[4].view(count, width),
        num_blocks=num_blocks,
    )


@lru_cache(64)
def _starts(count: int) -> NDArray[numpy.int32]:
    return numpy.arange(count + 1, dtype=numpy.int32)


IMPLEMENTATION_HINT = 'attn_implementation="sdpa" or "eager" computes it'


@dataclass(eq=False)
class Visibility:
    """Queries and keys of one model call for one kind of layer, and which queries see which keys."""

    batch: int
    q_length: int
    kv_length: int
    """Number of keys in the cache's tensors, including slots not written yet (static cache)."""
    q_offset: int
    kv_offset: int
    """Position of the first key; a sliding-window cache has dropped earlier ones."""
    window: int | None
    padding: NDArray[numpy.bool_] | None
    """bool [batch, positions]: False for positions that were padding when the mask was made. None means no padding."""
    refusal: str = ""
    """Reason why Headway does not support the mask; raised when a layer uses it, since some masks are never used."""
    calls: dict[Any, Any] = field(default_factory=dict)
    """Plans that the layers of a step share, keyed by everything on which a plan depends."""
    metadata: dict[Any, Any] = field(default_factory=dict)
    """Metadata that the plans of several kinds of layers share."""
    new_keys: Tensor | None = None
    """int64 [q_length]: indices of this call's tokens among the keys. None if they are the last keys of each row."""

    @cached_property
    def rows(self) -> Sequences:
        """The batch's sequences without padding or empty queries. :raises ConfigError: if there is padding within a sequence."""
        count, length = self.batch, self.q_offset + self.q_length
        seen = None if self.padding is None else self.padding[:, :length]
        if seen is None or (seen.shape[1] == length and seen.all()):  # no padding
            queries, rows = list(range(0, count * self.q_length, self.q_length)), list(range(count))
            return Sequences(queries, [self.q_length] * count, [0] * count, [length - self.kv_offset] * count, rows)
        first, end = seen.argmax(1), seen.shape[1] - seen[:, ::-1].argmax(1)
        end = numpy.where(seen.any(1), end, first)
        if (seen.sum(1) != end - first).any():
            raise ConfigError("attention_mask", "padding before or behind a sequence", "padding inside it", IMPLEMENTATION_HINT)
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
        """Return the visibility of sequences packed in one row. ends_q, ends_k: int64 [n + 1], start of each sequence and end of
        the last, in queries and keys."""
        query_lens, kv_lens = numpy.diff(ends_q), numpy.diff(ends_k)
        live = query_lens > 0
        visibility = cls(1, q_length, kv_length, 0, 0, None, None)
        starts = ends_q[:-1], query_lens, ends_k[:-1], kv_lens, numpy.zeros_like(query_lens)
        rows = Sequences(*(each[live].tolist() for each in starts))
        visibility.__dict__["rows"] = rows
        new = numpy.zeros(q_length, dtype=numpy.int64)
        for query, count, key, length in zip(rows.queries, rows.query_lens, rows.keys, rows.kv_lens, strict=True):
            new[query : query + count] = numpy.arange(key + length - count, key + length)
        visibility.new_keys = torch.from_numpy(new)
        return visibility

    @cached_property
    def padded(self) -> bool:
        """True if some queries are padding, so that the real ones must be gathered."""
        return sum(self.rows.query_lens) != self.batch * self.q_length


class VisibilityMask(Tensor):
    """A mask [batch, 1, q_length, kv_length] without memory, which passes a Visibility through transformers to a layer."""

    visibility: Visibility

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """Return the mask itself, because it has no memory. transformers calls this method if the cache is static."""
        return self

    def to(self, *where: Any, **options: Any) -> VisibilityMask:
        """Return the mask itself, because it has no memory to move to another device."""
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
    **others: Any,
) -> Tensor:
    """Return a mask. transformers calls this function for each kind of mask of a model, with the parameters of `sdpa_mask`."""
    # The length of a static cache is only known on the device.
    visibility = Visibility(batch_size, q_length, kv_length, int(q_offset), int(kv_offset), local_size, None)
    if others.get("use_vmap") or (not others.get("allow_is_causal_skip", True) and q_length > 1):
        visibility.refusal = "a mask that is more than causal, with or without a window (packed sequences, images, a function)"
    elif attention_mask is not None and attention_mask.ndim != 2:
        visibility.refusal = f"an attention_mask of {attention_mask.ndim} dimensions"
    elif (
        mask_function is not None
        and not is_known_rule(mask_function, local_size)
        and not _matches_rule(visibility, mask_function)
    ):
        visibility.refusal = "a rule that is neither causal nor causal within a window (chunks, bidirectional attention)"
    elif attention_mask is not None:  # read before the step's first kernel, and copied, since the caller may reuse the memory
        visibility.padding = attention_mask.to("cpu", torch.bool, copy=True).numpy()
    empty = torch.zeros((), dtype=torch.bool, device=others.get("device", "cpu"))
    mask = empty.expand(batch_size, 1, q_length, kv_length).as_subclass(VisibilityMask)
    mask.visibility = visibility
    return mask


def _matches_rule(visibility: Visibility, rule: Rule) -> bool:
    """Return whether a rule lets three sample queries see exactly the keys that Headway would let them see."""
    last = visibility.q_offset + visibility.q_length - 1
    queries = {last, max(last - 1, visibility.q_offset), visibility.q_offset + visibility.q_length // 2}
    return all(allows(rule, query, visibility.window) for query in queries)


Rule = Callable[..., Tensor]
"""Function (batch, head, query, key) -> whether the query sees the key. Query and key are positions and may be tensors."""

_DEPTH = 6  # Maximum nesting of functions to compare


def is_known_rule(rule: Rule, window: int | None) -> bool:
    """Return whether a rule is transformers' own causal rule, with or without a window, by comparing the code of both."""
    if torch.compiler.is_dynamo_compiling():  # dynamo would trace the comparison
        return False
    causal = _causal(window)
    return causal is not None and bool(_written(rule) == causal)


def allows(rule: Rule, query: int, window: int | None) -> bool:
    """Return whether a rule lets a query see exactly its own key and the earlier ones within the window."""
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
    """Return the code of transformers' causal rule, or None if this version lacks it or its rule behaves differently."""
    name = "causal_mask_function" if window is None else "sliding_window_causal_mask_function"
    rule = getattr(masking_utils, name, None)
    if rule is not None and window is not None:
        rule = rule(window)
    around = 64 if window is None else window
    tried = (0, 1, around - 1, around, around + 1, 2 * around + 1)
    return _written(rule) if rule is not None and all(allows(rule, max(query, 0), window) for query in tried) else None


def _written(part: Any, depth: int = 0) -> Any:
    """Return the code and closure of a function. Functions with equal values compute the same; a mutable value equals only
    itself."""
    if isinstance(part, FunctionType) and depth < _DEPTH:
        held = tuple(_written(cell.cell_contents, depth + 1) for cell in part.__closure__ or ())
        plain = part.__defaults__ is None and part.__kwdefaults__ is None
        return (part.__code__, id(part.__globals__), held) if plain else object()
    if isinstance(part, tuple) and depth < _DEPTH:
        return tuple(_written(each, depth + 1) for each in part)
    return (type(part), part) if part is None or isinstance(part, (bool, int, float, str)) else object()
