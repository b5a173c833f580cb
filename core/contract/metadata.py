"""Attention metadata of one step: lengths, block tables and slots, shared by all layers and backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.core.contract.kernel import Packed

BlockTables = Sequence[Sequence[int] | NDArray[numpy.int32]] | NDArray[numpy.int32]
"""Physical blocks of each sequence, or int32 [num_seqs, max_blocks] with zeros after each sequence's last block."""


class Phase(Enum):
    """Kind of attention that a sequence needs. It is derived from the sequence's lengths."""

    PREFILL = "prefill"
    """No cached context: all keys belong to this step's tokens."""
    EXTEND = "extend"
    """Several new tokens after a cached context: after a prefix cache hit, or a later chunk of a long prompt."""
    DECODE = "decode"
    """One new token after a cached context, or 2 to 8 if draft tokens are verified."""

    @staticmethod
    def of(query_len: int, context_len: int, decode_query_len: int = 1) -> Phase:
        """Return the phase of a sequence with `query_len` new tokens after `context_len` cached tokens."""
        if context_len == 0:
            return Phase.PREFILL
        return Phase.DECODE if query_len <= decode_query_len else Phase.EXTEND


@dataclass(frozen=True)
class AttentionMetadata:
    """Metadata of one step. Tokens of all sequences are packed: sequences in PREFILL or EXTEND first, then sequences in DECODE.


    Field names are vLLM's. The `_cpu` tensors are host copies, made before the upload, so that no backend has to synchronise.
    """

    num_prefills: int
    """Number of sequences in PREFILL or EXTEND."""
    num_decodes: int
    """Number of sequences in DECODE, padding rows included."""
    num_prefill_tokens: int
    num_decode_tokens: int
    query_start_loc: Tensor
    """int32 [num_seqs + 1]: index of each sequence's first packed token. The last entry is the number of tokens."""
    seq_lens: Tensor
    """int32 [num_seqs]: number of cached plus new tokens. 0 marks a padding row."""
    context_lens: Tensor
    """int32 [num_seqs]: number of cached tokens, without this step's tokens."""
    block_table: Tensor
    """int32 [num_seqs, max_blocks]: physical block of each logical block. Entries after a sequence's last block are 0 and must
    not be read. With a sliding window, blocks that have left the window may have been freed: their entries name a block of zeros,
    which may be read but must not affect the result."""
    slot_mapping: Tensor
    """int64 [num_tokens]: cache slot of each new token's k and v, block * block_size + offset. Writers skip -1."""
    block_size: int
    max_query_len: int
    max_seq_len: int
    query_start_loc_cpu: Tensor
    seq_lens_cpu: Tensor
    block_table_cpu: Tensor
    num_blocks: int = 0
    """Number of blocks in the pool, for plans that depend on it. 0 means unknown."""
    upper_bound_lens: bool = False
    """True if `seq_lens_cpu` of decode sequences may be upper bounds, because the host has not read the results of earlier steps
    yet. A backend whose decode needs exact lengths sets `Capabilities.exact_host_lengths`."""

    @property
    def num_seqs(self) -> int:
        """Number of sequences in the step, padding rows included."""
        return self.num_prefills + self.num_decodes

    @property
    def num_tokens(self) -> int:
        """Number of new tokens in the step."""
        return self.num_prefill_tokens + self.num_decode_tokens

    @cached_property
    def query_lens(self) -> list[int]:
        """Number of new tokens of each sequence."""
        starts: list[int] = self.query_start_loc_cpu.tolist()
        return [end - start for start, end in pairwise(starts)]

    @cached_property
    def kv_lens(self) -> list[int]:
        """`seq_lens` as a list of Python ints."""
        return list(self.seq_lens_cpu.tolist())

    @cached_property
    def phase(self) -> Phase:
        """Phase of a step that does not mix phases: DECODE; EXTEND if any sequence has a cached context; otherwise PREFILL."""
        assert not (self.num_prefills and self.num_decodes), "a mixed step has two phases: use .prefill and .decode"
        if self.num_decodes:
            return Phase.DECODE
        cached = any(kv > q for q, kv in zip(self.query_lens, self.kv_lens, strict=True))
        return Phase.EXTEND if cached else Phase.PREFILL

    @cached_property
    def prefill(self) -> AttentionMetadata | None:
        """View of the sequences in PREFILL or EXTEND, or None if there are none."""
        if self.num_prefills == 0:
            return None
        return self if self.num_decodes == 0 else self._view(0, self.num_prefills)

    @cached_property
    def decode(self) -> AttentionMetadata | None:
        """View of the sequences in DECODE, with `query_start_loc` counted from 0, or None if there are none."""
        if self.num_decodes == 0:
            return None
        return self if self.num_prefills == 0 else self._view(self.num_prefills, self.num_seqs)

    def _view(self, first: int, last: int) -> AttentionMetadata:
        decodes = first >= self.num_prefills
        skip = self.num_prefill_tokens if decodes else 0
        count = self.num_decode_tokens if decodes else self.num_prefill_tokens
        query_lens, kv_lens = self.query_lens[first:last], self.kv_lens[first:last]
        return AttentionMetadata(
            num_prefills=0 if decodes else self.num_prefills,
            num_decodes=self.num_decodes if decodes else 0,
            num_prefill_tokens=0 if decodes else count,
            num_decode_tokens=count if decodes else 0,
            query_start_loc=self.query_start_loc[first : last + 1] - skip,
            seq_lens=self.seq_lens[first:last],
            context_lens=self.context_lens[first:last],
            block_table=self.block_table[first:last],
            slot_mapping=self.slot_mapping[skip : skip + count],
            block_size=self.block_size,
            max_query_len=max(query_lens),
            max_seq_len=max(kv_lens),
            query_start_loc_cpu=self.query_start_loc_cpu[first : last + 1] - skip,
            seq_lens_cpu=self.seq_lens_cpu[first:last],
            block_table_cpu=self.block_table_cpu[first:last],
            num_blocks=self.num_blocks,
            upper_bound_lens=self.upper_bound_lens and decodes,
        )

    @classmethod
    def one_prompt(
        cls, length: int, block_table: Tensor, slot_mapping: Tensor, block_size: int, num_blocks: int = 0
    ) -> AttentionMetadata:
        """Return the metadata of one prompt of a fixed length, over static tensors of a CUDA graph.

        block_table: int32 [1, blocks]
        slot_mapping: int64 [length]
        """
        device = slot_mapping.device
        starts, lens = torch.tensor([0, length], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        return cls(
            num_prefills=1,
            num_decodes=0,
            num_prefill_tokens=length,
            num_decode_tokens=0,
            query_start_loc=starts.to(device),
            seq_lens=lens.to(device),
            context_lens=torch.zeros(1, dtype=torch.int32, device=device),
            block_table=block_table,
            slot_mapping=slot_mapping,
            block_size=block_size,
            max_query_len=length,
            max_seq_len=length,
            query_start_loc_cpu=starts,
            seq_lens_cpu=lens,
            block_table_cpu=torch.zeros(block_table.shape, dtype=torch.int32),
            num_blocks=num_blocks,
        )

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int] | NDArray[numpy.int32],
        context_lens: Sequence[int] | NDArray[numpy.int32],
        block_tables: BlockTables,
        block_size: int,
        device: torch.device | str = "cpu",
        decode_query_len: int = 1,
        num_draft_tokens: Sequence[int] | NDArray[numpy.int32] | None = None,
        num_blocks: int = 0,
        upper_bound_lens: bool = False,
    ) -> AttentionMetadata:
        """Return the metadata of one step, made from lengths on the host.

        Sequences in DECODE must come last. A padding row has context_len = -query_len, hence length 0, and no blocks. It counts
        as DECODE, and is the only kind of row that sees no key.

        block_tables: physical blocks of each sequence, with room for its context and new tokens. An array is padded with zeros.
        decode_query_len: maximum number of new tokens that counts as DECODE.
        num_draft_tokens: number of draft tokens to verify per sequence. A sequence with n draft tokens has n + 1 query tokens and
        is in DECODE; a sequence without draft tokens is in DECODE only with one query token. Lengths do not distinguish draft
        tokens from a prompt's tokens, so pass this argument if there are any.
        num_blocks, upper_bound_lens: see the fields of the same names.

        :raises ConfigError: if a sequence has impossible lengths or blocks, or comes too early; the message gives its index.
        """
        _check_lengths(query_lens, context_lens, block_tables, num_draft_tokens)
        _check_blocks(numpy.add(query_lens, context_lens), block_tables, block_size, num_blocks)
        most = decode_query_len if num_draft_tokens is None else numpy.asarray(num_draft_tokens) + 1
        surplus = (numpy.add(query_lens, context_lens) == 0) & (numpy.asarray(query_lens) > most)
        if surplus.any():
            row, longest = int(surplus.argmax()), "the longest decode (decode_query_len, num_draft_tokens + 1)"
            raise ConfigError(f"{_BUILD}: sequence {row}", f"padding of at most {longest}", f"query_len {query_lens[row]}")
        tables, blocks = [block_tables], [num_blocks]
        return cls.build_groups(query_lens, context_lens, tables, block_size, device, most, blocks, upper_bound_lens)[0]

    @classmethod
    def build_groups(
        cls,
        query_lens: Sequence[int] | NDArray[numpy.int32],
        context_lens: Sequence[int] | NDArray[numpy.int32],
        block_tables: Sequence[BlockTables],
        block_size: int,
        device: torch.device | str,
        decode_query_lens: int | NDArray[numpy.int32],
        num_blocks: Sequence[int],
        upper_bound_lens: bool = False,
    ) -> list[AttentionMetadata]:
        """Return one `AttentionMetadata` per cache group. The results differ only in block table, slots and `num_blocks`.

        The function runs once per engine step, so it does not check lengths and blocks.

        :raises ConfigError: if a sequence in DECODE comes before one that is not.

        decode_query_lens: maximum number of new tokens that counts as DECODE: one number for all sequences, or one per sequence.
        """
        num_seqs = len(query_lens)
        query, context = (numpy.asarray(each, dtype=numpy.int32) for each in (query_lens, context_lens))
        decodes = (context != 0) & (query <= decode_query_lens)  # Phase.of
        num_prefills = num_seqs - int(decodes.sum())
        if decodes[:num_prefills].any():
            row = int(decodes.argmax())
            got = f"query_len {query[row]} before a prompt"
            raise ConfigError(f"{_BUILD}: sequence {row}", "all sequences in DECODE last", got)

        num_tokens, widest = int(query.sum()), max(1, max(map(_widest, block_tables)))
        packed = _pack(query, context, block_tables, widest, block_size)
        starts, seq_lens = packed.host("starts"), packed.host("seq_lens")
        host_tables = [packed.host(f"table {group}").reshape(num_seqs, widest) for group in range(len(block_tables))]
        packed.upload(torch.device(device))
        num_prefill_tokens = int(starts[num_prefills])
        first = cls(
            num_prefills=num_prefills,
            num_decodes=num_seqs - num_prefills,
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=num_tokens - num_prefill_tokens,
            query_start_loc=packed.device("starts"),
            seq_lens=packed.device("seq_lens"),
            context_lens=packed.device("contexts"),
            block_table=packed.device("table 0").view(num_seqs, widest),
            slot_mapping=packed.device("slots 0").view(torch.int64),
            block_size=block_size,
            max_query_len=int(query.max()) if num_seqs else 0,
            max_seq_len=int(seq_lens.max()) if num_seqs else 0,
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens_cpu=torch.from_numpy(seq_lens),
            block_table_cpu=torch.from_numpy(host_tables[0]),
            num_blocks=num_blocks[0],
            upper_bound_lens=upper_bound_lens,
        )
        others = [
            replace(
                first,
                block_table=packed.device(f"table {group}").view(num_seqs, widest),
                slot_mapping=packed.device(f"slots {group}").view(torch.int64),
                block_table_cpu=torch.from_numpy(host_tables[group]),
                num_blocks=num_blocks[group],
            )
            for group in range(1, len(block_tables))
        ]
        return [first, *others]


