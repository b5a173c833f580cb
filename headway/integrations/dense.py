"""Dense keys and values of another program, seen as blocks: a block begins at every slot, so any sequence is a list of blocks.

A view whose blocks overlap names each run of `block_size` slots by its first one. So a sequence may begin anywhere, behind the
padding of its row or in the middle of a tensor, and nothing is copied. Only the last blocks of the memory's last head end behind
that memory (*open* blocks): a decode that reads live slots alone takes them as they are, a prompt without context reads no cache
at all, and for any other part whose tables would name one, keys and values are copied to where there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.compiled import upload
from headway.core.contract.layout import NHD, CacheGeometry, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.select.costs import Shape
from headway.core.select.selector import Selector


class Sequences(NamedTuple):
    """Sequences of a call, as lists of Python's numbers: there are few, and numpy's arrays cost more to make."""

    queries: list[int]
    """Index of each sequence's first new token among those of the call."""
    query_lens: list[int]
    keys: list[int]
    """Place of each sequence's first key, in its row of the keys' tensor."""
    kv_lens: list[int]
    rows: list[int]
    """Row of the batch of each sequence."""

    def part(self, chosen: Sequence[bool]) -> Sequences:
        """The chosen sequences."""
        return Sequences(*(list(compress(each, chosen)) for each in self))

    def last_block(self, row: int, size: int) -> int:
        """The largest slot at which a sequence's last block begins. row: slots from a row of the batch to the next."""
        every = zip(self.rows, self.keys, self.kv_lens, strict=True)
        return max(at * row + key + (length - 1) // size * size for at, key, length in every)


@dataclass(frozen=True, slots=True)
class BackendShare:
    """Sequences that one backend serves, all decodes or all prompts."""

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
        """Whether the backend reads the cache, and not the new tokens' keys alone."""
        return not (self.phase is Phase.PREFILL and self.backend.capabilities.dense_prefill)

    @property
    def reads_whole(self) -> bool:
        """Whether the backend may read whole blocks, past a sequence's end."""
        return self.reads and not (self.phase is Phase.DECODE and self.backend.capabilities.reads_live_slots)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks over keys and values [batch, num_kv_heads, length, head_dim or v_head_dim] of one kind of layer."""

    block_size: int
    row: int
    """Slots from a row of the batch to the next."""
    num_blocks: int
    """Slots at which a whole block of all heads begins."""
    open_blocks: int
    """Further slots, at which a block begins that ends behind the memory."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    """Strides of the key's and the value's view [num_blocks, block_size, num_kv_heads, head_dim or v_head_dim]."""
    room: int = 0
    """Slots that a copy must have behind each row; 0: there is no copy."""

    @classmethod
    def of(cls, key: Tensor, value: Tensor, shares: Sequence[BackendShare], size: int) -> Blocks:
        """Lay blocks over the tensors' own memory, if that memory holds all blocks that are read; else over copies."""
        reading = [share for share in shares if share.reads]
        own = cls._over(key, value, size)
        if own is not None:
            whole = [share.sequences.last_block(own.row, size) for share in reading if share.reads_whole]
            if (own.num_blocks or not reading) and all(last < own.num_blocks for last in whole):
                return own
        if not reading:  # the tables name slots as if rows lay one behind the other
            batch, heads, length, _ = key.shape
            shapes = tuple((0, size, heads, tensor.shape[3]) for tensor in (key, value))
            strides = tuple((dim, dim, dim, 1) for dim in (key.shape[3], value.shape[3]))
            return cls(size, length, 0, batch * length, shapes, strides)  # type: ignore[arg-type]
        copies = cls._over(_with_room(key, size - 1), _with_room(value, size - 1), size)
        assert copies is not None
        return replace(copies, room=size - 1)

    @classmethod
    def _over(cls, key: Tensor, value: Tensor, size: int) -> Blocks | None:
        """Lay blocks over this memory without a copy; None: strides that are no whole numbers of slots, or that differ."""
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
        """The overlapping blocks of keys and values, over their own memory or over copies."""
        if self.room:
            key, value = _with_room(key, self.room), _with_room(value, self.room)
        return {
            "key": key.as_strided(self.shapes[0], self.strides[0]),
            "value": value.as_strided(self.shapes[1], self.strides[1]),
        }

    def cache(self, key: Tensor, value: Tensor, spec: AttentionSpec) -> LayerCache:
        """The blocks as a checked cache."""
        geometry = CacheGeometry.of(spec, self.num_blocks, self.block_size)
        return LayerCache(self.views(key, value), NHD, geometry, open_blocks=self.open_blocks)

    def metadata(self, share: BackendShare, device: torch.device) -> AttentionMetadata:
        """The metadata of attention for a share, over these blocks."""
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
        lens = sequences.query_lens, contexts
        return AttentionMetadata.build_groups(*lens, [table], size, device, 1, [self.num_blocks])[0]


@lru_cache(64)
def _offsets(columns: int, size: int) -> NDArray[numpy.int32]:
    """Offsets of a sequence's blocks from its first slot; remembered, since many steps have equally many."""
    return numpy.arange(0, columns * size, size, dtype=numpy.int32)


def _row(tensor: Tensor) -> int | None:
    """Slots from a row of the batch to the next; None: no whole number."""
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
    """Build the metadata of single tokens as `AttentionMetadata.build` does, in less than half of its time.

    kv_lens: cached tokens and the new one, at least 2 of each sequence. slots: of each new token, block * block_size + offset.
    tables: [num_seqs, max_blocks], 0 past a sequence's end.
    """
    count, width = tables.shape
    fields = (
        _starts(count),
        numpy.array(kv_lens, dtype=numpy.int32),
        numpy.array([kv_len - 1 for kv_len in kv_lens], dtype=numpy.int32),
        numpy.array(slots, dtype=numpy.int64).view(numpy.int32),
        tables.reshape(-1),
    )
    # One piece of memory, whose fields begin at multiples of 16 bytes, as in Packed.
    sizes = [size for field in fields for size in (len(field), -len(field) % 4)]
    host = numpy.zeros(sum(sizes), dtype=numpy.int32)
    at = 0
    for field in fields:
        host[at : at + len(field)] = field
        at += len(field) + -len(field) % 4
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
