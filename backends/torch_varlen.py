"""`torch_varlen`: torch.nn.attention.varlen, torch's own copy of FlashAttention 2, where it reads a paged cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headway.backends.varlen import VarlenAttention, VarlenStep
from headway.core.contract.capabilities import ALL_PHASES, Capabilities
from headway.core.contract.layout import NHD, CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.kernels.runtime.probe import HALF_DTYPES, at_least, declares, find, has_gpu

MODULE = "torch.nn.attention.varlen"
PARAMETERS = frozenset({"block_table", "seqused_k", "scale", "window_size", "enable_gqa"})
HINT = "pip install 'torch>=2.13': the first release whose varlen_attn takes a block_table"


class TorchVarlen(VarlenAttention):
    """FlashAttention 2 with nothing to install: varlen prefill and extend, paged split-KV decode.

    `graph_level` stays NONE: whether its custom operator captures has not been tried on a GPU.
    """

    name = "torch_varlen"
    capabilities = Capabilities(
        phases=ALL_PHASES,
        layouts=(NHD,),
        dtypes=HALF_DTYPES,
        block_multiple=256,
        head_dims=tuple(range(8, 257, 8)),
        features=frozenset({"sliding_window"}),
        dense_prefill=True,
        non_causal=True,
    )

    def __init__(
        self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(spec, layout, block_size, options)
        self._attend = find(MODULE, "varlen_attn", HINT)[0]
        self._attend_out = find(MODULE, "varlen_attn_out", HINT)[0]
        # (-1, 0) is causal and (-1, -1) sees all; with a window of w keys, w - 1 of them lie left of the query itself.
        left = -1 if spec.sliding_window is None else spec.sliding_window - 1
        self._window = (left, 0 if spec.causal else left)
        self._gqa = spec.group_size > 1

    @classmethod
    def available(cls) -> Support:
        """Whether both functions read a paged cache, and there is a GPU for them."""
        support = has_gpu()
        for name in ("varlen_attn", "varlen_attn_out"):
            support &= declares(MODULE, name, HINT, PARAMETERS)
        return support

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """The claim, and the GPU's generation."""
        return super().supports(spec, layout, block_size, phase) & at_least((8, 0), spec.device)

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        """Name of the kernel that will really run."""
        kernel = "flash_fwd_kernel" if phase is Phase.PREFILL else "flash_fwd_splitkv_kernel"
        return f"{kernel} (torch {torch.__version__}, varlen_attn)"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: VarlenStep, out: Tensor) -> None:
        """k, v: [num_tokens, num_kv_heads, head_dim], or the cache's [num_blocks, block_size, num_kv_heads, head_dim]."""
        # cu_seq_k of a paged call: only its shape is looked at, seqused_k rules.
        arguments = (q, k, v, plan.starts, plan.starts, plan.max_query_len, plan.max_kv_len)
        options = {
            "scale": self.spec.scale,
            "window_size": self._window,
            "enable_gqa": self._gqa,
            "seqused_k": plan.kv_lens if plan.paged else None,
            "block_table": plan.block_table if plan.paged else None,
        }
        if plan.max_query_len == 1 and self._gqa:
            # One token a sequence: FlashAttention swaps heads and rows, and what its varlen form then writes is a copy of `out`.
            out.copy_(self._attend(*arguments, **options))
        else:
            self._attend_out(out, *arguments, **options)
