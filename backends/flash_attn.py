"""The attention backend `flash_attn`: FlashAttention 2 (Dao 2023) from the package flash-attn."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.backends.varlen import VARLEN, VarlenAttention, VarlenStep
from headway.core.contract.backend import Options
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import CacheLayout, LayerCache
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES, Support
from headway.kernels.runtime.probe import at_least, find, has_gpu

MODULE = "flash_attn.flash_attn_interface"
ENTRY = "flash_attn_gpu"
"""Name by which flash-attn's Python code imports its compiled module."""
ARITY = {"varlen_fwd": 21, "fwd_kvcache": 20}
"""Number of arguments of each compiled function since flash-attn 2.7. They are positional, so only that can be checked."""
HINT = (
    "take the prebuilt wheel for your torch, CUDA and Python from https://github.com/Dao-AILab/flash-attention/releases; "
    "else pip install flash-attn --no-build-isolation, which compiles: minutes for one GPU architecture on 16 cores, hours on few"
)


class FlashAttention2(VarlenAttention):
    """Varlen prefill and extend, and paged split-KV decode.

    Calls the compiled functions below `flash_attn_varlen_func` and `flash_attn_with_kvcache`. Those Python functions allocate
    their output and use autograd; the compiled functions write `out` in place and read the key lengths (`seqused_k`) on the
    device.
    """

    name = "flash_attn"
    capabilities = replace(VARLEN, features=frozenset({"sliding_window", "softcap", "alibi_slopes"}))
    # Decode allocates split buffers from the caching allocator, that is from the graph's pool during capture. The number of
    # splits
    # is fixed at capture from the block table's width; lengths are read on the device.
    graph_level = GraphLevel.UNIFORM

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        self._library = find(MODULE, ENTRY, HINT)[0]
        self._slopes = None
        if spec.alibi_slopes is not None:
            self._slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=spec.device)
        # A window of w keys includes the query's own key; the library takes the number of keys to its left. -1 means unbounded.
        self._left = -1 if spec.sliding_window is None else spec.sliding_window - 1
        self._right = self._left if spec.sliding_window is None or not spec.causal else 0
        self._softcap = spec.softcap or 0.0
        self._folds = spec.sliding_window is None and spec.alibi_slopes is None

    @classmethod
    def available(cls) -> Support:
        library, support = find(MODULE, ENTRY, HINT)
        if support:
            for name, arity in ARITY.items():
                support &= _takes(library, name, arity)
        return has_gpu() & support

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        return super().supports(spec, layout, block_size, phase) & at_least((8, 0), spec.device)

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        if phase is Phase.PREFILL:
            return "flash_fwd_kernel (flash-attn 2, varlen_fwd)"
        return f"flash_fwd_splitkv_kernel (flash-attn 2, {'fwd_kvcache' if phase is Phase.DECODE else 'varlen_fwd'})"

    def decode(self, q: Tensor, cache: LayerCache, plan: VarlenStep, out: Tensor, lse: Tensor | None = None) -> None:
        """Run split-KV decode if all sequences have the same number of new tokens, else varlen attention (verification)."""
        assert lse is None, "not declared"
        if not plan.uniform:
            self.attend(q, cache.key, cache.value, plan, out)
            return
        spec, causal = self.spec, True
        shape: tuple[int, ...] = (plan.num_seqs, plan.max_query_len, spec.num_heads, spec.head_dim)
        queries, result = q.view(shape), out.view(shape)
        if self._folds and plan.max_query_len == 1:
            # Use the query heads of a kv head as query rows, so that keys are read once. The library also does this, but then
            # expects `out` in the swapped shape. Doing it here writes `out` in place with every release.
            shape = (plan.num_seqs, spec.num_kv_heads, spec.group_size, spec.head_dim)
            queries, result, causal = q.view(shape).transpose(1, 2), out.view(shape).transpose(1, 2), False
        self._library.fwd_kvcache(
            queries,
            cache.key,
            cache.value,
            None,  # k, v to append: already written by the cache writer
            None,
            plan.kv_lens,
            None,  # rotary cos, sin
            None,
            None,  # cache_batch_idx
            None,  # leftpad_k
            plan.block_table,
            self._slopes,
            result,
            spec.scale,
            causal,
            self._left,
            self._right,
            self._softcap,
            False,  # rotary_interleaved
            0,  # num_splits: the library's heuristic
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: VarlenStep, out: Tensor) -> None:
        paged = plan.paged
        written = self._library.varlen_fwd(
            q,
            k,
            v,
            out,
            plan.starts,
            plan.starts,  # cu_seqlens_k: in a paged call only its shape matters; lengths come from seqused_k
            plan.kv_lens if paged else None,
            None,  # leftpad_k
            plan.block_table if paged else None,
            self._slopes,
            plan.max_query_len,
            plan.max_kv_len,
            0.0,  # dropout
            self.spec.scale,
            False,  # zero_tensors
            self.spec.causal,
            self._left,
            self._right,
            self._softcap,
            False,  # return_softmax
            None,  # generator
        )[0]
        if plan.max_query_len == 1 and written.data_ptr() != out.data_ptr():
            # With one token per sequence, the library swaps heads and rows, and its varlen call returns a copy.
            out.copy_(written)


def _takes(library: Any, name: str, arity: int) -> Support:
    """Return whether a compiled function exists and has `arity` arguments, according to the signature in its pybind11
    docstring."""
    function = getattr(library, name, None)
    if function is None:
        return Support.no(f"flash_attn_2_cuda.{name}", "to exist", "a build without it", HINT)
    found = len(re.findall(r"\barg\d+:", function.__doc__ or ""))
    if found in (0, arity):  # 0 means that there is no signature
        return YES
    return Support.no(f"flash_attn_2_cuda.{name}", f"{arity} arguments", found, "pip install 'flash-attn>=2.7'")