_BUILD = "AttentionMetadata.build"


def _check_lengths(
    query_lens: Sequence[int] | NDArray[numpy.int32],
    context_lens: Sequence[int] | NDArray[numpy.int32],
    block_tables: BlockTables,
    num_draft_tokens: Sequence[int] | NDArray[numpy.int32] | None,
) -> None:
    """Check the lengths of all sequences: each has at least one new token, unless its row is padding.

    :raises ConfigError: if the lists have unequal lengths, or a sequence has impossible lengths.
    """
    lists = {"query_lens": query_lens, "context_lens": context_lens, "block_tables": block_tables}
    lists |= {} if num_draft_tokens is None else {"num_draft_tokens": num_draft_tokens}
    if len({len(each) for each in lists.values()}) > 1:
        raise ConfigError(_BUILD, "lists with one entry per sequence", ", ".join(f"{len(each)} {n}" for n, each in lists.items()))
    query, context = numpy.asarray(query_lens), numpy.asarray(context_lens)
    wrong = (query < 1) | ((context < 0) & (query + context != 0))
    if wrong.any():
        row = int(wrong.argmax())
        need = "a query_len of at least 1 and a context_len of at least 0 (the two of a padding row add up to 0)"
        raise ConfigError(f"{_BUILD}: sequence {row}", need, f"query_len {query[row]}, context_len {context[row]}")


