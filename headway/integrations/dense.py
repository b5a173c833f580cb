"""Somebody else's dense keys and values as blocks: a block begins at every slot, so any sequence is a list of blocks.

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
from headway.core.contract.layout import NHD, CacheGeometry, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.single_tokens import single_tokens
from headway.core.contract.spec import AttentionSpec
from headway.core.select.costs import Shape
from headway.core.select.selector import Selector


class Sequences(NamedTuple):
    """The sequences of a call, or some of them, as Python's numbers: there are few, and numpy's arrays cost more to make."""

    queries: list[int]
    """Of each sequence its first new token, counted through the call's."""
    query_lens: list[int]
    keys: list[int]
    """Its first key, in its row of the keys' tensor."""
    kv_lens: list[int]
    rows: list[int]
    """Its row of the batch."""

    def part(self, chosen: Sequence[bool]) -> Sequences:
        """Those that are chosen."""
        return Sequences(*(list(compress(each, chosen)) for each in self))

    def last_block(self, row: int, size: int) -> int:
        """The largest slot at which one's last block begins; row: slots from a row of the batch to the next."""
        every = zip(self.rows, self.keys, self.kv_lens, strict=True)
        return max(at * row + key + (length - 1) // size * size for at, key, length in every)


@dataclass(frozen=True, slots=True)
class Share:
    """Sequences that one backend serves, all decodes or all prompts."""

    sequences: Sequences
    phase: Phase
    backend: AttentionBackend

    @classmethod
    def all_of(cls, sequences: Sequences, selector: Selector, spec: AttentionSpec) -> list[Share]:
        """Prompts first, each share with the backend that `selector` chooses."""
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
    def _of(cls, sequences: Sequences, phase: Phase, selector: Selector, spec: AttentionSpec) -> Share:
        shape = Shape.of(phase, sequences.query_lens, sequences.kv_lens)
        return cls(sequences, phase, selector.backends_for(phase, shape.batch, shape.query_len, shape.kv_len)[spec])

    @property
    def reads(self) -> bool:
        """Whether the cache is read, and not the new tokens' keys alone."""
        return not (self.phase is Phase.PREFILL and self.backend.capabilities.dense_prefill)

    @property
    def reads_whole(self) -> bool:
        """Whether whole blocks may be read, past a sequence's end."""
        return self.reads and not (self.phase is Phase.DECODE and self.backend.capabilities.reads_live_slots)


@dataclass(frozen=True, slots=True)
class Blocks:
    """How keys and values [batch, num_kv_heads, length, head_dim or v_head_dim] of one kind are seen as blocks."""

    block_size: int
    row: int
    """Slots from a row of the batch to the next."""
    num_blocks: int
    """Slots at which a whole block of all heads begins."""
    open_blocks: int
    """Further ones, at which a block begins that ends behind the memory."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    """Of the key's and the value's view [num_blocks, block_size, num_kv_heads, head_dim or v_head_dim]."""
    room: int = 0
    """Slots that a copy must have behind each row; 0: there is no copy."""

    @classmethod
    def of(cls, key: Tensor, value: Tensor, shares: Sequence[Share], size: int) -> Blocks:
        """The tensors' own memory, where the blocks that are read lie in it; else copies."""
        reading = [share for share in shares if share.reads]
        own = cls._over(key, value, size)
        if own is not None:
            whole = [share.sequences.last_block(own.row, size) for share in reading if share.reads_whole]
            if (own.num_blocks or not reading) and all(last < own.num_blocks for last in whole):
                return own
        if not reading:  # nothing is; the tables name slots as if rows lay one behind the other
            batch, heads, length, _ = key.shape
            shapes = tuple((0, size, heads, tensor.shape[3]) for tensor in (key, value))
            strides = tuple((dim, dim, dim, 1) for dim in (key.shape[3], value.shape[3]))
            return cls(size, length, 0, batch * length, shapes, strides)  # type: ignore[arg-type]
        copies = cls._over(_with_room(key, size - 1), _with_room(value, size - 1), size)
        assert copies is not None
        return replace(copies, room=size - 1)

    @classmethod
    def _over(cls, key: Tensor, value: Tensor, size: int) -> Blocks | None:
        """Over this memory as it is; None: rows or slots are no whole steps apart, or other ones in the value."""
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
        """The blocks of keys and values of this kind, overlapping: of their own memory, or of copies."""
        if self.room:
            key, value = _with_room(key, self.room), _with_room(value, self.room)
        return {
            "key": key.as_strided(self.shapes[0], self.strides[0]),
            "value": value.as_strided(self.shapes[1], self.strides[1]),
        }

    def cache(self, key: Tensor, value: Tensor, spec: AttentionSpec) -> LayerCache:
        """As a cache, checked."""
        geometry = CacheGeometry.of(spec, self.num_blocks, self.block_size)
        return LayerCache(self.views(key, value), NHD, geometry, open_blocks=self.open_blocks)

    def metadata(self, share: Share, device: torch.device) -> AttentionMetadata:
        """What a share asks of attention over these blocks."""
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
        return AttentionMetadata.build(sequences.query_lens, contexts, table, size, device, num_blocks=self.num_blocks)


@lru_cache(64)
def _offsets(columns: int, size: int) -> NDArray[numpy.int32]:
    """Of a sequence's blocks from its first slot; many steps have equally many."""
    return numpy.arange(0, columns * size, size, dtype=numpy.int32)


def _row(tensor: Tensor) -> int | None:
    """Slots from a row of the batch to the next; None: no whole number of them."""
    step = tensor.stride(2)
    whole = tensor.stride(3) == 1 and step > 0 and tensor.stride(0) % step == 0
    return tensor.stride(0) // step if whole else None


def _with_room(tensor: Tensor, slots: int) -> Tensor:
    return pad(tensor, (0, 0, 0, slots)).contiguous()
