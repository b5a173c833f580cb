"""FlashInfer's latent attention (flashinfer.mla) as a backend: decode and extend of absorbed layers, 576 elements a token."""

from __future__ import annotations

import inspect
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from headway import hookimpl
from headway.contract import (
    LATENT,
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    BackendInfo,
    CacheLayout,
    Capabilities,
    LayerCache,
    Phase,
    Support,
)

HEAD = (576, 512)
"""head_dim and v_head_dim: the library is built for DeepSeek's."""
WORKSPACE = 128 * 2**20
"""Bytes for partial results, as the library recommends."""
PLAN = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal")
RUN = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "out")


def find_wrapper() -> tuple[Any, Support]:
    """The library's class, or why it cannot be called: releases differ in what its methods take."""
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper as Wrapper
    except Exception as error:
        return None, Support.no(
            "flashinfer.mla", "an import", f"{type(error).__name__}: {error}", "pip install flashinfer-python"
        )
    for method, wanted in (("plan", PLAN), ("run", RUN)):
        missing = set(wanted) - set(inspect.signature(getattr(Wrapper, method)).parameters)
        if missing:
            need = f"the parameters {', '.join(wanted)}"
            return None, Support.no(f"flashinfer.mla {method}", need, f"none named {', '.join(sorted(missing))}")
    return Wrapper, Support()


class FlashInferLatent(AttentionBackend):
    """FlashInfer (Ye et al. 2025, arXiv 2501.01005) plans on the host, from exact lengths, once a step."""

    name = "flashinfer"
    capabilities = Capabilities(
        phases=frozenset({Phase.EXTEND, Phase.DECODE}),
        layouts=(LATENT,),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(),
        v_head_dims=(HEAD,),
        value_in_key=True,
        exact_host_lengths=True,
    )

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: dict[str, str] | None = None) -> None:
        super().__init__(spec, layout, block_size, options)
        self._wrapper = find_wrapper()[0](torch.empty(WORKSPACE, dtype=torch.int8, device=spec.device))

    @classmethod
    def available(cls) -> Support:
        """A GPU, and a release whose methods take what is passed here."""
        if not torch.cuda.is_available():
            return Support.no("device", "a CUDA GPU", "none")
        return find_wrapper()[1]

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """The claim; one kv head, with the value inside it."""
        support = super().supports(spec, layout, block_size, phase)
        if not spec.value_in_key or spec.num_kv_heads != 1:
            support &= Support.no("value_in_key", "absorbed latent attention", f"{spec.num_kv_heads} kv heads, {spec}")
        return support

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        """The library chooses between two by the GPU."""
        return "BatchMLAPagedAttention (FlashInfer)"

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """What the instance has taken."""
        return WORKSPACE

    def plan(self, metadata: AttentionMetadata) -> bool:
        """Plan the one wrapper for the step; False where no sequence has a key."""
        lens, table = metadata.kv_lens, metadata.block_table_cpu
        counts = [-(-length // self.block_size) for length in lens]
        blocks = list(chain.from_iterable(table[row, :count].tolist() for row, count in enumerate(counts)))
        if not blocks:
            return False
        spec, device = self.spec, metadata.block_table.device
        ends = torch.tensor([0, *counts]).cumsum(0)
        starts, pages, page_ids, kv_lens = (
            torch.as_tensor(numbers, dtype=torch.int32).to(device)
            for numbers in (metadata.query_start_loc_cpu, ends, blocks, lens)
        )
        sizes = spec.num_heads, spec.v_head_dim, spec.head_dim - spec.v_head_dim, self.block_size
        self._wrapper.plan(starts, pages, page_ids, kv_lens, *sizes, True, spec.scale, spec.dtype, spec.cache_dtype)
        return True

    def decode(self, q: Tensor, cache: LayerCache, plan: bool, out: Tensor) -> None:
        """One or several of the newest tokens of each sequence."""
        if plan:
            value = self.spec.v_head_dim
            rows = cache.key.squeeze(2)
            queries = q[..., :value].contiguous(), q[..., value:].contiguous()
            self._wrapper.run(*queries, rows[..., :value], rows[..., value:], out=out)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: bool, out: Tensor) -> None:
        """The same, of longer chunks."""
        self.decode(q, cache, plan, out)


@hookimpl
def headway_register_backends() -> list[BackendInfo]:
    """One backend, loaded when somebody asks for it."""
    summary = "FlashInfer's latent attention (MLA): decode and extend"
    return [BackendInfo("flashinfer", summary, lambda: FlashInferLatent, "flashinfer-python", api_version=2)]