def _check_blocks(kv_lens: NDArray[numpy.int32], block_tables: BlockTables, block_size: int, num_blocks: int) -> None:
    """Check that each sequence has enough blocks for its tokens.

    num_blocks: number of blocks in the pool. 0 means unknown.

    :raises ConfigError: if a block table is too short, or names a block outside the pool.
    """
    if block_size < 1:
        raise ConfigError(_BUILD, "a block_size of at least 1", block_size)
    for row, (count, blocks) in enumerate(zip((-(-kv_lens // block_size)).tolist(), block_tables, strict=True)):
        if count > len(blocks):
            need = f"{count} blocks of {block_size} for its {kv_lens[row]} tokens"
            raise ConfigError(f"{_BUILD}: sequence {row}", need, f"{len(blocks)}")
        used = blocks[:count]
        if count:
            least, most = (used.min(), used.max()) if isinstance(used, numpy.ndarray) else (min(used), max(used))
            if least < 0 or (num_blocks and most >= num_blocks):
                need = f"blocks from 0 to {num_blocks - 1}" if num_blocks else "blocks from 0 on"
                raise ConfigError(f"{_BUILD}: sequence {row}", need, f"block {least if least < 0 else most}")


def _pack(
    query: NDArray[numpy.int32], context: NDArray[numpy.int32], block_tables: Sequence[BlockTables], widest: int, block_size: int
) -> Packed:
    """Return a step's metadata in one host buffer, because one copy to the device takes less time than several small ones.

    Fields: starts, seq_lens and contexts of the sequences. In addition, for each cache group N: "table N", [num_seqs, widest],
    and "slots N", the int64 slot of each token.
    """
    num_seqs, num_tokens = len(query), int(query.sum())
    sizes = {"starts": num_seqs + 1, "seq_lens": num_seqs, "contexts": num_seqs}
    sizes |= {f"slots {group}": 2 * num_tokens for group in range(len(block_tables))}
    sizes |= {f"table {group}": num_seqs * widest for group in range(len(block_tables))}
    packed = Packed(**sizes)
    starts = packed.host("starts")
    numpy.cumsum(query, out=starts[1:])
    numpy.add(query, context, out=packed.host("seq_lens"))
    numpy.maximum(context, 0, out=packed.host("contexts"))
    rows, positions = numpy.arange(num_seqs), context  # [num_tokens]: the sequence of each token, and its position
    if num_tokens > num_seqs:
        rows = numpy.repeat(rows, query)
        positions = numpy.arange(num_tokens) - (starts[:-1] - context)[rows]
    columns, places = numpy.maximum(positions, 0) // block_size, positions % block_size
    for group, blocks in enumerate(block_tables):
        table = packed.host(f"table {group}").reshape(num_seqs, widest)
        if isinstance(blocks, numpy.ndarray):
            table[:, : blocks.shape[1]] = blocks
        else:
            for row, listed in enumerate(blocks):
                table[row, : len(listed)] = listed
        slot_mapping = packed.host(f"slots {group}").view(numpy.int64)
        numpy.multiply(table[rows, columns], block_size, out=slot_mapping, dtype=numpy.int64)
        slot_mapping += places
        slot_mapping[positions < 0] = -1
    return packed


def _widest(blocks: BlockTables) -> int:
    return blocks.shape[1] if isinstance(blocks, numpy.ndarray) else max((len(row) for row in blocks), default=0)
