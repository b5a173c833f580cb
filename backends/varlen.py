"""The attention backend `torch_varlen`, and the base class of backends that call a library for varlen attention."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, Options
from headway.core.contract.capabilities import ALL_PHASES, Capabilities
from headway.core.contract.layout import NHD, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.kernels.runtime.probe import HALF_DTYPES, at_least, declares, find, has_gpu


@dataclass(frozen=True, slots=True)
class VarlenStep:
    """Arguments of one step's library calls. The tensors belong to the metadata, so a captured graph reads their current contents
    at replay."""

    starts: Tensor
    """int32 [num_seqs + 1]: index of each sequence's first packed token."""
    kv_lens: Tensor
    """int32 [num_seqs]: number of keys of each sequence, 0 for a padding row."""
    block_table: Tensor
    """int32 [num_seqs, max_blocks]: block numbers of each sequence."""
    num_seqs: int
    max_query_len: int
    max_kv_len: int
    paged: bool
    """True if keys are read from the cache. False means that all keys are this step's k and v."""
    uniform: bool
    """True if every sequence has `max_query_len` new tokens."""
    kv_starts: Tensor | None = None
    """int32 [num_seqs + 1]: index of each sequence's first key, as if the keys of all sequences were packed. None if the library
    takes the numbers of keys, or all keys are this step's."""

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> VarlenStep:
        """Return the arguments for the step that `metadata` describes, without device work."""
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
    """Base of backends whose library has one call for packed sequences, over this step's k and v or over a paged cache."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: VarlenStep, out: Tensor) -> None:
        """Compute attention by calling the library.

        k, v: if `plan.paged`, the cache's [num_blocks, block_size, num_kv_heads, head_dim]; otherwise this step's packed
        [num_tokens, num_kv_heads, head_dim].
        q, out: [num_tokens, num_heads, head_dim]
        """

    def plan(self, metadata: AttentionMetadata) -> VarlenStep:
        return VarlenStep.of(metadata)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: VarlenStep, out: Tensor, lse: Tensor | None = None
    ) -> None:
        assert lse is None, "not declared"
        if plan.paged:
            self.attend(q, cache.key, cache.value, plan, out)
        else:
            self.attend(q, k, v, plan, out)

    def decode(self, q: Tensor, cache: LayerCache, plan: VarlenStep, out: Tensor, lse: Tensor | None = None) -> None:
        assert lse is None, "not declared"
        self.attend(q, cache.key, cache.value, plan, out)


VARLEN = Capabilities(
    phases=ALL_PHASES,
    layouts=(NHD,),
    dtypes=HALF_DTYPES,
    block_multiple=256,
    head_dims=tuple(range(8, 257, 8)),
    dense_prefill=True,
    non_causal=True,
)
"""Claims that backends over FlashAttention's kernels share."""
MODULE = "torch.nn.attention.varlen"
PARAMETERS = frozenset({"block_table", "seqused_k", "scale", "window_size", "enable_gqa"})
HINT = "pip install 'torch>=2.13': the first release whose varlen_attn takes a block_table"


class TorchVarlen(VarlenAttention):
    """Copy of FlashAttention 2 in PyTorch: prefill, extend and paged split-KV decode. CUDA graphs have not been tested."""

    name = "torch_varlen"
    capabilities = replace(VARLEN, features=frozenset({"sliding_window"}))

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        self._attend = find(MODULE, "varlen_attn", HINT)[0]
        self._attend_out = find(MODULE, "varlen_attn_out", HINT)[0]
        # (-1, 0) is causal, (-1, -1) sees all keys; a window of w keys has w - 1 keys to the left of the query.
        left = -1 if spec.sliding_window is None else spec.sliding_window - 1
        self._window = (left, 0 if spec.causal else left)
        self._gqa = spec.group_size > 1

    @classmethod
    def available(cls) -> Support:
        support = has_gpu()
        for name in ("varlen_attn", "varlen_attn_out"):
            support &= declares(MODULE, name, HINT, PARAMETERS)
        return support

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        return super().supports(spec, layout, block_size, phase) & at_least((8, 0), spec.device)

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        kernel = "flash_fwd_kernel" if phase is Phase.PREFILL else "flash_fwd_splitkv_kernel"
        return f"{kernel} (torch {torch.__version__}, varlen_attn)"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: VarlenStep, out: Tensor) -> None:
        # In a paged call, only the shape of cu_seq_k matters; lengths come from seqused_k.
        # With one token per sequence, FlashAttention swaps heads and rows, and its varlen call then returns a copy of `out`.
        copies = plan.max_query_len == 1 and self._gqa
        written = (self._attend if copies else partial(self._attend_out, out))(
            q,
            k,
            v,
            plan.starts,
            plan.starts,
            plan.max_query_len,
            plan.max_kv_len,
            scale=self.spec.scale,
            window_size=self._window,
            enable_gqa=self._gqa,
            seqused_k=plan.kv_lens if plan.paged else None,
            block_table=plan.block_table if plan.paged else None,
        )
        if copies:
            out.copy_(written)
