"""The attention backend `vllm_paged`: paged attention for vLLM's cache layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from headway.backends.options import Options, count_of
from headway.backends.vllm_paged.decode import MAX_WARPS, PagedDecode, PagedDecodePlan
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.capabilities import FEATURES, Capabilities
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import VLLM_5D, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.kernels.runtime.nvrtc.compiler import find_compiler
from headway.kernels.runtime.probe import at_least, has_gpu

CAPABILITY = (8, 0)
"""Minimum compute capability: the first with bfloat16 MMAs and asynchronous copies."""
FP8_CAPABILITY = (8, 9)
"""Minimum compute capability for FP8 caches: the first with instructions that convert e4m3."""
_FP8 = torch.float8_e4m3fn


class VllmPagedAttention(AttentionBackend):
    """CUDA C++ paged attention for vLLM's cache layout, single-pass (v1) or partitioned (v2). Only for decode and
    verification."""

    name = "vllm_paged"
    capabilities = Capabilities(
        phases=frozenset({Phase.DECODE}),
        layouts=(VLLM_5D,),
        kv_dtypes=(_FP8,),
        block_multiple=8,
        head_dims=(64, 80, 96, 112, 128, 192, 256),
        features=FEATURES,
        contiguous_blocks=True,
        reads_whole_blocks=True,
    )
    graph_level = GraphLevel.UNIFORM
    options: ClassVar[Mapping[str, str]] = {
        "num_partitions": "partitions of every context, in place of the built-in rule; 1 is the single-pass form",
        "num_warps": f"warps of a block of threads, 1 to {MAX_WARPS}",
    }

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        cut = count_of(self.name, options, "num_warps", MAX_WARPS), count_of(self.name, options, "num_partitions", None)
        self._decode = PagedDecode(spec, block_size, cut)

    @classmethod
    def available(cls) -> Support:
        return has_gpu() & find_compiler()[1]

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        """Return whether the cache is contiguous. The kernels compute addresses from the layout, and do not support strides."""
        support = super().accepts(cache)
        for name, tensor in cache.tensors.items():
            if not tensor.is_contiguous():
                support &= Support.no(f"cache, {name}", "one piece of memory", f"strides {tensor.stride()}", "name triton")
        return support

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        support = super().supports(spec, layout, block_size, phase) & at_least(CAPABILITY, spec.device)
        if block_size != 8 and block_size % 16:
            support &= Support.no("block_size", "8 or a multiple of 16", block_size, "--block-size 16")
        if spec.cache_dtype == _FP8:
            if spec.dtype == torch.float32:
                support &= Support.no("dtype", "bfloat16 or float16 with an fp8 cache", "float32", "choose another --dtype")
            support &= at_least(FP8_CAPABILITY, spec.device)
            if block_size % 16:
                support &= Support.no("block_size", "a multiple of 16 for an fp8 cache", block_size, "--block-size 16")
        return support

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        return "paged_attention (CUDA C++)"

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        return self._decode.workspace_bytes(max_num_seqs)

    def plan(self, metadata: AttentionMetadata) -> PagedDecodePlan:
        return self._decode.plan(metadata)

    def decode(self, q: Tensor, cache: LayerCache, plan: PagedDecodePlan, out: Tensor, lse: Tensor | None = None) -> None:
        assert lse is None, "not declared"
        self._decode.run(q, cache, plan, out)
