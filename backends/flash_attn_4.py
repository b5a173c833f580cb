"""The attention backend `flash_attn_4`: FlashAttention 4 in the CuTe DSL, from the package flash-attn-4 (flash_attn.cute)."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from headway.backends.varlen import VARLEN, VarlenAttention, VarlenStep
from headway.core.contract.backend import Options
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES, Support
from headway.kernels.runtime.probe import capability, find, has_gpu

MODULE = "flash_attn.cute.interface"
ENTRY = "_flash_attn_fwd"
PARAMETERS = frozenset(
    (
        *("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "softmax_scale", "causal"),
        *("window_size_left", "learnable_sink", "num_splits", "score_mod", "out"),
    )
)
HINT = "pip install --pre flash-attn-4 (no compiler needed; unpack it after flash-attn 2, whose folder holds an old copy)"
MAJORS = (9, 10)
"""Major compute capabilities for which the library's forward pass uses tensor cores and supports a paged cache."""
TILE = 128
"""Number of keys per tile for heads of up to 128 elements. If a block has this size, TMA loads it."""


class FlashAttention4(VarlenAttention):
    """Varlen prefill with Hopper's and Blackwell's tensor-core instructions, and extend and decode over a paged cache.

    The backend calls the forward function below `flash_attn_varlen_func`, because that function accepts `out`. The public
    function allocates its output. A kernel is compiled at its first call, so a step must run before it is captured. The library
    has no split-KV on Hopper, so decode with few sequences and long contexts leaves most of the GPU idle.
    """

    name = "flash_attn_4"
    capabilities = replace(
        VARLEN,
        block_multiple=TILE,
        features=frozenset({"sliding_window", "softcap", "sinks"}),
        shares_plans=True,
        non_causal=False,
        reads_whole_blocks=True,
    )
    graph_level = GraphLevel.UNIFORM

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        self._forward = find(MODULE, ENTRY, HINT)[0]
        self._left = None if spec.sliding_window is None else spec.sliding_window - 1  # number of keys to the left of the query
        # Made once, because the library otherwise makes a function per call with a soft cap, and hashes its source.
        utilities = import_module("flash_attn.cute.utils") if spec.softcap is not None else None
        self._score_mod = utilities and utilities.create_softcap_scoremod(spec.softcap)
        self._sinks = None
        if spec.sinks is not None:
            self._sinks = torch.tensor(spec.sinks, dtype=torch.float32, device=spec.device)
        found = capability(spec.device)
        # 0 means the library's heuristic; Hopper does not support splits
        self._splits = 0 if found is not None and found[0] == 10 else 1

    @classmethod
    def available(cls) -> Support:
        support = has_gpu() & find(MODULE, ENTRY, HINT, PARAMETERS)[1]
        if torch.cuda.is_available():
            support &= _generation(torch.device("cuda"))
        return support

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        support = super().supports(spec, layout, block_size, phase) & _generation(spec.device)
        found = capability(spec.device)
        if found is not None and found[0] == 10 and 128 < spec.head_dim < 256:
            support &= Support.no("head_dim", "at most 128, or 256, on compute capability 10.x", spec.head_dim)
        by_tma = block_size == TILE and spec.head_dim <= TILE
        if phase is not Phase.PREFILL and not by_tma and spec.head_dim % 16:
            need = f"a multiple of 16, or at most {TILE} with a block_size of {TILE}"
            support &= Support.no("head_dim", need, spec.head_dim, f"--block-size {TILE}")
        return support

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        found = capability(spec.device)
        generation = "Sm100" if found is not None and found[0] == 10 else "Sm90"
        return f"FlashAttentionForward{generation} (flash-attn-4, {'varlen' if phase is Phase.PREFILL else 'paged'})"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: VarlenStep, out: Tensor) -> None:
        """Call the forward function. Paged calls are batched if all sequences have the same number of new tokens."""
        starts: Tensor | None = plan.starts
        keys: dict[str, Any] = {"cu_seqlens_k": plan.starts}
        if plan.paged:
            keys = {"seqused_k": plan.kv_lens, "page_table": plan.block_table, "num_splits": self._splits}
        if plan.paged and plan.uniform:  # [num_seqs, query_len, heads, dim]: the kernel need not search for a tile's sequence
            shape = (plan.num_seqs, plan.max_query_len, self.spec.num_heads, self.spec.head_dim)
            q, out, starts = q.view(shape), out.view(shape), None
        self._forward(
            q,
            k,
            v,
            cu_seqlens_q=starts,
            **keys,
            max_seqlen_q=plan.max_query_len,
            max_seqlen_k=plan.max_kv_len,
            softmax_scale=self.spec.scale,
            causal=True,
            window_size_left=self._left,
            learnable_sink=self._sinks,
            score_mod=self._score_mod,
            out=out,
        )


def _generation(device: torch.device) -> Support:
    found = capability(device)
    if found is None or found[0] in MAJORS:
        return YES
    return Support.no("compute capability", "9.x (Hopper) or 10.x (Blackwell)", "{}.{}".format(*found))
