"""What one step asks of attention: lengths, block table and slots, shared by all layers and all backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.transfer import upload


class Phase(Enum):
    """What kind of attention a sequence needs; derived from its lengths, never a flag."""

    PREFILL = "prefill"
    """No cached context: every key the queries see is among this step's tokens."""
    EXTEND = "extend"
    """Several new tokens after a cached context: a prefix hit, or a later chunk of a long prompt."""
    DECODE = "decode"
    """One new token after a cached context (2 to 8 where a speculator's guesses are verified)."""

    @staticmethod
    def of(query_len: int, context_len: int, decode_query_len: int = 1) -> Phase:
        """Phase of a sequence with `query_len` new tokens after `context_len` cached ones."""
        if context_len == 0:
            return Phase.PREFILL
        return Phase.DECODE if query_len <= decode_query_len else Phase.EXTEND


@dataclass(frozen=True)
class AttentionMetadata:
    """One step. Tokens of all sequences are packed; sequences that prefill or extend come first, then those that decode.

    Names are vLLM's. Every tensor has a CPU twin made before the copy to the device, so that no backend has to synchronise.
    """

    num_prefills: int
    """Sequences in the first part (PREFILL or EXTEND)."""
    num_decodes: int
    """Sequences in the second part (DECODE), padding rows included."""
    num_prefill_tokens: int
    num_decode_tokens: int
    query_start_loc: Tensor
    """int32 [num_seqs + 1]: the first packed token of each sequence; the last entry is the number of tokens."""
    seq_lens: Tensor
    """int32 [num_seqs]: cached plus new tokens; 0 marks a padding row."""
    context_lens: Tensor
    """int32 [num_seqs]: cached tokens, before this step's."""
    block_table: Tensor
    """int32 [num_seqs, max_blocks]: physical block of each logical block; entries past a sequence's end are 0 and never read."""
    slot_mapping: Tensor
    """int64 [num_tokens]: where each new token's k and v go, block * block_size + offset; -1 is skipped by every writer."""
    block_size: int
    max_query_len: int
    max_seq_len: int
    query_start_loc_cpu: Tensor
    seq_lens_cpu: Tensor
    block_table_cpu: Tensor
    num_blocks: int = 0
    """Blocks of the pool, for plans that depend on its size; 0: not known."""
    upper_bound_lens: bool = False
    """Whether `seq_lens_cpu` of the sequences that decode may be upper bounds, since the host launched steps that it has not read
    yet. A backend whose decode must know the lengths exactly says so (`Capabilities.exact_host_lengths`)."""

    @property
    def num_seqs(self) -> int:
        """Sequences in the step, padding rows included."""
        return self.num_prefills + self.num_decodes

    @property
    def num_tokens(self) -> int:
        """New tokens in the step."""
        return self.num_prefill_tokens + self.num_decode_tokens

    @cached_property
    def query_lens(self) -> list[int]:
        """New tokens of each sequence."""
        starts: list[int] = self.query_start_loc_cpu.tolist()
        return [end - start for start, end in pairwise(starts)]

    @cached_property
    def kv_lens(self) -> list[int]:
        """`seq_lens` as Python numbers."""
        return list(self.seq_lens_cpu.tolist())

    @cached_property
    def phase(self) -> Phase:
        """Of a view: DECODE, EXTEND if any sequence has a cached context, else PREFILL. A mixed step has none: ask its views."""
        assert not (self.num_prefills and self.num_decodes), "a mixed step has two phases: use .prefill and .decode"
        if self.num_decodes:
            return Phase.DECODE
        cached = any(kv > q for q, kv in zip(self.query_lens, self.kv_lens, strict=True))
        return Phase.EXTEND if cached else Phase.PREFILL

    @cached_property
    def prefill(self) -> AttentionMetadata | None:
        """View of the sequences that prefill or extend; None where there are none."""
        if self.num_prefills == 0:
            return None
        return self if self.num_decodes == 0 else self._view(0, self.num_prefills)

    @cached_property
    def decode(self) -> AttentionMetadata | None:
        """View of the sequences that decode, with `query_start_loc` counted from 0; None where there are none."""
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
        """A single prompt of a fixed length over tensors that a graph keeps: block_table int32 [1, blocks], slot_mapping int64
        [length]."""
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
        block_tables: Sequence[Sequence[int] | NDArray[numpy.int32]] | NDArray[numpy.int32],
        block_size: int,
        device: torch.device | str = "cpu",
        decode_query_len: int = 1,
        num_draft_tokens: Sequence[int] | NDArray[numpy.int32] | None = None,
        num_blocks: int = 0,
        upper_bound_lens: bool = False,
    ) -> AttentionMetadata:
        """Lay out one step from host lengths.

        block_tables: for each sequence the physical blocks that hold its context and have room for its new tokens; rows of one
        array hold 0 past those.
        decode_query_len: most new tokens that still count as DECODE.
        num_draft_tokens: for each sequence the drafts that it verifies. A sequence with drafts has one query token more than
        drafts and is DECODE, one without is DECODE with a single query token: lengths alone cannot tell a draft from a prompt.
        num_blocks, upper_bound_lens: see the fields.
        Sequences that decode must come last; a padding row has query_len 1, context_len -1 (so a length of 0) and no blocks.
        """
        num_seqs = len(query_lens)
        query, context = (numpy.asarray(each, dtype=numpy.int32) for each in (query_lens, context_lens))
        most = decode_query_len if num_draft_tokens is None else numpy.asarray(num_draft_tokens) + 1
        decodes = (context != 0) & (query <= most)  # Phase.of
        num_prefills = num_seqs - int(decodes.sum())
        assert not decodes[:num_prefills].any(), "sequences that prefill or extend must come before those that decode"

        num_tokens = int(query.sum())
        whole = block_tables if isinstance(block_tables, numpy.ndarray) else None
        widest = max((len(row) for row in block_tables), default=0) if whole is None else whole.shape[1]
        # All that the device needs lies in one piece of memory: a copy costs more than what it carries.
        packed = _Packed(
            slots=2 * num_tokens, starts=num_seqs + 1, seq_lens=num_seqs, contexts=num_seqs, table=num_seqs * max(widest, 1)
        )
        starts, seq_lens = packed.host("starts"), packed.host("seq_lens")
        numpy.cumsum(query, out=starts[1:])
        numpy.add(query, context, out=seq_lens)
        numpy.maximum(context, 0, out=packed.host("contexts"))
        table = packed.host("table").reshape(num_seqs, max(widest, 1))
        if whole is None:
            for row, blocks in enumerate(block_tables):
                table[row, : len(blocks)] = blocks
        else:
            table[:, :widest] = whole
        num_prefill_tokens = int(starts[num_prefills])

        rows = numpy.repeat(numpy.arange(num_seqs), query)  # [num_tokens]: the sequence of each token
        positions = numpy.arange(num_tokens) - (starts[:-1] - context)[rows]
        numpy.multiply(table[rows, numpy.maximum(positions, 0) // block_size], block_size, out=packed.slots, dtype=numpy.int64)
        packed.slots += positions % block_size
        packed.slots[positions < 0] = -1

        packed.upload(torch.device(device))
        return cls(
            num_prefills=num_prefills,
            num_decodes=num_seqs - num_prefills,
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=num_tokens - num_prefill_tokens,
            query_start_loc=packed.device("starts"),
            seq_lens=packed.device("seq_lens"),
            context_lens=packed.device("contexts"),
            block_table=packed.device("table").view(table.shape),
            slot_mapping=packed.device("slots").view(torch.int64),
            block_size=block_size,
            max_query_len=int(query.max()) if num_seqs else 0,
            max_seq_len=int(seq_lens.max()) if num_seqs else 0,
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens_cpu=torch.from_numpy(seq_lens),
            block_table_cpu=torch.from_numpy(table),
            num_blocks=num_blocks,
            upper_bound_lens=upper_bound_lens,
        )


_ALIGN = 4
"""Fields begin at multiples of 16 bytes, which kernels may rely on."""


class _Packed:
    """Several int32 fields in one piece of host memory, and then in one of the device's."""

    def __init__(self, **lengths: int) -> None:
        """Fields by name, with their numbers of int32 elements; all are zero. `slots`, the first, holds int64 numbers."""
        self._at: dict[str, slice] = {}
        end = 0
        for name, length in lengths.items():
            start = -(-end // _ALIGN) * _ALIGN
            end = start + length
            self._at[name] = slice(start, end)
        self._host = numpy.zeros(end, dtype=numpy.int32)
        self._device = torch.empty(0)
        self.slots = self.host("slots").view(numpy.int64)

    def host(self, name: str) -> NDArray[numpy.int32]:
        """A field in host memory."""
        return self._host[self._at[name]]

    def upload(self, device: torch.device) -> None:
        """Copy all fields; host memory must not change any more."""
        self._device = upload(torch.from_numpy(self._host), device)

    def device(self, name: str) -> Tensor:
        """A field on the device."""
        return self._device[self._at[name]]
