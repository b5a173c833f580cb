"""What backends over libraries of varlen attention share: a step's arguments, and where its keys come from."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import LayerCache
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


class VarlenAttention(AttentionBackend):
    """A backend whose library has one call for packed sequences, over their own k and v or over a paged cache."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: VarlenStep, out: Tensor) -> None:
        """k, v: where `plan.paged`, the cache's [num_blocks, block_size, num_kv_heads, head_dim]; else packed as q is,
        [num_tokens, num_kv_heads, head_dim]. q, out: [num_tokens, num_heads, head_dim]."""

    def plan(self, metadata: AttentionMetadata) -> VarlenStep:
        """No device work: the metadata has it all."""
        return VarlenStep.of(metadata)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: VarlenStep, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Over this step's k and v where there is no context, else over the cache."""
        assert lse is None, "not declared"
        if plan.paged:
            self.attend(q, cache.key, cache.value, plan, out)
        else:
            self.attend(q, k, v, plan, out)

    def decode(self, q: Tensor, cache: LayerCache, plan: VarlenStep, out: Tensor, lse: Tensor | None = None) -> None:
        """The same call with the queries of each sequence, one or several, ragged or not."""
        assert lse is None, "not declared"
        self.attend(q, cache.key, cache.value, plan, out)
