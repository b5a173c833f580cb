"""The arguments that libraries of varlen attention take for one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headway.core.contract.metadata import AttentionMetadata, Phase


@dataclass(frozen=True, slots=True)
class VarlenStep:
    """The arguments of one step's calls. Tensors are the metadata's own, so that a captured graph sees them updated in place."""

    starts: Tensor
    """int32 [num_seqs + 1]: first packed token of each sequence."""
    kv_lens: Tensor
    """int32 [num_seqs]: keys of each sequence, 0 in a padding row."""
    block_table: Tensor
    """int32 [num_seqs, max_blocks]."""
    num_seqs: int
    max_query_len: int
    max_kv_len: int
    paged: bool
    """Whether keys come from the cache; else this step's k and v are all the keys there are."""
    uniform: bool
    """Whether every sequence has `max_query_len` new tokens."""

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> VarlenStep:
        """Read off one view of a step; no device work."""
        return cls(
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.num_seqs,
            metadata.max_query_len,
            metadata.max_seq_len,
            paged=metadata.phase is not Phase.PREFILL,
            uniform=metadata.num_tokens == metadata.num_seqs * metadata.max_query_len,
        )
