"""`flash_attn`: FlashAttention 2 (Dao 2023) from the package flash-attn."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from headway.backends.options import Options
from headway.backends.varlen import VarlenAttention, VarlenStep
from headway.core.contract.capabilities import ALL_PHASES, Capabilities
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import NHD, CacheLayout, LayerCache
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES, Support
from headway.kernels.runtime.probe import HALF_DTYPES, at_least, find, has_gpu

MODULE = "flash_attn.flash_attn_interface"
ENTRY = "flash_attn_gpu"
"""The name under which flash-attn's own Python reaches its compiled module."""
ARITY = {"varlen_fwd": 21, "fwd_kvcache": 20}
"""Arguments of the compiled functions we call, since flash-attn 2.7. They are positional, so a count is what can be probed."""
HINT = (
    "take the prebuilt wheel for your torch, CUDA and Python from https://github.com/Dao-AILab/flash-attention/releases; "
    "else pip install flash-attn --no-build-isolation, which compiles: minutes for one GPU architecture on 16 cores, hours on few"
)


class FlashAttention2(VarlenAttention):
    """Varlen prefill and extend, paged split-KV decode.

    It calls the compiled functions under `flash_attn_varlen_func` and `flash_attn_with_kvcache`: those two allocate their output
    and pass through autograd, the compiled ones write `out` in place and read the keys' true lengths (`seqused_k`) on the device.
    """

    name = "flash_attn"
    capabilities = Capabilities(
        phases=ALL_PHASES,
        layouts=(NHD,),
        dtypes=HALF_DTYPES,
        block_multiple=256,
        head_dims=tuple(range(8, 257, 8)),
        features=frozenset({"sliding_window", "softcap", "alibi_slopes"}),
        dense_prefill=True,
        non_causal=True,
    )
    # Decode allocates its split buffers from the caching allocator, which a graph's pool serves; splits are fixed at capture
    # from the block table's width, and lengths are read on the device.
    graph_level = GraphLevel.UNIFORM

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        self._library = find(MODULE, ENTRY, HINT)[0]
        self._slopes = None
        if spec.alibi_slopes is not None:
            self._slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=spec.device)
        # A window of w keys ends at the query itself; FA counts the keys to its left. -1 is no bound; causal sets the right one.
        self._left = -1 if spec.sliding_window is None else spec.sliding_window - 1
        self._right = self._left if spec.sliding_window is None or not spec.causal else 0
        self._softcap = spec.softcap or 0.0
        self._folds = spec.sliding_window is None and spec.alibi_slopes is None

    @classmethod
    def available(cls) -> Support:
        """Whether flash-attn's compiled functions import and take the arguments we pass."""
        library, support = find(MODULE, ENTRY, HINT)
        if support:
            for name, arity in ARITY.items():
                support &= _takes(library, name, arity)
        return has_gpu() & support

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """The claim, and the GPU's generation."""
        return super().supports(spec, layout, block_size, phase) & at_least((8, 0), spec.device)

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        """Name of the kernel that will really run."""
        if phase is Phase.PREFILL:
            return "flash_fwd_kernel (flash-attn 2, varlen_fwd)"
        return f"flash_fwd_splitkv_kernel (flash-attn 2, {'fwd_kvcache' if phase is Phase.DECODE else 'varlen_fwd'})"

    def decode(self, q: Tensor, cache: LayerCache, plan: VarlenStep, out: Tensor, lse: Tensor | None = None) -> None:
        """Split-KV where all sequences have the same number of new tokens; ragged verification goes through varlen."""
        assert lse is None, "not declared"
        if not plan.uniform:
            self.attend(q, cache.key, cache.value, plan, out)
            return
        spec, causal = self.spec, True
        shape: tuple[int, ...] = (plan.num_seqs, plan.max_query_len, spec.num_heads, spec.head_dim)
        queries, result = q.view(shape), out.view(shape)
        if self._folds and plan.max_query_len == 1:
            # The query heads of a kv head as query rows, so that keys are read once. The library does this swap by itself, but
            # then wants `out` in the swapped shape: doing it here keeps `out` in place, whatever the release.
            shape = (plan.num_seqs, spec.num_kv_heads, spec.group_size, spec.head_dim)
            queries, result, causal = q.view(shape).transpose(1, 2), out.view(shape).transpose(1, 2), False
        self._library.fwd_kvcache(
            queries,
            cache.key,
            cache.value,
            None,  # k, v to append: the writer has done that
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
        """k, v: [num_tokens, num_kv_heads, head_dim], or the cache's [num_blocks, block_size, num_kv_heads, head_dim]."""
        paged = plan.paged
        written = self._library.varlen_fwd(
            q,
            k,
            v,
            out,
            plan.starts,
            plan.starts,  # cu_seqlens_k: of a paged call only its shape is looked at, seqused_k rules
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
            # One token a sequence: the library swaps heads and rows itself, and its varlen form answers in a copy.
            out.copy_(written)


def _takes(library: Any, name: str, arity: int) -> Support:
    """Whether a compiled function exists and takes so many arguments, as pybind11 writes its signature into the docstring."""
    function = getattr(library, name, None)
    if function is None:
        return Support.no(f"flash_attn_2_cuda.{name}", "to exist", "a build without it", HINT)
    found = len(re.findall(r"\barg\d+:", function.__doc__ or ""))
    if found in (0, arity):  # 0: no signature to read
        return YES
    return Support.no(f"flash_attn_2_cuda.{name}", f"{arity} arguments", found, "pip install 'flash-attn>=2.7'")
